"""Tests of the answers of unchanged transformers, accelerate and TRL to requests that run here.

A refusal has its type, the module that raises it and a piece of its text. What is taken without a refusal is measured
against each document alone, and so is ours on the same batch.
`python -m tests.functional_tests.test_transformers_stock PATH` writes the table, which is in benchmarks/results.
"""

import contextlib
import copy
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("trl")
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.big_modeling import _attach_context_parallel_hooks as drop_masks
from accelerate.big_modeling import (
    _refuse_recurrent_layers_under_sequence_parallelism as refuse_under_sequence_parallelism,
)
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.utils.logging import warning_once
from trl import GRPOConfig, SFTConfig, SFTTrainer

from megatron_cp import Packing
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel
from tests.functional_tests.test_transformers_training import OnCpu, PackingTrainer, on_rank
from tests.transformers_cases import MODELS, build, stock, tokenizer

FOLDER = tempfile.gettempdir()  # a trainer wants one, and nothing is saved
LENGTHS = [20, 31, 9]
LEAK, CLOSE = 2e-2, 1e-6
VARIANTS = {"GptOss without windows": ("GptOss", {"layer_types": ["full_attention"] * 2})}


@cache
def documents():
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=random) for length in LENGTHS]


def collated(**options):
    """Packs documents into a row, as the collator of transformers does."""
    return DataCollatorWithFlattening(**options)([{"input_ids": each.tolist()} for each in documents()])


def tiny(name, dtype=torch.float32):
    kind, changed = VARIANTS.get(name, (name, {}))
    return build(kind, dtype=dtype, **changed)


@cache
@torch.enable_grad()  # of `stock`, whoever asks first
def model_and_logits(name):
    """A tiny model and its logits on each document alone, `[total, vocabulary]`."""
    model = tiny(name, torch.float64).eval()
    return model, stock(model, Packing(LENGTHS), torch.cat(documents()))[1]


def ours(name, **options):
    """The largest error of a logit over two ranks, on the row that the stock class is given."""
    model, expected = model_and_logits(name)
    batch = collated(**options)

    def main(group):
        own = copy.deepcopy(model)
        cp = enable_context_parallel(own, group, layout="balanced", scheme="exact")
        sharded = cp.shard(batch)
        with torch.no_grad():
            out = own(**sharded, num_items_in_batch=max(sharded.num_items, 1))
            return cp.gather(out.logits, sharded)[0]

    return (run_ranks(main, 2)[0] - expected).abs().max().item()


def trained_by_trl():
    """The largest error of a step's loss with `SFTTrainer(packing=True)` on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        logged, expected, *_ = run_ranks(on_rank, 2, PackingTrainer, "Qwen3Next", folder, kind="processes")[0]
    return max(abs(found - alone) for (found, _), (alone, _) in zip(logged, expected, strict=True))


def equal(error):
    return f"runs, within {error:.0e}"


def trainer_of(name):
    """The stock Trainer of a tiny model at `cp_size=2`, with packed batches."""
    args = TrainingArguments(
        FOLDER, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=1,
        per_device_train_batch_size=3, parallelism_config=OnCpu(cp_size=2),
    )  # fmt: skip
    data = [{"input_ids": each.tolist()} for each in documents()]
    return Trainer(model=tiny(name), args=args, train_dataset=data, data_collator=DataCollatorWithFlattening())


def train(name):
    trainer_of(name).train()


def shard(name):
    trainer = trainer_of(name)
    return trainer._prepare_context_parallel_inputs(trainer.model, collated())


def pack_by_trl():
    from datasets import Dataset

    args = SFTConfig(FOLDER, use_cpu=True, report_to=[], bf16=False, packing=True, parallelism_config=OnCpu(cp_size=2))
    data = Dataset.from_list([{"input_ids": each.tolist()} for each in documents()])
    return SFTTrainer(model=tiny("Llama"), args=args, train_dataset=data, processing_class=tokenizer())


def forward(name, **options):
    batch = collated(**options)
    del batch["labels"]
    with torch.no_grad():
        return model_and_logits(name)[0](**batch, use_cache=False).logits[0]


@dataclass(frozen=True)
class Refusal:
    """`request` in the table's words, `ask` of the stock class, and what it answers; `here`: the same of ours."""

    request: str
    ask: Callable[[], object]
    source: str
    says: str
    here: Callable[[], str]
    error: type[Exception] = ValueError


def of_kind(name, request, layers):
    """A kind of layers that accelerate's context parallelism does not take."""
    says = f"Context parallelism does not support attention layers of type ['{layers}']"
    return Refusal(
        f"{request} at `cp_size=2`", partial(train, name), "accelerate.big_modeling", says, lambda: equal(ours(name))
    )


REFUSALS = {
    "window": of_kind("Gemma2", "Gemma2 (windows, soft cap)", "sliding_attention"),
    "sinks": of_kind("GptOss", "GptOss (windows, learned sinks)", "sliding_attention"),
    "chunks": of_kind("Llama4", "Llama4 (chunked attention)", "chunked_attention"),
    "gdn": of_kind("Qwen3Next", "Qwen3Next (Gated DeltaNet)", "linear_attention"),
    "kda": of_kind("KimiLinear", "KimiLinear (Kimi Delta Attention, MLA)", "linear_attention"),
    "mamba": of_kind("Mamba2", "Mamba2", "linear_attention"),
    "parallel": of_kind("FalconH1", "FalconH1 (Mamba-2 beside attention)", "hybrid"),
    "sinks alone": Refusal(
        "GptOss without windows at `cp_size=2`", partial(shard, "GptOss without windows"), "transformers.trainer",
        "supported only with SDPA attention, you are using eager", lambda: equal(ours("GptOss without windows")),
    ),
    "ulysses": Refusal(
        "Qwen3Next under sequence parallelism (Ulysses)",
        lambda: refuse_under_sequence_parallelism(tiny("Qwen3Next")),
        "accelerate.big_modeling",
        "Sequence parallelism does not support attention layers of type ['linear_attention']",
        lambda: equal(ours("Qwen3Next")),
    ),
    "packing": Refusal(
        "`SFTTrainer` with `packing=True` at `cp_size=2`",
        pack_by_trl,
        "trl.trainer.sft_trainer",
        "Packing is not compatible with context parallelism",
        lambda: f"trains (Qwen3Next): each of 6 losses within {trained_by_trl():.0e}",
    ),
    "cu_seq_lens": Refusal(
        "Qwen3Next, packed, with `cu_seq_lens`, on a CPU",
        partial(forward, "Qwen3Next", return_flash_attn_kwargs=True),
        "transformers.integrations.hub_kernels",
        "`chunk_gated_delta_rule` can't keep packed sequences apart without `flash-linear-attention`",
        lambda: equal(ours("Qwen3Next", return_flash_attn_kwargs=True)),
    ),
    "seq_idx": Refusal(
        "Bamba, packed, with `seq_idx`, on a CPU",
        partial(forward, "Bamba", return_seq_idx=True),
        "transformers.integrations.hub_kernels",
        "`causal_conv1d_fn` can't keep packed sequences apart without `causal_conv1d`",
        lambda: equal(ours("Bamba", return_seq_idx=True)),
    ),
    "cpu": Refusal(
        "`ParallelismConfig(cp_size=2)` on CPU ranks",
        lambda: Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2)),
        "accelerate.parallelism_config",
        "ParallelismConfig is only compatible DistributedType.FSDP",
        lambda: "a loop of one's own runs on CPU ranks; a Trainer has the same refusal",
    ),
    "grpo": Refusal(
        "`GRPOConfig` at `cp_size=2`",
        lambda: GRPOConfig(FOLDER, use_cpu=True, report_to=[], bf16=False, parallelism_config=OnCpu(cp_size=2)),
        "trl.trainer.grpo_config",
        "GRPOTrainer does not support sequence-dim parallelism",
        lambda: "runs with `Parallelism` and `ContextParallelGRPOMixin`",
    ),
}  # fmt: skip


@contextlib.contextmanager
def as_rank_of_two():
    """This process as rank 0 of 2 for accelerate: in a group that sends nothing, since refusals come before that."""
    before = dict(os.environ)
    AcceleratorState._reset_state(True)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "unused",
                   "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()
        AcceleratorState._reset_state(True)
        os.environ.clear()
        os.environ.update(before)


def answer(ask):
    """The error and the module that raised it, or (None, None)."""
    with as_rank_of_two(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ask()
        except Exception as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            return error, frame.f_globals["__name__"]
    return None, None


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.thorough
def test_stock_refuses(name):
    refusal = REFUSALS[name]
    error, source = answer(refusal.ask)
    assert type(error) is refusal.error
    assert refusal.says in str(error)
    assert source == refusal.source


FULL_ATTENTION = {"Llama", "Qwen3", "DeepseekV3", "Nemotron", "StableLm"}


def supported():
    """The classes that say that they can be trained under context parallelism."""
    return {name for name in MODELS if tiny(name).supports_context_parallel}


def test_stock_classes_say_what_they_support():
    assert supported() == FULL_ATTENTION


def leak(name, masks_dropped=False):
    """Errors of logits of the first document and of later ones, and the messages that were logged or warned."""
    model, expected = model_and_logits(name)
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    if masks_dropped:
        drop_masks(model)
    batch, messages = collated(), []
    del batch["labels"]
    handler = SimpleNamespace(level=0, handle=lambda record: messages.append(record.getMessage()))
    warning_once.cache_clear()
    logging.getLogger("transformers").addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned, torch.no_grad():
            warnings.simplefilter("always")
            errors = (model(**batch, use_cache=False).logits[0] - expected).abs().amax(1)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    first, *later = errors.split(LENGTHS)
    return first.max().item(), torch.cat(later).max().item(), messages + [str(each.message) for each in warned]


def test_a_packed_hybrid_leaks_without_a_warning_or_a_refusal():
    first, later, messages = leak("Qwen3Next")
    assert first < CLOSE
    assert later > LEAK
    assert all("falling back to its reference PyTorch implementation" in each for each in messages)
    assert ours("Qwen3Next") < CLOSE
    refuse_under_sequence_parallelism(tiny("FalconH1"))
    assert ours("FalconH1") < CLOSE


def test_a_packed_model_leaks_under_context_parallelism_without_a_refusal():
    """TRL refuses it, the Trainer does not: accelerate drops the mask that keeps documents apart."""
    assert answer(partial(shard, "Llama")) == (None, None)
    assert leak("Llama")[1] < CLOSE
    first, later, messages = leak("Llama", masks_dropped=True)
    assert first < CLOSE
    assert later > LEAK
    assert not messages
    assert ours("Llama") < CLOSE


def _rows():
    for refusal in REFUSALS.values():
        error, source = answer(refusal.ask)
        assert refusal.says in str(error)
        yield refusal.request, f'{type(error).__name__}, `{source}`: "{refusal.says}"', refusal.here()
    flags = f"True for {len(supported())} of {len(MODELS)} classes ({', '.join(sorted(supported()))})"
    yield "`supports_context_parallel`", f"`transformers.modeling_utils`: {flags}", f"all {len(MODELS)} run"
    leaked = "**no refusal, no warning**: later documents' logits off by"
    _, later, messages = leak("Qwen3Next")
    largest = model_and_logits("Qwen3Next")[1].abs().max()
    said = ' The one thing that is logged: the slow kernels are "correct".' if messages else ""
    yield (
        "Qwen3Next, packed, with `position_ids`, on a CPU", f"{leaked} {later:.0e} of {largest:.1f}.{said}",
        equal(ours("Qwen3Next")),
    )  # fmt: skip
    _, later, _ = leak("Llama", masks_dropped=True)
    yield (
        "Llama, packed by `DataCollatorWithFlattening`, `Trainer` at `cp_size=2`",
        f"{leaked} {later:.0e} of {model_and_logits('Llama')[1].abs().max():.1f} once accelerate has dropped the mask",
        equal(ours("Llama")),
    )
    refuse_under_sequence_parallelism(tiny("FalconH1"))
    yield (
        "FalconH1 under sequence parallelism (Ulysses)",
        "`accelerate.big_modeling`: no refusal, though its Mamba-2 layers have a state (not run: it needs DeepSpeed)",
        equal(ours("FalconH1")),
    )


def _page():
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "accelerate", "trl", "torch"))
    rows = "\n".join(f"| {' | '.join(row)} |" for row in _rows())
    return f"""# What transformers, accelerate and TRL answer

{versions}; CPU, tiny random models, a pack of {LENGTHS[0]}, {LENGTHS[1]} and {LENGTHS[2]} tokens.
"Within": the largest error of a logit over two ranks, against the stock class on each document alone.
The stock classes are asked as rank 0 of 2, and what they refuse they refuse before anything is sent.

    python -m tests.functional_tests.test_transformers_stock benchmarks/results/transformers_stock.md  # writes this

| request | stock answers | here |
|---|---|---|
{rows}

The stock `Trainer` takes full causal attention with one document a row. torch computes it on a GPU only, so that it is
not compared here.
"""


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(_page())
