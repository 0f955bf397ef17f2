"""Tests of Triton's output for the gates on A100, H100 and B200, without one: registers, accesses, compilations.

As for the exchange's kernels (`test_triton_compiled`), a stand-in for the CUDA driver takes Triton's place for good, so
it has a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_cp.linear.gates import delta, steps
from tests.shared import once
from tests.unit_tests.exchange.test_triton_compiled import (
    ARCHITECTURES,
    SM_90,
    again,
    asked_for,
    compiled_by,
    compiling,
    described,
    each_architecture,
    forget,
)

BF16, FP32 = torch.bfloat16, torch.float32
# Registers of a thread as Triton 3.6.0 compiles for sm_80, sm_90 and sm_100.
REGISTERS = {
    "gdn delta_forward": (48, 48, 48), "gdn delta_backward": (64, 56, 56), "gdn delta_parameters": (25, 24, 22),
    "kda delta_forward": (56, 56, 56), "kda delta_backward": (128, 128, 128), "kda delta_parameters": (40, 40, 32),
    "bounded delta_forward": (48, 48, 48), "bounded delta_backward": (96, 96, 96),
    "norms delta_forward": (32, 32, 32), "norms delta_backward": (44, 44, 44),
    "mamba step_forward": (48, 46, 47), "mamba step_backward": (56, 64, 64), "mamba step_parameters": (22, 24, 22),
    "clamped step_forward": (48, 47, 48), "clamped step_backward": (62, 64, 64),
}  # fmt: skip
MARGIN = 1.1  # for another ptxas
MORE = {"bounded", "clamped"}  # like the calls before them


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of a process that compiles."""
    module = "tests.unit_tests.linear.test_gates_compiled"
    return once(tmp_path_factory, "gates_compiled", lambda: compiled_by(module, *asked_for(request)))


@each_architecture
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=again(SM_90, case.split()[0] in MORE)) for case in REGISTERS]
)  # fmt: skip
def test_registers_suffice(made, architecture: int, case: str):
    kernel = made["kernels"][str(architecture)][case]
    assert kernel["local"] == 0
    assert kernel["registers"] <= MARGIN * REGISTERS[case][ARCHITECTURES.index(architecture)]
    assert not kernel["fused"]  # a product is rounded before it is added


@each_architecture
def test_whole_units_are_read_and_written_at_once(made, architecture: int):
    """Norms of q and k are 4 wide accesses each way for a thread; KDA's decays are another 2 in and 4 out."""
    found = {case: each["machine_accesses"] for case, each in made["kernels"][str(architecture)].items()}
    assert found["gdn delta_forward"]["LDG.128"] == found["gdn delta_forward"]["STG.128"] == 4
    assert found["kda delta_forward"]["LDG.128"] == 6
    assert found["kda delta_forward"]["STG.128"] == 8
    assert "LDG.16" not in found["norms delta_backward"]


@pytest.mark.thorough
def test_no_number_and_no_place_makes_another_kernel(made):
    """A kernel for each type, kind of layer and size of a head, whatever tokens, heads and places there are.

    Another kernel might add up in another order, and a rank's bits would differ from another's.
    """
    assert made["drawn"] == made["expected"]


def rows(tokens: int, heads: int, dim: int, *, dtype: torch.dtype = BF16, first: int = 0, gap: int = 0) -> Tensor:
    """A section of a table, `first` elements into its rows."""
    table = torch.zeros(tokens, first + heads * dim + gap, dtype=dtype)
    return table[:, first : first + heads * dim].unflatten(1, (heads, dim))


def run(function: Any, inputs: list[Tensor | None], *options: Any) -> None:
    """Forward and backward."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    outputs = function.apply(*leaves, *options)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else [outputs]) if y is not None]
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])


def delta_call(
    heads: int, tokens: int = 256, channels: int = 1, lower_bound: float | None = None, dim: int = 128, **place: int
) -> None:
    q, k = rows(tokens, heads, dim, **place), rows(tokens, heads, dim, **place)
    beta, x = rows(tokens, heads, 1, **place), rows(tokens, heads, channels, **place)
    parameters = [torch.zeros(heads + 1), torch.zeros((heads + 1) * channels)]
    run(delta._Fused, [q, k, beta, x, *parameters], slice(1, heads + 1), lower_bound, channels > 1)


def step_call(heads: int, tokens: int = 256, limit: Any = None, **place: int) -> None:
    parameters = [torch.zeros(heads + 1), torch.zeros(heads + 1)]
    run(steps._Fused, [rows(tokens, heads, 1, **place), *parameters], slice(1, heads + 1), limit, True)


CALLS = {
    "gdn": lambda: delta_call(4),
    "kda": lambda: delta_call(4, channels=128),
    "bounded": lambda: delta_call(4, channels=128, lower_bound=-5.0),
    "norms": lambda: run(delta._FusedNorms, [rows(256, 4, 128), rows(256, 4, 128)]),
    "mamba": lambda: step_call(4),
    "clamped": lambda: step_call(4, limit=(0.0, 1.0)),
}


def drawn_calls(compiled: list[Any]) -> dict[str, int]:
    """Kernels compiled for other tokens, heads and places."""
    forget(triton_kernels)
    compiled.clear()
    draw = np.random.default_rng(0)
    for number in range(60):
        place = {"first": int(draw.integers(9)), "gap": int(draw.integers(9))}
        heads, tokens = int(draw.integers(1, 33)), int(draw.choice([1, 16, 17, draw.integers(1, 700)]))
        channels, bound = ((1, None), (16, None), (12, -5.0))[number % 3]
        delta_call(heads, tokens, channels, bound, dim=(64, 12)[number % 2], **place)
        step_call(heads, tokens, (None, (0.5, 1.0))[number % 2], **place)
    return dict(Counter(kernel.metadata.name for kernel in compiled))


# Two sizes of key heads with three kinds of decays, and one or up to 16 channels; with limits and without.
EXPECTED = {
    "delta_forward": 6, "delta_backward": 6, "delta_parameters": 2, "step_forward": 2, "step_backward": 2,
    "step_parameters": 1,
}  # fmt: skip


def main() -> None:
    torch.autograd.set_multithreading_enabled(False)
    found: dict[int, dict[str, Any]] = {}
    left_out = MORE if "--few" in sys.argv else set()
    with compiling() as (driver, compiled, folder):
        for architecture in [int(word) for word in sys.argv[1:] if word != "--few"]:
            driver.architecture = architecture
            forget(triton_kernels)
            found[architecture] = {}
            for case, call in CALLS.items():
                if case in left_out:
                    continue
                compiled.clear()
                call()
                for kernel in compiled:
                    found[architecture][f"{case} {kernel.metadata.name}"] = described(kernel, folder)
        drawn = drawn_calls(compiled) if set(found) == set(ARCHITECTURES) else None
    print(json.dumps({"kernels": found, "drawn": drawn, "expected": EXPECTED}))


if __name__ == "__main__":
    from megatron_cp.linear.gates import triton_kernels

    main()
