"""The gates of a delta rule: `q / |q|`, `k / |k|`, the logarithms g of the decays, and `sigmoid(beta)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.linear.activations import sigmoid, sigmoid_value, softplus_value
from megatron_cp.linear.gates.tensors import dense, has_kernels, own_part, unit_of, whole
from megatron_cp.linear.reductions import (
    cached_accumulation_dtype,
    l2_gradient,
    l2_normalised_and_scale,
    sum_over_tokens,
)


def delta_gates(
    q: Tensor, k: Tensor, beta: Tensor, x: Tensor, *, heads: slice,
    A_log: Tensor, dt_bias: Tensor,  # noqa: N803 - the parameter's name everywhere
    lower_bound: float | None = None, per_feature: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gates of a mixer for this rank's heads; differentiable once.

        g = -exp(A_log) softplus(x + dt_bias), or lower_bound sigmoid(exp(A_log) (x + dt_bias))

    Args:
        q, k: `[T, g, d]`
        beta: `[T, h, 1]`
        x: `[T, h, c]`, where c is 1, or the number of features if each has a decay.
        heads: slice of the h heads among all heads.
        A_log: `[all heads]`
        dt_bias: `[all heads * c]`
        lower_bound: limit of g; None for no limit.
        per_feature: True if g keeps x's last axis.

    Returns:
        q and k in their types, g `[T, h]` or `[T, h, c]` and beta `[T, h]` in float32 at least.
    """
    function = _Fused if has_kernels(q, k, beta, x, A_log, dt_bias) else _Eager
    gates: tuple[Tensor, Tensor, Tensor, Tensor]
    gates = function.apply(q, k, beta, x, A_log, dt_bias, heads, lower_bound, per_feature)
    return gates


def channel_gates(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, b: Tensor, w: Tensor, *, heads: slice,
    A_log: Tensor, dt_bias: Tensor,  # noqa: N803 - the parameter's name everywhere
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gates of Gated DeltaNet-2 for this rank's heads, by torch's operators; differentiable once.

    Args:
        q, k, x, b: `[T, g, d]`; x is what decays are computed from.
        v, w: `[T, h, dv]`
        heads: slice of the g key heads among all key heads.
        A_log: `[all key heads]`
        dt_bias: `[all key heads * d]`

    Returns:
        q and k in their types, the values to be written `sigmoid(w) v` in that of v, and the log decays and
        `sigmoid(b)`, both `[T, g, d]`, in float32 at least.
    """
    q, k, g, erase = _Eager.apply(q, k, b, x, A_log, dt_bias, heads, None, True)
    write = sigmoid(w.to(cached_accumulation_dtype(w.dtype)))
    return q, k, (write * v).to(v.dtype), g, erase.view(b.shape)  # a single feature is kept as an axis


def normalised(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Divides q and k, `[T, g, d]` each, by the norms of their rows; differentiable once."""
    both: tuple[Tensor, Tensor] = (_FusedNorms if has_kernels(q, k) else _EagerNorms).apply(q, k)
    return both


class _Fused(torch.autograd.Function):
    """The gates by Triton kernels, which save their inputs only."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, beta: Tensor, x: Tensor, rates: Tensor, bias: Tensor, heads: slice,
        lower_bound: float | None, per_feature: bool,
    ) -> Any:  # fmt: skip
        from megatron_cp.linear.gates.triton import delta

        unit, x_unit = unit_of(q), unit_of(x)
        given = dense((q, k, beta, x, rates, bias), (unit, unit, 1, x_unit, 1, 1))
        ctx.save_for_backward(*given)
        ctx.options, ctx.units = (heads.start, lower_bound, (unit, x_unit)), (unit, unit, x_unit, 1)
        g_shape = x.shape if per_feature else x.shape[:2]
        return delta(given, heads.start, lower_bound, (unit, x_unit), g_shape)

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from megatron_cp.linear.gates.triton import delta_gradients

        return *delta_gradients(ctx.saved_tensors, dense(gradients, ctx.units), *ctx.options), None, None, None


class _Eager(torch.autograd.Function):
    """The gates by torch's operators, in place on tensors that this function made. beta may have features too."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, beta: Tensor, x: Tensor, A_log: Tensor, dt_bias: Tensor,  # noqa: N803
        heads: slice, lower_bound: float | None, per_feature: bool,
    ) -> Any:  # fmt: skip
        acc_dtype = cached_accumulation_dtype(x.dtype)
        (q_out, q_scale), (k_out, k_scale) = l2_normalised_and_scale(q), l2_normalised_and_scale(k)
        strength = sigmoid_value(beta.squeeze(-1).to(acc_dtype))
        rate = own_part(A_log, heads).to(acc_dtype).exp()
        shift = own_part(dt_bias, heads, x.shape[2]).to(acc_dtype)
        if per_feature:
            rate, shifted = rate[:, None], x.to(acc_dtype) + shift.view(x.shape[1:])
        else:
            shifted = x.squeeze(-1).to(acc_dtype) + shift
        if lower_bound is None:
            activated = softplus_value(shifted)
            g = activated * rate.neg()
        else:
            activated = sigmoid_value(shifted * rate)
            g = activated * lower_bound
        ctx.save_for_backward(q, k, q_scale, k_scale, strength, rate, shifted, activated)
        ctx.parameters = (A_log.shape[0], A_log.dtype), (dt_bias.shape[0], dt_bias.dtype)
        ctx.options = x.shape, x.dtype, beta.shape, beta.dtype, heads, lower_bound
        return q_out, k_out, g, strength

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, q_scale, k_scale, strength, rate, shifted, activated = ctx.saved_tensors
        dq_out, dk_out, dg, dstrength = gradients
        shape, dtype, beta_shape, beta_dtype, heads, lower_bound = ctx.options
        rates_meta, bias_meta = ctx.parameters
        if lower_bound is None:
            drate = dg * activated
            dshifted = (dg * rate.neg()).mul_(sigmoid_value(shifted))
        else:
            inner = dg * lower_bound
            inner *= torch.rsub(activated, 1).mul_(activated)
            drate, dshifted = inner * shifted, inner * rate
        if drate.ndim == 3:
            drate = drate.sum(-1) if shape[2] > 1 else drate.squeeze(-1)
        if lower_bound is None:
            drate.neg_()
        dA_log = sum_over_tokens(drate).mul_(rate.view(-1))  # noqa: N806
        dbeta = torch.rsub(strength, 1).mul_(strength).mul_(dstrength)
        return (
            l2_gradient(q, q_scale, dq_out), l2_gradient(k, k_scale, dk_out), dbeta.to(beta_dtype).view(beta_shape),
            dshifted.to(dtype).view(shape), whole(dA_log, rates_meta, heads),
            whole(sum_over_tokens(dshifted.flatten(1)), bias_meta, heads, shape[2]), None, None, None,
        )  # fmt: skip


class _FusedNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Any:
        from megatron_cp.linear.gates.triton import norms

        ctx.units = (unit_of(q),) * 2
        both = dense((q, k), ctx.units)
        ctx.save_for_backward(*both)
        return norms(both, ctx.units[0])

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from megatron_cp.linear.gates.triton import norm_gradients

        return norm_gradients(ctx.saved_tensors, dense(gradients, ctx.units), ctx.units[0])


class _EagerNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Any:
        (q_out, q_scale), (k_out, k_scale) = l2_normalised_and_scale(q), l2_normalised_and_scale(k)
        ctx.save_for_backward(q, k, q_scale, k_scale)
        return q_out, k_out

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, q_scale, k_scale = ctx.saved_tensors
        return l2_gradient(q, q_scale, gradients[0]), l2_gradient(k, k_scale, gradients[1])
