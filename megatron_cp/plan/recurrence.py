"""`Halo` and `Scan`: what a linear layer needs of the tokens before its own. Pure data; no torch in here.

Chunkwise, a rank computes all heads of its own tokens. Its *segments*, pieces of documents, then lack two things of
the tokens before them: the last `width - 1` inputs of the causal convolution, which a halo brings, and the state of
the recurrence. A segment maps the state before it to the state after it, `S_out = M S_in + E`; ranks exchange these
maps once and fold them in document order. In backward the gradient of the state runs the other way by the same maps,
transposed: `dS_in = M^T dS_out + R`, R being what the segment's own outputs want of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_cp.exchange.split_counts import SplitCounts, count_by_owner
from megatron_cp.layout import Layout
from megatron_cp.layout.fragments import arange_ranges
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.packing import IntArray
from megatron_cp.layout.segments import Segments


@dataclass(frozen=True, eq=False)
class HaloTables:
    """One rank's half of a halo exchange.

    The rows that arrive and then the own rows that another own segment needs lie end to end, and `places` says where
    in `[waiting segments * reach]` each belongs. What no row is written to lies before a document.

    Attributes:
        send_rows, send_counts: own rows to each rank, grouped by rank.
        recv_counts: rows from each rank.
        own_rows: rows that this rank needs and has.
        places: for each row that arrives and then each own row, its place.
        num_waiting: segments whose document began before them, in the order of the rows.
    """

    send_rows: IntArray
    send_counts: IntArray
    recv_counts: IntArray
    local_rows: IntArray
    places: IntArray
    num_waiting: int


@dataclass(frozen=True)
class Halo(Memo):
    """The tokens before each segment that a causal convolution of `width` taps reaches: one exchange.

    Attributes:
        layout: who holds which tokens.
        width: taps of the convolution.
        channels: features of a token.
    """

    layout: Layout
    width: int
    channels: int

    @property
    def reach(self) -> int:
        return self.width - 1

    @property
    def crosses(self) -> bool:
        """Whether anything travels."""
        return bool((self._needs[0] != self._needs[1]).any())

    @property
    def _needs(self) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        """For each token that a segment needs: who needs it, who has it, in which row, the segment, and the token."""
        return self.layout.memo(("halo needs", self.reach), self._make_needs)

    def _make_needs(self) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        segments, layout = Segments.of(self.layout), self.layout
        ids = np.flatnonzero(segments.past)
        ends = segments.start[ids]
        starts = np.maximum(ends - self.reach, layout.packing.cu_seqlens[segments.document[ids]])
        tokens, segment = arange_ranges(starts, ends), np.repeat(ids, ends - starts)
        owner, row = layout.located(tokens)
        return segments.rank[segment], owner, row, segment, tokens

    @property
    def split_counts(self) -> SplitCounts:
        """Rows from each rank to each, forward."""
        return self.layout.memo(("halo split counts", self.reach), self._make_split_counts)

    def _make_split_counts(self) -> SplitCounts:
        needer, owner, *_ = self._needs
        ranks = self.layout.cp_size
        counts = np.bincount(owner * ranks + needer, minlength=ranks * ranks).reshape(ranks, ranks)
        np.fill_diagonal(counts, 0)
        return SplitCounts(counts)

    def tables(self, rank: int) -> HaloTables:
        """One rank's."""
        key = ("halo", self.reach, rank)
        return self.layout.memo(key, lambda: self._tables(rank))

    def _tables(self, rank: int) -> HaloTables:
        needer, owner, row, segment, token = self._needs
        local, segments = Segments.of(self.layout).local(rank), Segments.of(self.layout)
        waiting = local.ids[local.past]
        number = np.zeros(segments.start.size, dtype=np.int64)
        number[waiting] = np.arange(waiting.size)
        sent = np.flatnonzero((owner == rank) & (needer != rank))
        sent = sent[np.argsort(needer[sent], kind="stable")]
        needed = np.flatnonzero(needer == rank)
        before = segments.start[segment[needed]] - token[needed]  # tokens back, from 1
        places = number[segment[needed]] * self.reach + self.reach - before
        foreign = np.flatnonzero(owner[needed] != rank)
        foreign = foreign[np.argsort(owner[needed][foreign], kind="stable")]
        at_home = np.flatnonzero(owner[needed] == rank)
        return HaloTables(
            send_rows=row[sent],
            send_counts=np.bincount(needer[sent], minlength=self.layout.cp_size),
            recv_counts=np.bincount(owner[needed][foreign], minlength=self.layout.cp_size),
            local_rows=row[needed][at_home],
            places=np.concatenate([places[foreign], places[at_home]]),
            num_waiting=int(waiting.size),
        )

    def bytes_sent(self, item_size: int, *, forward: bool) -> list[int]:
        """For each rank; in backward what came goes back."""
        needer, owner, *_ = self._needs
        rows = np.bincount((owner if forward else needer)[needer != owner], minlength=self.layout.cp_size)
        return (rows * self.channels * item_size).tolist()

    def describe(self) -> str:
        return f"halo of {self.reach} tokens, {self.channels} channels"


@dataclass(frozen=True)
class Scan(Memo):
    """The maps of segments that a recurrence exchanges, once in each direction.

    Attributes:
        layout: who holds which tokens.
        heads: heads, each with a state `[key_dim, value_dim]`.
        key_dim, value_dim: of the state.
        dense: whether M is a matrix `[key_dim, key_dim]` a head, as in a delta rule, or one number.
    """

    layout: Layout
    heads: int
    key_dim: int
    value_dim: int
    dense: bool

    @property
    def segments(self) -> Segments:
        return Segments.of(self.layout)

    @property
    def crosses(self) -> bool:
        """Whether anything travels."""
        return self.segments.crosses

    @property
    def state_size(self) -> int:
        """Elements of E."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def transition_shape(self) -> tuple[int, int, int]:
        """Of M."""
        return (self.heads, self.key_dim, self.key_dim) if self.dense else (self.heads, 1, 1)

    @property
    def transition_size(self) -> int:
        """Elements of M."""
        heads, rows, columns = self.transition_shape
        return heads * rows * columns

    def sizes(self, ids: IntArray, *, forward: bool) -> IntArray:
        """Elements of each segment's message: E, and M unless there is no state before (forward) or after it."""
        has_transition = self.segments.past[ids] if forward else self.segments.future[ids]
        return self.state_size + self.transition_size * has_transition.astype(np.int64)

    def split_counts(self, *, forward: bool) -> SplitCounts:
        """Elements from each rank to each."""
        return self.memo(("split counts", forward), lambda: self._make_split_counts(forward))

    def _make_split_counts(self, forward: bool) -> SplitCounts:
        ranks, sizes = self.layout.cp_size, self.sizes(np.arange(self.segments.start.size), forward=forward)
        counts = count_by_owner(self.segments.rank, sizes, *self.segments.needed_ranges(forward=forward), ranks)
        np.fill_diagonal(counts, 0)
        return SplitCounts(counts)

    def bytes_sent(self, item_size: int, *, forward: bool) -> list[int]:
        """For each rank the bytes of its maps, in at least 4 bytes an element."""
        ids = np.arange(self.segments.start.size)
        elements = self.segments.receivers(forward=forward) * self.sizes(ids, forward=forward)
        sent = np.bincount(self.segments.rank, weights=elements, minlength=self.layout.cp_size)
        return (sent.astype(np.int64) * max(item_size, 4)).tolist()

    def describe(self) -> str:
        kind = "matrices" if self.dense else "numbers"
        return f"scan of {self.heads} states {self.key_dim} x {self.value_dim}, transitions are {kind}"
