"""`attention`: softmax attention of a packed batch, exact for any document lengths, heads and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp.exchange.pack import like_rows
from megatron_cp.exchange.sections import HeadDeal
from megatron_cp.executor.arguments import check_plan, check_tensor, checked_scale
from megatron_cp.executor.groups import RankGroup, as_rank_group
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.executor.plan import Plan
from megatron_cp.executor.run import run
from megatron_cp.softmax.kernels import KERNELS, AttentionCall, AttentionKernel


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    group: RankGroup | dist.ProcessGroup | None = None,
    *,
    softmax_scale: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Softmax attention within each document, over the ranks of `group`; differentiable.

    Args:
        q: `[t, heads, head_dim]` this rank's rows of the plan's layout, or `[t, b, heads, head_dim]`.
        k: `[t, kv_heads, head_dim]`, likewise.
        v: `[t, kv_heads, value_head_dim]`, likewise.
        plan: from `plan_attention`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        softmax_scale: what scores are multiplied by; `head_dim ** -0.5` if None.
        kernel: "auto", or a kernel that `megatron-cp doctor` lists.

    Returns:
        `[t, heads, value_head_dim]` (or with `b`), zero in pad rows.

    Raises:
        ArgumentError: tensors, group or kernel that do not fit the plan. Raised before anything is sent.

    Example:
        >>> packing = Packing([3, 1])
        >>> plan = plan_attention(packing, Layout.contiguous(packing, cp_size=1), heads=2, head_dim=4)
        >>> q = k = v = torch.ones(4, 2, 4)
        >>> attention(q, k, v, plan).shape
        torch.Size([4, 2, 4])
    """
    check_plan(plan, "attention", "plan_attention")
    ranks = as_rank_group(group, plan.cp_size)
    blocks = plan.sections.blocks
    lead = (int(plan.layout.row_counts[ranks.rank]), *q.shape[1:-2][:1])
    for block, tensor in zip(blocks, (q, k, v), strict=True):
        check_tensor(block.name, tensor, (*lead, block.num_heads, block.head_dim), like=q, same_dtype=True)
    assert plan.mask is not None
    head_dim, value_head_dim = blocks[0].head_dim, blocks[2].head_dim
    scale = checked_scale("softmax_scale", softmax_scale, head_dim)
    call = AttentionCall(plan.mask, scale, head_dim, value_head_dim, q.dtype, q.device)
    backend = choose_kernel(KERNELS, kernel, call)
    runs = plan.table(("head_runs", ranks.rank), lambda: head_runs(plan.deal, ranks.rank, plan.heads_per_group))

    def local_attention(*sections: Tensor) -> list[Tensor]:
        return [_LocalAttention.apply(backend, call, runs, *sections)]

    (out,) = run(plan, ranks, [x.flatten(-2) for x in (q, k, v)], {"attention": local_attention})
    return out.unflatten(-1, (blocks[0].num_heads, value_head_dim))


HeadRun = tuple[slice, slice]


def head_runs(deal: HeadDeal, rank: int, heads_per_group: int) -> list[HeadRun]:
    """A rank's query heads and the key/value heads they read, in runs of one ratio, as slices of its own heads.

    One run where whole groups were dealt; several where a rank's heads begin or end inside a group.
    """
    (first_head, last_head), (first_group, last_group) = deal.heads[rank], deal.groups[rank]
    runs: list[HeadRun] = []
    for group in range(first_group, last_group):
        lo = max(group * heads_per_group, first_head) - first_head
        hi = min((group + 1) * heads_per_group, last_head) - first_head
        if hi <= lo:
            continue
        own = group - first_group
        if runs:
            heads, groups = runs[-1]
            if (heads.stop - heads.start) == (hi - lo) * (groups.stop - groups.start):
                runs[-1] = (slice(heads.start, hi), slice(groups.start, own + 1))
                continue
        runs.append((slice(lo, hi), slice(own, own + 1)))
    return runs


class _LocalAttention(torch.autograd.Function):
    """Attention of one rank's heads over all tokens. Gradients are written where the inputs stood (`like_rows`)."""

    @staticmethod
    def forward(
        ctx: Any, kernel: AttentionKernel, call: AttentionCall, runs: Sequence[HeadRun], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        ctx.call = (kernel, call, runs)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # as kernels may expect
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(*q.shape[1:-1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
        for heads, groups, batch in _parts(runs, q):
            kernel.forward(
                out[batch][:, heads],
                lse[batch[1:]][heads],
                q[batch][:, heads],
                k[batch][:, groups],
                v[batch][:, groups],
                call,
            )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        kernel, call, runs = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        (dout,) = gradients
        dq, dk, dv = like_rows(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            for heads, groups, batch in _parts(runs, q):
                kernel.backward(
                    dq[batch][:, heads], dk[batch][:, groups], dv[batch][:, groups],
                    dout[batch][:, heads], q[batch][:, heads], k[batch][:, groups], v[batch][:, groups],
                    out[batch][:, heads], lse[batch[1:]][heads], call,
                )  # fmt: skip
        return None, None, None, dq, dk, dv


def _parts(runs: Sequence[HeadRun], q: Tensor) -> list[tuple[slice, slice, tuple[Any, ...]]]:
    """The kernel calls of one layer: each run of heads of each batch entry. None where there is no token or head."""
    batches: list[tuple[Any, ...]] = [(slice(None),)] if q.ndim == 3 else [(slice(None), b) for b in range(q.shape[1])]
    return [(heads, groups, batch) for heads, groups in runs for batch in batches] if q.numel() else []
