"""`TileAssignment`: the part of a mask that each KV rank computes. Pure data; no torch in here.

A rank may compute tiles between queries that it does not hold and keys that it does not hold. Then both travel: the
*remote queries*, whose partial results are sent back to their owners, and the keys as in every other schedule.

Shapes: bands are `[n, 6]`, see `layout/bands.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megatron_cp.layout import Layout
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.bands import NO_BANDS, areas, cut, moved, ranges_seen
from megatron_cp.layout.memo import Memo, frozen
from megatron_cp.layout.tiles import bands_of_held_keys, bands_of_keys, bands_of_queries
from megatron_cp.plan.flows import StreamRanges


class TileAssignment(Memo):
    """The parts of a mask that each KV rank computes. Compared and hashed by value.

    Attributes:
        bands: disjoint bands over the streams of queries and keys, grouped by rank.
        offsets: `[ranks + 1]`; the bands of rank `r` are `bands[offsets[r] : offsets[r + 1]]`.
    """

    def __init__(self, bands: IntArray, offsets: IntArray) -> None:
        self.bands, self.offsets = frozen(np.ascontiguousarray(bands)), frozen(np.ascontiguousarray(offsets))

    @property
    def size(self) -> int:
        return self.offsets.size - 1

    def rank_bands(self, rank: int) -> IntArray:
        """The bands that one rank computes, `[n, 6]`."""
        return self.bands[slice(*self.offsets[rank : rank + 2])]

    @cached_property
    def areas(self) -> list[int]:
        """The number of (query, key) pairs that each rank computes."""
        before = np.concatenate([[0], np.cumsum(areas(self.bands))])
        return [int(count) for count in np.diff(before[self.offsets])]

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that differ where two assignments differ, up to hash collisions."""
        found = hashlib.blake2b(self.bands.astype(np.int64).tobytes(), digest_size=8)
        found.update(self.offsets.astype(np.int64).tobytes())
        return found.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TileAssignment):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.bands, other.bands)

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True)
class AssignmentQuality:
    """Distance of one direction of an assignment from the best.

    Attributes:
        busiest_bytes: bytes that the busiest KV rank sends or receives, whichever is more, for one head rank.
        bound: lower bound on `busiest_bytes` for every assignment of these tiles under this load cap; finer tiles may
            need less.
        load_cap: the most (query, key) pairs that a KV rank computes.
        note: limits of a longer search for this problem; empty if there are none.
    """

    busiest_bytes: int
    bound: int
    is_optimal: bool
    load_cap: int
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class TiledWork:
    """The tiles that each rank computes, forward and backward.

    Attributes:
        forward, backward: the assignments of the two directions.
        solutions: bytes of each direction and their bound; not part of the value.
    """

    forward: TileAssignment
    backward: TileAssignment
    solutions: tuple[AssignmentQuality, ...] = field(default=(), compare=False)


class AssignedTiles(Memo):
    """An assignment with the layouts of queries and keys, split into parts by the rows that they need.

    Args:
        queries, keys: owners of the query and key rows.
    """

    def __init__(self, assignment: TileAssignment, queries: Layout, keys: Layout) -> None:
        self.assignment, self.queries, self.keys = assignment, queries, keys

    def local_tiles(self, rank: int) -> IntArray:
        """The tiles of own queries and own keys; queries and keys are numbered by local row."""
        return bands_of_held_keys(self._own_queries(rank), self.keys, rank)

    def remote_key_tiles(self, rank: int) -> IntArray:
        """The tiles of own queries, numbered by local row, and keys of other ranks, numbered by place in the stream."""
        return self.memo(("far", rank), lambda: _outside(self._own_queries(rank), self.keys, rank, queries=False))

    def remote_query_tiles(self, rank: int) -> IntArray:
        """The tiles of queries of other ranks; queries and keys are numbered by place in the stream."""
        return self.memo(
            ("remote queries", rank),
            lambda: _outside(self.assignment.rank_bands(rank), self.queries, rank, queries=True),
        )

    @cached_property
    def moves_queries(self) -> bool:
        """True if any rank computes queries of another rank."""
        return any(len(self.remote_query_tiles(rank)) for rank in range(self.assignment.size))

    @cached_property
    def moves_keys(self) -> bool:
        """True if any rank computes own queries with keys of another rank."""
        return any(len(self.remote_key_tiles(rank)) for rank in range(self.assignment.size))

    @property
    def far_part(self) -> TilePart | None:
        """The tiles that are computed with rows of other ranks; None if no rank needs any."""
        if self.moves_queries:
            return TilePart(self, self.remote_key_tiles, self.remote_query_tiles)
        return TilePart(self, self.remote_key_tiles, None) if self.moves_keys else None

    def _own_queries(self, rank: int) -> IntArray:
        return self.memo(("own", rank), lambda: bands_of_queries(self.assignment.rank_bands(rank), self.queries, rank))


class TilePart(Memo):
    """The tiles that each rank computes with rows of other ranks.

    Args:
        own: returns the tiles of a rank's own queries, numbered by local row, over the stream of keys.
        remote: returns the tiles of remote queries on a rank, over both streams; None if there are none.
    """

    def __init__(
        self, tiles: AssignedTiles, own: Callable[[int], IntArray], remote: Callable[[int], IntArray] | None
    ) -> None:
        self.tiles, self.own, self.remote = tiles, own, remote

    def wanted_keys(self, rank: int) -> StreamRanges:
        """The keys that a rank computes with, as ranges of the stream."""
        return self.memo(("keys", rank), lambda: ranges_seen(np.concatenate([self.own(rank), self._remote(rank)])))

    def wanted_queries(self, rank: int) -> StreamRanges:
        """The queries of other ranks that a rank computes, as ranges of the stream."""
        return self.memo(("queries", rank), lambda: ranges_seen(self._remote(rank)[:, [2, 3, 0, 1, 4, 5]]))

    def own_tiles(self, rank: int) -> IntArray:
        """The tiles of own queries, with keys numbered by their row among `wanted_keys`."""
        return bands_of_keys(self.own(rank), *self.wanted_keys(rank))

    def remote_tiles(self, rank: int) -> IntArray:
        """The tiles of remote queries, numbered by row among the queries and keys that the rank fetches."""
        starts, ends = self.wanted_queries(rank)
        pieces, number = cut(self._remote(rank), starts, ends, queries=True)
        rows = np.cumsum(ends - starts) - (ends - starts)
        return bands_of_keys(moved(pieces, (rows - starts)[number], 0), *self.wanted_keys(rank))

    def _remote(self, rank: int) -> IntArray:
        return NO_BANDS if self.remote is None else self.remote(rank)


def _outside(bands: IntArray, layout: Layout, rank: int, *, queries: bool) -> IntArray:
    """Cuts bands over the stream down to the queries, or keys, that one rank does not hold."""
    own = slice(*layout.fragment_offsets[rank : rank + 2])
    order = np.argsort(layout.starts[own], kind="stable")
    gaps = _gaps(layout.starts[own][order], layout.ends[own][order], layout.packing.total)
    return cut(bands, *gaps, queries=queries)[0]


def _gaps(starts: IntArray, ends: IntArray, total: int) -> StreamRanges:
    """Returns the ranges between rising ranges, and before and after them."""
    begins, stops = np.concatenate([[0], ends]), np.append(starts, total)
    kept = stops > begins
    return begins[kept], stops[kept]
