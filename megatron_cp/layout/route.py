"""`Route`: the transfer of rows from one layout to another, seen from one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.layout import Layout


@dataclass(frozen=True, eq=False)
class Route:
    """The tables of one rank for moving rows from a source layout to a target layout.

    `source[send_rows]` is the send buffer, cut by `send_counts` into one piece for each rank; the pieces received,
    cut by `recv_counts`, lie end to end and `target[recv_rows] = received`. `reversed` carries gradients.

    Attributes:
        send_rows: `[sum(send_counts)]` rows of this rank's source, grouped by destination rank.
        send_counts: `[cp_size]` rows that go to each rank.
        recv_rows: `[sum(recv_counts)]` the row of this rank's target for each received row.
        recv_counts: `[cp_size]` rows that come from each rank.
    """

    send_rows: IntArray
    send_counts: IntArray
    recv_rows: IntArray
    recv_counts: IntArray

    @classmethod
    def between(cls, source: Layout, target: Layout, rank: int) -> Route:
        """Makes the route of every token of `source` to the rank and row that hold it in `target`.

        Raises:
            ArgumentError: the layouts are not over the same packing and number of ranks.
        """
        for name, layout in (("source", source), ("target", target)):
            if not isinstance(layout, Layout):
                raise ArgumentError(name, layout, "a layout, such as Layout.contiguous(packing, cp_size)")
        if source.packing != target.packing or source.cp_size != target.cp_size:
            raise ArgumentError("target", target, f"a layout of the same packing over {source.cp_size} ranks")
        send_rows, send_counts = _grouped(source, target, rank)
        recv_rows, recv_counts = _grouped(target, source, rank)
        return cls(send_rows, send_counts, recv_rows, recv_counts)

    def reversed(self) -> Route:
        """Returns the route from the target back to the source."""
        return Route(self.recv_rows, self.recv_counts, self.send_rows, self.send_counts)

    @property
    def arrivals(self) -> IntArray:
        """`[sum(recv_counts)]` the received row for each target row: `target = received[arrivals]`."""
        inverse = np.empty_like(self.recv_rows)
        inverse[self.recv_rows] = np.arange(self.recv_rows.size)
        return inverse


def rows_between(source: Layout, target: Layout) -> IntArray:
    """Returns `[cp_size, cp_size]` rows that go from each rank of the source layout to each rank of the target."""
    starts = np.union1d(source.starts, target.starts)  # of pieces of the stream that are whole in both layouts
    before, after = (layout.located(starts)[0] for layout in (source, target))
    counts = np.zeros((source.cp_size, target.cp_size), dtype=np.int64)
    np.add.at(counts, (before, after), np.diff(starts, append=source.packing.total))
    return counts


def _grouped(local: Layout, other: Layout, rank: int) -> tuple[IntArray, IntArray]:
    """Returns a rank's rows in `local`, grouped by the rank that holds them in `other`, each group in stream order, and
    the counts.

    Sender and receiver can both derive stream order without communication.
    """
    tokens = local.tokens(rank)
    # Position in `other.order` names the rank: rank r holds positions [sum(counts[:r]), sum(counts[:r+1])).
    bounds = np.cumsum(other.token_counts)
    peer = np.searchsorted(bounds, other.inverse_order[tokens], side="right")
    rows = np.lexsort((tokens, peer))
    return rows, np.bincount(peer, minlength=local.cp_size)
