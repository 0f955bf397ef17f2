"""Nonlinearities whose bits do not depend on the shape of their argument.

torch's `sigmoid`, `silu` and `softplus` round differently in the last, partly filled vector of a CPU loop than in the
full ones. A head's values would then depend on the number of heads of a rank, and a head exchange could not be bitwise
equal to one rank. `exp`, `log1p` and arithmetic do not round so, which a test checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.no_compile import no_compile


def silu(x: Tensor) -> Tensor:
    """Computes `x * sigmoid(x)`."""
    return _Silu.apply(x)


def sigmoid(x: Tensor) -> Tensor:
    """Computes `1 / (1 + exp(-x))`; differentiable once."""
    return _Sigmoid.apply(x)


def softplus(x: Tensor) -> Tensor:
    """Computes `log(1 + exp(x))` without overflow."""
    return _Softplus.apply(x)


def sigmoid_value(x: Tensor) -> Tensor:
    """Computes `1 / (1 + exp(-x))`. Autograd's gradient of it is NaN where exp overflows."""
    return (x.neg().exp_() + 1).reciprocal_()  # below -88 exp overflows to inf in fp32, whose reciprocal 0 is right


def softplus_value(x: Tensor) -> Tensor:
    """Computes `softplus(x)`. It must not be differentiated by autograd."""
    return x.clamp(min=0).add_(x.abs().neg_().exp_().log1p_())


# Autograd's own gradients would divide inf by inf where exp overflows.


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return sigmoid_value(x).mul_(x)

    @staticmethod
    @no_compile
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        y = sigmoid_value(x)
        return gradients[0] * (y * (1 + x * (1 - y)))


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = sigmoid_value(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @no_compile
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradients[0] * (y * (1 - y))


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return softplus_value(x)

    @staticmethod
    @no_compile
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * sigmoid_value(x)
