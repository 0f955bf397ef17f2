"""Sums over tokens and norms of heads whose bits do not depend on the number of heads in a tensor."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.executor.no_compile import no_compile_backward

L2_EPS = 1e-6  # the value of fla and Megatron
# Cached for gates, whose host work a test counts. Not for code that torch.compile traces: it warns of a cache.
cached_accumulation_dtype = cache(accumulation_dtype)


def l2_normalised(x: Tensor) -> Tensor:
    """Divides `[..., d]` by the norms of its rows."""
    return l2_normalised_and_scale(x)[0]


def l2_normalised_and_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divides `[..., d]` by the norms of its rows. Returns the result and the factors, `[..., 1]`."""
    full = x.to(cached_accumulation_dtype(x.dtype))
    scale = full.square().sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()
    return (full * scale).to(x.dtype), scale


def l2_gradient(x: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient of x, given that of `l2_normalised(x)`, with the bits of torch's autograd."""
    full, gradient = x.to(scale.dtype), gradient.to(scale.dtype)
    along = (gradient * full).sum(-1, keepdim=True).mul_(-0.5).mul_(scale.pow(3))
    return (gradient * scale).add_((full * 2).mul_(along)).to(x.dtype)


def sum_over_tokens(rows: Tensor) -> Tensor:
    """Sums `[T, c]` to `[c]` along a dense axis: a sum over rows rounds differently with the number of columns."""
    return rows.t().contiguous().sum(1)


def expand_to_tokens(parameter: Tensor, tokens: int) -> Tensor:
    """Expands `[c]` to `[tokens, c]`; the gradient is computed by `sum_over_tokens`."""
    return _ExpandToTokens.apply(parameter, tokens)


class _ExpandToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, tokens: int) -> Tensor:
        return parameter.expand(tokens, -1)

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return sum_over_tokens(gradients[0]), None
