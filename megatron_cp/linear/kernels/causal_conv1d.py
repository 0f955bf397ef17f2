"""causal-conv1d's CUDA kernel of the convolution (package causal-conv1d)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.linear.activations import silu as apply_silu
from megatron_cp.linear.kernels.base import ConvKernel, LinearCall
from megatron_cp.linear.kernels.common.installed import package_refusal
from megatron_cp.linear.kernels.conv import add_history

OLDEST = (1, 2)  # the first version whose `causal_conv1d_fn` has these arguments
WIDTHS = range(2, 5)
ALIGN = 8  # channels


class CausalConv1dConv(ConvKernel):
    """`causal_conv1d_fn`, which separates documents by `seq_idx`.

    Before version 1.7 it takes no history together with `seq_idx`, and since then only that of the first document. So
    chunkwise it is called without its activation, which is applied after the history's contribution has been added.
    """

    name = "causal_conv1d"
    package = "causal-conv1d"
    devices = ("cuda",)

    def refusal(self, call: LinearCall) -> str | None:
        reason = package_refusal(call, self.package, "mamba", OLDEST, "causal_conv1d")
        if reason is None and call.conv_width not in WIDTHS:
            return f"has {WIDTHS[0]} to {WIDTHS[-1]} taps, not {call.conv_width}; use fla or chunked"
        odd = [channels for channels in call.channels if channels % ALIGN]
        if reason is None and odd:
            return f"has multiples of {ALIGN} channels, not {min(odd)}; use fla or chunked"
        return reason

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, *, silu: bool,
        history: Callable[[], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        from causal_conv1d import causal_conv1d_fn

        activation = "silu" if silu and history is None else None
        # Channel-last, as `[1, c, T]`.
        y = causal_conv1d_fn(_aligned(x).t()[None], weight, bias, seq_idx=_documents(call), activation=activation)
        y = y.squeeze(0).t()
        if history is not None:
            y = add_history(y, history().to(y.dtype), weight.to(y.dtype), call)
            y = apply_silu(y) if silu else y
        return cast("Tensor", _AlignedGradient.apply(y))


class _AlignedGradient(torch.autograd.Function):
    """The identity, whose gradient is what the package's backward takes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _aligned(gradients[0])


def _aligned(x: Tensor) -> Tensor:
    """Returns x, `[T, c]`, or a copy if its rows, one row too, do not begin at multiples of `ALIGN` elements."""
    if x.stride() == (x.shape[1], 1) and x.storage_offset() % ALIGN == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _documents(call: LinearCall) -> Tensor:
    """Returns `seq_idx`, `[1, T]`."""
    lengths = call.packing.lengths
    return call.packing.memo(
        ("causal_conv1d documents", call.device),
        lambda: on_device(np.repeat(np.arange(lengths.size), lengths), call.device)[None],
    )
