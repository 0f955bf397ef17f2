"""`TileAssignment`: which KV rank computes which part of a mask. Pure data; no torch in here.

A rank may compute tiles between queries that it does not hold and keys that it does not hold. Then both travel: the
queries as *visitors*, whose partial results go home again, and the keys as in every other schedule.

Shapes: bands are `[n, 6]`, see `layout/bands.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megatron_cp.layout import Layout
from megatron_cp.layout.bands import NO_BANDS, areas, cut, moved
from megatron_cp.layout.memo import Memo, frozen
from megatron_cp.layout.packing import IntArray
from megatron_cp.layout.tiles import bands_of_held_keys, bands_of_keys, bands_of_queries, ranges_seen
from megatron_cp.plan.flows import Ranges


class TileAssignment(Memo):
    """The parts of a mask that each KV rank computes. Compared and hashed by value.

    Attributes:
        bands: disjoint, over the streams of queries and keys, one rank's after the other's.
        offsets: `[ranks + 1]` where those of each rank begin.
    """

    def __init__(self, bands: IntArray, offsets: IntArray) -> None:
        self.bands, self.offsets = frozen(np.ascontiguousarray(bands)), frozen(np.ascontiguousarray(offsets))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.offsets.size - 1

    def of_rank(self, rank: int) -> IntArray:
        """The bands of one rank."""
        return self.bands[slice(*self.offsets[rank : rank + 2])]

    @cached_property
    def areas(self) -> list[int]:
        """For each rank the (query, key) pairs that it computes."""
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
    """How near one direction of an assignment is to the best.

    Attributes:
        bytes_on_the_way: that the busiest KV rank sends or receives, of one head rank, whichever is more.
        bound: that no assignment of these tiles to ranks under this load cap is below; one of finer tiles may be.
        is_optimal: the bound is reached.
        load_cap: (query, key) pairs that a KV rank computes at most.
        seconds: that the search took.
        note: what a longer search could not do for this problem; empty where there is nothing to say.
    """

    bytes_on_the_way: int
    bound: int
    is_optimal: bool
    load_cap: int
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class ScheduleQuality:
    """How near one direction of a plan is, in time, to what its tiles take in any order.

    Attributes:
        milliseconds: that were predicted.
        bound: milliseconds that the work of a rank, its transfers, or one tile with its way there and back take.
        hardware: on what, in words.
    """

    milliseconds: float
    bound: float
    hardware: str = ""


@dataclass(frozen=True)
class TiledWork:
    """Who computes which tile, forward and backward.

    Attributes:
        forward, backward: the assignments.
        rounds: in which rows come, forward and backward: 1, or 2 where keys that only own queries see come after
            visitors and their keys, so that results go home meanwhile.
        solutions: what is known of the bytes of each; not part of the value.
        schedules: what is known of the time of each; not part of the value.
    """

    forward: TileAssignment
    backward: TileAssignment
    rounds: tuple[int, int] = (1, 1)
    solutions: tuple[AssignmentQuality, ...] = field(default=(), compare=False)
    schedules: tuple[ScheduleQuality, ...] = field(default=(), compare=False)


class AssignedTiles(Memo):
    """An assignment beside the layouts of who holds what, cut into parts by what must be at hand for them.

    Args:
        assignment: which rank computes what.
        queries, keys: who holds which tokens.
    """

    def __init__(self, assignment: TileAssignment, queries: Layout, keys: Layout) -> None:
        self.assignment, self.queries, self.keys = assignment, queries, keys

    def at_home(self, rank: int) -> IntArray:
        """The tiles of own queries and own keys: queries in their rows, keys in theirs."""
        return bands_of_held_keys(self._own_queries(rank), self.keys, rank)

    def of_far_keys(self, rank: int) -> IntArray:
        """The tiles of own queries, in their rows, and keys of other ranks, as places in the stream."""
        return self.memo(("far", rank), lambda: _outside(self._own_queries(rank), self.keys, rank, queries=False))

    def of_visitors(self, rank: int) -> IntArray:
        """The tiles of queries of other ranks, both as places in the stream."""
        return self.memo(
            ("visiting", rank), lambda: _outside(self.assignment.of_rank(rank), self.queries, rank, queries=True)
        )

    def beside_visitors(self, rank: int) -> IntArray:
        """Of `of_far_keys` the tiles of keys that visitors see too."""
        return _cut_to(self.of_far_keys(rank), *self._keys_of_visitors(rank))

    def after_visitors(self, rank: int) -> IntArray:
        """Of `of_far_keys` the others."""
        return _cut_to(self.of_far_keys(rank), *_gaps(*self._keys_of_visitors(rank), self.keys.packing.total))

    @cached_property
    def moves_queries(self) -> bool:
        """Whether any rank computes queries of another."""
        return any(len(self.of_visitors(rank)) for rank in range(self.assignment.size))

    @cached_property
    def moves_keys(self) -> bool:
        """Whether any rank computes own queries with keys of another."""
        return any(len(self.of_far_keys(rank)) for rank in range(self.assignment.size))

    def parts(self, rounds: int) -> list[TilePart]:
        """What is computed once the rows of each round are at hand; the tiles at home are not among them.

        Args:
            rounds: 1 for all rows together, 2 for visitors and the keys that they see first.
        """
        if not self.moves_queries:
            return [TilePart(self, self.of_far_keys, None)] * self.moves_keys
        if rounds == 1 or not any(len(self.after_visitors(rank)) for rank in range(self.assignment.size)):
            return [TilePart(self, self.of_far_keys, self.of_visitors)]
        return [TilePart(self, self.beside_visitors, self.of_visitors), TilePart(self, self.after_visitors, None)]

    def _keys_of_visitors(self, rank: int) -> Ranges:
        return self.memo(("keys of visitors", rank), lambda: ranges_seen(self.of_visitors(rank)))

    def _own_queries(self, rank: int) -> IntArray:
        return self.memo(("own", rank), lambda: bands_of_queries(self.assignment.of_rank(rank), self.queries, rank))


class TilePart(Memo):
    """The tiles that each rank computes with the rows of one round.

    Args:
        tiles: of which these are a part.
        own: for each rank those of own queries, in their rows, over the stream of keys.
        visiting: for each rank those of visitors, over both streams; None where there are none.
    """

    def __init__(
        self, tiles: AssignedTiles, own: Callable[[int], IntArray], visiting: Callable[[int], IntArray] | None
    ) -> None:
        self.tiles, self.own, self.visiting = tiles, own, visiting

    def wanted_keys(self, rank: int) -> Ranges:
        """The keys that a rank computes with, as ranges of the stream."""
        return self.memo(("keys", rank), lambda: ranges_seen(np.concatenate([self.own(rank), self._visiting(rank)])))

    def wanted_queries(self, rank: int) -> Ranges:
        """The queries of other ranks that a rank computes, as ranges of the stream."""
        return self.memo(("queries", rank), lambda: ranges_seen(self._visiting(rank)[:, [2, 3, 0, 1, 4, 5]]))

    def own_tiles(self, rank: int) -> IntArray:
        """Those of own queries, with keys counted in the rows that a rank wants."""
        return bands_of_keys(self.own(rank), *self.wanted_keys(rank))

    def visiting_tiles(self, rank: int) -> IntArray:
        """Those of visitors, with queries and keys counted in the rows that a rank wants."""
        starts, ends = self.wanted_queries(rank)
        pieces, number = cut(self._visiting(rank), starts, ends, queries=True)
        rows = np.cumsum(ends - starts) - (ends - starts)
        return bands_of_keys(moved(pieces, (rows - starts)[number], 0), *self.wanted_keys(rank))

    def _visiting(self, rank: int) -> IntArray:
        return NO_BANDS if self.visiting is None else self.visiting(rank)


def _outside(bands: IntArray, layout: Layout, rank: int, *, queries: bool) -> IntArray:
    """The part of bands over the stream whose queries, or keys, one rank does not hold."""
    starts, ends = _others(layout, rank)
    pieces, _ = cut(bands, starts, ends, queries=queries)
    return pieces


def _others(layout: Layout, rank: int) -> Ranges:
    """The ranges of the stream that a rank does not hold, in rising order."""
    own = slice(*layout.fragment_offsets[rank : rank + 2])
    order = np.argsort(layout.starts[own], kind="stable")
    return _gaps(layout.starts[own][order], layout.ends[own][order], layout.packing.total)


def _gaps(starts: IntArray, ends: IntArray, total: int) -> Ranges:
    """What lies between rising ranges, and before and after them."""
    begins, stops = np.concatenate([[0], ends]), np.append(starts, total)
    kept = stops > begins
    return begins[kept], stops[kept]


def _cut_to(bands: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    pieces, _ = cut(bands, starts, ends, queries=False)
    return pieces
