"""Gated DeltaNet over a packed batch: the bare rule, and the whole mixer between one exchange in and one out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.sections import Section
from megatron_cp.executor.arguments import check_plan, check_tensor, checked_scale
from megatron_cp.executor.groups import RankGroup, as_rank_group
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.executor.plan import Plan
from megatron_cp.executor.run import run
from megatron_cp.linear.activations import sigmoid, softplus
from megatron_cp.linear.kernels import KERNELS, GatedDeltaKernel, LinearCall
from megatron_cp.linear.reductions import for_each_token

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
    check_plan(plan, "gdn", 'plan_linear(kind="gdn")')
    ranks, blocks = as_rank_group(group, plan.cp_size), plan.sections.blocks
    rows = int(plan.layout.row_counts[ranks.rank])
    for name, tensor, block in zip("qkv", (q, k, v), blocks[:3], strict=True):
        check_tensor(name, tensor, (rows, block.num_heads, block.head_dim), like=v, same_dtype=True)
    for name, tensor in (("g", g), ("beta", beta)):
        check_tensor(name, tensor, (rows, blocks[2].num_heads), like=v)
    backend, call, groups = _backend(plan, ranks, kernel, v, blocks[0].head_dim)
    scale = checked_scale("scale", scale, blocks[0].head_dim)

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
        `[t, heads, value_head_dim]` in the type of qkv, zero in pad rows. A parameter's gradient is this rank's
        share: sum it over the group, as data parallelism over the group does.

    Raises:
        ArgumentError: tensors, parameters, group or kernel that do not fit the plan. Raised before anything is sent.
    """
    check_plan(plan, "gdn", 'plan_linear(kind="gdn")')
    ranks, blocks = as_rank_group(group, plan.cp_size), plan.sections.blocks
    parameters = _Parameters(conv, conv_bias, A_log, dt_bias)
    _check_mixer(plan, ranks, qkv, beta, alpha, parameters)
    backend, call, groups = _backend(plan, ranks, kernel, qkv, blocks[0].head_dim)
    scale = checked_scale("scale", scale, blocks[0].head_dim)
    own = parameters.of_rank(blocks, ranks.rank)

    def local_mixer(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> list[Tensor]:
        if not v.numel():
            return [_connected(v, q, k, beta, alpha, *own.all())]
        q, k, v = (
            backend.conv(x.flatten(1), weight, bias, call).to(x.dtype).view(x.shape)
            for x, weight, bias in zip((q, k, v), own.conv, own.bias, strict=True)
        )
        wide, tokens = torch.promote_types(alpha.dtype, torch.float32), len(alpha)
        rate = for_each_token(own.A_log.to(wide).exp(), tokens)
        g = -rate * softplus(alpha.squeeze(-1).to(wide) + for_each_token(own.dt_bias.to(wide), tokens))
        beta = sigmoid(beta.squeeze(-1).to(wide))
        return [backend.rule(_l2_normalised(q), _l2_normalised(k), v, g, beta, groups, scale, call)]

    (out,) = run(plan, ranks, [qkv, beta, alpha], {"gdn": local_mixer})
    return out.unflatten(-1, (blocks[2].num_heads, blocks[2].head_dim))


class _Parameters(NamedTuple):
    """A mixer's parameters, whole as every rank holds them."""

    conv: Tensor
    bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor

    def of_rank(self, blocks: tuple[Section, ...], rank: int) -> _OwnParameters:
        """Those of a rank's heads; the convolution's for each of q, k and v."""
        conv = self.conv.squeeze(1) if self.conv.ndim == 3 else self.conv
        bias = [None] * 3 if self.bias is None else _own_channels(self.bias, blocks[:3], rank)
        first, last = blocks[2].ranges[rank]
        return _OwnParameters(
            _own_channels(conv, blocks[:3], rank), bias, self.A_log[first:last], self.dt_bias[first:last]
        )


class _OwnParameters(NamedTuple):
    conv: list[Tensor]
    bias: Sequence[Tensor | None]
    A_log: Tensor
    dt_bias: Tensor

    def all(self) -> list[Tensor]:
        return [*self.conv, *(bias for bias in self.bias if bias is not None), self.A_log, self.dt_bias]


def _check_mixer(
    plan: Plan, group: RankGroup, qkv: Tensor, beta: Tensor, alpha: Tensor, parameters: _Parameters
) -> None:
    blocks, rows = plan.sections.blocks, int(plan.layout.row_counts[group.rank])
    heads, channels = blocks[2].num_heads, sum(block.width for block in blocks[:3])
    check_tensor("qkv", qkv, (rows, channels), like=qkv)
    check_tensor("beta", beta, (rows, heads), like=qkv)
    check_tensor("alpha", alpha, (rows, heads), like=qkv)
    conv = parameters.conv
    if conv.ndim not in (2, 3) or conv.shape[-1] < 1:
        raise ArgumentError("conv", list(conv.shape), f"[{channels}, width] or [{channels}, 1, width], at least 1 wide")
    middle = (1,) if conv.ndim == 3 else ()
    check_tensor("conv", conv, (channels, *middle, conv.shape[-1]), like=qkv)
    if parameters.bias is not None:
        check_tensor("conv_bias", parameters.bias, (channels,), like=qkv)
    check_tensor("A_log", parameters.A_log, (heads,), like=qkv)
    check_tensor("dt_bias", parameters.dt_bias, (heads,), like=qkv)


def _backend(
    plan: Plan, group: RankGroup, kernel: str, v: Tensor, head_dim: int
) -> tuple[GatedDeltaKernel, LinearCall, list[int]]:
    """The kernel, what it is told, and the key head that each of this rank's value heads reads."""
    call = LinearCall(plan.packing, v.dtype, v.device, head_dim)
    (first, last), (first_group, _) = plan.deal.heads[group.rank], plan.deal.groups[group.rank]
    groups = [head // plan.deal.heads_per_group - first_group for head in range(first, last)]
    return choose_kernel(KERNELS, kernel, call), call, groups


def _own_channels(weight: Tensor, blocks: tuple[Section, ...], rank: int) -> list[Tensor]:
    """The channels of this rank's heads in each block of a `[channels, ...]` parameter."""
    own, start = [], 0
    for block in blocks:
        lo, hi = block.ranges[rank]
        own.append(weight[start + lo * block.head_dim : start + hi * block.head_dim])
        start += block.width
    return own


def _l2_normalised(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).to(x.dtype)


def _connected(empty: Tensor, *others: Tensor) -> Tensor:
    """`empty`, depending on every other (empty) tensor: a rank without work still takes part in every backward."""
    return empty + sum(other.sum() * 0 for other in others).to(empty.dtype)  # type: ignore[union-attr]
