"""Bands: the one shape that every mask is made of, as rows of an integer table.

Query `i` of `[q_start, q_end)` sees key `j` of `[k_start, k_end)` where `lo <= j - i <= hi`. With both bounds out of
reach that is a full rectangle, with `hi` alone a causal one, with `lo` alone an inverse causal one, with both a window.
A band cut to fewer queries and keys is a band again, and moving its axes moves its bounds: so what a rank computes is
described in the words of what the user asked for.

    bands    [n, 6] int64: q_start, q_end, k_start, k_end, lo, hi
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_cp.layout.packing import IntArray

FAR = 1 << 40  # a bound that no two tokens reach: `lo <= -FAR` and `hi >= FAR` bound nothing
NO_BANDS: IntArray = np.empty((0, 6), dtype=np.int64)


def tight(bands: IntArray) -> IntArray:
    """The same pairs in the smallest boxes, empty bands dropped: every query sees a key and every key a query."""
    boxes = tight_boxes(bands)
    return boxes[_not_empty(boxes)]


def area(bands: IntArray) -> int:
    """The number of (query, key) pairs in disjoint bands, exactly."""
    return int(areas(bands).sum())


def areas(bands: IntArray) -> IntArray:
    """`[n]` the number of pairs in each band."""
    q0, q1, k0, k1, lo, hi = tight_boxes(bands).T
    ends = _sum_of_clipped(q0 + hi + 1, q1 - q0, k1)  # sum over queries of min(k1, i + hi + 1)
    starts = -_sum_of_clipped(-(q1 - 1 + lo), q1 - q0, -k0)  # of max(k0, i + lo), from the last query to the first
    return ends - starts


def tight_boxes(bands: IntArray) -> IntArray:
    """As `tight`, with empty bands left in as boxes of nothing: row for row the same bands."""
    q0, q1, k0, k1, lo, hi = bands.T
    q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    boxes = np.stack([q0, q1, k0, k1, lo, hi], axis=1)
    boxes[(q0 >= q1) | (k0 >= k1) | (lo > hi)] = 0
    return boxes


def _not_empty(boxes: IntArray) -> NDArray[np.bool_]:
    return boxes[:, 1] > boxes[:, 0]


def _sum_of_clipped(first: IntArray, count: IntArray, limit: IntArray) -> IntArray:
    """The sum of `min(limit, first + n)` over n in [0, count)."""
    below = np.clip(limit - first, 0, count)  # so many terms are below the limit
    return below * first + below * (below - 1) // 2 + (count - below) * limit


def keys_seen(bands: IntArray, total: int) -> IntArray:
    """`[total]` the number of keys that each query sees, of disjoint bands."""
    q0, q1, k0, k1, lo, hi = tight(bands).T
    # min(k1, i + hi + 1) rises with i until it stays at k1, max(k0, i + lo) stays at k0 until it rises: each is a
    # constant and a slope that begins or ends once, so two sums of steps hold them all.
    height, slope = np.zeros(total + 1, dtype=np.int64), np.zeros(total + 1, dtype=np.int64)
    flat_from = np.clip(k1 - hi - 1, q0, q1)
    rises_from = np.clip(k0 - lo, q0, q1)
    np.add.at(height, q0, np.minimum(k1, q0 + hi + 1) - np.maximum(k0, q0 + lo))
    np.add.at(height, q1, -(np.minimum(k1, q1 + hi + 1) - np.maximum(k0, q1 + lo)))
    for at, change in ((q0, 1), (flat_from, -1), (rises_from, -1), (q1, 1)):
        np.add.at(slope, at, change)
    # A slope that begins at `at` adds from the query after it on.
    return np.cumsum(height + np.concatenate([[0], np.cumsum(slope)[:-1]]))[:total]


def cut(bands: IntArray, starts: IntArray, ends: IntArray, *, queries: bool) -> tuple[IntArray, IntArray]:
    """Every band cut to every range that it meets, along one axis.

    Args:
        bands: `[n, 6]`.
        starts, ends: `[m]` disjoint, non-empty ranges in rising order.
        queries: the axis: queries, or keys.

    Returns:
        the tight bands in band order, and for each the number of its range.
    """
    first, last = (0, 1) if queries else (2, 3)
    lowest = np.searchsorted(ends, bands[:, first], side="right")
    count = np.maximum(np.searchsorted(starts, bands[:, last], side="left") - lowest, 0)
    pieces = np.repeat(bands, count, axis=0)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(lowest, count)
    pieces[:, first] = np.maximum(pieces[:, first], starts[number])
    pieces[:, last] = np.minimum(pieces[:, last], ends[number])
    boxes = tight_boxes(pieces)
    kept = _not_empty(boxes)
    return boxes[kept], number[kept]


def moved(bands: IntArray, queries: IntArray | int, keys: IntArray | int) -> IntArray:
    """The bands with both axes shifted: query `i` becomes `i + queries`, key `j` becomes `j + keys`."""
    q0, q1, k0, k1, lo, hi = bands.T
    shift = np.asarray(keys) - np.asarray(queries)
    return np.stack([q0 + queries, q1 + queries, k0 + keys, k1 + keys, _bound(lo, shift), _bound(hi, shift)], axis=1)


def _bound(bound: IntArray, shift: NDArray[np.int64]) -> IntArray:
    return np.where(np.abs(bound) >= FAR, bound, bound + shift)


def pure(bands: IntArray) -> IntArray:
    """The same pairs in bands whose edges are straight: the first key a query sees is `k_start` or rises with it.

    Likewise the last one. Each band is cut where an edge bends, into at most three; a bound that no longer binds is
    put out of reach. What is left is full, causal (ending in its corner), inverse causal or both.
    """
    pieces = tight(bands)
    q0, q1, k0, k1, lo, hi = pieces.T
    bends = np.sort(np.stack([np.clip(k0 - lo, q0, q1), np.clip(k1 - hi, q0, q1)], axis=1), axis=1)
    edges = np.concatenate([q0[:, None], bends, q1[:, None]], axis=1)
    parts = []
    for part in range(3):
        piece = pieces.copy()
        piece[:, 0], piece[:, 1] = edges[:, part], edges[:, part + 1]
        parts.append(tight_boxes(piece))
    cut_up = np.stack(parts, axis=1).reshape(-1, 6)
    cut_up = cut_up[_not_empty(cut_up)]
    q0, q1, k0, k1, lo, hi = cut_up.T
    cut_up[:, 4] = np.where(q1 - 1 + lo <= k0, -FAR, lo)
    cut_up[:, 5] = np.where(q0 + hi >= k1 - 1, FAR, hi)
    return cut_up
