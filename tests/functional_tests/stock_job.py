"""A job of Megatron's own loop and data sets on gloo, with and without megatron_cp.

All runs start from one checkpoint of the stock job, after its first step: Megatron's spec, batches and loss, or ours.
The data are a blend of two `.bin/.idx` pairs in Megatron's `GPTDataset`, read by its data loader, split for training
and evaluation.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

_FLAGS = """
    --num-layers 4 --position-embedding-type rope --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 192 --max-position-embeddings 192 --vocab-size 64 --make-vocab-size-divisible-by 32
    --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 4 --num-workers 0
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-decay-iters 100 --lr-warmup-iters 5 --clip-grad 1.0
    --eval-iters 3 --eval-interval 20 --split 8,2,0 --log-interval 1 --seed 5
    --no-load-rng
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local --no-rope-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
"""
SPEC = ["--spec", "megatron_cp.megatron.specs", "gpt_layer_spec"]
STOCK, OURS, PAGE = "stock", "megatron_cp", "page"


# -- one rank ----------------------------------------------------------------------------------------------------------


def stock_step(batches: Any, model: Any) -> Any:
    """The forward step of a GPT's pretraining, as Megatron's users have it."""
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(stock_loss, batch["loss_mask"])


def stock_loss(loss_mask: Any, losses: Any) -> Any:
    """Its loss function."""
    total, tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, tokens.int(), {"lm loss": torch.stack([total.detach(), tokens])}


def our_step(batches: Any, model: Any) -> Any:
    """Runs the forward step with our batch: a sample is one document, and each rank gets its part of it."""
    from megatron.training import get_args

    from megatron_cp.layout import Packing
    from megatron_cp.megatron.batch import layout_options, shard_batch
    from megatron_cp.megatron.loss import forward_step
    from megatron_cp.megatron.modules import slots_of
    from megatron_cp.planner.layouts import layout_by_name

    args, sample = get_args(), next(batches)
    tokens, labels, loss_mask = (sample[name].flatten() for name in ("tokens", "labels", "loss_mask"))
    layout = layout_by_name(args.cp_layout, Packing([len(tokens)]), args.context_parallel_size, **layout_options(args))
    group = _groups().cp
    batch = shard_batch(tokens, layout, group, slots=slots_of(model), labels=labels, loss_mask=loss_mask)
    return forward_step(iter([batch]), model)


def step_of_the_page() -> Any:
    """Returns the forward step that docs/moving-a-megatron-job.md adds to Megatron's script, on the CPU."""
    from megatron.training import get_args

    page = (Path(__file__).parents[2] / "docs" / "moving-a-megatron-job.md").read_text()
    (added,) = [
        block for block in re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "def " in block
    ]
    code = "\n".join(line[1:] for line in added.splitlines() if line.startswith("+")).replace('"cuda"', '"cpu"')
    scope = {"get_args": get_args, "lru_cache": cache}
    exec(code, scope)
    return scope["packed_step"]


@cache
def _groups() -> Any:
    from megatron_cp.megatron.groups import BatchGroups

    return BatchGroups.make()


def data_sets(samples: list[int]) -> Any:
    """Builds the data sets by Megatron's builder."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, of_splits = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, blend=blend, blend_per_split=of_splits,
        split=args.split, tokenizer=build_tokenizer(args), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, path_to_cache=args.data_cache_path,
        inter_document_masking=args.dataloader_inter_document_masking,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()


def rank_main(kind: str) -> None:
    """Runs one process of a job, with Megatron's flags as its arguments."""
    from megatron_cp.megatron.cpu import run_megatron_on_cpu

    torch.set_num_threads(1)
    run_megatron_on_cpu(pretrain=True)
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.enums import ModelType
    from megatron.core.transformer import TransformerConfig
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

    dataset_utils.compile_helpers = lambda: None  # the wheel brings them compiled
    if kind == STOCK:
        args = parse_and_validate_args()
        config, step = core_transformer_config_from_args(args, TransformerConfig), stock_step
    else:
        from megatron_cp.megatron.config import TransformerConfig as OurConfig
        from megatron_cp.megatron.config import add_arguments, with_options

        args = parse_and_validate_args(extra_args_provider=add_arguments)
        config = with_options(core_transformer_config_from_args(args, OurConfig), args)
        step = our_step if kind == OURS else step_of_the_page()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args, config))
    data_sets.is_distributed = True  # type: ignore[attr-defined]
    try:
        pretrain(container, data_sets, ModelType.encoder_or_decoder, step)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


# -- all of them -------------------------------------------------------------------------------------------------------


def corpus(prefix: Path, seed: int) -> Path:
    """Documents of numbers that go up by steps of their own, which can be learnt."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder, random = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16), np.random.default_rng(seed)
    for length in random.integers(20, 300, 300):
        numbers = (random.integers(60) + np.arange(length) * random.integers(1, 4 + seed)) % 60
        builder.add_document(torch.from_numpy(numbers), [int(length)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def losses(kind: str, ranks: int, folder: Path, flags: list[str]) -> tuple[list[float], list[float]]:
    """Returns the losses of all steps and of all evaluations."""
    own = [*SPEC, "--context-parallel-size", str(ranks)] if kind != STOCK else []
    own += ["--dataloader-inter-document-masking"] if kind == PAGE else []  # documents of any length in a sample
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    cache = ["--data-cache-path", str(folder / kind / str(ranks))]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, __file__, kind, *_FLAGS.split(), *own, *flags, *cache],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{kind} on {ranks} ranks failed:\n{done.stdout[-3000:]}{done.stderr[-6000:]}")
    printed = done.stdout + done.stderr
    steps = [float(loss) for loss in re.findall(r"iteration +\d+/.*?lm loss: (\S+) ", printed)]
    evaluations = [float(loss) for loss in re.findall(r"validation loss at .*? lm loss value: (\S+) ", printed)]
    return steps, evaluations


def compared(
    runs: dict[str, tuple[str, int]], steps: int, flags: list[str]
) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the losses of all runs after the first step, by name; a run is a kind and a number of ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = ["--data-path", "0.3", str(corpus(folder / "a", 0)), "0.7", str(corpus(folder / "b", 1))]
        start = ["--save", str(folder / "start"), "--save-interval", "1", "--exit-interval", "1"]
        every = [*data, "--train-iters", str(steps + 1), *flags]
        losses(STOCK, 1, folder, [*every, *start])
        every += ["--load", str(folder / "start")]
        return {run: losses(kind, ranks, folder, every) for run, (kind, ranks) in runs.items()}


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    with contextlib.suppress(KeyboardInterrupt):
        rank_main(kind)
