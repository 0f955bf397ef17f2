"""Mamba-2's step sizes, `softplus(dt + dt_bias)` within limits, and its decays, `-exp(A_log)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.linear.activations import sigmoid_value, softplus_value
from megatron_cp.linear.gates.tensors import dense, has_kernels, own_part, whole
from megatron_cp.linear.reductions import cached_accumulation_dtype, sum_over_tokens


def step_gates(
    x: Tensor, *, heads: slice, A_log: Tensor | None, bias: Tensor | None,  # noqa: N803 - the parameter's name
    limit: tuple[float, float] | None, softplus: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes the steps and decays of the recurrence for this rank's heads; differentiable once.

    Args:
        x: `[T, h, 1]`
        heads: slice of the h heads among all heads.
        A_log: `[all heads]`; None to compute no decays.
        bias: `[all heads]`, added to x.
        limit: lower and upper limit to which steps are clamped at the end.
        softplus: True if steps are the softplus of the sum.

    Returns:
        The steps `[T, h]` and the decays `[h]` or None, in at least float32.
    """
    given = [each for each in (x, A_log, bias) if each is not None]
    function = _Fused if has_kernels(*given) else _Eager
    steps, decays = function.apply(x, A_log, bias, heads, limit, softplus)
    return steps, decays


class _Fused(torch.autograd.Function):
    """The steps by Triton kernels, which save their inputs only."""

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
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from megatron_cp.linear.gates.triton import step_gradients

        (dsteps,), ddecays, (heads, limit, softplus) = dense(gradients[:1], (1,)), gradients[1], ctx.options
        found = step_gradients(ctx.saved_tensors, (dsteps, ddecays), heads, limit, softplus=softplus)
        return *found, None, None, None


class _Eager(torch.autograd.Function):
    """The steps by torch's operators, in place on tensors that this function made."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, A_log: Tensor | None, bias: Tensor | None, heads: slice,  # noqa: N803
        limit: tuple[float, float] | None, softplus: bool,
    ) -> Any:  # fmt: skip
        acc_dtype = cached_accumulation_dtype(x.dtype)
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
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        shifted, unlimited, decays = ctx.saved_tensors
        (dshifted, ddecays), (rates_meta, bias_meta) = gradients, ctx.parameters
        dtype, heads, limit, softplus = ctx.options
        if limit is not None:
            least, most = limit
            is_within = (unlimited >= least).logical_and_(unlimited <= most)
            dshifted = torch.where(is_within, dshifted, 0)
        if softplus:
            dshifted = dshifted * sigmoid_value(shifted)
        dA_log = None if rates_meta is None else whole(ddecays * decays, rates_meta, heads)  # noqa: N806
        dbias = None if bias_meta is None else whole(sum_over_tokens(dshifted), bias_meta, heads)
        return dshifted.to(dtype).unsqueeze(-1), dA_log, dbias, None, None, None
