"""Counts the host's work for one layer on CUDA: Python calls, operators of torch and launches of kernels.

    python -m tools.host_counts              every layer and scheme, as JSON

One forward and one backward on one rank: bfloat16, 64 tokens in 3 documents, 4 heads of 16, zigzag, 2 ranks (a2a+p2p:
4). No GPU is needed: the layer runs on the runtime and the driver of the emulated device, without its values. torch's
code for CUDA, Triton's launchers and autograd are the real ones; kernels are launched and compute nothing, and messages
go nowhere. Unlike times, counts are the same under any load, so a test holds them. Attention's kernel and the linear
layers' are left out, since they are other packages' own: kernels that compute nothing are in their place.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp.executor.run import prepare
from megatron_cp.executor.scan import LocalScan
from megatron_cp.linear.kernels import Inputs, LinearCall, LinearKernel, ScanWork
from megatron_cp.softmax.attention import attention
from megatron_cp.softmax.kernels import AttentionKernel
from megatron_cp.softmax.on_rank import prepare_attention
from megatron_cp.testing.layers import LAYERS
from megatron_cp.testing.parity import Case, draw
from tools.gpu_check.one_rank import StillGroup
from tools.nullgpu.device import HERE, UnavailableError, environment

_COUNTS = "HOST_COUNTS"  # a variable of the process that counts

CASES: dict[str, dict[str, Any]] = {
    **{f"attention {scheme}": {"layer": "attention", "cp": 2, "scheme": scheme}
       for scheme in ("a2a", "p2p", "all_gather", "exact")},
    "attention a2a, 2 chunks": {"layer": "attention", "cp": 2, "scheme": "a2a", "head_chunks": 2},
    "attention a2a, contiguous": {"layer": "attention", "cp": 2, "scheme": "a2a", "layout": "contiguous"},
    "attention a2a+p2p": {"layer": "attention", "cp": 4, "scheme": "a2a+p2p"},
    **{f"{layer} {mode}": {"layer": layer, "cp": 2, "scheme": mode}
       for layer in ("gdn", "kda", "mamba", "conv1d") for mode in ("headwise", "chunkwise")},
}  # fmt: skip


class NullAttention(AttentionKernel):
    """Writes nothing."""

    name, package, unrounded_partials = "null", "", True

    def refusal(self, call: Any) -> str | None:
        return None

    def forward(self, *args: Any) -> None:
        pass

    def backward(self, *args: Any) -> None:
        pass


class NullLinear(LinearKernel):
    """A convolution and a recurrence that allocate their results, each in one function of autograd."""

    name, package, kinds = "null", "", ("gdn", "kda", "mamba")

    def refusal(self, call: Any) -> str | None:
        return None

    def rule(self, inputs: Inputs, *args: Any) -> Tensor:
        return _Null.apply(inputs.values, *inputs)

    def work(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> ScanWork:
        return ScanWork(list(inputs), _NullScan(inputs, call), lambda out: out)

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, *, silu: bool,
        history: Callable[[], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        given = [x, weight, *([] if bias is None else [bias]), *([] if history is None else [history()])]
        return _Null.apply(x, *given)


class _Null(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


class _NullScan(LocalScan):
    def __init__(self, inputs: Inputs, call: LinearCall) -> None:
        assert call.segments is not None
        self._to_later = int(call.segments.future.sum())
        self._through = int((call.segments.past & call.segments.future).sum())
        heads, value_dim = inputs.values.shape[1:]
        self._state = (heads, inputs.keys.shape[2], value_dim)

    def leave(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
        heads, key_dim, value_dim = self._state
        like = tensors[0]
        return (
            like.new_empty(self._to_later, heads, key_dim, value_dim, dtype=torch.float32),
            like.new_empty(self._through, heads, key_dim, key_dim, dtype=torch.float32), None,
        )  # fmt: skip

    def finish(self, tensors: Sequence[Tensor], begun: Any, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        self._arrived = states
        heads, _, value_dim = self._state
        return tensors[0].new_empty(len(tensors[0]), heads, value_dim), []

    def leave_backward(self, *args: Any) -> tuple[Tensor, Any]:
        return torch.empty_like(self._arrived), None

    def finish_backward(self, tensors: Sequence[Tensor], *args: Any) -> list[Tensor]:
        return [torch.empty_like(tensor) for tensor in tensors]


def counts_of(options: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Returns the counts of each direction of a layer, on the emulated device."""
    sizes = {"lengths": (20, 1, 43), "heads": 4, "groups": 4, "head_dim": 16, "value_head_dim": 16}
    case = Case(**sizes | {"dtype": torch.bfloat16} | options)
    cuda, plan, problem = torch.device("cuda", 0), case.plan(), draw(case)
    group = StillGroup(0, case.cp)
    prepare(plan, 0, cuda)
    inputs = [plan.layout.shard(x, 0).to(cuda).requires_grad_() for x in problem.inputs.values()]
    parameters = {name: x.to(cuda).requires_grad_() for name, x in problem.parameters.items()}
    leaves = [*inputs, *parameters.values()]
    if case.layer == "attention":
        prepare_attention(plan, 0, cuda)

    def forward() -> Tensor:
        if case.layer == "attention":
            return attention(*inputs, plan, group, kernel=NullAttention())
        return LAYERS[case.layer].run(*inputs, plan, group, **parameters, kernel=NullLinear())

    gradient = torch.ones_like(forward())

    def backward(out: Tensor) -> None:
        torch.autograd.grad(out, leaves, gradient, allow_unused=True)

    for _ in range(3):
        backward(forward())
    outs = [forward() for _ in range(3)]
    return {"forward": _counted(forward), "backward": _counted(lambda: backward(outs.pop()))}


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


def _counted(call: Any) -> dict[str, int]:
    seen = {"call": 0, "c_call": 0}

    def hook(_: Any, event: str, __: Any) -> None:
        if event in seen:
            seen[event] += 1

    kernels = _launches()
    call()
    kernels = _launches() - kernels
    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    with _Operators() as operators:
        call()
    return {"calls": seen["call"], "calls of C": seen["c_call"], "operators": operators.seen, "launches": kernels}


def _launches() -> int:
    """Kernels so far: torch's and Triton's."""
    return int(ctypes.CDLL(None).nullgpu_launches())


def main() -> int:
    """Prints the counts, of a process on the emulated device, which this one becomes. Exit code 2 without the device.

    That process loads the device's libraries but not `site`, which computes values.
    """
    argparse.ArgumentParser(description=__doc__).parse_args()
    if _COUNTS not in os.environ:
        try:
            device = environment()
        except UnavailableError as reason:
            print(f"host_counts: {reason}", file=sys.stderr)
            return 2
        paths = [path for path in device["PYTHONPATH"].split(os.pathsep) if path != str(HERE / "site")]
        own = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0", _COUNTS: "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tools.host_counts"], device | own)
    torch.autograd.set_multithreading_enabled(False)
    torch.bmm = lambda a, b: a.new_empty(len(a), a.shape[1], b.shape[2])  # the emulated device has no cuBLAS
    print(json.dumps({name: counts_of(case) for name, case in CASES.items()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
