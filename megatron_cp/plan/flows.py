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

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.layout import Layout
from megatron_cp.layout.fragments import arange_ranges
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.packing import IntArray
from megatron_cp.layout.tiles import bands_of_held_keys, bands_of_keys

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
    def rows_sent(self, rank: int) -> int:
        """Rows that a rank sends to others."""

    @abstractmethod
    def message_rows(self, rank: int) -> MessageRows:
        """The buffers of a rank."""

    def item_size(self, item_size: int) -> int:
        """Bytes of an element on its way, of `item_size` bytes where it is at home."""
        return item_size


class KeyFlow(RowFlow):
    """A flow that brings rows to where they are seen."""

    @abstractmethod
    def tokens(self, rank: int) -> IntArray:
        """The place in the stream of each row that is then at hand."""

    @abstractmethod
    def bands(self, bands: IntArray, rank: int) -> IntArray:
        """Bands over the stream of keys, counted in the rows that are then at hand."""

    @abstractmethod
    def describe(self) -> str:
        """What it does, in words."""


@dataclass(frozen=True, eq=False)
class PassOn(KeyFlow):
    """One hop of a ring.

    Attributes:
        layout: who owns which rows.
        hops: that the rows have then made from their owners; as many as ranks take them home.
        sums: what travels is summed on the way, in at least fp32.
    """

    layout: Layout
    hops: int
    sums: bool = False

    def source(self, rank: int) -> int:
        """Whose rows a rank then has."""
        return (rank - self.hops) % self.layout.cp_size

    def tokens(self, rank: int) -> IntArray:
        return self.layout.tokens(self.source(rank))

    def bands(self, bands: IntArray, rank: int) -> IntArray:
        return bands_of_held_keys(bands, self.layout, self.source(rank))

    def rows_sent(self, rank: int) -> int:
        return int(self.layout.token_counts[(rank - self.hops + 1) % self.layout.cp_size])

    def rows_received(self, rank: int) -> int:
        """Rows that a rank then has."""
        return int(self.layout.token_counts[(rank - self.hops) % self.layout.cp_size])

    def message_rows(self, rank: int) -> MessageRows:
        return MessageRows(None, self.rows_received(rank), None)

    def item_size(self, item_size: int) -> int:
        return max(item_size, 4) if self.sums else item_size

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

    send_rows: IntArray
    send_counts: IntArray
    recv_counts: IntArray
    order: IntArray | None
    inverse: IntArray | None
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

    def rows_sent(self, rank: int) -> int:
        if self.equal_shares:
            return self.longest * (self.size - 1)
        sent = self.split_counts.sent_by(rank)
        return sum(sent) - sent[rank]

    def message_rows(self, rank: int) -> MessageRows:
        return self.memo(("message rows", rank), lambda: self._message_rows(rank))

    def _message_rows(self, rank: int) -> MessageRows:
        wanted, in_order = sum(self.split_counts.received_by(rank)), self.arrives_in_order(rank)
        if not self.equal_shares:
            return MessageRows(sum(self.split_counts.sent_by(rank)), wanted, None if in_order else wanted)
        received = self.size * self.longest
        return MessageRows(self.longest, received, None if in_order and received == wanted else wanted)

    def describe(self) -> str:
        return self.words

    def arrives_in_order(self, rank: int) -> bool:
        """Whether the rows that a rank fetches, one owner's after the other's, are in stream order."""
        owners = self._pieces[1][self._taken(*self.wanted(rank)) > 0]
        return bool((owners[1:] >= owners[:-1]).all())

    def tables(self, rank: int) -> FetchTables:
        """What a rank sends and receives, row by row."""
        return self.memo(("tables", rank), lambda: self._make_tables(rank))

    def shares(self) -> IntArray:
        """`[total]` where each row of the stream stands among shares that are all as long as the longest."""
        counts, places = self.layout.token_counts, self.layout.inverse_order
        lasts = np.cumsum(counts)
        owners = np.searchsorted(lasts, places, side="right")
        found: IntArray = owners * self.longest + places - (lasts - counts)[owners]
        return found

    def _make_tables(self, rank: int) -> FetchTables:
        tokens, owners = self._owners(*self.wanted(rank))
        by_owner = np.argsort(owners, kind="stable")
        in_order = bool((by_owner[1:] > by_owner[:-1]).all())
        order = np.empty_like(by_owner)
        order[by_owner] = np.arange(by_owner.size)
        send_rows = [self._rows_within(rank, *self.wanted(reader)) for reader in range(self.size)]
        return FetchTables(
            send_rows=np.concatenate(send_rows),
            send_counts=np.array([rows.size for rows in send_rows]),
            recv_counts=np.bincount(owners, minlength=self.size),
            order=None if in_order else order,
            inverse=None if in_order else by_owner,
            tokens=tokens,
        )

    def _count_rows(self) -> IntArray:
        if self.equal_shares:
            return np.repeat(self.layout.token_counts[:, None], self.size, axis=1)
        _, owner = self._pieces
        counts = np.zeros((self.size, self.size), dtype=np.int64)
        for reader in range(self.size):
            counts[:, reader] = np.bincount(owner, weights=self._taken(*self.wanted(reader)), minlength=self.size)
        return counts

    def _taken(self, starts: IntArray, ends: IntArray) -> IntArray:
        """How many rows of each piece lie in ranges of the stream."""
        edges, _ = self._pieces
        return _covered(edges[1:], starts, ends) - _covered(edges[:-1], starts, ends)

    @property
    def _pieces(self) -> tuple[IntArray, IntArray]:
        """The fragments of all rows in stream order: `[n + 1]` edges, and the rank that owns each."""
        return self.memo(("pieces",), lambda: pieces_of(self.layout))

    def _rows_within(self, rank: int, starts: IntArray, ends: IntArray) -> IntArray:
        """A rank's own rows that lie in rising ranges of the stream, in stream order."""
        lo, hi = self.layout.fragment_offsets[rank : rank + 2]
        local_starts, local_ends = self.layout.starts[lo:hi], self.layout.ends[lo:hi]
        first_rows = np.cumsum(local_ends - local_starts) - (local_ends - local_starts)
        order = np.argsort(local_starts, kind="stable")
        local_starts, local_ends, first_rows = local_starts[order], local_ends[order], first_rows[order]
        # Every own fragment meets `count` ranges from `lowest` on.
        lowest = np.searchsorted(ends, local_starts, side="right")
        count = np.maximum(np.searchsorted(starts, local_ends, side="left") - lowest, 0)
        piece = np.repeat(np.arange(order.size), count)
        met = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(lowest, count)
        shift = first_rows[piece] - local_starts[piece]
        return arange_ranges(
            np.maximum(local_starts[piece], starts[met]) + shift, np.minimum(local_ends[piece], ends[met]) + shift
        )

    def _owners(self, starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        """The tokens of ranges of the stream, with the rank that owns each."""
        tokens = arange_ranges(starts, ends)
        lasts = np.cumsum(self.layout.token_counts)
        return tokens, np.searchsorted(lasts, self.layout.inverse_order[tokens], side="right")


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

    def rows_sent(self, rank: int) -> int:
        sent = self.fetch.split_counts.received_by(rank)
        return sum(sent) - sent[rank]

    def message_rows(self, rank: int) -> MessageRows:
        sent = sum(self.fetch.split_counts.received_by(rank))
        return MessageRows(
            sent=None if self.fetch.arrives_in_order(rank) else sent,
            received=sum(self.fetch.split_counts.sent_by(rank)),
            ordered=None,
        )


def pieces_of(layout: Layout) -> tuple[IntArray, IntArray]:
    """The fragments of a layout in stream order: `[n + 1]` edges, and the rank that has each."""
    starts = np.sort(layout.starts)
    return np.append(starts, layout.packing.total), layout.located(starts)[0]


def _covered(places: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """How many tokens before each place lie in disjoint ranges that rise."""
    if not starts.size:
        return np.zeros_like(places)
    before = np.concatenate([[0], np.cumsum(ends - starts)])
    index = np.searchsorted(starts, places, side="right")  # ranges that begin at or before the place
    return before[index] - np.maximum(ends[index - 1] - places, 0) * (index > 0)
