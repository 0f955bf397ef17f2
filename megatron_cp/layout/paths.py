"""Masks along the paths of documents that branch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_cp.layout import bands as band
from megatron_cp.layout.bands import UNBOUNDED
from megatron_cp.layout.branches import Branches, Runs
from megatron_cp.layout.packing import IntArray


def bands_along_paths(branches: Branches, bands: IntArray) -> IntArray:
    """Returns the bands of the packed stream, `[n, 6]`, that give every path what `bands` give one document.

    A band has keys of one run. Its queries are those of a run, or of several that follow one another in the stream and
    of which each query sees all these keys: with a band for each two runs of a path there would be as many as the
    square of the levels.

    Args:
        bands: a mask of one document as long as the longest path, in which no query sees later keys.
    """
    walk = _Walk(branches.runs)
    return np.concatenate([band.NO_BANDS, *(walk.along(*row) for row in bands.tolist())])


class _Walk:
    """Looks at every run together with the runs of its path, from itself up.

    Attributes:
        starts, ends: `[n]` the positions of a run in its path.
        stream: `[n]` what is added to a position to get its token in the stream.
        parents: `[n]` the run above.
        places, sizes: `[n + 1]` the place of each run in an order in which all runs that continue it, directly or not,
            follow it, and the number of these and itself; at the end a run that is in no path.
    """

    def __init__(self, runs: Runs) -> None:
        self.starts, self.ends, self.parents = runs.positions, runs.positions + runs.stops - runs.starts, runs.parents
        self.stream = runs.starts - runs.positions
        self.places, self.sizes = _preorder(runs.parents.tolist())

    def along(self, first: int, last: int, first_key: int, last_key: int, lo: int, hi: int) -> IntArray:
        """Returns one band of a path as bands of the stream."""
        q0, q1 = np.maximum(self.starts, first), np.minimum(self.ends, last)
        lowest = np.maximum(first_key, q0 + lo)
        # True for runs between whose queries and those of the run before, in the stream, the band leaves none out.
        follows = np.concatenate([[False], (q1[:-1] == self.ends[:-1]) & (q0[1:] == self.starts[1:]), [False]])
        q0, q1 = np.append(q0, 0), np.append(q1, 0)

        def sees_all(run: IntArray, keys: IntArray, k0: IntArray, k1: IntArray) -> NDArray[np.bool_]:
            """Returns True where all queries of a run see the keys of a run of its path, but none after themselves."""
            below = (self.places[keys] <= self.places[run]) & (self.places[run] < self.places[keys] + self.sizes[keys])
            earlier = (q0[run] + hi >= k1 - 1) | ((run == keys) & (hi == 0))
            return below & (q0[run] < q1[run]) & (q1[run] - 1 + lo <= k0) & (k0 < k1) & earlier

        keys = self._before(last_key)
        run = np.flatnonzero((q0[:-1] < q1[:-1]) & (lowest < np.minimum(last_key, q1[:-1] + hi)) & (keys >= 0))
        keys, pieces = keys[run], [band.NO_BANDS]
        begun, ended = [(run[:0], run[:0])], [(run[:0], run[:0])]
        while run.size:
            k0, k1 = np.maximum(self.starts[keys], first_key), np.minimum(self.ends[keys], last_key)
            whole, before, behind = (sees_all(run + step, keys, k0, k1) for step in (0, -1, 1))
            before, behind = before & follows[run], behind & follows[run + 1]
            for ranges, edge in ((begun, whole & ~before), (ended, whole & ~behind)):
                ranges.append((keys[edge], run[edge]))
            boxes = np.stack([q0[run], q1[run], k0, k1, np.full_like(k0, lo), np.full_like(k0, hi)], axis=1)
            pieces.append(band.moved(boxes, self.stream[run], self.stream[keys])[(k0 < k1) & ~whole])
            # What a causal band shows to a run and to both beside it further down, it shows them further up.
            goes_on = (self.parents[keys] >= 0) & (self.starts[keys] > lowest[run])
            goes_on &= ~(whole & before & behind) | (lo > -UNBOUNDED) | (hi != 0)
            run, keys = run[goes_on], self.parents[keys[goes_on]]
        joined = [map(np.concatenate, zip(*ranges, strict=True)) for ranges in (begun, ended)]
        (keys, head), (_, tail) = (_sorted(*ranges) for ranges in joined)
        k0, k1 = np.maximum(self.starts[keys], first_key), np.minimum(self.ends[keys], last_key)
        queries = q0[head] + self.stream[head], q1[tail] + self.stream[tail]
        pieces.append(band.range_bands(*queries, k0 + self.stream[keys], k1 + self.stream[keys], hi=0))
        return np.concatenate(pieces)

    def _before(self, position: int) -> IntArray:
        """Returns `[n]` the last run of each run's path that begins before a position; -1 for none."""
        found = np.arange(self.starts.size)
        for run in np.flatnonzero(self.starts >= position).tolist():
            found[run] = found[self.parents[run]] if self.parents[run] >= 0 else -1
        return found


def _preorder(parents: list[int]) -> tuple[IntArray, IntArray]:
    """Returns the `places` and `sizes` of `_Walk`."""
    sizes, places, free, roots = [1] * len(parents), list[int](), list[int](), 0
    for run in range(len(parents) - 1, -1, -1):
        if parents[run] >= 0:
            sizes[parents[run]] += sizes[run]
    for run, parent in enumerate(parents):
        places.append(free[parent] if parent >= 0 else roots)
        free.append(places[run] + 1)
        if parent >= 0:
            free[parent] += sizes[run]
        else:
            roots += sizes[run]
    return np.array([*places, -1]), np.array([*sizes, 0])


def _sorted(keys: IntArray, run: IntArray) -> tuple[IntArray, IntArray]:
    order = np.lexsort((run, keys))
    return keys[order], run[order]
