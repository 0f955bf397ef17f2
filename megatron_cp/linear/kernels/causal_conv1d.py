"""causal-conv1d's CUDA kernel of the convolution (package causal-conv1d)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.extras import install
from megatron_cp.linear.activations import silu as apply_silu
from megatron_cp.linear.kernels.base import ConvKernel, LinearCall
from megatron_cp.linear.kernels.common.installed import import_failure, installed_version
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
        installed = installed_version(self.package)
        if installed is None or installed < OLDEST:
            what = "not installed" if installed is None else f"older than version {OLDEST[0]}.{OLDEST[1]}"
            return f"causal-conv1d is {what}; {install('mamba')}"
        if call.device.type != "cuda":
            return f"runs on CUDA, the tensors are on {call.device.type}; use chunked or reference"
        if call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"has no {call.dtype}; use chunked or reference"
        if call.conv_width not in WIDTHS:
            return f"has {WIDTHS[0]} to {WIDTHS[-1]} taps, not {call.conv_width}; use fla or chunked"
        odd = [channels for channels in call.channels if channels % ALIGN]
        if odd:
            return f"has multiples of {ALIGN} channels, not {min(odd)}; use fla or chunked"
        failure = import_failure("causal_conv1d")
        return None if failure is None else f"causal-conv1d cannot be imported ({failure}); {install('mamba')}"

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, *, silu: bool,
        history: Callable[[], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        from causal_conv1d import causal_conv1d_fn

        activation = "silu" if silu and history is None else None
        # Channel-last, as `[1, c, T]`, and contiguous, since strides too must be multiples of 8.
        y = causal_conv1d_fn(x.contiguous().t()[None], weight, bias, seq_idx=_documents(call), activation=activation)
        y = y.squeeze(0).t()
        if history is None:
            return y
        y = add_history(y, history().to(y.dtype), weight.to(y.dtype), call)
        return apply_silu(y) if silu else y


def _documents(call: LinearCall) -> Tensor:
    """Returns `seq_idx`, `[1, T]`."""
    lengths = call.packing.lengths
    return call.packing.memo(
        ("causal_conv1d documents", call.device),
        lambda: on_device(np.repeat(np.arange(lengths.size), lengths), call.device)[None],
    )
