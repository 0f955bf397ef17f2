"""`Halo` and `Scan`: what a linear layer needs from the tokens before its own. Pure data; no torch in here.

Chunkwise, a rank computes all heads of its own tokens. Its *segments*, pieces of documents, then lack two things from
the tokens before them: the last `width - 1` inputs of the causal convolution, sent as a halo, and the state of the
recurrence. A segment maps the state before it to the state after it, `S_out = M S_in + E`; ranks exchange these maps
once and fold them in document order. In backward the gradient of the state runs in the opposite direction through the
same maps, transposed: `dS_in = M^T dS_out + R`, where R is the gradient of the segment's own outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_cp.exchange.split_counts import SplitCounts, count_by_owner
from megatron_cp.layout import Layout
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.fragments import arange_ranges
from megatron_cp.layout.memo import Memo, remembered
from megatron_cp.layout.segments import Segments


@dataclass(frozen=True, eq=False)
class HaloTables:
    """The index tables of one rank's half of a halo exchange.

    The received rows, followed by own rows that another own segment needs, are written to `places` in a buffer of
    `[num_waiting * reach]` rows. Places that no row is written to lie before the start of a document.

    Attributes:
        send_rows, send_counts: own rows to send, grouped by destination rank, and `[ranks]` their counts.
        recv_counts: `[ranks]` rows from each rank.
        own_rows: rows that this rank needs and has.
        places: the place of each received row and then of each own row.
        num_waiting: segments whose document begins before them, in the order of the rows.
    """

    send_rows: IntArray
    send_counts: IntArray
    recv_counts: IntArray
    local_rows: IntArray
    places: IntArray
    num_waiting: int


@dataclass(frozen=True)
class Halo(Memo):
    """The tokens before each segment that a causal convolution of `width` taps reaches, fetched in one exchange.

    Attributes:
        continued: True if the tokens before a document's first one are those of earlier calls: all segments wait, and
            every rank also gets the last tokens that each document then has, behind the rows of its segments.
    """

    layout: Layout
    width: int
    channels: int
    continued: bool = False

    @property
    def reach(self) -> int:
        return self.width - 1

    @property
    def crosses(self) -> bool:
        """True if any row travels between ranks."""
        return bool((self._needs[0] != self._needs[1]).any())

    @property
    def _needs(self) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        """Five arrays over the tokens that segments need: rank in need, owner, row there, segment, distance to it."""
        return self.layout.memo(("halo needs", self.reach, self.continued), self._make_needs)

    @property
    def segments(self) -> Segments:
        return Segments.from_layout(self.layout, continued=self.continued)

    def _make_needs(self) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        segments, layout = self.segments, self.layout
        ids = np.flatnonzero(segments.parent >= 0)
        needer, piece = segments.rank[ids], segments.parent[ids]
        if self.continued:  # the end of a document is one more segment, without tokens, on every rank
            _, last = np.unique(segments.document[::-1], return_index=True)
            last = segments.start.size - 1 - last
            ends = np.tile(segments.start.size + segments.document[last], layout.cp_size)
            needer = np.concatenate([needer, np.repeat(np.arange(layout.cp_size), last.size)])
            ids, piece = np.concatenate([ids, ends]), np.concatenate([piece, np.tile(last, layout.cp_size)])
        found = []
        distance = np.zeros(ids.size, dtype=np.int64)
        while ids.size:  # from piece to piece along the document
            taken = np.minimum(self.reach - distance, segments.end[piece] - segments.start[piece])
            ends = segments.end[piece]
            tokens, segment = arange_ranges(ends - taken, ends), np.repeat(ids, taken)
            found.append((segment, tokens, np.repeat(ends + distance, taken) - tokens, np.repeat(needer, taken)))
            distance = distance + taken
            goes_on = (distance < self.reach) & (segments.parent[piece] >= 0)
            ids, piece, distance = ids[goes_on], segments.parent[piece[goes_on]], distance[goes_on]
            needer = needer[goes_on]
        columns = zip(*found, strict=True) if found else [[np.empty(0, dtype=np.int64)]] * 4
        segment, tokens, before, needer = map(np.concatenate, columns)
        order = np.lexsort((-before, segment))
        segment, tokens, before = segment[order], tokens[order], before[order]
        owner, row = layout.located(tokens)
        return needer[order], owner, row, segment, before

    @property
    def split_counts(self) -> SplitCounts:
        """Rows from each rank to each rank, forward."""
        return self.layout.memo(("halo split counts", self.reach, self.continued), self._make_split_counts)

    def _make_split_counts(self) -> SplitCounts:
        needer, owner, *_ = self._needs
        ranks = self.layout.cp_size
        counts = np.bincount(owner * ranks + needer, minlength=ranks * ranks).reshape(ranks, ranks)
        np.fill_diagonal(counts, 0)
        return SplitCounts(counts)

    def tables(self, rank: int) -> HaloTables:
        """Returns the index tables of one rank."""
        key = ("halo", self.reach, rank, self.continued)
        return self.layout.memo(key, lambda: self._tables(rank))

    def _waiting(self, rank: int) -> IntArray:
        """Returns the segments of a rank that wait, in the order of its rows, and then the ends of documents."""
        segments, local = self.segments, self.segments.local(rank)
        documents = np.arange(self.layout.packing.num_documents if self.continued else 0)
        return np.concatenate([local.ids[local.past], segments.start.size + documents])

    def earlier(self, rank: int) -> tuple[IntArray, IntArray]:
        """Returns the places of rows of earlier calls, and which these are among `[documents * reach]`, the last
        `reach` rows of each document before its first token here.
        """
        return self.layout.memo(("halo earlier", self.reach, rank), lambda: self._earlier(rank))

    def _earlier(self, rank: int) -> tuple[IntArray, IntArray]:
        segments, packing, waiting = self.segments, self.layout.packing, self._waiting(rank)
        begins = packing.cu_seqlens
        document = np.concatenate([segments.document, np.arange(packing.num_documents)])[waiting]
        distance = np.concatenate([segments.start, begins[1:]])[waiting] - begins[document]
        slot, row = np.nonzero(np.arange(self.reach) < (self.reach - distance)[:, None])
        return slot * self.reach + row, document[slot] * self.reach + row + distance[slot]

    def _tables(self, rank: int) -> HaloTables:
        needer, owner, row, segment, before = self._needs
        waiting = self._waiting(rank)
        number = np.zeros(self.segments.start.size + self.layout.packing.num_documents, dtype=np.int64)
        number[waiting] = np.arange(waiting.size)
        sent = np.flatnonzero((owner == rank) & (needer != rank))
        sent = sent[np.argsort(needer[sent], kind="stable")]
        needed = np.flatnonzero(needer == rank)
        places = number[segment[needed]] * self.reach + self.reach - before[needed]
        foreign = np.flatnonzero(owner[needed] != rank)
        foreign = foreign[np.argsort(owner[needed][foreign], kind="stable")]
        own = np.flatnonzero(owner[needed] == rank)
        return HaloTables(
            send_rows=row[sent],
            send_counts=np.bincount(needer[sent], minlength=self.layout.cp_size),
            recv_counts=np.bincount(owner[needed][foreign], minlength=self.layout.cp_size),
            local_rows=row[needed][own],
            places=np.concatenate([places[foreign], places[own]]),
            num_waiting=int(waiting.size),
        )

    def bytes_sent(self, item_size: int, *, forward: bool) -> list[int]:
        """Returns the bytes that each rank sends; in backward the received rows' gradients go back."""
        needer, owner, *_ = self._needs
        rows = np.bincount((owner if forward else needer)[needer != owner], minlength=self.layout.cp_size)
        return (rows * self.channels * item_size).tolist()

    def describe(self) -> str:
        return f"halo of {self.reach} tokens, {self.channels} channels"


@dataclass(frozen=True)
class Scan(Memo):
    """The maps of segments that a recurrence exchanges, once in each direction.

    Attributes:
        heads: the number of heads, each with a state `[key_dim, value_dim]`.
        dense: True if M is a matrix `[key_dim, key_dim]` for each head, as in a delta rule; else it is one number.
        continued: True if documents continue the states of earlier calls, forward only; see `Segments`.
        gathers: True if every rank gets the maps of all ranks in one all-gather, with each share padded to the longest;
            else those that it needs, in one all-to-all. Both are folded in the same order.
    """

    layout: Layout
    heads: int
    key_dim: int
    value_dim: int
    dense: bool
    continued: bool = False
    gathers: bool = False

    @property
    def segments(self) -> Segments:
        return Segments.from_layout(self.layout, continued=self.continued)

    @property
    def crosses(self) -> bool:
        """True if any map travels between ranks."""
        return self.segments.crosses

    @property
    def state_size(self) -> int:
        """Elements of E."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def transition_shape(self) -> tuple[int, int, int]:
        """The shape of M: heads, rows, columns."""
        return (self.heads, self.key_dim, self.key_dim) if self.dense else (self.heads, 1, 1)

    @property
    def transition_size(self) -> int:
        """Elements of M."""
        heads, rows, columns = self.transition_shape
        return heads * rows * columns

    def sizes(self, ids: IntArray, *, forward: bool) -> IntArray:
        """Returns the elements of each segment's message: E, and M unless there is no state before (forward) or after
        it.
        """
        has_transition = self.segments.past[ids] if forward else self.segments.future[ids]
        return self.state_size + self.transition_size * has_transition.astype(np.int64)

    @remembered
    def split_counts(self, *, forward: bool) -> SplitCounts:
        """Elements from each rank to each rank."""
        ranks, sizes = self.layout.cp_size, self.sizes(np.arange(self.segments.start.size), forward=forward)
        counts = count_by_owner(self.segments.rank, sizes, *self.segments.needed_ranges(forward=forward), ranks)
        np.fill_diagonal(counts, 0)
        return SplitCounts(counts)

    def leaving(self, rank: int, *, forward: bool) -> IntArray:
        """Returns the segments of a rank whose maps any segment waits for; rising."""
        segments = self.segments
        return np.flatnonzero((segments.future if forward else segments.past) & (segments.rank == rank))

    @remembered
    def share(self, *, forward: bool) -> int:
        """Returns the elements of the longest share of an all-gather."""
        segments = self.segments
        ids = np.flatnonzero(segments.future if forward else segments.past)
        elements = np.bincount(segments.rank[ids], self.sizes(ids, forward=forward), minlength=self.layout.cp_size)
        return int(elements.max())

    def buffer_sizes(self, rank: int, *, forward: bool) -> tuple[int, int]:
        """Returns the elements that a rank sends in one message, and those that it receives."""
        if self.gathers:
            return self.share(forward=forward), self.share(forward=forward) * self.layout.cp_size
        counts = self.split_counts(forward=forward)
        return sum(counts.sent_by(rank)), sum(counts.received_by(rank))

    def bytes_sent(self, item_size: int, *, forward: bool) -> list[int]:
        """Returns the bytes of the maps that each rank sends, in at least 4 bytes an element."""
        ranks = self.layout.cp_size
        if self.gathers:
            return [self.share(forward=forward) * (ranks - 1) * max(item_size, 4)] * ranks
        ids = np.arange(self.segments.start.size)
        elements = self.segments.receivers(forward=forward) * self.sizes(ids, forward=forward)
        sent = np.bincount(self.segments.rank, weights=elements, minlength=self.layout.cp_size)
        return (sent.astype(np.int64) * max(item_size, 4)).tolist()

    def describe(self) -> str:
        kind = "matrices" if self.dense else "numbers"
        maps = ", maps gathered" if self.gathers else ""
        return f"scan of {self.heads} states {self.key_dim} x {self.value_dim}, transitions are {kind}{maps}"
