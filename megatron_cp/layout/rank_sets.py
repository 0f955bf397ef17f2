"""Layouts of some of the ranks: the layouts of a head exchange among them."""

from __future__ import annotations

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.layout import Layout
from megatron_cp.layout.packing import Packing


def merge_ranks(layout: Layout, count: int) -> Layout:
    """Returns the layout in which every `count` neighbouring ranks are one, which holds their tokens in stream order.

    With `count` 1 it is the layout itself, including its order and pad rows; above, there are no pad rows.
    """
    if layout.cp_size % count:
        raise ArgumentError("count", count, f"a divisor of the {layout.cp_size} ranks")
    if count == 1:
        return layout
    return layout.memo(("merged ranks", count), lambda: _merge_ranks(layout, count))


def take_ranks(layout: Layout, first: int, count: int) -> Layout:
    """Returns the layout of `count` neighbouring ranks from `first` on, over the stream of their own tokens.

    That stream is the packed stream with the tokens of all other ranks left out; its documents do not matter to an
    exchange, so it is one. Rows are the same as in `layout`.
    """
    if (first, count) == (0, layout.cp_size):
        return layout
    return layout.memo(("taken ranks", first, count), lambda: _take_ranks(layout, first, count))


def _merge_ranks(layout: Layout, count: int) -> Layout:
    starts, ends, offsets = [], [], [0]
    for first in range(0, layout.cp_size, count):
        lo, hi = layout.fragment_offsets[first], layout.fragment_offsets[first + count]
        order = np.argsort(layout.starts[lo:hi], kind="stable")
        starts.append(layout.starts[lo:hi][order])
        ends.append(layout.ends[lo:hi][order])
        offsets.append(offsets[-1] + order.size)
    return Layout(layout.packing, np.concatenate(starts), np.concatenate(ends), np.array(offsets))


def _take_ranks(layout: Layout, first: int, count: int) -> Layout:
    bounds = layout.fragment_offsets[first : first + count + 1]
    starts, ends = (edges[bounds[0] : bounds[-1]] for edges in (layout.starts, layout.ends))
    order = np.argsort(starts, kind="stable")
    sizes = (ends - starts)[order]
    placed = np.empty_like(starts)
    placed[order] = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    return Layout(
        Packing([total]), placed, placed + ends - starts, bounds - bounds[0],
        align=layout.align, min_rows=layout.min_rows,
    )  # fmt: skip
