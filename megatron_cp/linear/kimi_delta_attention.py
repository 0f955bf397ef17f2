"""Kimi Delta Attention over a packed batch: the bare rule, and the whole mixer between its projections."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError, as_number
from megatron_cp.executor.arguments import check_plan
from megatron_cp.executor.autocast import lowered
from megatron_cp.executor.cache import LayerCache
from megatron_cp.executor.groups import Group
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.linear.gated_delta_net import delta_mixer, delta_rule
from megatron_cp.linear.gates.delta import delta_gates
from megatron_cp.linear.kernels import LinearKernel
from megatron_cp.linear.on_rank import LinearChunk, MixerParameters
from megatron_cp.plan.kinds import KDA
from megatron_cp.plan.plan import Plan


@no_compile
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: Plan,
    group: Group | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    kernel: str | LinearKernel = "auto",
    cache: LayerCache | None = None,
) -> Tensor:
    """Computes Kimi Delta Attention's rule within each document, over the ranks of `group`; differentiable.

    `S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T`, `o_t = scale S_t^T q_t` (Kimi Linear,
    arXiv 2510.26692, eq. 1): the gated delta rule with a decay for each feature of the key.

    Args:
        q: `[t, key_heads, head_dim]`, this rank's rows in the plan's layout.
        k: `[t, key_heads, head_dim]`.
        v: `[t, heads, value_head_dim]`.
        g: `[t, heads, head_dim]`, log decay, at most 0.
        beta: `[t, heads]`, write strength, in (0, 1).
        plan: from `plan_linear(kind="kda")`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        scale: queries are multiplied by it; `head_dim ** -0.5` if None.
        use_qk_l2norm_in_kernel: True to divide q and k by their norms first.
        kernel: "auto", a kernel that `megatron-cp doctor` lists, or a `LinearKernel`.
        cache: the layer's part of a `Cache`, such as `cache.layer(0)`: documents continue its states, which become
            those after the new tokens.

    Returns:
        `[t, heads, value_head_dim]`, zero in pad rows.

    Raises:
        ArgumentError: tensors, group, kernel or cache that do not fit the plan. Raised before anything is sent.
    """
    return delta_rule(
        KDA, "kda", {"q": q, "k": k, "v": v, "g": g, "beta": beta}, plan, group, scale, use_qk_l2norm_in_kernel,
        kernel, cache, arranged=lambda _, *sections: [*sections[:4], sections[4].squeeze(-1)],
    )  # fmt: skip


@no_compile
def kda_mixer(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: Plan,
    group: Group | None = None,
    *,
    conv: Tensor,
    conv_bias: Tensor | None = None,
    A_log: Tensor,  # noqa: N803 - the parameter's name everywhere
    dt_bias: Tensor,
    lower_bound: float | None = None,
    scale: float | None = None,
    kernel: str | LinearKernel = "auto",
    cache: LayerCache | None = None,
) -> Tensor:
    """Computes a Kimi Delta Attention layer between its projections; differentiable.

    A headwise plan takes one collective before and one after; a chunkwise plan takes a halo and an exchange of states.
    The caller applies the output gate and its norm to the result.

        q, k, v = silu(causal_conv1d(qkv));  q, k = q / |q|, k / |k|
        g = -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias))
        out = kda(q, k, v, g, sigmoid(beta))

    Args:
        qkv: `[t, 2 * key_heads * head_dim + heads * value_head_dim]`, this rank's rows, before the convolution.
        g: `[t, heads * head_dim]`, before its activation.
        beta: `[t, heads]`, before the sigmoid.
        plan: from `plan_linear(kind="kda")`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        conv: `[channels, width]` or `[channels, 1, width]`, weight over the channels of qkv, whole on every rank.
        conv_bias: `[channels]`.
        A_log: `[heads]`, whole on every rank.
        dt_bias: `[heads * head_dim]`, whole on every rank.
        lower_bound: limit of the log decay, below 0; None for no limit.
        scale: queries are multiplied by it; `head_dim ** -0.5` if None.
        kernel: "auto", a kernel that `megatron-cp doctor` lists, or a `LinearKernel`.
        cache: the layer's part of a `Cache`, such as `cache.layer(0)`: documents continue its states, which become
            those after the new tokens.

    Returns:
        `[t, heads, value_head_dim]` in the type of qkv, zero in pad rows. A parameter's gradient is this rank's share,
        which must be summed over the group, as data parallelism over the group does.

    Raises:
        ArgumentError: tensors, parameters, group, kernel or cache that do not fit the plan. Raised before anything is
            sent.
    """
    check_plan(plan, "kda", 'plan_linear(kind="kda")')
    (qkv,) = lowered(qkv)
    if lower_bound is not None and not -torch.finfo(torch.float32).max <= as_number(lower_bound) < 0:
        raise ArgumentError("lower_bound", lower_bound, "a finite number below 0, or None")
    inputs, parameters = {"qkv": qkv, "g": g, "beta": beta}, MixerParameters(conv, conv_bias, A_log, dt_bias)
    bound = None if lower_bound is None else float(lower_bound)

    def gates(chunk: LinearChunk, q: Tensor, k: Tensor, v: Tensor, x: Tensor, beta: Tensor) -> list[Tensor]:
        q, k, g, beta = delta_gates(
            q, k, beta, x, heads=chunk.heads, A_log=A_log, dt_bias=dt_bias, lower_bound=bound, per_feature=True
        )
        return [q, k, v, g, beta]

    return delta_mixer(
        "kda_mixer", inputs, "g", parameters, plan, group, scale, kernel, cache, gates, lower_bound=bound
    )
