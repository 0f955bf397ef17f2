"""What stands before a delta rule: `q / |q|`, `k / |k|`, the decays' logarithms g, and `sigmoid(beta)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.opaque import opaque_backward
from megatron_cp.linear.activations import sigmoid_value, softplus_value
from megatron_cp.linear.gates.tensors import dense, has_kernels, own_part, unit_of, whole
from megatron_cp.linear.reductions import acc_type, l2_gradient, l2_normalised_and_scale, sum_over_tokens


def delta_gates(
    q: Tensor, k: Tensor, beta: Tensor, x: Tensor, *, heads: slice,
    A_log: Tensor, dt_bias: Tensor,  # noqa: N803 - the parameter's name everywhere
    lower_bound: float | None = None, per_feature: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gates of a mixer, for own heads; differentiable once.

        g = -exp(A_log) softplus(x + dt_bias), or lower_bound sigmoid(exp(A_log) (x + dt_bias))

    Args:
        q, k: `[T, g, d]`
        beta: `[T, h, 1]`
        x: `[T, h, c]`, c being 1 or, if there is a decay for each feature, the features.
        heads: which of all heads the h are.
        A_log: `[all heads]`
        dt_bias: `[all heads * c]`
        lower_bound: of g; None for none.
        per_feature: whether g keeps x's last axis.

    Returns:
        q and k in their types, g `[T, h]` or `[T, h, c]` and beta `[T, h]` in float32 at least.
    """
    function = _Fused if has_kernels(q, k, beta, x, A_log, dt_bias) else _OnTorch
    gates: tuple[Tensor, Tensor, Tensor, Tensor]
    gates = function.apply(q, k, beta, x, A_log, dt_bias, heads, lower_bound, per_feature)
    return gates


def normalised(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Both `[T, g, d]` divided by their norms; differentiable once."""
    both: tuple[Tensor, Tensor] = (_FusedNorms if has_kernels(q, k) else _NormsOnTorch).apply(q, k)
    return both


class _Fused(torch.autograd.Function):
    """By the kernels, which need nothing but what came in."""

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
    @opaque_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from megatron_cp.linear.gates.triton import delta_gradients

        return *delta_gradients(ctx.saved_tensors, dense(gradients, ctx.units), *ctx.options), None, None, None


class _OnTorch(torch.autograd.Function):
    """By torch's operators, in place wherever a tensor is this function's own."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, beta: Tensor, x: Tensor, A_log: Tensor, dt_bias: Tensor,  # noqa: N803
        heads: slice, lower_bound: float | None, per_feature: bool,
    ) -> Any:  # fmt: skip
        acc_dtype = acc_type(x.dtype)
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
        ctx.options = x.shape, x.dtype, beta.dtype, heads, lower_bound
        return q_out, k_out, g, strength

    @staticmethod
    @opaque_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, q_scale, k_scale, strength, rate, shifted, activated = ctx.saved_tensors
        dq_out, dk_out, dg, dstrength = gradients
        shape, dtype, beta_dtype, heads, lower_bound = ctx.options
        of_rates, of_bias = ctx.parameters
        if lower_bound is None:
            of_rate = dg * activated
            of_shifted = (dg * rate.neg()).mul_(sigmoid_value(shifted))
        else:
            inner = dg * lower_bound
            inner *= torch.rsub(activated, 1).mul_(activated)
            of_rate, of_shifted = inner * shifted, inner * rate
        if of_rate.ndim == 3:
            of_rate = of_rate.sum(-1) if shape[2] > 1 else of_rate.squeeze(-1)
        if lower_bound is None:
            of_rate.neg_()
        dA_log = sum_over_tokens(of_rate).mul_(rate.view(-1))  # noqa: N806
        dbeta = torch.rsub(strength, 1).mul_(strength).mul_(dstrength)
        return (
            l2_gradient(q, q_scale, dq_out), l2_gradient(k, k_scale, dk_out), dbeta.to(beta_dtype).unsqueeze(-1),
            of_shifted.to(dtype).view(shape), whole(dA_log, of_rates, heads),
            whole(sum_over_tokens(of_shifted.flatten(1)), of_bias, heads, shape[2]), None, None, None,
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
    @opaque_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from megatron_cp.linear.gates.triton import norm_gradients

        return norm_gradients(ctx.saved_tensors, dense(gradients, ctx.units), ctx.units[0])


class _NormsOnTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Any:
        (q_out, q_scale), (k_out, k_scale) = l2_normalised_and_scale(q), l2_normalised_and_scale(k)
        ctx.save_for_backward(q, k, q_scale, k_scale)
        return q_out, k_out

    @staticmethod
    @opaque_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, q_scale, k_scale = ctx.saved_tensors
        return l2_gradient(q, q_scale, gradients[0]), l2_gradient(k, k_scale, gradients[1])
