"""Runs a Megatron job (pretraining or SFT) on packed documents, with our layers and batches. See pretrain_hybrid.sh.

It calls Megatron's own `pretrain` with three things of ours: the layer spec that `--spec` names, a `get_batch` that
shards packed documents of any lengths, and the loss per token. Everything else is Megatron's, and so are its flags and
checkpoints. `docs/moving-a-megatron-job.md` explains each step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, print_rank_0

from megatron_cp.data.blend import BlendedStream
from megatron_cp.data.corpus import Corpus, split_corpus
from megatron_cp.data.even import GlobalBatch
from megatron_cp.data.stream import PackedStream
from megatron_cp.layout import Layout
from megatron_cp.megatron.batch import ShardedBatch, layout_options, shard_batch
from megatron_cp.megatron.config import TransformerConfig, add_arguments, with_options
from megatron_cp.megatron.dynamic import grouped_packs, step_cost
from megatron_cp.megatron.groups import BatchGroups
from megatron_cp.megatron.indexed import IndexedCorpus
from megatron_cp.megatron.loss import forward_step as forward_step_of
from megatron_cp.megatron.modules import layer_slots, slots_of
from megatron_cp.megatron.pack import Pack, broadcast_pack
from megatron_cp.planner.layouts import choose_layout, layout_by_name


@cache
def batch_groups() -> BatchGroups:
    """Makes the groups on every rank before training starts: pipeline stages enter their first step one by one."""
    return BatchGroups.make()


def get_batch(data_iterator: Iterator[Pack] | None, model: Any) -> ShardedBatch:
    """Returns this rank's share of the next pack; the first tensor-parallel rank reads it and broadcasts it."""
    args, groups = get_args(), batch_groups()
    pack = next(data_iterator) if data_iterator is not None else None
    pack = broadcast_pack(pack, groups.tp_host)
    ranks = groups.of(pack)  # the context-parallel ranks, or those of a group with --hybrid-context-parallel
    return shard_batch(
        pack.tokens,
        layout_of(pack, ranks.size, model),
        ranks,
        slots=slots_of(model),
        labels=pack.labels,
        loss_mask=pack.loss_mask,
        device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu",
        seed=getattr(args, "curr_iteration", 0),  # for dropout; Megatron sets it when training begins
    )


def layout_of(pack: Pack, size: int, model: Any) -> Layout:
    """Returns a pack's layout over `size` ranks; `--cp-layout auto` logs its reason at the steps that Megatron logs."""
    args = get_args()
    # With shard_batch's options, a plan that was made to choose is not made again.
    rows = layout_options(args)
    if args.cp_layout != "auto":
        return layout_by_name(args.cp_layout, pack.packing, size, **rows)
    choice = choose_layout(pack.packing, size, layer_slots(model), **rows)
    if getattr(args, "curr_iteration", 0) % args.log_interval == 0:
        print_rank_0(choice.explain())
    return choice.layout


def forward_step(data_iterator: Iterator[Pack] | None, model: Any) -> Any:
    """Computes the loss of a microbatch; Megatron calls it."""
    return forward_step_of(iter([get_batch(data_iterator, model)]), model)


def global_batch() -> GlobalBatch | None:
    """Returns the packs that a step reads with `--cp-even-packs`, and their cost by the flops that Megatron counts."""
    args = get_args()
    if not args.cp_even_packs:
        return None
    ranks = mpu.get_data_parallel_world_size()
    # Stages and experts wait for each other in each microbatch; else ranks wait once a step.
    barrier = args.pipeline_model_parallel_size > 1 or args.expert_model_parallel_size > 1
    cost, _ = step_cost(args)
    return GlobalBatch(ranks, args.global_batch_size // ranks, cost, barrier)


def packs(stream: PackedStream | BlendedStream, first: int, number: int) -> Iterator[Pack]:
    """Yields this data-parallel rank's share of `number` packs, beginning with the pack `first`."""
    start = first + mpu.get_data_parallel_rank()
    for index in range(start, first + number, mpu.get_data_parallel_world_size()):
        packing, tokens = stream.pack(index)
        weights = stream.loss_weights(index)  # for conversations; None if all tokens are learnt
        yield Pack(packing, torch.from_numpy(tokens), loss_mask=None if weights is None else torch.from_numpy(weights))


def stream_of(split: int) -> PackedStream | BlendedStream | None:
    """Returns packs of at most `--seq-length` tokens for training (0) or validation (1); None if it has no data.

    Several `.bin/.idx` prefixes each give their share of packs, with weights or without, in the order of Megatron's
    blends.
    """
    args = get_args()
    blend, of_splits = get_blend_and_blend_per_split(args)
    prefixes, weights = (blend if of_splits is None else of_splits[split]) or ([], None)
    if len(prefixes) > 1 and args.cp_even_packs:
        raise SystemExit("--cp-even-packs: not with a blend, whose packs each come from one corpus")
    corpora: list[Corpus | None] = [IndexedCorpus(prefix, args.padded_vocab_size) for prefix in prefixes]
    if of_splits is None:
        corpora = [split_corpus(corpus, args.split)[split] for corpus in corpora if corpus is not None]
    given = [
        (PackedStream(corpus, args.seq_length, args.seed, even=global_batch()), weight)
        for corpus, weight in zip(corpora, weights or [1.0] * len(corpora), strict=True)
        if corpus is not None
    ]
    if len(given) < 2:
        return given[0][0] if given else None
    streams, shares = zip(*given, strict=True)
    return BlendedStream(streams, shares if weights else None)


def conversations(samples: list[int]) -> tuple[list[Any], int]:
    """Returns the data sets of `--data-path` (`.jsonl`), packed and masked by `SFTDataset`, and their pad token.

    Every rank builds the data sets of all splits, since Megatron's builder waits for all of them; only the reading
    ranks get them.
    """
    args = get_args()
    tokenizer = build_tokenizer(args)
    blend, of_splits = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=of_splits,
        split=args.split if of_splits is None else None,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=1,  # or it would pad every conversation to a multiple of 2 * cp
    )
    wanted = [number if index < 2 else 0 for index, number in enumerate(samples)]  # none for tests
    builder = BlendedMegatronDatasetBuilder(
        SFTDataset, wanted, lambda: mpu.get_tensor_model_parallel_rank() == 0, config
    )
    return builder.build(), tokenizer.pad


def sft_packs(dataset: Any, pad_token: int, first: int) -> Iterator[Pack]:
    """Yields the packs of this data-parallel rank, beginning with the pack `first`."""
    start = first + mpu.get_data_parallel_rank()
    for index in range(start, len(dataset), mpu.get_data_parallel_world_size()):
        yield Pack.from_megatron(dataset[index], pad_token)


def datasets(samples: list[int]) -> tuple[Iterator[Pack] | None, Iterator[Pack] | None, None]:
    """Returns iterators over training and validation packs, for `--dataloader-type external`, on the reading ranks."""
    args = get_args()
    batch_groups()
    sets, pad_token = conversations(samples) if args.sft else ([None, None], 0)
    if mpu.get_tensor_model_parallel_rank() != 0:
        return None, None, None
    seen, seen_in_validation = args.consumed_train_samples, args.consumed_valid_samples
    training, validation = sets[:2] if args.sft else (stream_of(0), stream_of(1))
    if training is None:
        raise SystemExit(f"--split: got {args.split}; it leaves nothing to train on")
    if validation is None:
        need_no_evaluation("there is nothing to validate on")
    if args.sft:
        validated = sft_packs(validation, pad_token, seen_in_validation) if validation is not None else None
        return grouped_packs(sft_packs(training, pad_token, seen), batch_groups(), args), validated, None
    validated = packs(validation, seen_in_validation, samples[1]) if validation is not None else None
    return grouped_packs(packs(training, seen, samples[0] - seen), batch_groups(), args), validated, None


def need_no_evaluation(reason: str) -> None:
    """Refuses `--eval-iters`: Megatron would evaluate by it alone, and find no data."""
    if get_args().eval_iters:
        raise SystemExit(f"{reason}: pass --eval-iters 0")


datasets.is_distributed = True  # type: ignore[attr-defined] # every rank calls it


def arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the library's flags, and this job's own."""
    even = "assign a step's documents to its packs so that all data-parallel ranks take equally long, by their flops"
    add_arguments(parser).add_argument("--cp-even-packs", action="store_true", help=even)
    return parser


def main() -> None:
    """Parses Megatron's flags and ours, and trains."""
    if not Path(dataset_utils.__file__).with_name("Makefile").exists():
        # Megatron-Core's wheel brings these helpers compiled, and not the Makefile that `pretrain` would run.
        dataset_utils.compile_helpers = lambda: None
    args = parse_and_validate_args(extra_args_provider=arguments)
    if args.cp_even_packs and not args.calculate_per_token_loss:
        raise SystemExit("pass --calculate-per-token-loss: without it the loss depends on which documents share a pack")
    if args.full_validation:
        raise SystemExit("--full-validation: a validation set of packs has no end; pass --eval-iters")
    if args.micro_batch_size != 1:
        raise SystemExit("pass --micro-batch-size 1: a pack is a whole microbatch")
    if args.dataloader_type != "external":
        raise SystemExit("pass --dataloader-type external: packs come from an iterator")
    if args.cp_even_packs and (args.sft or args.rampup_batch_size is not None):
        raise SystemExit(
            "--cp-even-packs: neither with --sft, whose packs Megatron fills, nor with --rampup-batch-size"
        )
    config = with_options(core_transformer_config_from_args(args, TransformerConfig), args)
    container = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args, config))
    try:
        pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
    finally:
        # Megatron leaves the groups to the interpreter's end, where gloo's threads now and then abort the process.
        if isinstance(sys.exception(), SystemExit | None) and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
