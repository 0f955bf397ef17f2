"""`RowFlow`: a transfer of rows between ranks, before a stage or after it. Pure data; no torch in here.

A flow says for every rank which rows it sends, which rows it then holds, and their order. Bytes, collectives, memory
and descriptions of a plan are sums and walks over flows.

    PassOn    each rank passes its current rows on to the next rank, and gets those of the rank before
    Fetch     each rank gets the rows that it wants from their owners, in one collective
    Return    values computed for fetched rows return to the owners, which sum them in the order of ranks
    ByHost    a fetch in two hops, in which a row crosses to each other host once

Ranks are those along the keys' axis (`kv_rank`); rows are counted without pad rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp.exchange.split_counts import SplitCounts, count_by_owner
from megatron_cp.layout import Layout
from megatron_cp.layout.array_types import BoolArray, IntArray
from megatron_cp.layout.bands import unions
from megatron_cp.layout.fragments import arange_ranges, index_ranges, joined_up
from megatron_cp.layout.memo import Memo, frozen, remembered
from megatron_cp.layout.tiles import bands_of_held_keys, bands_of_keys

IndexTable = NDArray[np.int32] | IntArray  # 32 bits if its numbers fit
StreamRanges = tuple[IntArray, IntArray]  # starts and ends of ranges of the stream, in rising order


class MessageRows(NamedTuple):
    """Row counts of the buffers that one flow needs on a rank.

    Attributes:
        sent: rows packed or reordered before sending; None if they are sent from where they are.
        received: rows of the buffer that receives.
        ordered: rows of the copy in the wanted order; None if rows arrive in that order.
    """

    sent: int | None
    received: int
    ordered: int | None


class RowFlow(ABC):
    """A transfer of rows between ranks.

    Attributes:
        layout: the owner of each row.
    """

    layout: Layout

    @property
    def size(self) -> int:
        return self.layout.cp_size

    @abstractmethod
    def rows_sent_by_ranks(self) -> IntArray:
        """Returns `[ranks]` rows that each rank sends to others."""

    def rows_sent(self, rank: int) -> int:
        """Returns the number of rows that a rank sends to others."""
        return int(self.rows_sent_by_ranks()[rank])

    @abstractmethod
    def message_rows(self, rank: int) -> MessageRows:
        """Returns the row counts of a rank's buffers."""


class KeyFlow(RowFlow):
    """A flow of keys to the queries that see them."""

    @abstractmethod
    def tokens(self, rank: int) -> IntArray:
        """Returns the place in the stream of each row that the rank then holds."""

    @abstractmethod
    def bands(self, bands: IntArray, rank: int) -> IntArray:
        """Renumbers bands over the stream of keys by the rows that the rank then holds."""

    def source(self, rank: int) -> int | None:
        """Returns the rank whose rows are then held unchanged; None if they come from several ranks."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Returns a phrase for `explain`."""


@dataclass(frozen=True, eq=False)
class PassOn(KeyFlow):
    """A single hop of a ring, in which each rank sends to the next higher one.

    `executor/transfers.py`, and `walk.py` and `kernel_times.py` in `planner/predict/`, rely on this order too.

    Attributes:
        hops: hops from the rows' owner, this one included; after as many hops as ranks they are at their owner again.
    """

    layout: Layout
    hops: int

    def source(self, rank: int) -> int:
        """Returns the owner of the rows that a rank then holds."""
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
        """Returns the number of rows that a rank then holds."""
        return int(self.layout.token_counts[(rank - self.hops) % self.layout.cp_size])

    def message_rows(self, rank: int) -> MessageRows:
        return MessageRows(None, self.rows_received(rank), None)

    def describe(self) -> str:
        return f"keys pass round a ring of {self.size} ranks, each computed while the next is under way"


class FetchTables(NamedTuple):
    """The index tables of one rank's half of a fetch: send, receive, put in stream order.

    Attributes:
        send_rows: own rows, grouped by destination rank, this rank included.
        send_counts, recv_counts: `[ranks]` rows to and from each rank.
        order: the received row for each place in stream order; None if rows arrive in stream order.
        inverse: the place in stream order of each received row; None if rows arrive in stream order.
        tokens: `[sum(recv_counts)]` place in the stream of the fetched rows, rising.
    """

    send_rows: IndexTable
    send_counts: IntArray
    recv_counts: IntArray
    order: IndexTable | None
    inverse: IndexTable | None
    tokens: IntArray


class Fetch(Memo, KeyFlow):
    """A transfer of the rows that each rank wants, from their owners.

    Args:
        wanted: returns the rows that a rank wants, as ranges of the stream.
        description: the phrase for `explain`.
        equal_shares: all ranks want all rows: an all-gather, with every share padded to the longest.
    """

    def __init__(
        self, layout: Layout, wanted: Callable[[int], StreamRanges], description: str, *, equal_shares: bool = False
    ) -> None:
        self.layout, self.wanted, self.description, self.equal_shares = layout, wanted, description, equal_shares

    def tokens(self, rank: int) -> IntArray:
        return self.tables(rank).tokens

    def bands(self, bands: IntArray, rank: int) -> IntArray:
        return bands_of_keys(bands, *self.wanted(rank))

    @property
    def split_counts(self) -> SplitCounts:
        """Rows from each rank to each rank, itself included."""
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

    @remembered
    def message_rows(self, rank: int) -> MessageRows:
        wanted = sum(self.split_counts.received_by(rank))
        ordered = wanted if self.puts_in_order[rank] else None
        if self.equal_shares:
            return MessageRows(self.longest, self.size * self.longest, ordered)
        return MessageRows(sum(self.split_counts.sent_by(rank)), wanted, ordered)

    def describe(self) -> str:
        return self.description

    @property
    def puts_in_order(self) -> BoolArray:
        """`[ranks]` True where a rank copies the received rows, into stream order and without padding.

        An all-gather delivers whole shares in the order of ranks. An all-to-all delivers each owner's rows in stream
        order, so that only the order of owners matters.
        """
        if self.equal_shares:
            as_it_stands = self.layout.in_stream_order and self.size * self.longest == self.layout.packing.total
            return np.full(self.size, not as_it_stands)
        return ~self.arrive_in_order

    def arrives_in_order(self, rank: int) -> bool:
        """Returns True if rows picked for a rank in stream order, owner after owner, are in stream order.

        It describes an all-to-all, and gradients that are returned; see `puts_in_order` for an all-gather.
        """
        _, _, owners = self.wanted_pieces(rank)
        return bool((owners[1:] >= owners[:-1]).all())

    @property
    def arrive_in_order(self) -> BoolArray:
        """`[ranks]` the value of `arrives_in_order` for every rank."""
        return self.memo(("arrive in order",), lambda: frozen(self._arrive_in_order()))

    def _arrive_in_order(self) -> BoolArray:
        if self.equal_shares:
            return np.full(self.size, self.arrives_in_order(0))
        (edges, owners), (starts, ends, offsets) = owned_fragments(self.layout), self.all_wanted
        reader = np.repeat(np.arange(self.size), np.diff(offsets))[ends > starts]
        starts, ends = starts[ends > starts], ends[ends > starts]
        first = np.searchsorted(edges[1:], starts, side="right")  # pieces of a range; the last one belongs to it
        last = np.searchsorted(edges[:-1], ends, side="left") - 1
        senders, rows = self._sender_rows(owners)
        falls = np.zeros(senders.shape, dtype=np.int64)  # before each piece, so that no range is cut into its pieces
        np.cumsum(senders[:, 1:] < senders[:, :-1], axis=1, out=falls[:, 1:])
        row = rows[reader]
        found = np.ones(self.size, dtype=bool)
        found[reader[falls[row, last] > falls[row, first]]] = False
        drops = (senders[row[1:], first[1:]] < senders[row[:-1], last[:-1]]) & (reader[1:] == reader[:-1])
        found[reader[1:][drops]] = False
        return found

    def order_table(self, rank: int) -> str | None:
        """Returns the name of the table by which a rank puts what has arrived in order; None if it does not."""
        return self.order_name if self.puts_in_order[rank] else None

    @property
    def order_name(self) -> str:
        """The name of the table that puts rows in order."""
        return "shares" if self.equal_shares else "order"

    def tables(self, rank: int) -> FetchTables:
        """Returns the index tables of one rank."""
        return self.memo(("tables", rank), lambda: self._make_tables(rank))

    def fixed_tables(self, rank: int) -> dict[str, IndexTable]:
        """Returns one rank's index tables by name, for CUDA graphs: there is an order also if rows arrive in it."""
        tables = self.tables(rank)
        order, inverse = (
            np.arange(tables.tokens.size) if table is None else table for table in (tables.order, tables.inverse)
        )
        order = self.shares() if self.equal_shares else order
        return {"send_rows": tables.send_rows, self.order_name: order, "inverse": inverse}

    def shares(self) -> IndexTable:
        """Returns `[total]` the row of each token of the stream among shares that are all padded to the longest."""
        starts = np.sort(self.layout.starts)
        owners, rows = self.layout.located(starts)
        places = owners * self.longest + rows
        return index_ranges(places, places + np.diff(starts, append=self.layout.packing.total))

    def _make_tables(self, rank: int) -> FetchTables:
        # A piece has one owner and lies in one range.
        starts, ends, owners = self.wanted_pieces(rank)
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
        """Returns own rows that others want, grouped by destination and in stream order, and the count for each
        destination.
        """
        if self.equal_shares:
            rows = self._rows_within(rank, *self.wanted(rank), np.array([0, self.wanted(rank)[0].size]))[0]
            return np.concatenate([rows] * self.size), np.full(self.size, rows.size)
        return self._rows_within(rank, *self.all_wanted)

    def senders(self, readers: IntArray | int, owners: IntArray) -> IntArray:
        """Returns the ranks that send rows of these owners to these readers."""
        return owners

    def _sender_rows(self, owners: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the different rows of `senders` over all readers, and `[ranks]` the row of each reader."""
        return owners[None], np.zeros(self.size, dtype=np.int64)

    def _count_rows(self) -> IntArray:
        """Returns the counts as `[owners, readers]`."""
        if self.equal_shares:
            return np.repeat(self.layout.token_counts[:, None], self.size, axis=1)
        return _count_wanted(self.layout, *self.all_wanted)

    @property
    @remembered
    def all_wanted(self) -> tuple[IntArray, IntArray, IntArray]:
        """The ranges that all ranks want, grouped by rank, and `[ranks + 1]` offsets of the groups."""
        starts, ends = zip(*(self.wanted(reader) for reader in range(self.size)), strict=True)
        return np.concatenate(starts), np.concatenate(ends), np.cumsum([0, *(ranges.size for ranges in starts)])

    def wanted_pieces(self, rank: int) -> tuple[IntArray, IntArray, IntArray]:
        """Returns the starts, ends and owners of a rank's wanted ranges, cut at changes of owner, in stream order."""
        (edges, owners), (starts, ends) = owned_fragments(self.layout), self.wanted(rank)
        number, piece = _meetings(starts, ends, edges[:-1], edges[1:])
        starts, ends = np.maximum(starts[number], edges[piece]), np.minimum(ends[number], edges[piece + 1])
        return starts, ends, self.senders(rank, owners[piece])

    def _rows_within(
        self, rank: int, starts: IntArray, ends: IntArray, offsets: IntArray
    ) -> tuple[IndexTable, IntArray]:
        """Returns a rank's own rows that lie in ranges of the stream, which rise for each reader.

        Args:
            starts, ends: the ranges, grouped by reader.
            offsets: `[readers + 1]` offsets of the groups.

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
    """The adjoint of a fetch: values computed for its rows go back to their owners and are summed there."""

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
        return None if self.fetch.arrive_in_order[rank] else self.order_name

    @property
    def order_name(self) -> str:
        """The name of the table that groups rows by owner."""
        return "inverse"

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


class ByHost(Fetch):
    """The second of two hops of a fetch: each rank gets the rows that it wants from ranks of its own host.

    In the first hop a row crosses to each other host once, to the rank there that has the place of its owner, which
    sends it on to all ranks of the host that want it. A rank sends own rows in the second hop, too. Rows that are sent
    are those of the first hop's buffer, as they arrived.

    Args:
        direct: the fetch of the same rows in one hop.

    Attributes:
        first: the first hop: rows of other hosts that a rank sends on, and own rows that ranks of its host want.
    """

    def __init__(self, direct: Fetch, hosts: tuple[int, ...]) -> None:
        super().__init__(direct.layout, direct.wanted, f"{direct.description}, once to each host")
        self.direct, self.first = direct, _FirstHop(direct, hosts)
        self._hosts = np.array(hosts)
        self._same_host = [np.flatnonzero(self._hosts == host) for host in hosts]
        self._forwards = self.first.forwards[self._hosts]  # [readers, owners] the sender

    def share_tables(self, other: ByHost) -> None:
        """Shares the tables of the same flow of another plan."""
        self.share_memo(other)
        self.first.share_memo(other.first)

    def senders(self, readers: IntArray | int, owners: IntArray) -> IntArray:
        return self._forwards[readers, owners]

    def _sender_rows(self, owners: IntArray) -> tuple[IntArray, IntArray]:
        return self.first.forwards[:, owners], self._hosts

    def _count_rows(self) -> IntArray:
        counts = np.zeros((self.size, self.size), dtype=np.int64)
        owners, readers = np.indices(counts.shape)
        np.add.at(counts, (self._forwards[readers, owners], readers), self.direct.split_counts.counts)
        return counts

    def _sent_rows(self, rank: int) -> tuple[IndexTable, IntArray]:
        arrived, found, counts = self.first.tables(rank), list[IndexTable](), np.zeros(self.size, dtype=np.int64)
        for reader in self._same_host[rank].tolist():
            starts, ends, senders = self.wanted_pieces(reader)
            starts, ends = starts[senders == rank], ends[senders == rank]
            rows = np.searchsorted(arrived.tokens, starts)
            if arrived.order is not None:
                rows = arrived.order[rows].astype(np.int64)
            found.append(index_ranges(rows, rows + ends - starts))
            counts[reader] = (ends - starts).sum()
        rows_of_all: IntArray = np.concatenate(found)
        return rows_of_all, counts


class _FirstHop(Fetch):
    """The first hop of `ByHost`; `forwards` has, `[hosts, owners]`, the rank of each host that gets an owner's rows."""

    def __init__(self, direct: Fetch, hosts: tuple[int, ...]) -> None:
        self._hosts = hosts
        members = [np.flatnonzero(np.array(hosts) == host) for host in range(max(hosts) + 1)]
        places = np.zeros(len(hosts), dtype=np.int64)
        for ranks in members:
            places[ranks] = np.arange(ranks.size)
        self.forwards = np.array([ranks[places % ranks.size] for ranks in members])
        held = partial(_forwarded, direct, hosts, self.forwards)  # not a method: flows are in no cycle
        super().__init__(direct.layout, held, direct.description)
        self._direct = direct

    def _count_rows(self) -> IntArray:
        counts = np.zeros((self.size, self.size), dtype=np.int64)
        wanted = _count_wanted(self.layout, *_wanted_by_hosts(self._direct, self._hosts))
        counts[np.arange(self.size)[:, None], self.forwards.T] = wanted
        return counts


@remembered
def owned_fragments(layout: Layout) -> tuple[IntArray, IntArray]:
    """Returns the fragments of a layout in stream order: `[n + 1]` edges, and the rank that holds each."""
    starts = np.sort(layout.starts)
    return np.append(starts, layout.packing.total), layout.located(starts)[0]


def _count_wanted(layout: Layout, starts: IntArray, ends: IntArray, offsets: IntArray) -> IntArray:
    """Returns `[owners, readers]` the rows of each owner in ranges of the stream, which are grouped by reader."""
    edges, owner = owned_fragments(layout)
    places = np.concatenate([starts, ends])
    # Counts whole pieces from where a range begins to where it ends, and corrects for the parts outside the range.
    piece = np.searchsorted(edges[1:-1], places, side="right")
    within, sign = places - edges[piece], np.repeat([-1, 1], [starts.size, ends.size])
    reader = np.tile(np.repeat(np.arange(offsets.size - 1), np.diff(offsets)), 2)
    whole = piece[: starts.size], piece[starts.size :], offsets
    counts = count_by_owner(owner, np.diff(edges), *whole, layout.cp_size)
    np.add.at(counts, (owner[piece], reader), sign * within)
    return counts


def _meetings(starts: IntArray, ends: IntArray, rising_starts: IntArray, rising_ends: IntArray) -> StreamRanges:
    """Returns the index pairs of a range and a disjoint rising range that overlap, in this order."""
    lowest = np.searchsorted(rising_ends, starts, side="right")
    last = np.maximum(np.searchsorted(rising_starts, ends, side="left"), lowest)
    return np.repeat(np.arange(starts.size), last - lowest), arange_ranges(lowest, last)


@remembered
def _wanted_by_hosts(direct: Fetch, hosts: tuple[int, ...]) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the ranges that any rank of a host wants, grouped by host, and `[hosts + 1]` offsets of the groups."""
    starts, ends, offsets = direct.all_wanted
    host = np.repeat(hosts, np.diff(offsets))
    order = np.argsort(host, kind="stable")
    ranges = np.stack([starts, ends], axis=1)[order]
    return unions(ranges, np.searchsorted(host[order], np.arange(max(hosts) + 2)))


def _forwarded(direct: Fetch, hosts: tuple[int, ...], forwards: IntArray, rank: int) -> StreamRanges:
    """Returns the rows that ranks of the host of `rank` want and that it sends to them."""
    host, (edges, owners) = hosts[rank], owned_fragments(direct.layout)
    starts, ends, offsets = _wanted_by_hosts(direct, hosts)
    own = slice(offsets[host], offsets[host + 1])
    starts, ends = starts[own], ends[own]
    number, piece = _meetings(starts, ends, edges[:-1], edges[1:])
    chosen = forwards[host, owners[piece]] == rank
    number, piece = number[chosen], piece[chosen]
    begins, stops = np.maximum(starts[number], edges[piece]), np.minimum(ends[number], edges[piece + 1])
    found = joined_up(begins, stops, np.array([0, begins.size]))
    return found[0], found[1]


def first_hop(flow: Fetch) -> Fetch:
    """Returns the fetch that brings rows from their owners: that of the first hop where there are two."""
    return flow.first if isinstance(flow, ByHost) else flow
