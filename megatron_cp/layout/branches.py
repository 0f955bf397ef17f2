"""`Branches`: the segments of a packing whose documents are trees, each segment continuing its parent.

A *path* runs from a root to a segment. A token's position, the keys that it sees, the inputs of its convolution and its
recurrent state are those of the document that its path is. Segments that merely continue the one before them in the
stream are computed as one *run* with it, so that a chain of segments gives the same bits as one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_cp.layout import bands as band
from megatron_cp.layout.array_types import BoolArray, IntArray
from megatron_cp.layout.bands import UNBOUNDED
from megatron_cp.layout.memo import Memo, frozen


class Runs(NamedTuple):
    """The runs of tokens that continue one another, in stream order; none is empty.

    Attributes:
        starts, stops: `[n]` the range of the packed stream.
        parents: `[n]` the run that each one continues, from its last token on; -1 for the first run of a path.
        positions: `[n]` the position of the first token in its path.
    """

    starts: IntArray
    stops: IntArray
    parents: IntArray
    positions: IntArray


class Branches(Memo):
    """The segments of documents that branch, in stream order, and the segment that each one continues.

    Attributes:
        lengths: `[n]` tokens of each segment.
        parents: `[n]` the number of an earlier segment of the same tree; -1 for a root.
        ends: `[n]` how many documents end with each segment.
    """

    def __init__(self, lengths: IntArray, parents: IntArray, ends: IntArray) -> None:
        self.lengths, self.parents, self.ends = frozen(lengths), frozen(parents), frozen(ends)

    @cached_property
    def starts(self) -> IntArray:
        """`[n]` the first token of each segment in the packed stream."""
        return frozen(np.cumsum(self.lengths) - self.lengths)

    @cached_property
    def copies(self) -> IntArray:
        """`[n]` the number of documents that each segment is a part of."""
        copies = self.ends.copy()
        for segment in range(copies.size - 1, -1, -1):
            if self.parents[segment] >= 0:
                copies[self.parents[segment]] += copies[segment]
        return frozen(copies)

    @cached_property
    def runs(self) -> Runs:
        """The segments that have tokens, joined where one merely continues the one before it."""
        kept = np.flatnonzero(self.lengths)
        number = np.full(self.lengths.size, -1)
        number[kept] = np.arange(kept.size)
        for segment in range(self.lengths.size):  # a segment without tokens stands for its parent
            if number[segment] < 0 and self.parents[segment] >= 0:
                number[segment] = number[self.parents[segment]]
        above = self.parents[kept]
        parents = np.where(above >= 0, number[above], -1)
        children = np.bincount(parents[parents >= 0], minlength=kept.size)
        goes_on = (parents >= 0) & (parents == np.arange(kept.size) - 1) & (children[parents] == 1)
        run = np.cumsum(~goes_on) - 1
        heads = np.flatnonzero(~goes_on)
        starts = self.starts[kept][heads]
        stops = np.append(starts[1:], self.lengths.sum())[: starts.size]
        parents = np.where(parents[heads] >= 0, run[parents[heads]], -1)
        positions = np.zeros(starts.size, dtype=np.int64)
        for number_of_run, parent in enumerate(parents.tolist()):
            if parent >= 0:
                positions[number_of_run] = positions[parent] + stops[parent] - starts[parent]
        return Runs(frozen(starts), frozen(stops), frozen(parents), frozen(positions))

    @property
    def longest(self) -> int:
        """The number of tokens of the longest path."""
        return int((self.runs.positions + self.runs.stops - self.runs.starts).max(initial=0))

    def positions_of(self, tokens: IntArray) -> IntArray:
        """Returns the position of each token of the packed stream in its path."""
        runs = self.runs
        run = np.searchsorted(runs.starts, tokens, side="right") - 1
        return runs.positions[run] + tokens - runs.starts[run]

    @cached_property
    def predecessors(self) -> IntArray:
        """`[total]` the token before each one in its path; -1 for first tokens."""
        runs = self.runs
        before = np.arange(int(self.lengths.sum())) - 1
        before[runs.starts] = np.where(runs.parents >= 0, runs.stops[runs.parents] - 1, -1)
        return frozen(before)

    @property
    def value(self) -> bytes:
        """Bytes that are equal for equal trees."""
        return np.stack([self.lengths, self.parents, self.ends]).tobytes()

    def describe(self) -> str:
        """Returns the counts of segments, documents and tokens in words."""
        copies = int((self.copies * self.lengths).sum())
        documents, segments = int(self.ends.sum()), self.lengths.size
        return (
            f"{documents} document{'s' * (documents != 1)} in {segments} segment{'s' * (segments != 1)}, "
            f"{int(self.lengths.sum())} tokens in place of {copies}"
        )


class Trie(NamedTuple):
    """The common beginnings of sequences.

    Attributes:
        lengths, parents, ends: `[n]` the segments; see `Branches`.
        tokens: `[total]` the tokens of all segments.
        paths: for each sequence its segments, from the root on.
    """

    lengths: list[int]
    parents: list[int]
    ends: list[int]
    tokens: IntArray
    paths: list[list[int]]


def trie_of(sequences: Sequence[IntArray], min_shared: int) -> Trie:
    """Finds the common beginnings of sequences that are at least `min_shared` tokens long."""
    order = sorted(range(len(sequences)), key=lambda number: sequences[number].tolist())
    common = [0] * len(order)  # with the sequence before, in this order
    for place in range(1, len(order)):
        one, other = sequences[order[place - 1]], sequences[order[place]]
        size = min(one.size, other.size)
        differs = np.flatnonzero(one[:size] != other[:size])
        shared = int(differs[0]) if differs.size else size
        common[place] = shared if shared >= min_shared else 0
    lengths, parents, ends, tokens = list[int](), list[int](), list[int](), [np.empty(0, dtype=np.int64)]
    paths: list[list[int]] = [[] for _ in order]
    left = [(0, len(order), 0, -1)]  # sequences from one place up to another share a number of tokens, up to a segment
    while left:
        first, last, depth, parent = left.pop()
        stop = min(common[first + 1 : last], default=int(sequences[order[first]].size))
        ending = [place for place in range(first, last) if sequences[order[place]].size == stop]
        if stop == 0:  # sequences without tokens share nothing
            for place in ending:
                paths[order[place]].append(len(lengths))
                lengths.append(0)
                parents.append(-1)
                ends.append(1)
        elif stop > depth:
            lengths.append(stop - depth)
            parents.append(parent)
            ends.append(0)
            tokens.append(sequences[order[first]][depth:stop])
            parent = len(lengths) - 1
            for place in range(first, last):
                paths[order[place]].append(parent)
        if ending and stop:
            ends[parent] += len(ending)
        cuts = [place for place in range(first + 1, last) if common[place] == stop and place > first + len(ending)]
        starts = [first + len(ending), *cuts] if first + len(ending) < last else []
        left += [(*pair, stop, parent) for pair in zip(starts, [*cuts, last], strict=False)][::-1]
    return Trie(lengths, parents, ends, np.concatenate(tokens), paths)


# -- masks along paths ----------------------------------------------------------------------------------------------


def bands_along_paths(branches: Branches, bands: IntArray) -> IntArray:
    """Returns the bands of the packed stream, `[n, 6]`, that give every path what `bands` give one document.

    A band has keys of one run. Its queries are those of a run, or of several that follow one another in the stream and
    of which each query sees all these keys: with a band for each two runs of a path there would be as many as the
    square of the levels.

    Args:
        bands: a mask of one document as long as the longest path, in which no query sees later keys.
    """
    walk = _RunsOfPaths(branches.runs)
    return np.concatenate([band.NO_BANDS, *(walk.along(*row) for row in bands.tolist())])


class _RunsOfPaths:
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

        def sees_all(run: IntArray, keys: IntArray, k0: IntArray, k1: IntArray) -> BoolArray:
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
    """Returns the `places` and `sizes` of `_RunsOfPaths`."""
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
