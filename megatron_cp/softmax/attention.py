"""`attention`: softmax attention of a packed batch, exact for any mask, document lengths, heads and number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.executor.arguments import check_plan, check_tensor, checked_scale
from megatron_cp.executor.attend import attend, attend_backward, head_by_head
from megatron_cp.executor.groups import RankGroup, as_rank_group
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.executor.plan import Plan, ToHeads
from megatron_cp.executor.run import LocalWork, run
from megatron_cp.executor.schedule import Attend, HeadChunk
from megatron_cp.executor.wire import Wire
from megatron_cp.layout.tiles import Tiles
from megatron_cp.softmax.kernels import KERNELS, AttentionCall, AttentionKernel


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    group: RankGroup | dist.ProcessGroup | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    kernel: str = "auto",
) -> Tensor:
    """Softmax attention within each document, over the ranks of `group`; differentiable.

    Args:
        q: `[t, heads, head_dim]` this rank's rows of the plan's layout, or `[t, b, heads, head_dim]`.
        k: `[s, kv_heads, head_dim]`, likewise; s is t, or in cross-attention this rank's rows of the keys' layout.
        v: `[s, kv_heads, value_head_dim]`, likewise.
        plan: from `plan_attention`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        softmax_scale: what scores are multiplied by; `head_dim ** -0.5` if None.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv 2408.00118); 0 for none.
        sink: `[heads]` a learned score without a value, one a head, that takes part in every softmax (gpt-oss; all
            zero is the off-by-one softmax). The same on every rank; its gradient is this rank's share, to be summed.
        dropout: the share of weights that become zero after the softmax, the others growing by `1 / (1 - dropout)`.
        seed: of the dropout, at least 0: with the entry of the batch, the head and the places of query and key in the
            packed stream it decides which weights, whatever the number of ranks. The same on every rank; give every
            layer and step another one.
        kernel: "auto", or a kernel that `megatron-cp doctor` lists.

    Returns:
        `[t, heads, value_head_dim]` (or with `b`), zero in pad rows and for queries that see no key.

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
    step, blocks = plan.attend, plan.sections.blocks
    assert step is not None
    if not isinstance(q, Tensor):
        raise ArgumentError("q", q, "a tensor")
    batch = q.shape[1:-2][:1]
    key_rows = int(plan.kv_layout.row_counts[ranks.rank])
    for block, tensor, rows in zip(
        blocks, (q, k, v), (int(plan.layout.row_counts[ranks.rank]), key_rows, key_rows), strict=True
    ):
        check_tensor(block.name, tensor, (rows, *batch, block.num_heads, block.head_dim), like=q, same_dtype=True)
    call = attention_call(
        plan, q.dtype, q.device, softmax_scale=softmax_scale, softcap=softcap, dropout=dropout, seed=seed
    )
    if sink is not None:
        check_tensor("sink", sink, (blocks[0].num_heads,), like=q)
    backend = choose_kernel(KERNELS, kernel, call)
    wire = Wire(ranks, plan.transport)
    node, lane = divmod(ranks.rank, step.num_lanes)
    along = wire.part(range(lane, ranks.size, step.num_lanes))

    def local_attention(chunk: int) -> dict[str, LocalWork]:
        own = plan.attend_of(chunk)
        first, last = own.deal.heads[lane]
        place = _Place(own, node, lane, along, _Heads(backend, call, first))
        return {
            "attend": lambda *tensors: [_Attention.apply(place, sink if sink is None else sink[first:last], *tensors)]
        }

    exchanged = any(isinstance(each, ToHeads) for each in plan.steps)
    tensors = [x.flatten(-2) if exchanged else x for x in (q, k, v)]
    (out,) = run(plan, wire, tensors, local_attention)
    return out.unflatten(-1, (blocks[0].num_heads, blocks[2].head_dim)) if exchanged else out


def prepare_attention(plan: Plan, rank: int, device: torch.device) -> None:
    """Makes what the device's first kernel derives from a plan's tiles, so that no layer has to.

    Call it where the batch is sharded, after `executor.run.prepare`. Another kernel makes its own in its first layer.
    """
    step = plan.attend
    assert step is not None
    kernel = next(kernel for kernel in KERNELS if device.type in kernel.devices)
    for stage in range(step.num_stages):
        tiles = step.tiles(rank // step.num_lanes, stage)
        if len(tiles.bands):
            kernel.prepare(tiles.cropped if stage else tiles.cropped_keys, device)


def attention_call(
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: int = 0,
) -> AttentionCall:
    """What a kernel would be asked to do for a plan, its numbers checked.

    Raises:
        ArgumentError: a scale, cap or share of dropout that is no such thing.
    """
    assert plan.mask is not None
    q, _, v = plan.sections.blocks
    if not isinstance(softcap, int | float) or not 0 <= softcap < float("inf"):
        raise ArgumentError("softcap", softcap, "a finite number of at least 0, 0 for none")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ArgumentError("dropout", dropout, "a share from 0 up to but not including 1")
    scale = checked_scale("softmax_scale", softmax_scale, q.head_dim)
    seed = checked_integer("seed", seed, 0)
    return AttentionCall(scale, q.head_dim, v.head_dim, dtype, device, float(softcap), float(dropout), seed)


@dataclass(frozen=True)
class _Heads:
    """One kernel for all heads of a lane: a call for each run of one ratio and each entry of the batch."""

    kernel: AttentionKernel
    call: AttentionCall
    first_head: int  # of the lane, in the whole layer

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, chunk: HeadChunk
    ) -> None:
        for heads, groups, batch, call in self._parts(chunk, q):
            self.kernel.forward(
                out[batch][:, heads], lse[batch[1:]][heads],
                q[batch][:, heads], k[batch][:, groups], v[batch][:, groups],
                tiles, call, self.first_head + chunk.heads.start + heads.start,
            )  # fmt: skip

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, tiles: Tiles, chunk: HeadChunk,
    ) -> None:  # fmt: skip
        for heads, groups, batch, call in self._parts(chunk, q):
            self.kernel.backward(
                dq[batch][:, heads], dk[batch][:, groups], dv[batch][:, groups],
                dout[batch][:, heads], q[batch][:, heads], k[batch][:, groups], v[batch][:, groups],
                out[batch][:, heads], lse[batch[1:]][heads],
                tiles, call, self.first_head + chunk.heads.start + heads.start,
            )  # fmt: skip

    def _parts(self, chunk: HeadChunk, q: Tensor) -> Iterator[tuple[slice, slice, tuple[Any, ...], AttentionCall]]:
        """The kernel calls of one stage: each run of heads of each entry of the batch, which has dropout of its own."""
        for heads, groups in chunk.runs:
            if q.ndim == 3:
                yield heads, groups, (slice(None),), self.call
                continue
            for entry in range(q.shape[1]):
                call = replace(self.call, seed=self.call.seed + entry * _NEXT_ENTRY) if self.call.dropout else self.call
                yield heads, groups, (slice(None), entry), call


_NEXT_ENTRY = 2**31 - 1  # between the seeds of a batch's entries: farther apart than callers number layers and steps


@dataclass(frozen=True)
class _Place:
    """Where one rank stands in an attention, and what it computes with."""

    step: Attend
    node: int
    lane: int
    wire: Wire
    work: _Heads


class _Attention(torch.autograd.Function):
    """The attention of a lane's heads of a node's queries. Saved: the inputs, the output and its log-sum-exp.

    A sink is one more key, of score `sink` and of no value: it adds to the denominator alone. So it is added to the
    result, once, whatever computed that, and backward is the one of any other key.

        lse' = log(exp(lse) + exp(sink))        O' = O exp(lse - lse')
        dsink = -sum over queries of exp(sink - lse') rowsum(dO' * O')
    """

    @staticmethod
    def forward(ctx: Any, place: _Place, sink: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.place = place
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # as kernels may expect
        out, lse = attend(place.step, place.node, place.lane, place.wire, place.work, q, k, v)
        if sink is not None:
            before = head_by_head(lse)
            lse = torch.logaddexp(before, sink.to(lse.dtype).unsqueeze(-1), out=head_by_head(lse))
            # Both -inf where a query sees no key and the sink has no weight either.
            out.mul_(_per_query(before.sub_(lse).exp_().nan_to_num_(0.0)).to(out.dtype))
        ctx.save_for_backward(sink, q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        place, (dout,) = ctx.place, gradients
        sink, q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(dout.device.type, enabled=False):
            dsink = None
            if sink is not None:
                share = torch.exp(sink.to(lse.dtype).unsqueeze(-1) - lse).nan_to_num_(0.0)
                terms = _per_query(share) * (dout.to(lse.dtype) * out)
                dsink = -terms.sum((*range(terms.ndim - 2), -1)).to(sink.dtype)
            dq, dk, dv = attend_backward(
                place.step, place.node, place.lane, place.wire, place.work, dout, q, k, v, out, lse
            )
        return None, dsink, dq, dk, dv


def _per_query(x: Tensor) -> Tensor:
    """`[(b,) h, t]` as `[t, (b,) h, 1]`."""
    return x.movedim(-1, 0).unsqueeze(-1)
