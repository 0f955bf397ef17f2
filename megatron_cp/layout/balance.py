"""Shares of the packed stream with even tokens and work, in few fragments: the algorithm of `Layout.balanced`.

This is necklace splitting with two measures. The rest of the stream is closed up to a circle of `n * ranks` tokens.
Slide a window of `n` tokens around it: the windows that start at 0, n, 2n, ... contain all the work, so that some have
no more than their share and some no less, and neighbouring windows differ by the work of one token at either end. So
some window has its share within half the work of one token, whether or not all windows can have the same size. Taking
it out costs two cuts, and the last rank keeps the rest: at most `2 * ranks - 1` fragments in all.

    place  a number that counts along the rest, 0 at its first token in the stream

Only some windows are examined. The circle falls into a few *arcs*: all windows that start within one take the same
number of cuts and leave the same number of fragments. Arcs are searched from the one that leaves the fewest, until a
window is found whose share is close enough. Work is linear in pieces along the stream, a few for each document, and no
table has an entry for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_cp.layout.array_types import BoolArray, IntArray
from megatron_cp.layout.bands import cut, ranges_seen_by_ranks
from megatron_cp.layout.fragments import arange_ranges

MOST_FRAGMENTS = 3  # fragments of a rank, if one of the attempts finds such shares
CLOSE = 1e-3  # relative error of a share that counts as none: a cut saved is worth more

# The tolerance of a window's share, and the place that an attempt prefers among windows that cost the same number of
# cuts: a fraction of the rest, or None for the window whose work is closest. Over 300 packs of 64 heavy-tailed
# documents at cp 4 to 64 the first attempt kept to three fragments in 86 % of cases, some attempt in 99 %.
_ATTEMPTS = [(tolerance, near) for tolerance in (CLOSE, 2 * CLOSE) for near in (None, 0.0, 0.5, 1.0)]
# With this few tokens a rank, one token is worth more than `CLOSE`: the most even of these attempts is taken.
FEW_TOKENS = 64
_ATTEMPTS_AT_FEW = [(0.0, near) for near in (None, 0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)]
_MOST_WINDOWS = 512  # windows of all attempts together; each takes 0.2 to 1 ms to find
_STARTS = 256  # windows on a grid; bisection then searches between two of them
_FEW_STARTS = 64  # distance up to which bisection is faster than solving for the crossing

Fragments: TypeAlias = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class TokenWork:
    """The work of each token of the stream: linear in pieces.

    Attributes:
        starts: `[n]` the first token of each piece, from 0 on.
        first: `[n]` the work of the first token of each piece.
        slope: `[n]` the increase of work from each token of the piece to the next.
        total: tokens of the stream, at least one if `before` is called.
    """

    starts: IntArray
    first: IntArray
    slope: IntArray
    total: int

    @classmethod
    def from_tokens(cls, work: IntArray) -> TokenWork:
        """Makes pieces from the work `[total]` of each token."""
        starts = np.flatnonzero(np.diff(work, prepend=work[:1] - 1))
        return cls(starts, work[starts], np.zeros_like(starts), work.size)

    def before(self, places: IntArray) -> IntArray:
        """Returns the work of all tokens before each place of the stream."""
        start, before, twice_first, slope = self._sums[self._next.searchsorted(places, side="right")].T
        tokens = places - start
        return before + (tokens * (twice_first + slope * tokens) >> 1)

    @cached_property
    def _next(self) -> IntArray:
        """The first token of each piece except the first piece."""
        return self.starts[1:]

    @cached_property
    def _sums(self) -> IntArray:
        """`[n, 4]` for each piece its start, the work before it, `twice_first` and `slope`.

        The work of its first `t` tokens is `t (twice_first + slope t) / 2`. The columns are in one table since they are
        looked up together.
        """
        return np.stack([self.starts, self._before, 2 * self.first - self.slope, self.slope], axis=1)

    @cached_property
    def _before(self) -> IntArray:
        """The work before each piece."""
        tokens = np.diff(self.starts, append=self.total)
        work = tokens * self.first + self.slope * (tokens * (tokens - 1) // 2)
        return np.cumsum(work) - work


def even_shares(work: TokenWork, cp_size: int) -> list[Fragments]:
    """Returns each rank's fragments in stream order; token counts differ by at most one.

    Args:
        work: for example the number of keys that each query sees.
        cp_size: the number of ranks. Ranks are numbered by the first token that they hold.
    """
    total, everything = work.total, work.before(np.array([work.total]))[0] if work.total else 0
    cuts = (np.arange(cp_size + 1) * total // cp_size).tolist()
    contiguous = [[(start, end)] for start, end in pairwise(cuts)]
    if total <= cp_size or most_work(contiguous, work) * cp_size <= (1 + CLOSE) * everything:
        return contiguous
    few = total <= FEW_TOKENS * cp_size

    def cost(shares: list[Fragments]) -> tuple[int, int]:
        excess, heaviest = max(_most_fragments(shares) - MOST_FRAGMENTS, 0), most_work(shares, work)
        return (heaviest, excess) if few else (excess, heaviest)

    best = min(_attempts(work, cp_size, few=few), key=cost)
    return min(contiguous, sorted(best), key=lambda shares: most_work(shares, work))


def _attempts(work: TokenWork, cp_size: int, *, few: bool) -> Iterator[list[Fragments]]:
    """Yields the shares of successive attempts: of all if tokens are few, else up to one that keeps to
    `MOST_FRAGMENTS`.
    """
    attempts = _ATTEMPTS_AT_FEW if few else _ATTEMPTS
    for tolerance, near in attempts[: max(1, _MOST_WINDOWS // cp_size)]:
        shares = _shares(work, cp_size, tolerance, near)
        yield shares
        if not few and _most_fragments(shares) <= MOST_FRAGMENTS:
            return


def _shares(work: TokenWork, cp_size: int, tolerance: float, near: float | None) -> list[Fragments]:
    tokens, longer = divmod(work.total, cp_size)  # `longer` ranks hold one token more
    rest = _Rest(work, np.array([0]), np.array([work.total]))
    shares = []
    for ranks in range(cp_size, 1, -1):
        sizes = [tokens + 1] * (longer > 0) + [tokens] * (longer < ranks)
        share = rest.work_before[-1] / ranks
        start, size = _Search(rest, sizes, share, tolerance, near).best()
        fragments, rest = rest.split(start, size)
        shares.append(fragments)
        longer -= size - tokens
    return [*shares, _pairs(rest.starts, rest.ends)]


@dataclass(frozen=True, eq=False)
class _Rest:
    """The tokens that no rank has taken yet: `starts` and `ends` of their fragments, in stream order."""

    work: TokenWork
    starts: IntArray
    ends: IntArray

    @cached_property
    def offsets(self) -> IntArray:
        """The place of each fragment, and of the end."""
        return np.concatenate([[0], (self.ends - self.starts).cumsum()])

    @cached_property
    def work_before(self) -> IntArray:
        """The work before each of the `offsets`."""
        return np.concatenate([[0], np.cumsum(self.work.before(self.ends) - self.work.before(self.starts))])

    def split(self, start: int, size: int) -> tuple[Fragments, _Rest]:
        """Returns a window's fragments in stream order, and the rest without it."""
        total = self.offsets[-1]
        end = start + size
        places = np.concatenate([self.offsets, [start, end if end <= total else end - total]])
        places.sort()
        sizes = places[1:] - places[:-1]
        kept = sizes > 0
        places, sizes = places[:-1][kept], sizes[kept]
        starts = places + self.shift(places)
        ends = starts + sizes
        taken = ((places >= start) & (places < end)) | (places < end - total)
        return _pairs(starts[taken], ends[taken]), _Rest(self.work, starts[~taken], ends[~taken])

    def work_of(self, start: IntArray, size: IntArray) -> IntArray:
        """Returns the work of windows; a window that passes the end goes on from the start."""
        ends, shift, before = self._twice
        places = np.concatenate([start, start + size])
        fragment = ends.searchsorted(places, side="right")
        work = self.work.before(places + shift[fragment]) + before[fragment]
        return work[start.size :] - work[: start.size]

    def shift(self, places: IntArray) -> IntArray:
        """Returns the offset from each place, of the rest repeated twice, to the stream."""
        ends, shift, _ = self._twice
        return shift[ends.searchsorted(places, side="right")]

    @cached_property
    def _twice(self) -> tuple[IntArray, IntArray, IntArray]:
        """Tables of the rest repeated twice, so that no window passes the end.

        The ends of the fragments without the last one; the offset from each fragment's places to the stream; and the
        work before each fragment less that before it in the stream.
        """
        firsts = np.concatenate([self.offsets[:-1], self.offsets[:-1] + self.offsets[-1]])
        before = np.concatenate([self.work_before[:-1], self.work_before[:-1] + self.work_before[-1]])
        starts = np.concatenate([self.starts, self.starts])
        return firsts[1:], starts - firsts, before - self.work.before(starts)


class _Arcs(NamedTuple):
    """Windows of one size that start between `start` and `end`, neither included, a row each.

    All windows of an arc take two cuts and hold as many fragments, and so do those that they leave.
    """

    start: IntArray
    end: IntArray
    size: IntArray
    turn: IntArray
    cost: IntArray

    def take(self, rows: IntArray) -> _Arcs:
        return _Arcs(*(values[rows] for values in self))


class _Windows(NamedTuple):
    """Windows of the rest, one per row; a window that passes the end goes on from the start.

    Attributes:
        start: the place of the first token.
        size: the number of tokens.
        work: the work of these tokens.
        cost: a number that rises with the fragments beyond `MOST_FRAGMENTS`, then with the cuts that the window takes,
            then with the fragments of all other tokens.
        turn: the tie breaker: of windows that are otherwise equal the one with the lowest turn, then `start`, is taken.
    """

    start: IntArray
    size: IntArray
    work: IntArray
    cost: IntArray
    turn: IntArray


class _Search:
    """The search for one rank's window: the cheapest window that has the rank's share of the work.

    Args:
        share: the work that the window should have.
        tolerance: the fraction of the share by which the work may miss it.
        near: the preference among windows of equal cost: see `_ATTEMPTS`.
    """

    def __init__(self, rest: _Rest, sizes: list[int], share: float, tolerance: float, near: float | None) -> None:
        self.rest, self.sizes, self.share, self.tolerance, self.near = rest, sizes, share, tolerance, near
        self.total = int(rest.offsets[-1])
        self.step = -(-self.total // _STARTS)

    def best(self) -> tuple[int, int]:
        """Returns the start and the size of the window to take."""
        arcs, edges = self._arcs()
        windows, lowest = [edges], self._lowest_cost(edges)
        # Without a tolerance all windows must be examined.
        for cost in sorted(set(arcs.cost.tolist())) if self.tolerance else [None]:
            if cost is not None and lowest < cost:
                break
            windows.append(self._searched(arcs if cost is None else arcs.take((arcs.cost == cost).nonzero()[0])))
            lowest = min(lowest, self._lowest_cost(windows[-1]))
        start, size, work, cost, turn = (np.concatenate(values) for values in zip(*windows, strict=True))
        missed = np.abs(work - self.share)
        away = missed if self.near is None else np.abs(start + size / 2 - self.near * self.total)
        reached = (missed <= max(self.tolerance * self.share, missed.min())).nonzero()[0]
        best = reached[np.lexsort([values[reached] for values in (start, turn, missed, away, cost)])[0]]
        return int(start[best]), int(size[best])

    def _lowest_cost(self, windows: _Windows) -> float:
        """Returns the lowest cost of a window that has its share within the tolerance; infinite if none has."""
        reached = np.abs(windows.work - self.share) <= self.tolerance * self.share
        return float(windows.cost[reached].min()) if reached.any() else np.inf

    def _arcs(self) -> tuple[_Arcs, _Windows]:
        """Returns the arcs of each size, and the windows between arcs, which begin or end with a fragment."""
        offsets, sizes = self.rest.offsets, np.array(self.sizes)[:, None]
        count = offsets.size - 1
        starts = np.empty((sizes.size, 2 * count), dtype=np.int64)
        starts[:, :count], starts[:, count:] = offsets[:-1], (offsets[1:] - sizes) % self.total
        starts.sort(axis=1)
        ends = np.empty_like(starts)
        ends[:, :-1], ends[:, -1] = starts[:, 1:], self.total
        # Three turns for each size: grids, windows below crossings, windows above crossings.
        start, end = starts.ravel(), ends.ravel()
        size, turn = sizes.ravel().repeat(2 * count), np.arange(0, 3 * sizes.size, 3).repeat(2 * count)
        cost, cost_inside = self._cost(np.concatenate([start, start + 1]), np.concatenate([size, size])).reshape(2, -1)
        edges = _Windows(start, size, self.rest.work_of(start, size), cost, turn)
        below = (edges.work <= self.share).reshape(starts.shape)
        crosses = below != np.concatenate([below[:, 1:], below[:, :1]], axis=1)
        # In an arc without a grid only the crossing between its ends is examined.
        has_grid = ((end - 1) // size > start // size) | ((end - 1) // self.step > start // self.step)
        arcs = ((end - start > 1) & (has_grid | crosses.ravel())).nonzero()[0]
        return _Arcs(start, end, size, turn, cost_inside).take(arcs), edges

    def _cost(self, start: IntArray, size: IntArray) -> IntArray:
        offsets, count = self.rest.offsets, self.rest.starts.size
        end = start + size
        wraps = end > self.total
        end = np.where(wraps, end - self.total, end)
        first = offsets.searchsorted(start, side="right") - 1
        last = offsets.searchsorted(end, side="left") - 1
        fragments = last - first + 1 + np.where(wraps, count, 0)
        cuts = (start > offsets[first]).astype(np.int64) + (end < offsets[last + 1])
        left = count + cuts - fragments
        excess = np.maximum(np.maximum(fragments, left) - MOST_FRAGMENTS, 0)
        return (excess * 3 + cuts) * (count + 3) + left

    def _searched(self, arcs: _Arcs) -> _Windows:
        """Returns the windows of arcs that are worth examining: those on a grid, and those next to the share
        between.
        """
        places, arc = self._grid(arcs)
        work = self.rest.work_of(places, arcs.size[arc])
        below = work <= self.share
        crosses = ((below[1:] != below[:-1]) & (arc[1:] == arc[:-1])).nonzero()[0]
        low, high = self._crossings(places[crosses], places[crosses + 1], arcs.size[arc[crosses]], below[crosses])
        places, arc = np.concatenate([places, low, high]), np.concatenate([arc, arc[crosses], arc[crosses]])
        turn = arcs.turn[arc]
        turn[work.size :] += 1
        turn[work.size + low.size :] += 1
        work = np.concatenate([work, self.rest.work_of(places[work.size :], arcs.size[arc[work.size :]])])
        inside = ((places > arcs.start[arc]) & (places < arcs.end[arc])).nonzero()[0]
        arc = arc[inside]
        return _Windows(places[inside], arcs.size[arc], work[inside], arcs.cost[arc], turn[inside])

    def _grid(self, arcs: _Arcs) -> tuple[IntArray, IntArray]:
        """Returns the starts that are examined first, from the start of each arc to its end; and the arc of each.

        They lie at even distances, and next to each other: only neighbouring windows are certain to have work on both
        sides of the share.
        """
        places, owners = [arcs.start, arcs.end], [np.arange(arcs.start.size)] * 2
        for step in (self.step, arcs.size):
            first, last = arcs.start // step + 1, (arcs.end - 1) // step + 1
            owner = owners[0].repeat(last - first)
            owners.append(owner)
            places.append(arange_ranges(first, last) * (step if isinstance(step, int) else step[owner]))
        place, arc = np.concatenate(places), np.concatenate(owners)
        order = np.lexsort((place, arc))
        return place[order], arc[order]

    def _crossings(self, low: IntArray, high: IntArray, size: IntArray, below: BoolArray) -> tuple[IntArray, IntArray]:
        """Bisects between `low` and `high` for neighbouring window starts with work on either side of the share.

        Both lie in one arc, and `below` says on which side `low` is. If several neighbours have work on either side,
        the steps of the bisection decide which are found.
        """
        if not low.size:
            return low, high
        if (high - low).max() > _FEW_STARTS:
            low, high = self._narrowed(low, high, size)
        while (high - low > 1).any():
            middle = (low + high) // 2
            like_low = (self.rest.work_of(middle, size) <= self.share) == below
            low, high = np.where(like_low, middle, low), np.where(like_low, high, middle)
        return low, high

    def _narrowed(self, low: IntArray, high: IntArray, size: IntArray) -> tuple[IntArray, IntArray]:
        """Solves directly for the neighbours that are the only ones: where the work of windows is linear in their
        start.

        It is linear between the starts at which the first token, or the one after the last, begins a piece of the work,
        if both pieces have one slope. A bisection would take a step for each bit of `high - low`.
        """
        place, row, is_even = self._bends(low, high, size)
        work = self.rest.work_of(place, size[row])
        below = work <= self.share
        crosses = ((below[1:] != below[:-1]) & (row[1:] == row[:-1])).nonzero()[0]
        alone = np.bincount(row[crosses], minlength=low.size) == 1
        alone[row[:-1][~is_even & (row[1:] == row[:-1])]] = False
        crosses = crosses[alone[row[crosses]]]
        begin, rise = place[crosses], (work[crosses + 1] - work[crosses]) // (place[crosses + 1] - place[crosses])

        def like_begin(steps: IntArray) -> BoolArray:
            found: BoolArray = (work[crosses] + steps * rise <= self.share) == below[crosses]
            return found

        steps = np.floor((self.share - work[crosses]) / rise).astype(np.int64)
        steps -= ~like_begin(steps)  # an exact hit, or rounding, may be one step too far
        sure = like_begin(steps) & ~like_begin(steps + 1)
        low, high, begin = low.copy(), high.copy(), (begin + steps)[sure]
        low[row[crosses[sure]]], high[row[crosses[sure]]] = begin, begin + 1
        return low, high

    def _bends(self, low: IntArray, high: IntArray, size: IntArray) -> tuple[IntArray, IntArray, BoolArray]:
        """Returns the starts from `low` to `high` at which the work of windows may change its slope, both included.

        Returns:
            the starts, grouped by row; the row of each; and True where the work is linear up to the next start.
        """
        pieces, slope = self.rest.work.starts, self.rest.work.slope
        rows = np.arange(low.size)
        places, owners, number = [low, high], [rows, rows], []
        for moved in (0, size):
            shift = self.rest.shift(low + moved) + moved  # from the start of a window to its first token, or its end
            first = pieces.searchsorted(low + shift, side="right")
            last = pieces.searchsorted(high + shift, side="left")
            owners.append(np.repeat(rows, last - first))
            places.append(pieces[arange_ranges(first, last)] - shift[owners[-1]])
            number.append(shift)
        place, row = np.concatenate(places), np.concatenate(owners)
        order = np.lexsort((place, row))
        place, row = place[order], row[order]
        at_start, at_end = (pieces.searchsorted(place + shift[row], side="right") - 1 for shift in number)
        is_even = (slope[at_start] == slope[at_end])[:-1] | (np.diff(place) <= 1)
        return place, row, is_even


def _pairs(starts: IntArray, ends: IntArray) -> Fragments:
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _most_fragments(shares: list[Fragments]) -> int:
    return max(map(len, shares))


def most_work(shares: list[Fragments], work: TokenWork) -> int:
    """Returns the work of the rank that has most."""
    flat = np.array([fragment for fragments in shares for fragment in fragments])
    loads = work.before(flat[:, 1]) - work.before(flat[:, 0])
    firsts = np.cumsum([0, *map(len, shares[:-1])])
    return int(np.add.reduceat(loads, firsts).max())


# -- keys that travel -----------------------------------------------------------------------------------------------


def fewer_keys(
    shares: list[Fragments], others: list[list[Fragments]], work: TokenWork, bands: IntArray
) -> list[Fragments]:
    """Returns those of the shares whose busiest rank sends or receives fewest keys; less even ones are left out.

    Two in a thousand of the busiest rank's work, the tolerance of a share, count as nothing.
    """
    most = (1 + 2 * CLOSE) * most_work(shares, work)
    even = [each for each in others if most_work(each, work) <= most]
    return min([shares, *even], key=lambda each: most_keys_moved(bands, each)) if even else shares


def most_keys_moved(bands: IntArray, shares: list[Fragments]) -> int:
    """Returns the most keys that a rank receives or sends if each goes once to every other rank that sees it."""
    owners = np.repeat(np.arange(len(shares)), [len(fragments) for fragments in shares])
    starts, ends = np.array([fragment for fragments in shares for fragment in fragments]).T
    order = np.argsort(starts)
    pieces, number = cut(bands, starts[order], ends[order], queries=True)
    ranks = owners[order][number]
    by_rank = np.argsort(ranks, kind="stable")
    edges = np.searchsorted(ranks[by_rank], np.arange(len(shares) + 1))
    first, last, offsets = ranges_seen_by_ranks(pieces[by_rank], edges)
    readers = np.repeat(np.arange(len(shares)), np.diff(offsets))

    def by_owner(apart: int) -> IntArray:
        """Counts the keys of each rank that are seen, once for each rank; by itself alone if ranks lie apart."""
        seen = [np.sort(each + readers * apart) for each in (first, last)]
        before, after = (_overlap(each + owners * apart, *seen) for each in (starts, ends))
        return np.bincount(owners, after - before, minlength=len(shares)).astype(np.int64)

    own = by_owner(int(ends.max()))
    received = np.bincount(readers, last - first, minlength=len(shares)).astype(np.int64)
    return int(max((by_owner(0) - own).max(), (received - own).max()))


def _overlap(places: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """Returns how many places before each one lie in ranges, counted once for each range, from their sorted edges."""
    found = np.zeros_like(places)
    for sign, edges in ((1, starts), (-1, ends)):
        count = edges.searchsorted(places)
        found += sign * (count * places - np.concatenate([[0], np.cumsum(edges)])[count])
    return found
