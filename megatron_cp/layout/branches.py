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
from numpy.typing import NDArray

from megatron_cp.layout.memo import Memo, frozen

IntArray = NDArray[np.int64]


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
