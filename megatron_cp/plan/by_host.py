"""`ByHost`: a fetch in two hops, in which a row crosses to each other host once. Pure data; no torch in here."""

from __future__ import annotations

from functools import partial

import numpy as np

from megatron_cp.layout.bands import unions
from megatron_cp.layout.fragments import index_ranges, joined_up
from megatron_cp.layout.memo import remembered
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.flows import Fetch, IndexTable, Ranges, count_wanted, meetings, owned_fragments


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
        self._same_host = [np.flatnonzero(np.array(hosts) == host) for host in hosts]
        self._forwards = self.first.forwards[np.array(hosts)]  # [readers, owners] the sender

    def share_tables(self, other: ByHost) -> None:
        """Shares the tables of the same flow of another plan."""
        self.share_memo(other)
        self.first.share_memo(other.first)

    def senders(self, readers: IntArray | int, owners: IntArray) -> IntArray:
        return self._forwards[readers, owners]

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
        wanted = count_wanted(self.layout, *_wanted_by_hosts(self._direct, self._hosts))
        counts[np.arange(self.size)[:, None], self.forwards.T] = wanted
        return counts


@remembered
def _wanted_by_hosts(direct: Fetch, hosts: tuple[int, ...]) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the ranges that any rank of a host wants, grouped by host, and `[hosts + 1]` offsets of the groups."""
    starts, ends, offsets = direct.all_wanted
    host = np.repeat(hosts, np.diff(offsets))
    order = np.argsort(host, kind="stable")
    ranges = np.stack([starts, ends], axis=1)[order]
    return unions(ranges, np.searchsorted(host[order], np.arange(max(hosts) + 2)))


def _forwarded(direct: Fetch, hosts: tuple[int, ...], forwards: IntArray, rank: int) -> Ranges:
    """Returns the rows that ranks of the host of `rank` want and that it sends to them."""
    host, (edges, owners) = hosts[rank], owned_fragments(direct.layout)
    starts, ends, offsets = _wanted_by_hosts(direct, hosts)
    own = slice(offsets[host], offsets[host + 1])
    starts, ends = starts[own], ends[own]
    number, piece = meetings(starts, ends, edges[:-1], edges[1:])
    chosen = forwards[host, owners[piece]] == rank
    number, piece = number[chosen], piece[chosen]
    begins, stops = np.maximum(starts[number], edges[piece]), np.minimum(ends[number], edges[piece + 1])
    found = joined_up(begins, stops, np.array([0, begins.size]))
    return found[0], found[1]


def first_hop(flow: Fetch) -> Fetch:
    """Returns the fetch that brings rows from their owners: that of the first hop where there are two."""
    return flow.first if isinstance(flow, ByHost) else flow
