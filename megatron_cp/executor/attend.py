"""Softmax attention on one rank: computes the program's tiles and merges partial results.

Each direction has a class. The caller passes the code that computes a tile, the program
(`plan/attention_program.py`) says which rows move when, and `RowTransfers` moves them.

Shapes: `t` own query rows, pad rows included, `b` batch (absent for packed THD), `h` this rank's query heads, `g` its
key/value heads, `d` and `v` their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_cp.exchange.messages import like_rows
from megatron_cp.executor.arguments import accumulation_dtype, narrow
from megatron_cp.executor.partials import merge, output_with_row_sums, row_sums
from megatron_cp.executor.transfers import AttendOnRank, Bound, Keys, RowTransfers
from megatron_cp.layout.tiles import Tiles
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.head_chunks import HeadChunk
from megatron_cp.plan.payloads import Payload


class Queries(NamedTuple):
    """Rows of queries in forward: q `[t, (b,) h, d]`, and out `[t, (b,) h, v]` and lse `[(b,) h, t]`, to be written."""

    q: Tensor
    out: Tensor
    lse: Tensor

    def heads(self, chunk: HeadChunk) -> Queries:
        """Selects a chunk's heads."""
        if chunk.heads.stop - chunk.heads.start == self.q.shape[-2]:
            return self
        return Queries(*(narrow(x, -2, chunk.heads) for x in self))


class QueryGradients(NamedTuple):
    """Rows of queries in backward: dq, to be written, and what it is computed from. dlse is None for zero.

    `out` and `lse` are those of the whole softmax, of which the tiles may be a part.
    """

    dq: Tensor
    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None

    def heads(self, chunk: HeadChunk) -> QueryGradients:
        """Selects a chunk's heads."""
        if chunk.heads.stop - chunk.heads.start == self.q.shape[-2]:
            return self
        return QueryGradients(*(x if x is None else narrow(x, -2, chunk.heads) for x in self))  # type: ignore[arg-type]

    def part(self, rows: slice) -> QueryGradients:
        """Selects `rows`; allocates an uninitialised gradient buffer for them."""
        dq = torch.empty_like(self.dq[rows])
        dlse = self.dlse if self.dlse is None else self.dlse[..., rows]
        return QueryGradients(dq, self.dout[rows], self.q[rows], self.out[rows], self.lse[..., rows], dlse)


class TileWork(Protocol):
    """Computes tiles as `AttentionKernel` does, with the batch and all heads of a chunk."""

    @property
    def unrounded_partials(self) -> bool:
        """True if the kernel writes results, and reads outputs, in a wider type than that of the queries."""

    def forward(self, rows: Queries, keys: Keys, tiles: Tiles, chunk: HeadChunk) -> None:
        """Writes all of `rows.out` and `rows.lse`."""

    def backward(self, rows: QueryGradients, keys: Keys, gradients: Keys, tiles: Tiles, chunk: HeadChunk) -> None:
        """Writes all of `rows.dq`, and of `gradients`, those of keys and values."""


def attend(
    at: AttendOnRank, work: TileWork, q: Tensor, k: Tensor, v: Tensor, codes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns `out` `[t, (b,) h, v]` in the type of q, zero in pad rows, and `lse` `[(b,) h, t]` in at least fp32.

    Partial results are merged in at least fp32 and rounded once.

    Args:
        q: `[t, (b,) h, d]`.
        k, v: `[t, (b,) g, d]` and `[t, (b,) g, v]`, pad rows included.
        codes: the bytes of `coded_keys` that travel in place of k and v, which have been decoded from them; or None.
    """
    step, acc_dtype = at.step, accumulation_dtype(q.dtype)
    out = q.new_empty(*q.shape[:-1], step.out_features, dtype=acc_dtype if step.num_stages > 1 else q.dtype)
    lse = q.new_empty(*q.shape[1:-1], q.shape[0], dtype=acc_dtype)
    own, own_keys = _own_rows(step, at.kv_rank)
    if own.stop < len(q):
        out[own.stop :], lse[..., own.stop :] = 0, -torch.inf
    rows = Queries(narrow(q, 0, own), narrow(out, 0, own), narrow(lse, -1, own))
    keys = narrow(k, 0, own_keys), narrow(v, 0, own_keys)
    _AttendForward(at, work, rows, keys, _rows_of(codes, own_keys)).run()
    return out.to(q.dtype), lse


def attend_backward(
    at: AttendOnRank, work: TileWork, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dlse: Tensor | None = None, codes: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v, each with its own type and shape, zero in pad rows.

    Keys are sent again, as in forward; only the arguments and results of `attend` are kept in between.

    Args:
        dout: the gradient of `out`.
        dlse: the gradient of `lse`, finite, or None for zero. Where tiles are assigned it is a tensor on every rank or
            on none.
        codes: those of `attend`.
    """
    dq, dk, dv = like_rows(q, k, v)
    own, own_keys = _own_rows(at.step, at.kv_rank)
    for gradient, tokens in ((dq, own), (dk, own_keys), (dv, own_keys)):
        if tokens.stop < len(gradient):
            gradient[tokens.stop :] = 0
    acc_dtype = accumulation_dtype(q.dtype)
    in_place = len(at.step.backward_stages) == 1 or dq.dtype == acc_dtype
    total = narrow(dq, 0, own)
    total = total if in_place else torch.empty_like(total, dtype=acc_dtype)
    dlse = dlse if dlse is None else narrow(dlse, -1, own)
    rows = QueryGradients(
        total, narrow(dout, 0, own), narrow(q, 0, own), narrow(out, 0, own), narrow(lse, -1, own), dlse
    )
    keys, gradients = [(narrow(x, 0, own_keys), narrow(y, 0, own_keys)) for x, y in ((k, v), (dk, dv))]
    _AttendBackward(at, work, rows, keys, gradients, _rows_of(codes, own_keys)).run()
    if total.dtype != dq.dtype:
        narrow(dq, 0, own).copy_(total)
    return [dq, dk, dv]


def _own_rows(step: Attend, kv_rank: int) -> tuple[slice, slice]:
    """Returns the rows of own queries, and of own keys, without pad rows."""
    return slice(0, int(step.queries.token_counts[kv_rank])), slice(0, int(step.keys.token_counts[kv_rank]))


def _rows_of(codes: Tensor | None, rows: slice) -> Tensor | None:
    return codes if codes is None else narrow(codes, 0, rows)


class _AttendForward(RowTransfers):
    """Writes `rows.out` and `rows.lse`."""

    def __init__(self, at: AttendOnRank, work: TileWork, rows: Queries, keys: Keys, codes: Tensor | None) -> None:
        super().__init__(at, keys, [rows.q], codes, forward=True)
        self.work, self.rows = work, rows

    def compute(self, bound: Bound) -> None:
        do, chunk = bound.do, bound.chunk
        stage, keys = do.part.stage, self.keys(do.keys, chunk)
        self._attend(self.rows.heads(chunk), keys, self.tiles(self.kv_rank, stage), chunk, is_first=stage.number == 0)

    def compute_remote(self, bound: Bound) -> None:
        do, chunk = bound.do, bound.chunk
        (q,), keys = self.queries(do.queries, chunk), self.keys(do.keys, chunk, again=True)
        message, heads, size = self.buffers[do.results], q.shape[-2], self.step.value_head_dim
        out, sent_lse = message.narrow(-1, 0, heads * size), message.narrow(-1, heads * size, heads)
        out = out.view(*q.shape[:-1], size)
        lse = out.new_empty(*q.shape[1:-1], q.shape[0])
        tiles = self.step.remote_tiles(self.kv_rank, do.part.stage)
        self._attend(Queries(q, out, lse), keys, tiles, chunk, is_first=True)
        sent_lse.copy_(lse.movedim(-1, 0))

    def merge(self, bound: Bound) -> None:
        """Merges partial outputs of own queries, in the order of ranks."""
        rows, message = self.rows.heads(bound.chunk), self.buffers[bound.do.buffer]
        for index, first, count in bound.pieces:
            _merge_rows(rows, index, *self.columns(message.narrow(0, first, count), bound))

    def _attend(self, rows: Queries, keys: Keys, tiles: Tiles, chunk: HeadChunk, *, is_first: bool) -> None:
        """Computes tiles of some heads and merges them into `rows`.

        Args:
            is_first: no result has been computed for these queries: all of their rows are written.
        """
        if _is_empty(tiles, rows.q):
            if is_first:
                rows.out.zero_(), rows.lse.fill_(-torch.inf)
            return
        seen = narrow(keys[0], 0, tiles.key_rows), narrow(keys[1], 0, tiles.key_rows)
        if is_first:
            self.work.forward(rows, seen, tiles.cropped_keys, chunk)
            return
        some = tiles.query_rows
        part = Queries(rows.q[some], torch.empty_like(rows.out[some]), torch.empty_like(rows.lse[..., some]))
        self.work.forward(part, seen, tiles.cropped, chunk)
        merge(rows.out[some], rows.lse[..., some], part.out, part.lse)


class _AttendBackward(RowTransfers):
    """Writes the gradients of own queries, in `rows.dq`, and of own keys, in `gradients`."""

    def __init__(
        self, at: AttendOnRank, work: TileWork, rows: QueryGradients, keys: Keys, gradients: Keys, codes: Tensor | None
    ) -> None:
        leaving: list[Tensor] = []
        if at.step.tiled is not None and at.step.moves_queries(forward=False):
            sums = row_sums(rows.dout, rows.out)
            if rows.dlse is not None:
                sums -= rows.dlse.movedim(-1, 0).unsqueeze(-1)
            leaving = [rows.lse.movedim(-1, 0).unsqueeze(-1), sums, rows.q, rows.dout]
        super().__init__(at, keys, leaving, codes, forward=False)
        self.work, self.rows, self.own_gradients = work, rows, gradients
        self._remote_sums: Keys | None = None  # remote queries' part of the current keys' gradients

    @cached_property
    def key_sums(self) -> Keys:
        """Sums of the own keys' gradients in at least fp32, if other ranks' parts are added to them."""
        dk, dv = (torch.zeros_like(x, dtype=self.acc_dtype) for x in (self.k, self.v))
        return dk, dv

    def run(self) -> None:
        super().run()
        if self.step.key_gradients_return:
            for target, total in zip(self.own_gradients, self.key_sums, strict=True):
                target.copy_(total)

    def compute(self, bound: Bound) -> None:
        do, chunk = bound.do, bound.chunk
        stage, rows, keys = do.part.stage, self.rows.heads(chunk), self.keys(do.keys, chunk)
        tiles = self.tiles(self.kv_rank, stage)
        if do.gradients is not None:
            gradients = self.uncoded_keys(do.gradients, chunk)
        else:
            dk, dv = self.key_sums if self.step.key_gradients_return else self.own_gradients
            gradients = narrow(dk, -2, chunk.groups), narrow(dv, -2, chunk.groups)
        if not do.adds:
            self._attend(rows, keys, gradients, tiles, chunk, is_first=stage.number == 0)
        elif self._remote_sums is not None:
            self._add_to_remote_sums(rows, keys, gradients, tiles, chunk)
        elif not _is_empty(tiles, rows.q):
            self._attend(rows, keys, gradients, tiles, chunk, is_first=False)

    def compute_remote(self, bound: Bound) -> None:
        """Computes remote queries before own ones, so that their gradients travel while own queries are computed.

        The keys' gradients from both are summed in at least fp32.
        """
        do, chunk = bound.do, bound.chunk
        stage, keys = do.part.stage, self.keys(do.keys, chunk, again=True)
        gradients = self.uncoded_keys(do.gradients, chunk)
        tiles, own_tiles = self.step.remote_tiles(self.kv_rank, stage), self.tiles(self.kv_rank, stage)
        if len(tiles.bands) and not _is_empty(own_tiles, self.rows.heads(chunk).q):
            dk, dv = (x if x.dtype == self.acc_dtype else torch.empty_like(x, dtype=self.acc_dtype) for x in gradients)
            gradients = self._remote_sums = dk, dv
        lse, sums, q, dout = self.queries(do.queries, chunk)
        returned, wide = self.buffers[do.results].view(q.shape), self.work.unrounded_partials
        dq = returned
        if wide and dq.dtype != self.acc_dtype:
            dq = torch.empty_like(returned, dtype=self.acc_dtype)
        if self.rows.dlse is None:
            out, dlse = output_with_row_sums(dout, sums, wide=wide), None
        else:  # a sum that no output has where dout is zero
            out, dlse = torch.zeros_like(dout), -sums.squeeze(-1).movedim(0, -1)
        rows = QueryGradients(dq, dout, q, out, lse.squeeze(-1).movedim(0, -1).contiguous(), dlse)
        self._attend(rows, keys, gradients, tiles, chunk, is_first=True)
        if dq is not returned:
            returned.copy_(dq)

    def merge(self, bound: Bound) -> None:
        """Adds received gradients of own queries, or of own or forwarded keys, in the order of ranks."""
        do, chunk, message = bound.do, bound.chunk, self.buffers[bound.do.buffer]
        if do.target is not None:
            target = self.buffers[do.target]
            if do.flow is None:
                target.add_(message)
                return
            sums: Sequence[Tensor] = self.columns(target.zero_(), bound)
        elif do.flow is None:
            for target, source in zip(self.own_gradients, self.columns(message, bound), strict=True):
                target.copy_(source)
            return
        elif do.payload is Payload.KEY_GRADIENTS:
            sums = [narrow(x, -2, chunk.groups) for x in self.key_sums]
        else:
            sums = [self.rows.heads(chunk).dq]
        for total, column in zip(sums, self.columns(message, bound), strict=True):
            for index, first, count in bound.pieces:
                total.index_add_(0, index, column.narrow(0, first, count).to(total.dtype))

    def _add_to_remote_sums(
        self, rows: QueryGradients, keys: Keys, gradients: Keys, tiles: Tiles, chunk: HeadChunk
    ) -> None:
        sums, self._remote_sums = self._remote_sums, None
        assert sums is not None
        seen = tiles.key_rows
        parts = torch.empty_like(sums[0][seen]), torch.empty_like(sums[1][seen])
        self._attend_seen(rows, keys, parts, tiles, chunk, is_first=False)
        for gradient, total, part in zip(gradients, sums, parts, strict=True):
            total[seen].add_(part)
            if gradient.dtype != total.dtype:
                gradient.copy_(total)

    def _attend(
        self, rows: QueryGradients, keys: Keys, gradients: Keys, tiles: Tiles, chunk: HeadChunk, *, is_first: bool
    ) -> None:
        """Adds the queries' gradients to `rows.dq`, and writes those of the keys.

        Args:
            is_first: no gradient has been added yet: all of `rows.dq` is written.
        """
        if _is_empty(tiles, rows.q):
            for unseen in (*([rows.dq] if is_first else []), *gradients):
                unseen.zero_()
            return
        seen = tiles.key_rows
        for x in gradients:
            if seen.start:
                x[: seen.start].zero_()
            if seen.stop < len(x):
                x[seen.stop :].zero_()
        seen_gradients = narrow(gradients[0], 0, seen), narrow(gradients[1], 0, seen)
        self._attend_seen(rows, keys, seen_gradients, tiles, chunk, is_first=is_first)

    def _attend_seen(
        self, rows: QueryGradients, keys: Keys, gradients: Keys, tiles: Tiles, chunk: HeadChunk, *, is_first: bool
    ) -> None:
        """Does what `_attend` does, with `gradients` of the key rows in `tiles.key_rows` only."""
        seen = narrow(keys[0], 0, tiles.key_rows), narrow(keys[1], 0, tiles.key_rows)
        if is_first:
            self.work.backward(rows, seen, gradients, tiles.cropped_keys, chunk)
            return
        some = rows.part(tiles.query_rows)
        self.work.backward(some, seen, gradients, tiles.cropped, chunk)
        rows.dq[tiles.query_rows].add_(some.dq)


def _merge_rows(rows: Queries, index: Tensor, part: Tensor, part_lse: Tensor) -> None:
    # A function, so that its tensors are freed before the next rank's.
    out, lse = rows.out.index_select(0, index), rows.lse.index_select(-1, index)
    merge(out, lse, part, part_lse.squeeze(-1).movedim(0, -1))
    index = index.long()
    rows.out.index_copy_(0, index, out)
    rows.lse.index_copy_(-1, index, lse)


def _is_empty(tiles: Tiles, queries: Tensor) -> bool:
    return not len(tiles.bands) or not queries.numel()
