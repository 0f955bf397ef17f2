"""Softmax attention of rows that are spread over ranks and rows that every rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.agreement import agree_on_call
from megatron_cp.executor.arguments import accumulation_dtype, check_dense, check_tensor
from megatron_cp.executor.gather import gather
from megatron_cp.executor.groups import Group, as_rank_group
from megatron_cp.executor.no_compile import no_compile, no_compile_backward
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.held import HeldPlan
from megatron_cp.softmax.attention import attention
from megatron_cp.softmax.kernels import AttentionKernel
from megatron_cp.softmax.merge import merge

Partial = tuple[Tensor, Tensor]


@no_compile
def held_attention(
    q: Tensor, k: Tensor, v: Tensor, held_q: Tensor, held_k: Tensor, held_v: Tensor, plan: HeldPlan,
    group: Group | None = None, *, softmax_scale: float | None = None, softcap: float = 0.0,
    sink: Tensor | None = None, kernel: str | AttentionKernel = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes attention of documents whose first rows every rank holds; differentiable.

    Held keys and queries do not travel. Each rank attends from its own queries to held keys, and from held queries to
    its own keys; these partial results are gathered and merged, unless the mask shows held queries no keys that are
    spread, as a causal one. They are rounded to the type of q before they are merged.

    Args:
        q, k, v: this rank's rows of `plan.plan.layout`, `[t, heads or kv_heads, features]`.
        held_q, held_k, held_v: the held rows of all documents, `[n, heads or kv_heads, features]`, equal on every rank.
        plan: from `plan_held_attention`, the same on every rank.
        group: the plan's ranks.
        softmax_scale, softcap, sink, kernel: as in `attention`, for both kinds of queries.

    Returns:
        The output of this rank's rows `[t, heads, value_head_dim]`, and that of held rows `[n, ...]`, which is the same
        on every rank. The loss is the sum of what ranks compute: a loss of held rows counts on one rank only, or by
        one part on each. A rank's gradient of a held tensor is its share, as a parameter's is: the gradient is the sum
        over ranks, and through layers that every rank computes it reaches the parameters, whose shares are summed.

    Raises:
        ArgumentError: tensors, plan or group that do not fit one another. Raised before anything is sent.
    """
    if not isinstance(plan, HeldPlan):
        raise ArgumentError("plan", plan, "a plan of plan_held_attention")
    ranks = as_rank_group(group, plan.plan.cp_size)
    check_dense("q", q)
    rows = {"": int(plan.plan.layout.row_counts[ranks.rank]), "held_": plan.held.total}
    for kind, tensors in (("", (q, k, v)), ("held_", (held_q, held_k, held_v))):
        for block, name, tensor in zip(plan.plan.sections.blocks, "qkv", tensors, strict=True):
            shape = rows[kind], block.num_heads, block.head_dim
            check_tensor(f"{kind}{name}", tensor, shape, like=q, same_dtype=True)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "kernel": kernel}
    held = {"held_q": held_q, "held_k": held_k, "held_v": held_v}
    agree_on_call(ranks, [plan.plan], "held_attention", held, {"held rows and mask": plan.mark})
    rank, own = ranks.rank, int(plan.plan.layout.token_counts[ranks.rank])

    def part(q: Tensor, k: Tensor, v: Tensor, plan: Plan | None) -> list[Partial]:
        return [] if plan is None else [attention(q, k, v, plan, return_lse=True, **options)]

    beside = part(q[:own], held_k, held_v, plan.held_keys_plan(rank))
    if beside:
        out, lse = attention(q, k, v, plan.plan, group, sink=sink, return_lse=True, **options)
        merged, _ = merge([(out[:own], lse[:own]), *beside])
        out = torch.cat([merged, out[own:]])  # pad rows
    else:
        out = attention(q, k, v, plan.plan, group, sink=sink, **options)
    parts = [attention(held_q, held_k, held_v, plan.held_plan(), sink=sink, return_lse=True, **options)]
    for partial in part(held_q, k[:own], v[:own], plan.held_queries_plan(rank)):
        parts += _everyones(partial, plan, group)
    held_out, _ = merge(parts)
    both: tuple[Tensor, Tensor] = _BothResults.apply(out, held_out)
    return both


class _BothResults(torch.autograd.Function):
    """Returns both results. Their backward runs on every rank, also where a loss reads only one of them."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, held_out: Tensor) -> tuple[Tensor, Tensor]:
        return out.view_as(out), held_out.view_as(held_out)

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


def _everyones(partial: Partial, plan: HeldPlan, group: Group | None) -> list[Partial]:
    """Gathers every rank's partial result of held queries."""
    out, lse = partial
    dtype = accumulation_dtype(out.dtype)
    rows = torch.cat([out.to(dtype), lse[..., None].to(dtype)], -1)
    gathered = gather(rows, plan.partials, group, transport=plan.plan.transport)
    return [(x[..., :-1].to(out.dtype), x[..., -1]) for x in gathered.split(len(rows))]
