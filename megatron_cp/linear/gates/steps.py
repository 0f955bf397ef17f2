"""Mamba-2's step sizes, `softplus(dt + dt_bias)` within limits, and its decays, `-exp(A_log)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.opaque import opaque_backward
from megatron_cp.linear.activations import sigmoid_value, softplus_value
from megatron_cp.linear.gates.tensors import dense, has_kernels, own_part, whole
from megatron_cp.linear.reductions import acc_type, sum_over_tokens


def step_gates(
    x: Tensor, *, heads: slice, A_log: Tensor | None, bias: Tensor | None,  # noqa: N803 - the parameter's name
    limit: tuple[float, float] | None, softplus: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Steps and decays as the recurrence takes them, for own heads; differentiable once.

    Args:
        x: `[T, h, 1]`
        heads: which of all heads the h are.
        A_log: `[all heads]`; None if no decays are wanted.
        bias: `[all heads]`, added to x.
        limit: what steps are clamped to in the end.
        softplus: whether steps are the softplus of the sum.

    Returns:
        `[T, h]` and `[h]` or None, in float32 at least.
    """
    given = [each for each in (x, A_log, bias) if each is not None]
    function = _Fused if has_kernels(*given) else _OnTorch
    steps, decays = function.apply(x, A_log, bias, heads, limit, softplus)
    return steps, decays


class _Fused(torch.autograd.Function):
    """By the kernels, which need nothing but what came in."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, A_log: Tensor | None, bias: Tensor | None, heads: slice,  # noqa: N803
        limit: tuple[float, float] | None, softplus: bool,
    ) -> Any:  # fmt: skip
        from megatron_cp.linear.gates.triton import steps

        (x,) = dense((x,), (1,))
        inputs = x, None if A_log is None else A_log.contiguous(), None if bias is None else bias.contiguous()
        ctx.save_for_backward(*inputs)
        ctx.options = heads, limit, softplus
        return steps(inputs, heads, limit, softplus=softplus)

    @staticmethod
    @opaque_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from megatron_cp.linear.gates.triton import step_gradients

        (dsteps,), ddecays, (heads, limit, softplus) = dense(gradients[:1], (1,)), gradients[1], ctx.options
        found = step_gradients(ctx.saved_tensors, (dsteps, ddecays), heads, limit, softplus=softplus)
        return *found, None, None, None


class _OnTorch(torch.autograd.Function):
    """By torch's operators, in place wherever a tensor is this function's own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, A_log: Tensor | None, bias: Tensor | None, heads: slice,  # noqa: N803
        limit: tuple[float, float] | None, softplus: bool,
    ) -> Any:  # fmt: skip
        acc_dtype = acc_type(x.dtype)
        shifted = x.squeeze(-1).to(acc_dtype)
        if bias is not None:
            shifted = shifted + own_part(bias, heads).to(acc_dtype)
        unlimited = softplus_value(shifted) if softplus else shifted
        steps = unlimited if limit is None else unlimited.clamp(*limit)
        decays = None if A_log is None else own_part(A_log, heads).to(acc_dtype).exp().neg_()
        ctx.save_for_backward(shifted, None if limit is None else unlimited, decays)
        ctx.parameters = [None if each is None else (each.shape[0], each.dtype) for each in (A_log, bias)]
        ctx.options = x.dtype, heads, limit, softplus
        return steps, decays

    @staticmethod
    @opaque_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        shifted, unlimited, decays = ctx.saved_tensors
        (of_shifted, ddecays), (of_rates, of_bias) = gradients, ctx.parameters
        dtype, heads, limit, softplus = ctx.options
        if limit is not None:
            least, most = limit
            is_within = (unlimited >= least).logical_and_(unlimited <= most)
            of_shifted = torch.where(is_within, of_shifted, 0)
        if softplus:
            of_shifted = of_shifted * sigmoid_value(shifted)
        dA_log = None if of_rates is None else whole(ddecays * decays, of_rates, heads)  # noqa: N806
        dbias = None if of_bias is None else whole(sum_over_tokens(of_shifted), of_bias, heads)
        return of_shifted.to(dtype).unsqueeze(-1), dA_log, dbias, None, None, None
