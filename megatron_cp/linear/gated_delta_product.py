"""Gated DeltaProduct over a packed batch: the bare rule, and the whole mixer between its projections.

A token makes `num_householder` steps of the gated delta rule, with a key, a value and a write strength each. It decays
the state before the first of them, and its query reads the state after the last. So the rule is `gated_delta_rule` over
as many steps as all tokens have: the decay is 1 at the later steps, and what the earlier ones read is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_cp.executor.arguments import check_plan
from megatron_cp.executor.autocast import lowered
from megatron_cp.executor.cache import LayerCache
from megatron_cp.executor.groups import Group
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.linear.gated_delta_net import delta_mixer, delta_rule
from megatron_cp.linear.gates.delta import delta_gates
from megatron_cp.linear.kernels import LinearKernel
from megatron_cp.linear.on_rank import LinearChunk, MixerParameters
from megatron_cp.plan.kinds import GDP
from megatron_cp.plan.plan import Plan


@no_compile
def gated_delta_product(
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
    """Computes the gated delta product within each document, over the ranks of `group`; differentiable.

    A token decays the state, `S <- exp(g_t) S`, then makes n steps, `S <- (I - beta_tj k_tj k_tj^T) S + beta_tj k_tj
    v_tj^T` for j = 1 to n, and reads it, `o_t = scale S_t^T q_t` (DeltaProduct, arXiv 2502.10297, with the decay of
    Gated DeltaNet). With n = 1 it is `gated_delta_rule`. The n rows of a token lie one after another.

    Args:
        q: `[t, key_heads, head_dim]`, this rank's rows in the plan's layout.
        k: `[t * n, key_heads, head_dim]`.
        v: `[t * n, heads, value_head_dim]`.
        g: `[t, heads]`, log decay, at most 0.
        beta: `[t * n, heads]`, write strength, in (0, 2).
        plan: from `plan_linear(kind="gdp", num_householder=n)`, the same on every rank.
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

    def arranged(_: LinearChunk, *sections: Tensor) -> list[Tensor]:
        v, k, q, beta, g = _by_step(sections, plan.steps_a_token)
        return [q, k, v, g.squeeze(-1), beta.squeeze(-1)]

    return delta_rule(
        GDP, "gated_delta_product", {"v": v, "k": k, "q": q, "beta": beta, "g": g}, plan, group, scale,
        use_qk_l2norm_in_kernel, kernel, cache, arranged=arranged,
    )  # fmt: skip


@no_compile
def gated_delta_product_mixer(
    vkq: Tensor,
    beta: Tensor,
    alpha: Tensor,
    plan: Plan,
    group: Group | None = None,
    *,
    conv: Tensor,
    conv_bias: Tensor | None = None,
    A_log: Tensor,  # noqa: N803 - the parameter's name everywhere
    dt_bias: Tensor,
    scale: float | None = None,
    kernel: str | LinearKernel = "auto",
    cache: LayerCache | None = None,
) -> Tensor:
    """Computes a Gated DeltaProduct layer between its projections: convolution, gates and rule; differentiable.

    A headwise plan takes one collective before and one after; a chunkwise plan takes a halo and an exchange of states.
    The caller applies the output gate and its norm to the result.

        v, k, q = silu(causal_conv1d(vkq));  q, k = q / |q|, k / |k|
        g = -exp(A_log) softplus(alpha + dt_bias);  out = gated_delta_product(q, k, v, g, sigmoid(beta))

    The features are those of Megatron's layer: of a token's n steps each has all heads' values, then each has all
    heads' keys, and then come the queries.

    Args:
        vkq: `[t, n * heads * value_head_dim + (n + 1) * key_heads * head_dim]`, this rank's rows, before the
            convolution.
        beta: `[t, n * heads]`, before the sigmoid.
        alpha: `[t, heads]`, before the softplus.
        plan: from `plan_linear(kind="gdp", num_householder=n)`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        conv: `[channels, width]` or `[channels, 1, width]`, weight over the channels of vkq, whole on every rank.
        conv_bias: `[channels]`.
        A_log, dt_bias: `[heads]`, whole on every rank.
        scale: queries are multiplied by it; `head_dim ** -0.5` if None.
        kernel: "auto", a kernel that `megatron-cp doctor` lists, or a `LinearKernel`.
        cache: the layer's part of a `Cache`, such as `cache.layer(0)`: documents continue its states, which become
            those after the new tokens.

    Returns:
        `[t, heads, value_head_dim]` in the type of vkq, zero in pad rows. A parameter's gradient is this rank's share,
        which must be summed over the group, as data parallelism over the group does.

    Raises:
        ArgumentError: tensors, parameters, group, kernel or cache that do not fit the plan. Raised before anything is
            sent.
    """
    check_plan(plan, "gdp", 'plan_linear(kind="gdp")')
    (vkq,) = lowered(vkq)
    inputs = {"vkq": vkq, "beta": beta, "alpha": alpha}
    parameters = MixerParameters(conv, conv_bias, A_log, dt_bias)
    steps = plan.steps_a_token

    def gates(chunk: LinearChunk, *sections: Tensor) -> list[Tensor]:
        v, k, q, beta, x = _by_step(sections, steps)
        q, k, g, beta = delta_gates(q, k, beta, x, heads=chunk.heads, A_log=A_log, dt_bias=dt_bias)
        return [q, k, v, _at_first(g[::steps], steps), beta]

    return delta_mixer(
        "gated_delta_product_mixer", inputs, "alpha", parameters, plan, group, scale, kernel, cache, gates,
        count=2 * steps + 1,
    )  # fmt: skip


def _by_step(sections: Sequence[Tensor], steps: int) -> list[Tensor]:
    """Returns v, k, q, beta and what decays come from, `[T * steps, h, d]` each, given the sections of T tokens."""
    first = (0, steps, 2 * steps + 1)
    v, k, beta = (torch.stack(list(sections[at : at + steps]), 1).flatten(0, 1) for at in first)
    q, decay = sections[2 * steps], sections[-1]
    return [v, k, F.pad(q[:, None], (0, 0, 0, 0, steps - 1, 0)).flatten(0, 1), beta, _at_first(decay, steps)]


def _at_first(x: Tensor, steps: int) -> Tensor:
    """Returns `[T * steps, ...]` with the rows of `[T, ...]` at each token's first step, and zeros at the others."""
    return F.pad(x[:, None], (*(0, 0) * (x.ndim - 1), 0, steps - 1)).flatten(0, 1)
