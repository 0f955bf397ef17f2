"""Gated DeltaNet over a packed batch: the bare rule, and the whole mixer between one exchange in and one out."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.sections import HeadRange, Section
from megatron_cp.executor.groups import RankGroup, as_rank_group
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.executor.plan import Plan, ToHeads
from megatron_cp.executor.run import run
from megatron_cp.linear.activations import sigmoid, softplus
from megatron_cp.linear.kernels import KERNELS, GatedDeltaKernel, LinearCall

L2_EPS = 1e-6  # as in fla and Megatron


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: Plan,
    group: RankGroup | dist.ProcessGroup | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """The gated delta rule within each document, over the ranks of `group`; differentiable.

    `S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`, `o_t = scale S_t^T q_t` (Gated DeltaNet, arXiv
    2412.06464, eq. 10), the state S of a head `[head_dim, value_head_dim]` and zero where a document starts.

    Args:
        q: `[t, key_heads, head_dim]` this rank's rows of the plan's layout.
        k: `[t, key_heads, head_dim]`.
        v: `[t, heads, value_head_dim]`.
        g: `[t, heads]` log decay, at most 0.
        beta: `[t, heads]` write strength, in (0, 1).
        plan: from `plan_linear(kind="gdn")`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        scale: what queries are multiplied by; `head_dim ** -0.5` if None.
        use_qk_l2norm_in_kernel: divide q and k by their norms first.
        kernel: "auto", or a kernel that `megatron-cp doctor` lists.

    Returns:
        `[t, heads, value_head_dim]`, zero in pad rows.

    Raises:
        ArgumentError: tensors, group or kernel that do not fit the plan. Raised before anything is sent.
    """
    ranks, blocks = _checked_plan(plan, group)
    _check_tensors(plan, ranks, {"q": q, "k": k, "v": v, "beta": beta[..., None], "g": g[..., None]}, blocks)
    backend, call, groups = _backend(plan, ranks, kernel, v, blocks[0].head_dim)
    scale = blocks[0].head_dim ** -0.5 if scale is None else float(scale)

    def local_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> list[Tensor]:
        if not v.numel():
            return [_connected(v, q, k, beta, g)]
        if use_qk_l2norm_in_kernel:
            q, k = _l2_normalised(q), _l2_normalised(k)
        return [backend.rule(q, k, v, g.squeeze(-1), beta.squeeze(-1), groups, scale, call)]

    tensors = [q.flatten(1), k.flatten(1), v.flatten(1), beta, g]
    (out,) = run(plan, ranks, tensors, {"gdn": local_rule})
    return out.unflatten(-1, (blocks[2].num_heads, blocks[2].head_dim))


def gated_delta_net(
    qkv: Tensor,
    beta: Tensor,
    alpha: Tensor,
    plan: Plan,
    group: RankGroup | dist.ProcessGroup | None = None,
    *,
    conv: Tensor,
    conv_bias: Tensor | None = None,
    A_log: Tensor,  # noqa: N803 - the parameter's name everywhere
    dt_bias: Tensor,
    scale: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    """The mixer of a Gated DeltaNet layer between its projections: convolution, gates and rule; differentiable.

    One collective in and one out. The output gate is not an argument: it and its norm act on each token and head
    alone, so they run on the result, and the gate never travels.

        q, k, v = silu(causal_conv1d(qkv));  q, k = q / |q|, k / |k|
        g = -exp(A_log) softplus(alpha + dt_bias);  out = gated_delta_rule(q, k, v, g, sigmoid(beta))

    Args:
        qkv: `[t, 2 * key_heads * head_dim + heads * value_head_dim]` this rank's rows, before the convolution.
        beta: `[t, heads]` before the sigmoid.
        alpha: `[t, heads]` before the softplus.
        plan: from `plan_linear(kind="gdn")`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        conv: `[channels, width]` or `[channels, 1, width]` weight over the channels of qkv, whole on every rank.
        conv_bias: `[channels]`.
        A_log, dt_bias: `[heads]`, whole on every rank.
        scale: what queries are multiplied by; `head_dim ** -0.5` if None.
        kernel: "auto", or a kernel that `megatron-cp doctor` lists.

    Returns:
        `[t, heads, value_head_dim]`, zero in pad rows. A parameter's gradient is this rank's share: sum it over the
        group, as data parallelism over the group does.

    Raises:
        ArgumentError: tensors, parameters, group or kernel that do not fit the plan. Raised before anything is sent.
    """
    ranks, blocks = _checked_plan(plan, group)
    rows = int(plan.layout.row_counts[ranks.rank])
    heads, channels = blocks[2].num_heads, sum(block.width for block in blocks[:3])
    conv = conv.squeeze(1) if conv.ndim == 3 else conv
    shapes: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "qkv": (qkv, (rows, channels)),
        "beta": (beta, (rows, heads)),
        "alpha": (alpha, (rows, heads)),
        "conv": (conv, (channels, conv.shape[-1])),
        "A_log": (A_log, (heads,)),
        "dt_bias": (dt_bias, (heads,)),
    }
    if conv_bias is not None:
        shapes["conv_bias"] = (conv_bias, (channels,))
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            raise ArgumentError(name, tuple(tensor.shape), f"{list(shape)} on rank {ranks.rank}")
    backend, call, groups = _backend(plan, ranks, kernel, qkv, blocks[0].head_dim)
    scale = blocks[0].head_dim ** -0.5 if scale is None else float(scale)
    weights = _own_channels(conv, blocks[:3], ranks.rank)
    biases = _own_channels(conv_bias, blocks[:3], ranks.rank) if conv_bias is not None else [None] * 3
    first, last = plan.deal.heads[ranks.rank]
    own_A_log, own_dt_bias = A_log[first:last], dt_bias[first:last]  # noqa: N806

    def local_mixer(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> list[Tensor]:
        if not v.numel():
            parameters = [*weights, *(bias for bias in biases if bias is not None), own_A_log, own_dt_bias]
            return [_connected(v, q, k, beta, alpha, *parameters)]
        q, k, v = (
            backend.conv(x.flatten(1), weight, bias, call).view(x.shape)
            for x, weight, bias in zip((q, k, v), weights, biases, strict=True)
        )
        wide = torch.promote_types(alpha.dtype, torch.float32)
        g = -own_A_log.to(wide).exp() * softplus(alpha.squeeze(-1).to(wide) + own_dt_bias.to(wide))
        beta = sigmoid(beta.squeeze(-1))
        return [backend.rule(_l2_normalised(q), _l2_normalised(k), v, g, beta, groups, scale, call)]

    (out,) = run(plan, ranks, [qkv, beta, alpha], {"gdn": local_mixer})
    return out.unflatten(-1, (blocks[2].num_heads, blocks[2].head_dim))


def _checked_plan(plan: Plan, group: RankGroup | dist.ProcessGroup | None) -> tuple[RankGroup, tuple[Section, ...]]:
    if plan.kind != "gdn":
        raise ArgumentError("plan", f"a plan for {plan.kind}", 'a plan made by plan_linear(kind="gdn")')
    first = plan.steps[0]
    assert isinstance(first, ToHeads)
    return as_rank_group(group, plan.cp_size), first.exchange.sections.blocks


def _check_tensors(plan: Plan, group: RankGroup, tensors: dict[str, Tensor], blocks: tuple[Section, ...]) -> None:
    rows = int(plan.layout.row_counts[group.rank])
    for (name, tensor), block in zip(tensors.items(), blocks, strict=True):
        if tensor.shape != (rows, block.num_heads, block.head_dim):
            expected = [rows, block.num_heads] + [block.head_dim] * (block.name not in ("beta", "alpha"))
            raise ArgumentError(name, tuple(tensor.shape), f"{expected} on rank {group.rank}")


def _backend(
    plan: Plan, group: RankGroup, kernel: str, v: Tensor, head_dim: int
) -> tuple[GatedDeltaKernel, LinearCall, list[int]]:
    """The kernel, what it is told, and the key head that each of this rank's value heads reads."""
    call = LinearCall(plan.packing, v.dtype, v.device, head_dim)
    (first, last), (first_group, _) = plan.deal.heads[group.rank], plan.deal.groups[group.rank]
    groups = [head // plan.heads_per_group - first_group for head in range(first, last)]
    return choose_kernel(KERNELS, kernel, call), call, groups


def _own_channels(weight: Tensor, blocks: tuple[Section, ...], rank: int) -> list[Tensor]:
    """The channels of this rank's heads in each block of a `[channels, ...]` parameter."""
    own, start = [], 0
    for block in blocks:
        lo, hi = _channel_range(block, rank)
        own.append(weight[start + lo : start + hi])
        start += block.width
    return own


def _channel_range(block: Section, rank: int) -> HeadRange:
    lo, hi = block.ranges[rank]
    return lo * block.head_dim, hi * block.head_dim


def _l2_normalised(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).to(x.dtype)


def _connected(empty: Tensor, *others: Tensor) -> Tensor:
    """`empty`, depending on every other (empty) tensor: a rank without work still takes part in every backward."""
    return empty + sum(other.sum() * 0 for other in others).to(empty.dtype)  # type: ignore[union-attr]
