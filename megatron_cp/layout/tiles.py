"""`Tiles`: the visible pairs between the query rows and the key rows that one rank has at hand."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megatron_cp.layout import bands as band
from megatron_cp.layout.layout import Layout
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.packing import IntArray


class Tiles(Memo):
    """The visible pairs of one kernel call: the bands of a mask, counted in the rows of the q and k that are given.

    Attributes:
        bands: `[n, 6]` disjoint and tight, in the order of their first query; see `layout/bands.py`. A query may be in
            several bands, or in none: then it sees nothing.
        q_tokens, k_tokens: `[num_queries]`, `[num_keys]` place of each row in its packed stream: for dropout.
    """

    def __init__(self, bands: IntArray, q_tokens: IntArray, k_tokens: IntArray) -> None:
        self.bands, self.q_tokens, self.k_tokens = bands, q_tokens, k_tokens

    @cached_property
    def canonical(self) -> IntArray:
        """The bands cut up until each is full, causal, inverse causal or both; see `layout.bands.canonical`."""
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
        """The same pairs, counted in `query_rows` and `key_rows` alone."""
        queries, keys = self.query_rows, self.key_rows
        bands = band.moved(self.bands, -queries.start, -keys.start)
        return Tiles(bands, self.q_tokens[queries], self.k_tokens[keys])

    @cached_property
    def cropped_keys(self) -> Tiles:
        """The same pairs, counted in all query rows and `key_rows`."""
        keys = self.key_rows
        return Tiles(band.moved(self.bands, 0, -keys.start), self.q_tokens, self.k_tokens[keys])


class WholeTiles(Tiles):
    """Tiles that are computed with all rows, whatever is seen of them: so that every pack has as many."""

    @cached_property
    def query_rows(self) -> slice:
        return slice(0, len(self.q_tokens))

    @cached_property
    def key_rows(self) -> slice:
        return slice(0, len(self.k_tokens))

    @property
    def cropped(self) -> Tiles:
        return self

    @property
    def cropped_keys(self) -> Tiles:
        return self


def bands_of_queries(bands: IntArray, layout: Layout, rank: int) -> IntArray:
    """The part of a mask that the queries of one rank see, counted in their rows; keys stay places in the stream."""
    return _in_rows(bands, *_fragments(layout, rank), queries=True)


def bands_of_ranks(bands: IntArray, layout: Layout, ranks: range, *, queries: bool) -> tuple[IntArray, IntArray]:
    """`bands_of_queries`, or `bands_of_held_keys`, of neighbouring ranks, cut in one pass.

    Returns:
        the bands, rank after rank, and `[len(ranks) + 1]` where those of each rank begin.
    """
    offsets = layout.fragment_offsets[ranks.start : ranks.stop + 1]
    starts, ends = (edges[offsets[0] : offsets[-1]] for edges in (layout.starts, layout.ends))
    owners = np.repeat(np.arange(len(ranks)), np.diff(offsets))
    firsts = np.concatenate([[0], np.cumsum(ends - starts)])
    rows = firsts[:-1] - firsts[offsets[:-1] - offsets[0]][owners]  # where each range begins among the rank's rows
    order = np.argsort(starts, kind="stable")
    pieces, number = band.cut(bands, starts[order], ends[order], queries=queries)
    fragment = order[number]
    shift, owner = (rows - starts)[fragment], owners[fragment]
    pieces = band.moved(pieces, shift, 0) if queries else band.moved(pieces, 0, shift)
    by_rank = np.lexsort((pieces[:, 2], pieces[:, 0], owner))
    return pieces[by_rank], np.searchsorted(owner[by_rank], np.arange(len(ranks) + 1))


def bands_of_keys(bands: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """The part of a mask over keys that lie in rows, range after range of the stream, counted in those rows."""
    return _in_rows(bands, starts, ends, queries=False)


def bands_of_held_keys(bands: IntArray, layout: Layout, rank: int) -> IntArray:
    """`bands_of_keys` over the rows of one rank."""
    return _in_rows(bands, *_fragments(layout, rank), queries=False)


def ranges_seen(bands: IntArray) -> tuple[IntArray, IntArray]:
    """The keys that the queries of tight bands see, as starts and ends of the fewest ranges, in rising order."""
    starts, ends, _ = ranges_seen_by_ranks(bands, np.array([0, len(bands)]))
    return starts, ends


def ranges_seen_by_ranks(bands: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """`ranges_seen` of several ranks at once.

    Args:
        bands: of one rank after another.
        offsets: `[ranks + 1]` where those of each begin.

    Returns:
        starts and ends, rank after rank, and `[ranks + 1]` where those of each rank begin.
    """
    rank = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    apart = rank * (int(bands[:, 3].max(initial=0)) + 1)  # so that no range of one rank touches one of the next
    starts, ends = bands[:, 2] + apart, bands[:, 3] + apart
    order = np.argsort(starts, kind="stable")
    starts, ends, apart, rank = starts[order], np.maximum.accumulate(ends[order]), apart[order], rank[order]
    first = np.ones(starts.size, dtype=bool)
    np.greater(starts[1:], ends[:-1], out=first[1:])
    last = np.append(first[1:], True)[: starts.size]
    return (starts - apart)[first], (ends - apart)[last], np.searchsorted(rank[first], np.arange(offsets.size))


def _fragments(layout: Layout, rank: int) -> tuple[IntArray, IntArray]:
    lo, hi = layout.fragment_offsets[rank : rank + 2]
    return layout.starts[lo:hi], layout.ends[lo:hi]


def _in_rows(bands: IntArray, starts: IntArray, ends: IntArray, *, queries: bool) -> IntArray:
    rows = np.cumsum(ends - starts) - (ends - starts)  # where each range begins among the rows
    order = np.argsort(starts, kind="stable")
    pieces, number = band.cut(bands, starts[order], ends[order], queries=queries)
    shift = (rows - starts)[order][number]
    pieces = band.moved(pieces, shift, 0) if queries else band.moved(pieces, 0, shift)
    return pieces[np.lexsort((pieces[:, 2], pieces[:, 0]))]


def _span(starts: IntArray, ends: IntArray) -> slice:
    return slice(int(starts.min()), int(ends.max())) if starts.size else slice(0, 0)
