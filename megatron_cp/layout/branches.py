"""`Branches`: the segments of a packing whose documents are trees, each segment continuing its parent.

A *path* runs from a root to a segment. A token's position, the keys that it sees, the inputs of its convolution and its
recurrent state are those of the document that its path is. Segments that merely continue the one before them in the
stream are computed as one *run* with it, so that a chain of segments gives the same bits as one document.
"""

from __future__ import annotations

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

    def paths(self) -> tuple[IntArray, IntArray]:
        """Returns every pair of a run and a run of its path, itself included, sorted by the first."""
        runs, ancestors = [np.arange(self.starts.size)], [np.arange(self.starts.size)]
        while (known := self.parents[ancestors[-1]] >= 0).any():
            runs.append(runs[-1][known])
            ancestors.append(self.parents[ancestors[-1][known]])
        order = np.lexsort((np.concatenate(ancestors), np.concatenate(runs)))
        return np.concatenate(runs)[order], np.concatenate(ancestors)[order]


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
        return (
            f"{self.lengths.size} segments of {int(self.ends.sum())} documents, "
            f"{int(self.lengths.sum())} tokens where documents alone have {copies}"
        )

