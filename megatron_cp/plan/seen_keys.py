"""`SeenKeys`: the part of a mask that the queries of each KV rank see. Pure data; no torch in here."""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np

from megatron_cp.layout import Layout, Mask
from megatron_cp.layout.bands import areas, ranges_seen_by_ranks
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.packing import IntArray
from megatron_cp.layout.tiles import bands_of_ranks

_MOST_FRAGMENTS = 2**13  # fragments of the KV ranks that are cut out of a mask in one pass


class SeenKeys(Memo):
    """The visible part of a mask by KV rank, computed for blocks of neighbouring KV ranks, which takes little longer
    than one.
    """

    def __init__(self, mask: Mask, queries: Layout) -> None:
        self.mask, self.queries = mask, queries
        self.block = max(1, _MOST_FRAGMENTS * queries.cp_size // max(queries.starts.size, 1))

    def bands(self, kv_rank: int) -> IntArray:
        """The bands of a KV rank's queries, numbered by local row, over the stream of keys."""
        bands, offsets = self._bands(kv_rank // self.block)
        return bands[slice(*offsets[kv_rank % self.block :][:2])]

    def keys(self, kv_rank: int) -> tuple[IntArray, IntArray]:
        """The keys that a KV rank's queries see, as ranges of the stream."""
        block = kv_rank // self.block
        starts, ends, offsets = self.memo(("keys", block), lambda: ranges_seen_by_ranks(*self._bands(block)))
        own = slice(*offsets[kv_rank % self.block :][:2])
        return starts[own], ends[own]

    @cached_property
    def areas(self) -> list[int]:
        """The number of visible (query, key) pairs of each KV rank."""
        found = list[int]()
        for block in range(-(-self.queries.cp_size // self.block)):
            bands, offsets = self._bands(block)
            before = np.concatenate([[0], np.cumsum(areas(bands))])
            found += map(int, np.diff(before[offsets]))
        return found

    @cached_property
    def all_bands(self) -> tuple[IntArray, IntArray]:
        """The bands of all KV ranks, and `[n]` the KV rank of each."""
        blocks = [self._bands(block) for block in range(-(-self.queries.cp_size // self.block))]
        counts = np.concatenate([np.diff(offsets) for _, offsets in blocks])
        return np.concatenate([bands for bands, _ in blocks]), np.repeat(np.arange(counts.size), counts)

    def _bands(self, block: int) -> tuple[IntArray, IntArray]:
        """Returns the bands of a block of KV ranks, and the offsets of each rank's."""
        first = block * self.block
        ranks = range(first, min(first + self.block, self.queries.cp_size))
        make = partial(bands_of_ranks, self.mask.bands, self.queries, ranks, queries=True)
        return self.memo(("bands", block), make)
