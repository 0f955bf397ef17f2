"""Shares of the packed stream that are even in tokens and work, in few fragments: the algorithm of `Layout.balanced`.

This is necklace splitting with two measures. What is left of the stream is closed up to a circle of `n * ranks` tokens.
Slide a window of `n` tokens around it: the windows that start at 0, n, 2n, ... share out all the work, so that some
have no more than their share and some no less, and neighbouring windows differ by the work of one token at either
end. So some window has its share but for half the work of one token, whether or not all windows can be of one size.
Taking it out costs two cuts, and the last rank keeps the rest: at most `2 * ranks - 1` fragments in all.

    work   [total + 1] the work of all tokens before each place of the stream
    place  a number that counts along what is left, 0 where it starts in the stream
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_cp.layout.packing import IntArray

MOST_FRAGMENTS = 3  # of a rank, wherever one of the attempts finds such shares
CLOSE = 1e-3  # a share that misses the mean by no more has reached it: a cut saved is worth more

# How near to its share a window must come, and where an attempt looks first among windows that cost the same number of
# cuts: a fraction of what is left, or None for where the work is nearest. Over 300 packs of 64 heavy-tailed documents
# at cp 4 to 64 the first attempt kept to three fragments in 86 of 100, one of them all in 99.
_ATTEMPTS = [(tolerance, near) for tolerance in (CLOSE, 2 * CLOSE) for near in (None, 0.0, 0.5, 1.0)]
# With so few tokens a rank one token is worth more than `CLOSE`: the most even of these attempts is taken.
FEW_TOKENS = 64
_ATTEMPTS_AT_FEW = [(0.0, near) for near in (None, 0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)]
_MOST_WINDOWS = 512  # that all attempts together take; each costs about 1 ms to find
_STARTS = 256  # windows looked at between which the share is then sought by bisection

type Fragments = list[tuple[int, int]]


def even_shares(work_of_tokens: IntArray, cp_size: int) -> list[Fragments]:
    """For each rank its fragments in stream order; token counts differ by at most one.

    Args:
        work_of_tokens: `[total]` such as the number of keys that each query sees.
        cp_size: the number of ranks. Their numbers follow the first token that they hold.
    """
    total = work_of_tokens.size
    work = np.concatenate([[0], np.cumsum(work_of_tokens)])
    cuts = (np.arange(cp_size + 1) * total // cp_size).tolist()
    contiguous = [[(start, end)] for start, end in pairwise(cuts)]
    if total <= cp_size or _most_work(contiguous, work) * cp_size <= (1 + CLOSE) * work[-1]:
        return contiguous
    few = total <= FEW_TOKENS * cp_size

    def cost(shares: list[Fragments]) -> tuple[int, int]:
        excess, most_work = max(_most_fragments(shares) - MOST_FRAGMENTS, 0), _most_work(shares, work)
        return (most_work, excess) if few else (excess, most_work)

    best = min(_attempts(work, cp_size, few=few), key=cost)
    return min(contiguous, sorted(best), key=lambda shares: _most_work(shares, work))


def _attempts(work: IntArray, cp_size: int, *, few: bool) -> Iterator[list[Fragments]]:
    """Shares from one attempt after another, all where tokens are few, else until one keeps to `MOST_FRAGMENTS`."""
    attempts = _ATTEMPTS_AT_FEW if few else _ATTEMPTS
    for tolerance, near in attempts[: max(1, _MOST_WINDOWS // cp_size)]:
        shares = _shares(work, cp_size, tolerance, near)
        yield shares
        if not few and _most_fragments(shares) <= MOST_FRAGMENTS:
            return


def _shares(work: IntArray, cp_size: int, tolerance: float, near: float | None) -> list[Fragments]:
    tokens, longer = divmod(work.size - 1, cp_size)  # so many ranks hold one token more
    rest = _Rest(work, np.array([0]), np.array([work.size - 1]))
    shares = []
    for ranks in range(cp_size, 1, -1):
        sizes = [tokens + 1] * (longer > 0) + [tokens] * (longer < ranks)
        share = rest.work_before[-1] / ranks
        start, size = _best(rest.windows(sizes, share), share, tolerance, near, rest.offsets[-1])
        fragments, rest = rest.split(start, size)
        shares.append(fragments)
        longer -= size - tokens
    return [*shares, _pairs(rest.starts, rest.ends)]


class _Windows(NamedTuple):
    """Windows of what is left, a row each, over the end and on from the start where they are long enough.

    `work`; `fragments` in it; `cuts` that it takes; `left`, the fragments of all other tokens.
    """

    start: IntArray
    size: IntArray
    work: IntArray
    fragments: IntArray
    cuts: IntArray
    left: IntArray


def _best(windows: _Windows, share: float, tolerance: float, near: float | None, total: int) -> tuple[int, int]:
    """The start and size of the window to take: of those that have their share, the one that cuts least."""
    missed = np.abs(windows.work - share)
    away = missed if near is None else np.abs(windows.start + windows.size / 2 - near * total)
    excess = np.maximum(np.maximum(windows.fragments, windows.left) - MOST_FRAGMENTS, 0)
    reached = np.flatnonzero(missed <= max(tolerance * share, missed.min()))
    order = np.lexsort([values[reached] for values in (missed, away, windows.left, windows.cuts, excess)])
    best = reached[order[0]]
    return int(windows.start[best]), int(windows.size[best])


@dataclass(frozen=True, eq=False)
class _Rest:
    """What is left of the stream: `starts` and `ends` of its fragments, in stream order."""

    work: IntArray
    starts: IntArray
    ends: IntArray

    @cached_property
    def offsets(self) -> IntArray:
        """The place of each fragment, and of the end."""
        return np.concatenate([[0], np.cumsum(self.ends - self.starts)])

    @cached_property
    def work_before(self) -> IntArray:
        """The work before each of the `offsets`."""
        return np.concatenate([[0], np.cumsum(self.work[self.ends] - self.work[self.starts])])

    def windows(self, sizes: list[int], share: float) -> _Windows:
        """The windows worth a look: at the ends of fragments, on a grid, and beside the `share` of work between."""
        starts = [self._starts(size, share) for size in sizes]
        start, size = np.concatenate(starts), np.repeat(sizes, [places.size for places in starts])
        total, count = self.offsets[-1], self.starts.size
        end = start + size
        wraps = end > total
        end = np.where(wraps, end - total, end)
        first = np.searchsorted(self.offsets, start, side="right") - 1
        last = np.searchsorted(self.offsets, end, side="left") - 1
        fragments = last - first + 1 + np.where(wraps, count, 0)
        cuts = (start > self.offsets[first]).astype(np.int64) + (end < self.offsets[last + 1])
        return _Windows(start, size, self._work_of(start, size), fragments, cuts, count + cuts - fragments)

    def split(self, start: int, size: int) -> tuple[Fragments, _Rest]:
        """A window's fragments in stream order, and what is left without it."""
        total = self.offsets[-1]
        end = start + size
        places = np.unique(np.concatenate([self.offsets, [start, end if end <= total else end - total]]))
        starts = self._in_stream(places[:-1])
        ends = starts + np.diff(places)
        taken = ((places[:-1] >= start) & (places[:-1] < end)) | (places[:-1] < end - total)
        return _pairs(starts[taken], ends[taken]), _Rest(self.work, starts[~taken], ends[~taken])

    def _starts(self, size: int, share: float) -> IntArray:
        total = self.offsets[-1]
        # Windows side by side are among them, without which nothing says that some lie on either side of the share.
        evenly, side_by_side = (np.arange(0, total, step) for step in (-(-total // _STARTS), size))
        grid = np.unique(np.concatenate([evenly, side_by_side, self.offsets[:-1], (self.offsets[1:] - size) % total]))
        below = self._work_of(grid, size) <= share
        crosses = below != np.roll(below, -1)
        low, high, below = grid[crosses], np.append(grid[1:], total)[crosses], below[crosses]
        while (high - low > 1).any():
            middle = (low + high) // 2
            like_low = (self._work_of(middle, size) <= share) == below
            low, high = np.where(like_low, middle, low), np.where(like_low, high, middle)
        return np.concatenate([grid, low, high % total])

    def _work_of(self, start: IntArray, size: IntArray | int) -> IntArray:
        total, end = self.offsets[-1], start + size
        wraps = end > total
        work = self._work_up_to(np.where(wraps, end - total, end)) - self._work_up_to(start)
        return work + np.where(wraps, self.work_before[-1], 0)

    def _work_up_to(self, place: IntArray) -> IntArray:
        fragment = self._fragment(place)
        return self.work[self._in_stream(place)] - self.work[self.starts[fragment]] + self.work_before[fragment]

    def _in_stream(self, place: IntArray) -> IntArray:
        fragment = self._fragment(place)
        return self.starts[fragment] + place - self.offsets[fragment]

    def _fragment(self, place: IntArray) -> IntArray:
        """The fragment of each place; the end belongs to the last one."""
        return np.minimum(np.searchsorted(self.offsets, place, side="right"), self.starts.size) - 1


def _pairs(starts: IntArray, ends: IntArray) -> Fragments:
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _most_fragments(shares: list[Fragments]) -> int:
    return max(map(len, shares))


def _most_work(shares: list[Fragments], work: IntArray) -> int:
    return max(sum(int(work[end] - work[start]) for start, end in share) for share in shares)
