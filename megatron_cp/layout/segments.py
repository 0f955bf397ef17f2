"""`Segments`: the pieces of documents that ranks hold, and the order in which pieces continue one another.

A recurrence runs through a document from piece to piece, across ranks. *Forward* a piece waits for the state after the
pieces before it, in *backward* for the gradient from the pieces after it: the same tables with the direction as data.
Where documents branch, several pieces continue the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.layout.array_types import BoolArray, IntArray
from megatron_cp.layout.fragments import arange_ranges
from megatron_cp.layout.layout import Layout
from megatron_cp.layout.memo import Memo, remembered
from megatron_cp.layout.packing import Packing


@dataclass(frozen=True, eq=False)
class LocalSegments:
    """The segments of one rank, in the order of its rows.

    Attributes:
        ids: the numbers of the segments in `Segments`.
        packing: the segments as documents of a packed stream of this rank's tokens.
        past, future: True if the document begins before the segment, and if it continues after it.
    """

    ids: IntArray
    packing: Packing
    past: BoolArray
    future: BoolArray

    def waiting(self, *, forward: bool) -> BoolArray:
        """The segments that need a state or gradient from others before they are finished."""
        return self.past if forward else self.future

    def leaving(self, *, forward: bool) -> BoolArray:
        """The segments whose state or gradient others wait for."""
        return self.future if forward else self.past


class Segments(Memo):
    """The fragments of a layout, cut where documents begin or branch and numbered in stream order.

    Attributes:
        start, end: `[n]` range of the packed stream.
        rank, row: `[n]` the owner, and the owner's first row.
        parent: `[n]` the segment that each one continues; -1 where a document begins.
        past, future: `[n]` True if its document begins before it, and if it continues after it.
        branches: True if several segments continue the same one.
        continued: True if all documents continue a state from before their first token, and their last states are kept:
            every segment then has a past and a future. The parent of a document's first segment is -1 - document.
    """

    def __init__(self, layout: Layout, *, continued: bool = False) -> None:
        # Without the layout itself, which remembers these: a cycle would keep both until garbage collection.
        self.cp_size, packing = layout.cp_size, layout.packing
        self.branches, self.continued = packing.branches is not None, continued
        trees = packing.branches
        begins = packing.cu_seqlens[:-1][packing.lengths > 0] if trees is None else trees.runs.starts
        self.start = np.union1d(layout.starts, begins)
        self.end = np.append(self.start[1:], packing.total)[: self.start.size]
        self.rank, self.row = layout.located(self.start)
        self.document = packing.documents_of(self.start)
        if trees is None:
            self.past = self.start > packing.cu_seqlens[self.document]
            self.future = self.end < packing.cu_seqlens[self.document + 1]
            self.parent = np.where(self.past, np.arange(self.start.size) - 1, -1)
            if continued:
                self.parent = np.where(self.past, self.parent, -1 - self.document)
                self.past = self.future = np.ones(self.start.size, dtype=bool)
            return
        before = trees.predecessors[self.start]
        self.past = before >= 0
        self.parent = np.where(self.past, np.searchsorted(self.start, before, side="right") - 1, -1)
        self.future = np.bincount(self.parent[self.past], minlength=self.start.size) > 0

    @classmethod
    def from_layout(cls, layout: Layout, *, continued: bool = False) -> Segments:
        """Returns the segments of a layout, made once."""
        found: Segments = layout.memo(("segments", continued), lambda: cls(layout, continued=continued))
        return found

    @remembered
    def local(self, rank: int) -> LocalSegments:
        """Returns the segments of one rank."""
        ids = np.flatnonzero(self.rank == rank)
        ids = ids[np.argsort(self.row[ids], kind="stable")]
        lengths = (self.end - self.start)[ids]
        return LocalSegments(ids, Packing(lengths if ids.size else [0]), self.past[ids], self.future[ids])

    @cached_property
    def chain_start(self) -> IntArray:
        """`[n]` the first segment of each segment's document."""
        return np.maximum.accumulate(np.where(self.past, 0, np.arange(self.start.size)))

    @cached_property
    def chain_end(self) -> IntArray:
        """`[n]` one past the last segment of each segment's document."""
        ends = np.where(self.future, self.start.size, np.arange(self.start.size) + 1)
        return np.minimum.accumulate(ends[::-1])[::-1]

    @remembered
    def needed(self, rank: int, *, forward: bool) -> IntArray:
        """Returns the segments of all ranks whose maps give the states that a rank waits for; rising.

        Forward these are the segments of a document before the rank's last one, backward those after its first.
        """
        starts, ends, offsets = self.needed_ranges(forward=forward)
        own = slice(*offsets[rank : rank + 2])
        return arange_ranges(starts[own], ends[own])

    @remembered
    def needed_ranges(self, *, forward: bool) -> tuple[IntArray, IntArray, IntArray]:
        """Returns `needed` of all ranks in order, as ranges; and `[cp_size + 1]` the offsets of each rank's."""
        if self.continued:  # every rank keeps the last states of all documents
            ranks = np.arange(self.cp_size)
            return 0 * ranks, 0 * ranks + self.start.size, np.arange(self.cp_size + 1)
        if self.branches:
            needed = [self._related(np.flatnonzero(self.rank == rank), forward) for rank in range(self.cp_size)]
            ids = np.concatenate(needed)
            return ids, ids + 1, np.cumsum([0, *map(len, needed)])
        pair = self.rank * self.start.size + self.chain_start  # numbers each pair of a rank and a document
        ids = np.argsort(pair, kind="stable")
        first = np.flatnonzero(np.diff(pair[ids], prepend=-1))
        if forward:
            last = ids[np.append(first[1:], ids.size)[: first.size] - 1]
            starts, ends = self.chain_start[last], last
        else:
            starts, ends = ids[first] + 1, self.chain_end[ids[first]]
        return starts, ends, np.searchsorted(self.rank[ids[first]], np.arange(self.cp_size + 1))

    def _related(self, ids: IntArray, forward: bool) -> IntArray:
        """Returns the segments on the paths before the given ones (backward: after them); rising."""
        found = np.zeros(self.start.size, dtype=bool)
        if forward:
            while (ids := np.unique(self.parent[ids][self.parent[ids] >= 0])).size:
                ids = ids[~found[ids]]
                found[ids] = True
        else:
            after = np.zeros(self.start.size, dtype=bool)  # the given ones, and what is after them
            after[ids] = True
            for segment in np.flatnonzero(self.past).tolist():  # parents come before their children
                found[segment] = after[self.parent[segment]]
                after[segment] |= found[segment]
        return np.flatnonzero(found)

    @remembered
    def sent(self, source: int, target: int, *, forward: bool) -> IntArray:
        """Returns the segments whose maps one rank sends to another; rising; none to itself."""
        needed = self.needed(target, forward=forward)
        return needed[self.rank[needed] == source] if source != target else needed[:0]

    @cached_property
    def crosses(self) -> bool:
        """True if any document has tokens on more than one rank."""
        if self.continued:
            return self.cp_size > 1
        return bool((self.rank[self.parent] != self.rank)[self.past].any())

    @remembered
    def receivers(self, *, forward: bool) -> IntArray:
        """Returns `[n]` the number of other ranks that need each segment's map."""
        if self.continued:
            return np.full(self.start.size, self.cp_size - 1)
        if self.branches:
            ids, _, offsets = self.needed_ranges(forward=forward)
            others = ids[self.rank[ids] != np.repeat(np.arange(self.cp_size), np.diff(offsets))]
            return np.bincount(others, minlength=self.start.size)
        # A rank takes part in a document up to its last (backward: from its first) segment of it.
        ids = np.arange(self.start.size)
        order = ids if forward else ids[::-1]
        pair = self.chain_start * self.cp_size + self.rank
        _, extreme = np.unique(pair[order[::-1]], return_index=True)
        _, inverse = np.unique(pair, return_inverse=True)
        bounds = np.sort(order[::-1][extreme])  # for each rank and document, its last (first) segment
        local_bound = order[::-1][extreme][inverse]
        if forward:
            others = np.searchsorted(bounds, self.chain_end) - np.searchsorted(bounds, ids, side="right")
            return others - (local_bound > ids)
        others = np.searchsorted(bounds, ids) - np.searchsorted(bounds, self.chain_start)
        return others - (local_bound < ids)
