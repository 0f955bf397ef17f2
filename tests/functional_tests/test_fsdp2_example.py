"""The FSDP2 example over 2 x 2 processes has the losses of one rank."""

import functools
import importlib.util
from pathlib import Path
from types import SimpleNamespace

from megatron_cp.executor.launch import run_ranks
from tests.limits import limit

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_hybrid.py"


@functools.cache
def example():
    spec = importlib.util.spec_from_file_location("fsdp2_hybrid", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(dp, cp):
    return SimpleNamespace(dp=dp, cp=cp, steps=3, seq_length=64, lr=3e-3)


def on_rank(group, dp, cp):
    return example().train(group, options(dp, cp))


def test_losses_are_those_of_one_rank():
    found = run_ranks(on_rank, 4, 2, 2, kind="processes", timeout=limit(60))
    expected = example().train(None, options(2, 2))
    assert len(expected) == 4  # three steps, and what is held out
    assert expected[-1] < expected[0]
    for losses in found:
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < example().TOLERANCE
