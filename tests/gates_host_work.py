"""Measures the host's work for a layer's gates alone: Python calls and operators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp.linear.gated_delta_net import gated_delta_net
from megatron_cp.linear.kimi_delta_attention import kda_mixer
from megatron_cp.linear.mamba2 import mamba2_mixer
from megatron_cp.linear.on_rank import LinearOnRank
from megatron_cp.testing.modes import register_operators
from megatron_cp.testing.parity import Case, draw

OPERATIONS = {"gdn": gated_delta_net, "kda": kda_mixer, "mamba": mamba2_mixer}


# The last three lead to the emulated device, and to whoever watches its memory.
FOREIGN = ("/triton/", "/nullgpu/", "torch/_library/", "torch/_compile.py", "torch/_utils.py")


class Work(NamedTuple):
    """The work of one direction. Calls by which Triton or an emulated device launches or computes are not counted."""

    calls: int
    operators: int


class HostWork(NamedTuple):
    """The work of both directions."""

    forward: Work
    backward: Work


def host_work(layer: str, device: str) -> HostWork:
    """Returns the work of the second call, since the first one imports."""
    gates, sections, parameters = stage_of(layer, device)

    def forward() -> list[Tensor]:
        return [y for y in gates(*sections) if y.grad_fn is not None]

    outputs = forward()
    ones = [torch.ones_like(y) for y in outputs]
    leaves = [x for x in (*sections, *parameters) if x.requires_grad]

    def backward() -> Any:
        return torch.autograd.grad(outputs, leaves, ones, allow_unused=True, retain_graph=True)

    register_operators()
    with torch.autograd.set_multithreading_enabled(False):
        backward()
        for _ in range(2):  # the first time torch looks up what it keeps
            counted = [Work(calls_of(way), operators_of(way)) for way in (forward, backward)]
    return HostWork(*counted)


def stage_of(layer: str, device: str) -> tuple[Callable[..., list[Tensor]], list[Tensor], list[Tensor]]:
    """The gates of a mixer on one rank, what they take, and the parameters in their types."""
    case = Case(layer, 1, (12,), "contiguous", 4, 2, head_dim=8, value_head_dim=8, dtype=torch.float32)
    problem, plan, found = draw(case), case.plan(), {}

    def run(self: LinearOnRank, tensors: list[Tensor], **stages: Any) -> Tensor:
        found.update(stages, layer=self)
        return tensors[0]

    parameters = {name: x.to(device).requires_grad_() for name, x in problem.parameters.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearOnRank, "run", run)
        OPERATIONS[layer](*(x.to(device) for x in problem.inputs.values()), plan, **parameters, kernel="chunked")
    widths = [(block.num_heads, block.head_dim) for block in found["layer"].blocks]
    sections = [torch.randn(12, *shape, device=device).requires_grad_() for shape in widths]
    own = [parameters[name] for name in ("A_log", "dt_bias")]
    return lambda *given: found["gates"](found["layer"], *given), sections, own


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def operators_of(function: Callable[[], Any]) -> int:
    """Views included."""
    with _Operators() as counting:
        function()
    return counting.number


def calls_of(function: Callable[[], Any]) -> int:
    """Python calls, but for those of Triton and of an emulated device, and all that they call."""
    calls, foreign = 0, 0

    def watch(frame: Any, event: str, _: object) -> None:
        nonlocal calls, foreign
        if event == "call":
            path = frame.f_code.co_filename
            if foreign or any(part in path for part in FOREIGN):
                foreign += 1
            else:
                calls += 1
        elif event == "return" and foreign:
            foreign -= 1

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
