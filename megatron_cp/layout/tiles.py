"""`Tiles`: the visible pairs between the query rows and the key rows of one kernel call."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megatron_cp.layout import bands as band
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.layout import Layout
from megatron_cp.layout.memo import Memo


class Tiles(Memo):
    """The visible pairs of one kernel call: the bands of a mask, numbered by row of the given q and k.

    Attributes:
        bands: `[n, 6]` disjoint and tight, in the order of their first query; see `layout/bands.py`. A query may be in
            several bands, or in none: then it sees nothing.
        q_tokens, k_tokens: `[num_queries]`, `[num_keys]` place of each row in its packed stream: for dropout.
    """

    def __init__(self, bands: IntArray, q_tokens: IntArray, k_tokens: IntArray) -> None:
        self.bands, self.q_tokens, self.k_tokens = bands, q_tokens, k_tokens

    @cached_property
    def canonical(self) -> IntArray:
        """The bands, cut until each is full, causal, inverse causal or both; see `layout.bands.canonical`."""
        return band.canonical(self.bands)

    @cached_property
    def query_rows(self) -> slice:
        """The rows from the first query that sees a key to the last."""
        return _span(self.bands[:, 0], self.bands[:, 1])

    @cached_property
    def key_rows(self) -> slice:
        """The rows from the first key that is seen to the last."""
        return _span(self.bands[:, 2], self.bands[:, 3])

    @cached_property
    def cropped(self) -> Tiles:
        """The same pairs, numbered within `query_rows` and `key_rows`."""
        queries, keys = self.query_rows, self.key_rows
        bands = band.moved(self.bands, -queries.start, -keys.start)
        return Tiles(bands, self.q_tokens[queries], self.k_tokens[keys])

    @cached_property
    def cropped_keys(self) -> Tiles:
        """The same pairs, numbered within all query rows and `key_rows`."""
        keys = self.key_rows
        return Tiles(band.moved(self.bands, 0, -keys.start), self.q_tokens, self.k_tokens[keys])


def bands_of_queries(bands: IntArray, layout: Layout, rank: int) -> IntArray:
    """Returns the bands of one rank's queries, numbered by local row; keys stay places in the stream."""
    return bands_of_ranks(bands, layout, range(rank, rank + 1), queries=True)[0]


def bands_of_ranks(bands: IntArray, layout: Layout, ranks: range, *, queries: bool) -> tuple[IntArray, IntArray]:
    """Computes `bands_of_queries`, or `bands_of_held_keys`, of neighbouring ranks in one pass.

    Returns:
        the bands, grouped by rank, and `[len(ranks) + 1]` offsets of the groups.
    """
    offsets = layout.fragment_offsets[ranks.start : ranks.stop + 1]
    starts, ends = (edges[offsets[0] : offsets[-1]] for edges in (layout.starts, layout.ends))
    owners = np.repeat(np.arange(len(ranks)), np.diff(offsets))
    firsts = np.concatenate([[0], np.cumsum(ends - starts)])
    rows = firsts[:-1] - firsts[offsets[:-1] - offsets[0]][owners]  # the first row of each range
    order = np.argsort(starts, kind="stable")
    pieces, number = band.cut(bands, starts[order], ends[order], queries=queries)
    fragment = order[number]
    shift, owner = (rows - starts)[fragment], owners[fragment]
    pieces = band.moved(pieces, shift, 0) if queries else band.moved(pieces, 0, shift)
    by_rank = np.lexsort((pieces[:, 2], pieces[:, 0], owner))
    return pieces[by_rank], np.searchsorted(owner[by_rank], np.arange(len(ranks) + 1))


def bands_of_keys(bands: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """Cuts bands to ranges of keys, and numbers keys by row, the ranges lying end to end."""
    rows = np.cumsum(ends - starts) - (ends - starts)  # the first row of each range
    order = np.argsort(starts, kind="stable")
    pieces, number = band.cut(bands, starts[order], ends[order], queries=False)
    pieces = band.moved(pieces, 0, (rows - starts)[order][number])
    return pieces[np.lexsort((pieces[:, 2], pieces[:, 0]))]


def bands_of_held_keys(bands: IntArray, layout: Layout, rank: int) -> IntArray:
    """Cuts bands to the keys of one rank, numbered by local row."""
    return bands_of_ranks(bands, layout, range(rank, rank + 1), queries=False)[0]


def _span(starts: IntArray, ends: IntArray) -> slice:
    return slice(int(starts.min()), int(ends.max())) if starts.size else slice(0, 0)
