"""Sums over tokens and norms of heads whose bits do not depend on how many heads stand side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.opaque import opaque_backward

L2_EPS = 1e-6  # as in fla and Megatron


def l2_normalised(x: Tensor) -> Tensor:
    """`[..., d]` divided by its norms."""
    full = x.to(torch.promote_types(x.dtype, torch.float32))
    return (full * (full.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).to(x.dtype)


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
