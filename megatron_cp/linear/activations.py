"""Nonlinearities whose bits do not depend on the shape that they are applied to.

torch's `sigmoid`, `silu` and `softplus` round differently in the last, partly filled vector of a CPU loop than in the
full ones, so that one head's values would depend on how many heads stand beside it, and a head exchange could not be
bitwise equal to one rank. `exp`, `log1p` and the four operations do not have that fault (a test holds torch to it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.opaque import opaque


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`."""
    return _Silu.apply(x)


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))`, without overflow."""
    return _Softplus.apply(x)


def sigmoid_value(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`, which autograd differentiates to NaN where exp overflows."""
    return (x.neg().exp_() + 1).reciprocal_()  # exp overflows to inf below -88 in fp32, whose reciprocal is right: 0


def softplus_value(x: Tensor) -> Tensor:
    """`softplus(x)`, not to be differentiated by autograd."""
    return x.clamp(min=0).add_(x.abs().neg_().exp_().log1p_())


# The gradients are written out because autograd's own would divide inf by inf where exp overflows.


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return sigmoid_value(x).mul_(x)

    @staticmethod
    @opaque
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        y = sigmoid_value(x)
        return gradients[0] * (y * (1 + x * (1 - y)))


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return softplus_value(x)

    @staticmethod
    @opaque
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * sigmoid_value(x)
