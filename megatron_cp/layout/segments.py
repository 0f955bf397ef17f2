"""`Segments`: the pieces of documents that the ranks of a layout hold, and which piece continues which.

A recurrence runs through a document from piece to piece, whichever ranks hold them. *Forward* a piece waits for the
state that the pieces before it leave, in *backward* for the gradient that the pieces after it leave: the same tables
with the direction as data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_cp.layout.fragments import arange_ranges
from megatron_cp.layout.layout import Layout
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.packing import IntArray, Packing

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class LocalSegments:
    """One rank's segments, in the order of its rows.

    Attributes:
        ids: of the segments.
        packing: their lengths, as the documents of a packed stream: this rank's tokens.
        past, future: whether the document begins before a segment, and whether it goes on after it.
    """

    ids: IntArray
    packing: Packing
    past: BoolArray
    future: BoolArray

    def waiting(self, *, forward: bool) -> BoolArray:
        """Which need what others leave before they can be finished."""
        return self.past if forward else self.future

    def leaving(self, *, forward: bool) -> BoolArray:
        """Which leave something that others wait for."""
        return self.future if forward else self.past


class Segments(Memo):
    """Each fragment of a layout, cut where documents begin; numbered in stream order.

    Attributes:
        cp_size: ranks of the layout whose fragments they are.
        start, end: `[n]` range of the packed stream.
        rank, row: `[n]` who holds it, and in which row it begins.
        document: `[n]`
        past, future: `[n]` whether its document begins before it, and goes on after it.
    """

    def __init__(self, layout: Layout) -> None:
        # Not the layout itself, which remembers these: a circle would keep both until a collector comes.
        self.cp_size, packing = layout.cp_size, layout.packing
        starts_of_documents = packing.cu_seqlens[:-1][packing.lengths > 0]
        self.start = np.union1d(layout.starts, starts_of_documents)
        self.end = np.append(self.start[1:], packing.total)[: self.start.size]
        self.rank, self.row = layout.located(self.start)
        self.document = packing.documents_of(self.start)
        self.past = self.start > packing.cu_seqlens[self.document]
        self.future = self.end < packing.cu_seqlens[self.document + 1]

    @classmethod
    def of(cls, layout: Layout) -> Segments:
        """Those of a layout, made once."""
        found: Segments = layout.memo(("segments",), lambda: cls(layout))
        return found

    def local(self, rank: int) -> LocalSegments:
        """One rank's."""
        return self.memo(("local", rank), lambda: self._local(rank))

    def _local(self, rank: int) -> LocalSegments:
        ids = np.flatnonzero(self.rank == rank)
        ids = ids[np.argsort(self.row[ids], kind="stable")]
        lengths = (self.end - self.start)[ids]
        return LocalSegments(ids, Packing(lengths if ids.size else [0]), self.past[ids], self.future[ids])

    # -- documents as chains of segments -----------------------------------------------------------------------------

    @cached_property
    def chain_start(self) -> IntArray:
        """`[n]` the first segment of each segment's document."""
        return np.maximum.accumulate(np.where(self.past, 0, np.arange(self.start.size)))

    @cached_property
    def chain_end(self) -> IntArray:
        """`[n]` one past the last segment of each segment's document."""
        ends = np.where(self.future, self.start.size, np.arange(self.start.size) + 1)
        return np.minimum.accumulate(ends[::-1])[::-1]

    def needed(self, rank: int, *, forward: bool) -> IntArray:
        """The segments, own and others', whose maps lead to the states that a rank waits for; rising.

        Forward those of a document before the rank's last segment of it, backward those after its first.
        """
        return self.memo(("needed", rank, forward), lambda: self._needed(rank, forward))

    def _needed(self, rank: int, forward: bool) -> IntArray:
        starts, ends, offsets = self.needed_ranges(forward=forward)
        own = slice(*offsets[rank : rank + 2])
        return arange_ranges(starts[own], ends[own])

    def needed_ranges(self, *, forward: bool) -> tuple[IntArray, IntArray, IntArray]:
        """`needed` of all ranks, one after the other, as ranges; and `[cp_size + 1]` where those of each begin."""
        return self.memo(("needed ranges", forward), lambda: self._needed_ranges(forward))

    def _needed_ranges(self, forward: bool) -> tuple[IntArray, IntArray, IntArray]:
        pair = self.rank * self.start.size + self.chain_start  # of a rank and a document
        ids = np.argsort(pair, kind="stable")
        first = np.flatnonzero(np.diff(pair[ids], prepend=-1))
        if forward:
            last = ids[np.append(first[1:], ids.size)[: first.size] - 1]
            starts, ends = self.chain_start[last], last
        else:
            starts, ends = ids[first] + 1, self.chain_end[ids[first]]
        return starts, ends, np.searchsorted(self.rank[ids[first]], np.arange(self.cp_size + 1))

    def sent(self, source: int, target: int, *, forward: bool) -> IntArray:
        """The segments whose maps one rank sends to another; rising. None to itself."""
        return self.memo(("sent", source, target, forward), lambda: self._sent(source, target, forward))

    def _sent(self, source: int, target: int, forward: bool) -> IntArray:
        needed = self.needed(target, forward=forward)
        return needed[self.rank[needed] == source] if source != target else needed[:0]

    @cached_property
    def crosses(self) -> bool:
        """Whether any document has tokens on more than one rank."""
        return bool((self.past[1:] & (self.rank[1:] != self.rank[:-1])).any())

    def receivers(self, *, forward: bool) -> IntArray:
        """`[n]` to how many other ranks each segment's map goes."""
        return self.memo(("receivers", forward), lambda: self._receivers(forward))

    def _receivers(self, forward: bool) -> IntArray:
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
