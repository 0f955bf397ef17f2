"""`RowFlow`: rows that change place between ranks before a stage, or after it. Pure data; no torch in here.

A flow says for every rank which rows it sends, which it then has at hand, and in which order they stand. Bytes,
collectives, memory and words about a plan are sums and walks over flows.

    Fetch     each rank gets the rows that it wants from their owners, in one collective
    Return    what was made of fetched rows goes back to the owners, who sum it in the order of ranks
    PassOn    each rank passes on to the next what it has at hand, and gets what the rank before had

Ranks are those along the keys' axis (`kv_rank`); rows are counted without pad rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp.exchange.split_counts import SplitCounts, count_by_owner
from megatron_cp.layout import Layout
from megatron_cp.layout.fragments import arange_ranges, index_ranges
from megatron_cp.layout.memo import Memo, frozen
from megatron_cp.layout.packing import IntArray
from megatron_cp.layout.tiles import bands_of_held_keys, bands_of_keys

IndexTable = NDArray[np.int32] | IntArray  # in 32 bits where those hold its numbers
Ranges = tuple[IntArray, IntArray]  # starts and ends of ranges of the stream, in rising order


class MessageRows(NamedTuple):
    """Rows of the buffers that one flow takes on a rank.

    Attributes:
        sent: that are packed, or put in order, to be sent; None where what is at hand is sent as it stands.
        received: as they arrive.
        ordered: once more, in the order in which they are wanted; None where they arrive in it.
    """

    sent: int | None
    received: int
    ordered: int | None


class RowFlow(ABC):
    """Rows on their way.

    Attributes:
        layout: who owns which rows.
    """

    layout: Layout

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.layout.cp_size

    @abstractmethod
    def rows_sent_by_ranks(self) -> IntArray:
        """`[ranks]` rows that each rank sends to others."""

    def rows_sent(self, rank: int) -> int:
        """Rows that a rank sends to others."""
        return int(self.rows_sent_by_ranks()[rank])

    @abstractmethod
    def message_rows(self, rank: int) -> MessageRows:
        """The buffers of a rank."""


class KeyFlow(RowFlow):
    """A flow that brings rows to where they are seen."""

    @abstractmethod
    def tokens(self, rank: int) -> IntArray:
        """The place in the stream of each row that is then at hand."""

    @abstractmethod
    def bands(self, bands: IntArray, rank: int) -> IntArray:
        """Bands over the stream of keys, counted in the rows that are then at hand."""

    def source(self, rank: int) -> int | None:
        """The rank whose rows, as they stand, are then at hand; None where they are of several."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """What it does, in words."""


@dataclass(frozen=True, eq=False)
class PassOn(KeyFlow):
    """One hop of a ring.

    Attributes:
        layout: who owns which rows.
        hops: that the rows have then made from their owners; as many as ranks take them home.
    """

    layout: Layout
    hops: int

    def source(self, rank: int) -> int:
        """Whose rows a rank then has."""
        return (rank - self.hops) % self.layout.cp_size

    def tokens(self, rank: int) -> IntArray:
        return self.layout.tokens(self.source(rank))

    def bands(self, bands: IntArray, rank: int) -> IntArray:
        return bands_of_held_keys(bands, self.layout, self.source(rank))

    def rows_sent_by_ranks(self) -> IntArray:
        return self.layout.token_counts[(np.arange(self.size) - self.hops + 1) % self.size]

    def rows_sent(self, rank: int) -> int:
        return int(self.layout.token_counts[(rank - self.hops + 1) % self.layout.cp_size])

    def rows_received(self, rank: int) -> int:
        """Rows that a rank then has."""
        return int(self.layout.token_counts[(rank - self.hops) % self.layout.cp_size])

    def message_rows(self, rank: int) -> MessageRows:
        return MessageRows(None, self.rows_received(rank), None)

    def describe(self) -> str:
        return f"keys pass round a ring of {self.size} ranks, each computed while the next is under way"


class FetchTables(NamedTuple):
    """One rank's half of a fetch: rows go out, arrive, and are put in stream order.

    Attributes:
        send_rows: own rows, grouped by the rank that they go to, this rank included.
        send_counts, recv_counts: `[ranks]` rows to and from each rank.
        order: the received row that belongs in each place of the stream order; None where they arrive in it.
        inverse: the place in stream order of each received row; None likewise.
        tokens: `[sum(recv_counts)]` place in the stream of the fetched rows, rising.
    """

    send_rows: IndexTable
    send_counts: IntArray
    recv_counts: IntArray
    order: IndexTable | None
    inverse: IndexTable | None
    tokens: IntArray


class Fetch(Memo, KeyFlow):
    """Rows that come from their owners.

    Args:
        layout: who owns which rows.
        wanted: for each rank the rows that it wants, as ranges of the stream.
        words: which rows those are.
        equal_shares: all ranks want all rows, which an all-gather of shares that are as long as the longest brings.
    """

    def __init__(
        self, layout: Layout, wanted: Callable[[int], Ranges], words: str, *, equal_shares: bool = False
    ) -> None:
        self.layout, self.wanted, self.words, self.equal_shares = layout, wanted, words, equal_shares

    def tokens(self, rank: int) -> IntArray:
        return self.tables(rank).tokens

    def bands(self, bands: IntArray, rank: int) -> IntArray:
        return bands_of_keys(bands, *self.wanted(rank))

    @property
    def split_counts(self) -> SplitCounts:
        """Rows from each rank to each, a rank's own among them."""
        return self.memo(("split counts",), lambda: SplitCounts(self._count_rows()))

    @property
    def longest(self) -> int:
        """Rows of the longest share."""
        return int(self.layout.token_counts.max())

    def rows_sent_by_ranks(self) -> IntArray:
        if self.equal_shares:
            return np.full(self.size, self.longest * (self.size - 1))
        counts = self.split_counts.counts
        return self.memo(("rows sent",), lambda: frozen(counts.sum(axis=1) - counts.diagonal()))

    def message_rows(self, rank: int) -> MessageRows:
        return self.memo(("message rows", rank), lambda: self._message_rows(rank))

    def _message_rows(self, rank: int) -> MessageRows:
        wanted = sum(self.split_counts.received_by(rank))
        ordered = wanted if self.puts_in_order[rank] else None
        if self.equal_shares:
            return MessageRows(self.longest, self.size * self.longest, ordered)
        return MessageRows(sum(self.split_counts.sent_by(rank)), wanted, ordered)

    def describe(self) -> str:
        return self.words

    @property
    def puts_in_order(self) -> NDArray[np.bool_]:
        """`[ranks]` True where a rank copies what has arrived, to have it in stream order and without filling.

        Shares of an all-gather are whole ranks' rows as they stand there. Rows of an all-to-all are picked from the
        owner's in stream order, so that the order of owners decides.
        """
        if self.equal_shares:
            as_it_stands = self.layout.in_stream_order and self.size * self.longest == self.layout.packing.total
            return np.full(self.size, not as_it_stands)
        return ~self.arrive_in_order

    def arrives_in_order(self, rank: int) -> bool:
        """Returns True if rows picked for a rank in stream order, one owner's after the other's, are in stream order.

        This is the question of an all-to-all, and of gradients that go back; see `puts_in_order` for an all-gather.
        """
        _, _, owners = self._wanted_pieces(rank)
        return bool((owners[1:] >= owners[:-1]).all())

    @property
    def arrive_in_order(self) -> NDArray[np.bool_]:
        """`[ranks]` `arrives_in_order` of every rank."""
        return self.memo(("arrive in order",), lambda: frozen(self._arrive_in_order()))

    def _arrive_in_order(self) -> NDArray[np.bool_]:
        if self.equal_shares:  # all want the same
            return np.full(self.size, self.arrives_in_order(0))
        (edges, owners), (starts, ends, offsets) = pieces_of(self.layout), self._all_wanted
        number, piece = _meetings(starts, ends, edges[:-1], edges[1:])
        reader, owner = np.repeat(np.arange(self.size), np.diff(offsets))[number], owners[piece]
        falls = (owner[1:] < owner[:-1]) & (reader[1:] == reader[:-1])
        found = np.ones(self.size, dtype=bool)
        found[reader[1:][falls]] = False
        return found

    def order_table(self, rank: int) -> str | None:
        """Returns the name of the table by which a rank puts what has arrived in order; None if it does not."""
        if not self.puts_in_order[rank]:
            return None
        return "shares" if self.equal_shares else "order"

    def tables(self, rank: int) -> FetchTables:
        """What a rank sends and receives, row by row."""
        return self.memo(("tables", rank), lambda: self._make_tables(rank))

    def shares(self) -> IndexTable:
        """`[total]` where each row of the stream stands among shares that are all as long as the longest."""
        starts = np.sort(self.layout.starts)
        owners, rows = self.layout.located(starts)
        places = owners * self.longest + rows
        return index_ranges(places, places + np.diff(starts, append=self.layout.packing.total))

    def _make_tables(self, rank: int) -> FetchTables:
        # Piece by piece: a piece has one owner and lies in one range.
        starts, ends, owners = self._wanted_pieces(rank)
        sizes, by_owner = ends - starts, np.argsort(owners, kind="stable")
        in_order = bool((by_owner[1:] > by_owner[:-1]).all())
        order: IndexTable | None = None
        inverse: IndexTable | None = None
        if not in_order:
            places = (np.cumsum(sizes) - sizes)[by_owner]
            inverse = index_ranges(places, places + sizes[by_owner])
            arrived = np.empty_like(sizes)
            arrived[by_owner] = np.cumsum(sizes[by_owner]) - sizes[by_owner]
            order = index_ranges(arrived, arrived + sizes)
        send_rows, send_counts = self._sent_rows(rank)
        recv_counts = np.bincount(owners, weights=sizes, minlength=self.size).astype(np.int64)
        return FetchTables(send_rows, send_counts, recv_counts, order, inverse, arange_ranges(*self.wanted(rank)))

    def _sent_rows(self, rank: int) -> tuple[IndexTable, IntArray]:
        """A rank's own rows that others want, reader after reader, each in stream order; and how many each wants."""
        if self.equal_shares:
            rows = self._rows_within(rank, *self.wanted(rank), np.array([0, self.wanted(rank)[0].size]))[0]
            return np.concatenate([rows] * self.size), np.full(self.size, rows.size)
        return self._rows_within(rank, *self._all_wanted)

    def _count_rows(self) -> IntArray:
        """`[owners, readers]`."""
        if self.equal_shares:
            return np.repeat(self.layout.token_counts[:, None], self.size, axis=1)
        edges, owner = pieces_of(self.layout)
        starts, ends, offsets = self._all_wanted
        places = np.concatenate([starts, ends])
        # Whole pieces from the one where a range begins up to the one where it ends, and the difference within those.
        piece = np.searchsorted(edges[1:-1], places, side="right")
        within, sign = places - edges[piece], np.repeat([-1, 1], [starts.size, ends.size])
        reader = np.tile(np.repeat(np.arange(self.size), np.diff(offsets)), 2)
        counts = count_by_owner(owner, np.diff(edges), piece[: starts.size], piece[starts.size :], offsets, self.size)
        np.add.at(counts, (owner[piece], reader), sign * within)
        return counts

    @property
    def _all_wanted(self) -> tuple[IntArray, IntArray, IntArray]:
        """The ranges that ranks want, one rank's after the other's, and `[ranks + 1]` where those of each begin."""
        return self.memo(("all wanted",), self._join_wanted)

    def _join_wanted(self) -> tuple[IntArray, IntArray, IntArray]:
        starts, ends = zip(*(self.wanted(reader) for reader in range(self.size)), strict=True)
        return np.concatenate(starts), np.concatenate(ends), np.cumsum([0, *(ranges.size for ranges in starts)])

    def _wanted_pieces(self, rank: int) -> tuple[IntArray, IntArray, IntArray]:
        """The ranges that a rank wants, cut where the owner changes: starts, ends and owners, in stream order."""
        (edges, owners), (starts, ends) = pieces_of(self.layout), self.wanted(rank)
        number, piece = _meetings(starts, ends, edges[:-1], edges[1:])
        return np.maximum(starts[number], edges[piece]), np.minimum(ends[number], edges[piece + 1]), owners[piece]

    def _rows_within(
        self, rank: int, starts: IntArray, ends: IntArray, offsets: IntArray
    ) -> tuple[IndexTable, IntArray]:
        """A rank's own rows that lie in ranges of the stream, which rise for each reader.

        Args:
            rank: whose rows.
            starts, ends: of the ranges, reader after reader.
            offsets: `[readers + 1]` where the ranges of each begin.

        Returns:
            the rows, reader after reader, each in stream order; and how many there are for each reader.
        """
        lo, hi = self.layout.fragment_offsets[rank : rank + 2]
        local_starts, local_ends = self.layout.starts[lo:hi], self.layout.ends[lo:hi]
        first_rows = np.cumsum(local_ends - local_starts) - (local_ends - local_starts)
        order = np.argsort(local_starts, kind="stable")
        local_starts, local_ends, first_rows = local_starts[order], local_ends[order], first_rows[order]
        met, piece = _meetings(starts, ends, local_starts, local_ends)
        begins, stops = np.maximum(local_starts[piece], starts[met]), np.minimum(local_ends[piece], ends[met])
        shift, readers = first_rows[piece] - local_starts[piece], offsets.size - 1
        reader = np.repeat(np.arange(readers), np.diff(offsets))[met]
        counts = np.bincount(reader, weights=stops - begins, minlength=readers).astype(np.int64)
        return index_ranges(begins + shift, stops + shift), counts


@dataclass(frozen=True, eq=False)
class Return(RowFlow):
    """The adjoint of a fetch: what was made of the rows goes back to their owners, and is summed there.

    Attributes:
        fetch: which rows came, and from where.
    """

    fetch: Fetch

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        return self.fetch.layout

    @property
    def split_counts(self) -> SplitCounts:
        """Rows from each rank to each."""
        return self.fetch.split_counts.reversed()

    def order_table(self, rank: int) -> str | None:
        """Returns the name of the table by which a rank groups rows by owner; None if they are in this order."""
        return None if self.fetch.arrive_in_order[rank] else "inverse"

    def rows_sent_by_ranks(self) -> IntArray:
        counts = self.fetch.split_counts.counts
        return self.fetch.memo(("rows returned",), lambda: frozen(counts.sum(axis=0) - counts.diagonal()))

    def message_rows(self, rank: int) -> MessageRows:
        sent = sum(self.fetch.split_counts.received_by(rank))
        return MessageRows(
            sent=None if self.fetch.arrives_in_order(rank) else sent,
            received=sum(self.fetch.split_counts.sent_by(rank)),
            ordered=None,
        )


def pieces_of(layout: Layout) -> tuple[IntArray, IntArray]:
    """The fragments of a layout in stream order: `[n + 1]` edges, and the rank that has each."""
    return layout.memo(("pieces",), lambda: _pieces_of(layout))


def _pieces_of(layout: Layout) -> tuple[IntArray, IntArray]:
    starts = np.sort(layout.starts)
    return np.append(starts, layout.packing.total), layout.located(starts)[0]


def _meetings(starts: IntArray, ends: IntArray, rising_starts: IntArray, rising_ends: IntArray) -> Ranges:
    """The pairs of a range and one of disjoint rising ranges that have tokens in common, in this order."""
    lowest = np.searchsorted(rising_ends, starts, side="right")
    last = np.maximum(np.searchsorted(rising_starts, ends, side="left"), lowest)
    return np.repeat(np.arange(starts.size), last - lowest), arange_ranges(lowest, last)
