"""Gated DeltaNet over a packed batch: the bare rule, and the whole mixer between its projections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
from megatron_cp.plan.kinds import GDN, Dim, LinearKind
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
        GDN, "gated_delta_rule", {"q": q, "k": k, "v": v, "beta": beta, "g": g}, plan, group, scale,
        use_qk_l2norm_in_kernel, kernel, cache,
        arranged=lambda _, q, k, v, beta, g: [q, k, v, g.squeeze(-1), beta.squeeze(-1)],
    )  # fmt: skip


def delta_rule(
    kind: LinearKind, operation: str, tensors: dict[str, Tensor], plan: Plan, group: Group | None, scale: float | None,
    use_qk_l2norm_in_kernel: bool, kernel: str | LinearKernel, cache: LayerCache | None, *,
    arranged: Callable[..., Sequence[Tensor]],
) -> Tensor:  # fmt: skip
    """Computes a bare delta rule, such as `gated_delta_rule`.

    Args:
        tensors: by name, in the order of the kind's sections: `[t, heads, features]`, or `[t, heads]` where a head has
            one number, with as many rows for each token as it makes steps if each step has its own.
        arranged: takes a `LinearChunk` and its sections, and returns the arguments of `Delta`; q and k are normalised
            afterwards.
    """
    check_plan(plan, kind.name, f'plan_linear(kind="{kind.name}")')
    q, k, v = widened(tensors["q"], tensors["k"], tensors["v"])
    tensors |= {"q": q, "k": k, "v": v}
    layer, blocks = LinearOnRank(plan, group, kernel, "v", v, cache), {each.name: each for each in plan.sections.blocks}
    steps = [plan.steps_a_token if section.has_steps else 1 for section in kind.sections]
    shapes = {}
    for name, section, count in zip(tensors, kind.sections, steps, strict=True):
        block = blocks[section.name]
        features = () if section.dim is Dim.ONE else (block.head_dim,)
        shapes[name] = (layer.rows * count, block.num_heads, *features), not section.exact
    for name in sorted(tensors, key="v".__ne__):  # v is first, since the others are compared with it
        shape, same_dtype = shapes[name]
        check_tensor(name, tensors[name], shape, like=v, same_dtype=same_dtype, layout=plan.layout)
    scale = checked_scale("scale", scale, blocks["k"].head_dim)
    checked_flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
    comm = layer.agree(operation, tensors, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    def gates(chunk: LinearChunk, *sections: Tensor) -> list[Tensor]:
        q, k, *others = arranged(chunk, *sections)
        if use_qk_l2norm_in_kernel:
            q, k = normalised(q, k)
        return [q, k, *others]

    by_token = [
        x.flatten(1) if count == 1 else x.unflatten(0, (layer.rows, count)).flatten(1)
        for x, count in zip(tensors.values(), steps, strict=True)
    ]
    return layer.run(comm, by_token, conv=LinearChunk.sections, gates=gates, rule=partial(_rule, scale))


def delta_mixer(
    operation: str, inputs: dict[str, Tensor], decay: str, parameters: MixerParameters, plan: Plan, group: Group | None,
    scale: float | None, kernel: str | LinearKernel, cache: LayerCache | None, gates: Callable[..., list[Tensor]],
    count: int = 3, **options: Any,
) -> Tensor:  # fmt: skip
    """Computes a mixer of a delta rule, such as `gated_delta_net`.

    Args:
        inputs, decay: see `check_mixer`.
        gates: takes a `LinearChunk` and its sections after the convolution, and returns the arguments of `Delta`.
        count: the number of tensors that are convolved.
        options: the operation's own, which ranks compare.
    """
    layer, taps = check_mixer(plan, group, kernel, cache, inputs, parameters, decay)
    scale = checked_scale("scale", scale, {block.name: block.head_dim for block in plan.sections.blocks}["k"])
    comm = layer.agree(operation, {**inputs, **parameters._asdict()}, scale=scale, **options)
    return layer.run(
        comm,
        list(inputs.values()),
        conv=lambda chunk, *arrived: chunk.convolved(arrived, taps, parameters.conv_bias, count=count),
        gates=gates,
        rule=partial(_rule, scale),
    )


def _rule(scale: float, chunk: LinearChunk, *inputs: Tensor) -> list[Tensor]:
    """Computes the recurrence, whose state a token's query reads after the last of its steps."""
    out, steps = chunk.recurrence(Delta(*inputs), scale), chunk.layer.plan.steps_a_token
    return [out if steps == 1 else out[steps - 1 :: steps]]


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

    def gates(chunk: LinearChunk, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, x: Tensor) -> list[Tensor]:
        q, k, g, beta = delta_gates(q, k, beta, x, heads=chunk.heads, A_log=A_log, dt_bias=dt_bias)
        return [q, k, v, g, 2 * beta if allow_neg_eigval else beta]

    return delta_mixer(
        "gated_delta_net", inputs, "alpha", parameters, plan, group, scale, kernel, cache, gates,
        allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
