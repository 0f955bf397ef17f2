"""Sums over tokens and norms of heads whose bits do not depend on how many heads stand side by side."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.opaque import opaque_backward

L2_EPS = 1e-6  # as in fla and Megatron


@cache
def acc_type(dtype: torch.dtype) -> torch.dtype:
    """What values of a type are computed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def l2_normalised(x: Tensor) -> Tensor:
    """`[..., d]` divided by its norms."""
    return l2_normalised_and_scale(x)[0]


def l2_normalised_and_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., d]` divided by its norms, and what it was multiplied by, `[..., 1]`."""
    full = x.to(acc_type(x.dtype))
    scale = full.square().sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()
    return (full * scale).to(x.dtype), scale


def l2_gradient(x: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of x from that of `l2_normalised(x)`, by the steps of torch's autograd, whose bits it has."""
    full, gradient = x.to(scale.dtype), gradient.to(scale.dtype)
    along = (gradient * full).sum(-1, keepdim=True).mul_(-0.5).mul_(scale.pow(3))
    return (gradient * scale).add_((full * 2).mul_(along)).to(x.dtype)


def sum_over_tokens(rows: Tensor) -> Tensor:
    """`[T, c]` to `[c]`, along a dense axis: a sum down the rows rounds differently with the number of columns."""
    return rows.t().contiguous().sum(1)


def for_each_token(parameter: Tensor, tokens: int) -> Tensor:
    """`[c]` to `[tokens, c]`; its gradient is `sum_over_tokens`."""
    return _ForEachToken.apply(parameter, tokens)


class _ForEachToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, tokens: int) -> Tensor:
        return parameter.expand(tokens, -1)

    @staticmethod
    @opaque_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return sum_over_tokens(gradients[0]), None
