"""Kernels that compute nothing: what is left of a layer is ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.scan import LocalScan
from megatron_cp.layout.tiles import Tiles
from megatron_cp.linear.kernels import Inputs, LinearCall, LinearKernel, ScanWork
from megatron_cp.softmax.kernels import AttentionCall, AttentionKernel


class NullAttention(AttentionKernel):
    """Writes nothing."""

    name, package, unrounded_partials = "null", "", True

    def refusal(self, call: Any) -> str | None:
        return None

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall,
        first_head: int,
    ) -> None:  # fmt: skip
        pass

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, tiles: Tiles, call: AttentionCall, first_head: int,
    ) -> None:  # fmt: skip
        pass


class NullLinear(LinearKernel):
    """A convolution and a recurrence that allocate their results, each in one function of autograd."""

    name, package, kinds = "null", "", ("gdn", "kda", "mamba")

    def refusal(self, call: Any) -> str | None:
        return None

    def rule(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> Tensor:
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

    def leave_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], gradient: Tensor) -> tuple[Tensor, Any]:
        return torch.empty_like(self._arrived), None

    def finish_backward(
        self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor, states: Tensor
    ) -> list[Tensor]:
        return [torch.empty_like(tensor) for tensor in tensors]
