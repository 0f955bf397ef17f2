"""Gated DeltaNet over a packed batch: the bare rule, and the whole mixer between its projections."""

from __future__ import annotations

from torch import Tensor

from megatron_cp.errors import checked_flag, checked_scale
from megatron_cp.executor.arguments import check_plan, check_tensor
from megatron_cp.executor.autocast import lowered, widened
from megatron_cp.executor.cache import LayerCache
from megatron_cp.executor.groups import Group
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.linear.gates.delta import delta_gates, normalised
from megatron_cp.linear.kernels import Delta, LinearKernel
from megatron_cp.linear.on_rank import LinearChunk, LinearOnRank, MixerParameters, check_mixer
from megatron_cp.plan.plan import Plan


@no_compile
def gated_delta_rule(
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
    """Computes the gated delta rule within each document, over the ranks of `group`; differentiable.

    `S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`, `o_t = scale S_t^T q_t` (Gated DeltaNet, arXiv
    2412.06464, eq. 10). The state S of a head is `[head_dim, value_head_dim]`, and zero where a document starts.

    Args:
        q: `[t, key_heads, head_dim]`, this rank's rows in the plan's layout.
        k: `[t, key_heads, head_dim]`.
        v: `[t, heads, value_head_dim]`.
        g: `[t, heads]`, log decay, at most 0.
        beta: `[t, heads]`, write strength, in (0, 1).
        plan: from `plan_linear(kind="gdn")`, the same on every rank.
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
        "gdn", "gated_delta_rule", q, k, v, g, beta, plan, group, scale, use_qk_l2norm_in_kernel, kernel, cache,
        per_feature=False,
    )  # fmt: skip


def delta_rule(
    kind: str, operation: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: Plan,
    group: Group | None, scale: float | None, use_qk_l2norm_in_kernel: bool, kernel: str | LinearKernel,
    cache: LayerCache | None, *, per_feature: bool,
) -> Tensor:  # fmt: skip
    """Computes `gated_delta_rule`, or `kda`, whose g has a number `per_feature` and travels before beta."""
    check_plan(plan, kind, f'plan_linear(kind="{kind}")')
    q, k, v = widened(q, k, v)
    layer, blocks = LinearOnRank(plan, group, kernel, "v", v, cache), plan.sections.blocks
    # v is first, since the others are compared with it.
    for name, tensor, block in zip("vqk", (v, q, k), (blocks[2], *blocks[:2]), strict=True):
        check_tensor(
            name, tensor, (layer.rows, block.num_heads, block.head_dim), like=v, same_dtype=True, layout=plan.layout
        )
    heads = blocks[2].num_heads
    features = (blocks[3].head_dim,) if per_feature else ()
    check_tensor("g", g, (layer.rows, heads, *features), like=v, layout=plan.layout)
    check_tensor("beta", beta, (layer.rows, heads), like=v, layout=plan.layout)
    scale = checked_scale("scale", scale, blocks[0].head_dim)
    checked_flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
    comm = layer.agree(
        operation, {"q": q, "k": k, "v": v, "g": g, "beta": beta}, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip

    def gates(_: LinearChunk, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> list[Tensor]:
        if use_qk_l2norm_in_kernel:
            q, k = normalised(q, k)
        g, beta = others if per_feature else reversed(others)
        return [q, k, v, g if per_feature else g.squeeze(-1), beta.squeeze(-1)]

    return layer.run(
        comm,
        [q.flatten(1), k.flatten(1), v.flatten(1), *((g.flatten(1), beta) if per_feature else (beta, g))],
        conv=LinearChunk.sections,
        gates=gates,
        rule=lambda chunk, *inputs: [chunk.recurrence(Delta(*inputs), scale)],
    )


def delta_mixer(
    operation: str, inputs: dict[str, Tensor], decay: str, parameters: MixerParameters, plan: Plan, group: Group | None,
    scale: float | None, kernel: str | LinearKernel, cache: LayerCache | None, *, per_feature: bool,
    lower_bound: float | None = None, allow_neg_eigval: bool = False,
) -> Tensor:  # fmt: skip
    """Computes `gated_delta_net`, or `kda_mixer`, whose decay has a number `per_feature` and travels before beta.

    Args:
        inputs, decay: see `check_mixer`.
        lower_bound: see `kda_mixer`.
        allow_neg_eigval: see `gated_delta_net`.
    """
    layer, taps = check_mixer(plan, group, kernel, cache, inputs, parameters, decay)
    scale = checked_scale("scale", scale, plan.sections.blocks[0].head_dim)
    comm = layer.agree(
        operation, {**inputs, **parameters._asdict()}, scale=scale, lower_bound=lower_bound,
        allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip

    def gates(chunk: LinearChunk, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> list[Tensor]:
        x, beta = others if per_feature else reversed(others)
        q, k, g, beta = delta_gates(
            q, k, beta, x, heads=chunk.heads, A_log=parameters.A_log, dt_bias=parameters.dt_bias,
            lower_bound=lower_bound, per_feature=per_feature,
        )  # fmt: skip
        return [q, k, v, g, 2 * beta if allow_neg_eigval else beta]

    return layer.run(
        comm,
        list(inputs.values()),
        conv=lambda chunk, *arrived: chunk.convolved(arrived, taps, parameters.conv_bias, count=3),
        gates=gates,
        rule=lambda chunk, *inputs: [chunk.recurrence(Delta(*inputs), scale)],
    )


@no_compile
def gated_delta_net(
    qkv: Tensor,
    beta: Tensor,
    alpha: Tensor,
    plan: Plan,
    group: Group | None = None,
    *,
    conv: Tensor,
    conv_bias: Tensor | None = None,
    A_log: Tensor,  # noqa: N803 - the parameter's name everywhere
    dt_bias: Tensor,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    kernel: str | LinearKernel = "auto",
    cache: LayerCache | None = None,
) -> Tensor:
    """Computes a Gated DeltaNet layer between its projections: convolution, gates and rule; differentiable.

    A headwise plan takes one collective before and one after; a chunkwise plan takes a halo and an exchange of states.
    The output gate is not an argument: it and its norm act on each token and head separately, so they are applied to
    the result, and the gate is never sent.

        q, k, v = silu(causal_conv1d(qkv));  q, k = q / |q|, k / |k|
        g = -exp(A_log) softplus(alpha + dt_bias);  out = gated_delta_rule(q, k, v, g, sigmoid(beta))

    Args:
        qkv: `[t, 2 * key_heads * head_dim + heads * value_head_dim]`, this rank's rows, before the convolution.
        beta: `[t, heads]`, before the sigmoid.
        alpha: `[t, heads]`, before the softplus.
        plan: from `plan_linear(kind="gdn")`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        conv: `[channels, width]` or `[channels, 1, width]`, weight over the channels of qkv, whole on every rank.
        conv_bias: `[channels]`.
        A_log, dt_bias: `[heads]`, whole on every rank.
        allow_neg_eigval: True for write strengths of 2 sigmoid(beta), with which a token can turn what a state has for
            its key to the opposite (arXiv 2411.12537; OLMo-Hybrid).
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
    check_plan(plan, "gdn", 'plan_linear(kind="gdn")')
    (qkv,) = lowered(qkv)
    checked_flag("allow_neg_eigval", allow_neg_eigval)
    inputs, parameters = {"qkv": qkv, "beta": beta, "alpha": alpha}, MixerParameters(conv, conv_bias, A_log, dt_bias)
    return delta_mixer(
        "gated_delta_net", inputs, "alpha", parameters, plan, group, scale, kernel, cache, per_feature=False,
        allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
