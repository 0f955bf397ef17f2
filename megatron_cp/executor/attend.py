"""The loop of softmax attention: keys arrive stage by stage, tiles are computed, partial results are merged.

One loop for every schedule, forward and backward. What a tile is computed with is given by the caller.

Shapes: `t` own query rows, pad rows included, `b` batch (absent for packed THD), `h` this rank's query heads, `g` its
key/value heads, `d` and `v` their sizes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_cp.exchange.messages import like_rows
from megatron_cp.executor.arguments import part_of, summed_in
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.trace import NO_RANGE, profiling
from megatron_cp.executor.transfers import Keys, KeyTransfers, unpack
from megatron_cp.executor.visitors import CameHome, Visitors, row_sums, stand_in
from megatron_cp.layout.tiles import Tiles
from megatron_cp.plan.attention import Attend, Stage
from megatron_cp.plan.head_chunks import HeadChunk

# What goes out with visiting queries and what comes home, for errors and the names of ranges.
_VISITS = ("queries of assigned tiles", "partial outputs of assigned tiles")
_RETURNS = ("queries and output gradients of assigned tiles", "query gradients of assigned tiles")


class _Rows(NamedTuple):
    """Queries in backward, of some heads: `target` gets their gradients, the others are as forward left them."""

    target: Tensor
    dout: Tensor
    queries: Tensor
    out: Tensor
    lse: Tensor

    def part(self, rows: slice) -> _Rows:
        """Some of them, and of `target` nothing: a part of their gradients, unwritten."""
        target = torch.empty_like(self.target[rows])
        return _Rows(target, self.dout[rows], self.queries[rows], self.out[rows], self.lse[..., rows])


class TileWork(Protocol):
    """The computing of tiles: see `AttentionKernel`, with batch and all heads of a chunk."""

    @property
    def unrounded_partials(self) -> bool:
        """As of the kernel."""

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, chunk: HeadChunk
    ) -> None:
        """Writes all of `out` and `lse`."""

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, tiles: Tiles, chunk: HeadChunk,
    ) -> None:  # fmt: skip
        """Writes all of `dq`, `dk` and `dv`."""


def attend(
    step: Attend, kv_rank: int, head_rank: int, comm: Communicator, work: TileWork, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """`out` `[t, (b,) h, v]` in the type of q, zero in pad rows, and `lse` `[(b,) h, t]` in at least fp32.

    Partial results are merged in at least fp32 and rounded once.

    Args:
        comm: the ranks of one `head_rank`, and the transport between them.
        q: `[t, (b,) h, d]`.
        k, v: `[t, (b,) g, d]` and `[t, (b,) g, v]`, pad rows included.
    """
    acc_dtype = summed_in(q.dtype)
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=acc_dtype if step.num_stages > 1 else q.dtype)
    lse = q.new_empty(*q.shape[1:-1], q.shape[0], dtype=acc_dtype)
    own = slice(0, int(step.queries.token_counts[kv_rank]))
    if own.stop < len(q):
        out[own.stop :], lse[..., own.stop :] = 0, -torch.inf
    of_tokens, lse_of_tokens = (part_of(q, 0, own), part_of(out, 0, own)), part_of(lse, -1, own)
    visitors = None
    if step.tiled is not None and step.moves_queries(forward=True):
        visitors = Visitors(step, kv_rank, comm, of_tokens[:1], _VISITS, forward=True)
    transfers = _transfers(step, kv_rank, head_rank, comm, k, v, visitors, forward=True)
    for stage, chunk, keys in transfers.arrivals():
        if visitors is not None and stage.remote_queries is not None:
            with transfers.traced("attend", "visitors", stage, chunk) if profiling() else NO_RANGE:
                message = _attend_visitors(work, visitors, *keys, step.remote_tiles(kv_rank, stage), chunk, stage)
            _merge_visits(visitors, of_tokens[1], lse_of_tokens)
            visitors.start_home(stage, chunk, message)
        queries, merged = [part_of(x, -2, chunk.heads) for x in of_tokens]
        merged_lse = part_of(lse_of_tokens, -2, chunk.heads)
        with transfers.traced("attend", "", stage, chunk) if profiling() else NO_RANGE:
            tiles = step.tiles(kv_rank, stage)
            _attend_stage(work, merged, merged_lse, queries, *keys, tiles, chunk, is_first=stage.is_first)
    if visitors is not None:
        _merge_visits(visitors, of_tokens[1], lse_of_tokens)
    return out.to(q.dtype), lse


def attend_backward(
    step: Attend, kv_rank: int, head_rank: int, comm: Communicator, work: TileWork,
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k and v, each with its own type and shape, zero in pad rows.

    Keys travel again, as forward; nothing but what `attend` was given and returned is kept in between.
    """
    dq, dk, dv = like_rows(q, k, v)
    own, own_keys = (slice(0, int(layout.token_counts[kv_rank])) for layout in (step.queries, step.keys))
    for gradient, tokens in ((dq, own), (dk, own_keys), (dv, own_keys)):
        if tokens.stop < len(gradient):
            gradient[tokens.stop :] = 0
    acc_dtype = summed_in(q.dtype)
    in_place = len(step.backward_stages) == 1 or dq.dtype == acc_dtype
    total = part_of(dq, 0, own)
    total = total if in_place else torch.empty_like(total, dtype=acc_dtype)
    of_tokens, lse_of_tokens = [part_of(x, 0, own) for x in (total, dout, q, out)], part_of(lse, -1, own)
    dkeys, dvalues = part_of(dk, 0, own_keys), part_of(dv, 0, own_keys)
    visitors = None
    if step.tiled is not None and step.moves_queries(forward=False):
        visitors = Visitors(step, kv_rank, comm, _leaving(of_tokens, lse_of_tokens), _RETURNS, forward=False)
    transfers = _transfers(step, kv_rank, head_rank, comm, k, v, visitors, forward=False)
    for stage, chunk, keys in transfers.arrivals():
        packed = None
        if stage.gradients is not None:
            packed = transfers.gradients_like(keys)
            gradients = unpack(packed, *keys)
        else:
            own_gradients = part_of(dkeys, -2, chunk.groups), part_of(dvalues, -2, chunk.groups)
            gradients = transfers.own_sums(chunk) or own_gradients
        own_rows = _Rows(*(part_of(x, -2, chunk.heads) for x in (*of_tokens, lse_of_tokens)))
        with transfers.traced("attend", "", stage, chunk) if profiling() else NO_RANGE:
            tiles = step.tiles(kv_rank, stage)
            if visitors is not None and stage.remote_queries is not None:
                visiting = step.remote_tiles(kv_rank, stage)
                _attend_visited_backward(
                    work, visitors, total, own_rows, gradients, keys, tiles, visiting, chunk, stage
                )
            else:
                _attend_stage_backward(work, own_rows, gradients, keys, tiles, chunk, is_first=stage.is_first)
        if packed is not None:
            transfers.return_gradient(stage, chunk, packed)
    if visitors is not None:
        _sum_visits(visitors, total)
    if step.returns_gradients:
        transfers.reduce_gradients(dkeys, dvalues)
    if total.dtype != dq.dtype:
        part_of(dq, 0, own).copy_(total)
    return [dq, dk, dv]


def _attend_stage(
    work: TileWork, merged: Tensor, merged_lse: Tensor, queries: Tensor, keys: Tensor, values: Tensor, tiles: Tiles,
    chunk: HeadChunk, *, is_first: bool,
) -> None:  # fmt: skip
    """Adds what the queries of some heads see among a stage's keys. A function, so that its tensors end with it.

    Args:
        is_first: nothing has been computed for these queries: all of them are written.
    """
    if _is_empty(tiles, queries):
        if is_first:
            merged.zero_(), merged_lse.fill_(-torch.inf)
        return
    seen = tiles.key_rows
    if is_first:
        work.forward(
            merged, merged_lse, queries, part_of(keys, 0, seen), part_of(values, 0, seen), tiles.cropped_keys, chunk
        )  # fmt: skip
        return
    rows = tiles.query_rows
    part, part_lse = torch.empty_like(merged[rows]), torch.empty_like(merged_lse[..., rows])
    work.forward(part, part_lse, queries[rows], keys[seen], values[seen], tiles.cropped, chunk)
    merge(merged[rows], merged_lse[..., rows], part, part_lse)


def _attend_stage_backward(
    work: TileWork, own: _Rows, gradients: Keys, keys: Keys, tiles: Tiles, chunk: HeadChunk, *, is_first: bool
) -> None:
    """Adds to `own.target` the queries' gradients from a stage's keys, and writes those of the keys.

    Args:
        is_first: nothing has been added yet: all of the target is written.
    """
    if _is_empty(tiles, own.queries):
        for unseen in (*([own.target] if is_first else []), *gradients):
            unseen.zero_()
        return
    seen = tiles.key_rows
    for x in gradients:
        if seen.start:
            x[: seen.start].zero_()
        if seen.stop < len(x):
            x[seen.stop :].zero_()
    of_seen = part_of(gradients[0], 0, seen), part_of(gradients[1], 0, seen)
    _attend_seen_backward(work, own, of_seen, keys, tiles, chunk, is_first=is_first)


def _attend_seen_backward(
    work: TileWork, own: _Rows, gradients: Keys, keys: Keys, tiles: Tiles, chunk: HeadChunk, *, is_first: bool
) -> None:
    """Likewise, for gradients of the keys alone that the tiles see."""
    k, v = (part_of(x, 0, tiles.key_rows) for x in keys)
    rows = own if is_first else own.part(tiles.query_rows)
    target, dout, queries, out, lse = rows
    of_rows = tiles.cropped_keys if is_first else tiles.cropped
    work.backward(target, *gradients, dout, queries, k, v, out, lse, of_rows, chunk)
    if not is_first:
        own.target[tiles.query_rows].add_(target)


def _attend_visitors(
    work: TileWork, visitors: Visitors, keys: Tensor, values: Tensor, tiles: Tiles, chunk: HeadChunk, stage: Stage
) -> Tensor:
    """Computes the queries of others that have arrived. Returns their partial outputs and log-sum-exps, a message."""
    (queries,) = visitors.arrive(stage, chunk)
    (heads, size), acc_dtype = (queries.shape[-2], values.shape[-1]), summed_in(queries.dtype)
    message = visitors.message_like(len(queries), heads * (size + 1), acc_dtype)
    part, part_lse = _results(message, heads, size)
    lse = message.new_empty(*queries.shape[1:-1], len(queries))
    _attend_stage(work, part, lse, queries, keys, values, tiles, chunk, is_first=True)
    part_lse.copy_(lse.movedim(-1, 0))
    visitors.leave()
    return message


def _merge_visits(visitors: Visitors, out: Tensor, lse: Tensor) -> None:
    """Adds what other ranks have sent home of own queries to what this rank has."""
    for home in visitors.come_home():
        _merge_visit(home, part_of(out, -2, home.chunk.heads), part_of(lse, -2, home.chunk.heads))


def _merge_visit(home: CameHome, merged: Tensor, merged_lse: Tensor) -> None:
    """Adds what one rank sent home. A function, so that its tensors end with it."""
    part, part_lse = _results(home.message, merged.shape[-2], merged.shape[-1])
    own, own_lse = merged.index_select(0, home.rows), merged_lse.index_select(-1, home.rows)
    merge(own, own_lse, part, part_lse.movedim(0, -1))
    rows = home.rows.long()
    merged.index_copy_(0, rows, own)
    merged_lse.index_copy_(-1, rows, own_lse)


def _results(message: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    """Views `[s, (b,) h, v]` and `[s, (b,) h]` of partial outputs and log-sum-exps on their way home."""
    out, lse = message.split([heads * size, heads], -1)
    return out.unflatten(-1, (heads, size)), lse


def _leaving(of_tokens: list[Tensor], lse: Tensor) -> list[Tensor]:
    """What backward needs of own queries elsewhere."""
    _, dout, q, out = of_tokens
    return [lse.movedim(-1, 0).unsqueeze(-1), row_sums(dout, out), q, dout]


def _attend_visited_backward(
    work: TileWork, visitors: Visitors, total: Tensor, own: _Rows, gradients: Keys, keys: Keys, tiles: Tiles,
    visiting: Tiles, chunk: HeadChunk, stage: Stage,
) -> None:  # fmt: skip
    """`_attend_stage_backward` where queries of others see the keys too: those first, so that they go home meanwhile.

    What both leave at the keys is added in at least fp32.

    Args:
        total: the gradients of all own queries, of all heads: what comes home is added to it.
        gradients: of the keys, which are written.
        tiles, visiting: of own queries, and of others'.
    """
    no_own = _is_empty(tiles, own.queries)
    adds = not no_own and bool(len(visiting.bands))
    dk, dv = gradients
    acc_dtype = summed_in(dk.dtype)
    sums = gradients
    if adds and dk.dtype != acc_dtype:
        sums = torch.empty_like(dk, dtype=acc_dtype), torch.empty_like(dv, dtype=acc_dtype)
    message = _attend_visitors_backward(work, visitors, sums, keys, visiting, chunk, stage)
    _sum_visits(visitors, total)
    visitors.start_home(stage, chunk, message)
    if adds:
        seen = tiles.key_rows
        parts = torch.empty_like(sums[0][seen]), torch.empty_like(sums[1][seen])
        _attend_seen_backward(work, own, parts, keys, tiles, chunk, is_first=False)
        for gradient, summed, part in zip(gradients, sums, parts, strict=True):
            summed[seen].add_(part)
            if gradient is not summed:
                gradient.copy_(summed)
    elif not no_own:
        _attend_stage_backward(work, own, gradients, keys, tiles, chunk, is_first=False)


def _attend_visitors_backward(
    work: TileWork, visitors: Visitors, gradients: Keys, keys: Keys, tiles: Tiles, chunk: HeadChunk, stage: Stage
) -> Tensor:
    """Writes what others' queries leave at the keys. Returns the gradients of these queries, a message."""
    lse, sums, queries, dout = visitors.arrive(stage, chunk)
    message = visitors.message_like(len(queries), queries.shape[-2:].numel(), queries.dtype)
    home, wide = message.unflatten(-1, queries.shape[-2:]), work.unrounded_partials
    acc_dtype = summed_in(home.dtype)
    dq = torch.empty_like(home, dtype=acc_dtype) if wide and home.dtype != acc_dtype else home
    rows = _Rows(dq, dout, queries, stand_in(dout, sums, wide=wide), lse.squeeze(-1).movedim(0, -1).contiguous())
    _attend_stage_backward(work, rows, gradients, keys, tiles, chunk, is_first=True)
    if dq is not home:
        home.copy_(dq)
    visitors.leave()
    return message


def _sum_visits(visitors: Visitors, total: Tensor) -> None:
    """Adds the gradients that other ranks made of own queries."""
    for home in visitors.come_home():
        of_heads = part_of(total, -2, home.chunk.heads)
        part = home.message.unflatten(-1, of_heads.shape[-2:])
        of_heads.index_add_(0, home.rows, part.to(total.dtype))


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a partial result over other keys: `out` and `lse` become those of all keys. In place; `part` is used up.

    out = (1 - w) out + w part with w = sigmoid(part_lse - lse), the new keys' share of the softmax's denominator.

    Args:
        out, part: `[t, (b,) h, v]` of one type.
        lse, part_lse: `[(b,) h, t]`, -inf where a query has seen nothing; out is then finite, and part too.
    """
    before, added = row_padded_copy(lse), row_padded_copy(part_lse)
    share = torch.sub(added, before, out=row_padded_copy(lse)).sigmoid_()
    share.nan_to_num_(0.0)  # both -inf: no share to speak of, and no key to take it from
    lse.copy_(torch.logaddexp(before, added, out=before))
    weight = share.movedim(-1, 0).unsqueeze(-1).to(out.dtype)
    # No lerp: it rounds differently with the strides that it meets.
    out.mul_(1 - weight).add_(part.mul_(weight))


def row_padded_copy(lse: Tensor) -> Tensor:
    """A copy of `[(b,) h, t]` through which elementwise functions go head by head.

    torch computes exp and its like by vectors and, where those end or elements lie apart, one by one, which rounds
    differently. Through dense tensors it runs heads together, so that bits would depend on which other heads a rank
    has. So heads stand apart, each beginning on a cache line.
    """
    queries = lse.shape[-1]
    return lse.new_empty(*lse.shape[:-1], (queries // 16 + 1) * 16)[..., :queries].copy_(lse)


def _transfers(
    step: Attend, kv_rank: int, head_rank: int, comm: Communicator, k: Tensor, v: Tensor, visitors: Visitors | None, *,
    forward: bool,
) -> KeyTransfers:  # fmt: skip
    own = slice(0, int(step.keys.token_counts[kv_rank]))
    own_keys = part_of(k, 0, own), part_of(v, 0, own)
    return KeyTransfers(step, kv_rank, head_rank, comm, *own_keys, visitors, forward=forward)


def _is_empty(tiles: Tiles, queries: Tensor) -> bool:
    return not len(tiles.bands) or not queries.numel()
