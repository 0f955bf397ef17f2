"""Bands: the shape that every mask is made of, as rows of an integer table.

Query `i` of `[q_start, q_end)` sees key `j` of `[k_start, k_end)` if `lo <= j - i <= hi`. With both bounds out of reach
that is a full rectangle, with `hi` alone a causal one, with `lo` alone an inverse causal one, with both a window. A
band cut to fewer queries and keys is a band again, and moving its axes moves its bounds: so the work of a rank is
described in the same form as the user's mask.

    bands    [n, 6] int64: q_start, q_end, k_start, k_end, lo, hi
"""

from __future__ import annotations

import numpy as np

from megatron_cp.layout.array_types import BoolArray, IntArray

UNBOUNDED = 1 << 40  # a bound that no two tokens reach: `lo <= -UNBOUNDED` and `hi >= UNBOUNDED` bound nothing
NO_BANDS: IntArray = np.empty((0, 6), dtype=np.int64)
NO_BARRIERS: IntArray = np.empty(0, dtype=np.int64)


def range_bands(
    q_starts: IntArray, q_ends: IntArray, k_starts: IntArray, k_ends: IntArray, hi: int = UNBOUNDED
) -> IntArray:
    """Returns `[n, 6]` a band for each range of queries and keys: full, or with the bound `hi`."""
    unbounded = np.full_like(q_starts, -UNBOUNDED)
    return np.stack([q_starts, q_ends, k_starts, k_ends, unbounded, np.full_like(q_starts, hi)], axis=1)


def shrink(bands: IntArray) -> IntArray:
    """Returns the same pairs in the smallest boxes, without empty bands: every query sees a key and every key is
    seen.
    """
    boxes = tight_boxes(bands)
    return boxes[_not_empty(boxes)]


def area(bands: IntArray) -> int:
    """Returns the exact number of (query, key) pairs in disjoint bands."""
    return int(areas(bands).sum())


def areas(bands: IntArray) -> IntArray:
    """Returns `[n]` the number of pairs in each band."""
    return areas_of_boxes(tight(bands.T))


def areas_of_boxes(boxes: IntArray) -> IntArray:
    """Returns the `areas` of bands as `tight` returns them."""
    if int(np.abs(boxes[:4]).max(initial=0)) >= 2**31:
        boxes = boxes.astype(object)  # Python integers, since the product of two places may exceed 64 bits
    q0, q1, k0, k1, lo, hi = boxes
    ends = sum_of_clipped(q0 + hi + 1, q1 - q0, k1)  # sum over queries of min(k1, i + hi + 1)
    starts = -sum_of_clipped(-(q1 - 1 + lo), q1 - q0, -k0)  # sum of max(k0, i + lo)
    return ends - starts


def tight_boxes(bands: IntArray) -> IntArray:
    """Shrinks each band to the smallest box; empty bands stay as rows of zeros."""
    return np.ascontiguousarray(tight(bands.T).T)


def tight(columns: IntArray) -> IntArray:
    """Returns `tight_boxes` as `[6, n]` from bands as `[6, n]`, which takes less time: a column lies together."""
    q0, q1, k0, k1, lo, hi = columns
    q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    boxes = np.stack([q0, q1, k0, k1, lo, hi])
    boxes[:, (q0 >= q1) | (k0 >= k1) | (lo > hi)] = 0
    return boxes


def _not_empty(boxes: IntArray) -> BoolArray:
    return boxes[:, 1] > boxes[:, 0]


def sum_of_clipped(first: IntArray, count: IntArray, limit: IntArray) -> IntArray:
    """Returns the sum of `min(limit, first + n)` over n in [0, count)."""
    below = np.clip(limit - first, 0, count)  # number of terms below the limit
    return below * first + below * (below - 1) // 2 + (count - below) * limit


def keys_seen(bands: IntArray, total: int) -> IntArray:
    """Returns `[total]` the number of keys that each query sees, given disjoint bands."""
    starts, first, slope = seen_in_pieces(bands, total)
    sizes = np.diff(starts, append=total)
    # In place, since another table with an entry for each token costs page faults.
    steps = np.repeat(slope, sizes)  # increase from the previous query; the first of a piece is set below
    steps[starts] = np.diff(first, prepend=0) - np.append(0, ((sizes - 1) * slope)[:-1])
    return np.cumsum(steps, out=steps)


def seen_in_pieces(bands: IntArray, total: int) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the number of keys that each query sees, given disjoint bands, as pieces in which it is linear.

    Returns:
        `[n]` each: the first query of a piece, from 0 on; the keys that it sees; and the increase for each next query.
    """
    q0, q1, k0, k1, lo, hi = shrink(bands).T
    # min(k1, i + hi + 1) rises with i until it stays at k1, max(k0, i + lo) stays at k0 until it rises: each is a
    # constant and a slope that begins or ends once, so two sums of steps hold them all.
    flat_from, rises_from = np.clip(k1 - hi - 1, q0, q1), np.clip(k0 - lo, q0, q1)
    starts, number = np.unique(np.concatenate([[0], q0, q1, flat_from, rises_from]), return_inverse=True)
    begins, ends, flat, rises = number[1:].reshape(4, -1)
    height, slope = np.zeros(starts.size, dtype=np.int64), np.zeros(starts.size, dtype=np.int64)
    np.add.at(height, begins, np.minimum(k1, q0 + hi + 1) - np.maximum(k0, q0 + lo))
    np.add.at(height, ends, -(np.minimum(k1, q1 + hi + 1) - np.maximum(k0, q1 + lo)))
    for at, change in ((begins, 1), (flat, -1), (rises, -1), (ends, 1)):
        np.add.at(slope, at, change)
    slope = np.cumsum(slope)
    height[1:] += np.diff(starts) * slope[:-1]
    kept = starts < total
    return starts[kept], np.cumsum(height)[kept], slope[kept]


def cut(bands: IntArray, starts: IntArray, ends: IntArray, *, queries: bool) -> tuple[IntArray, IntArray]:
    """Cuts every band to every range that it meets, along one axis.

    Args:
        starts, ends: `[m]` disjoint, non-empty ranges in rising order.
        queries: the axis: queries, or keys.

    Returns:
        the tight bands in band order, and for each the number of its range.
    """
    return cut_up(bands, starts, ends, queries=queries)[:2]


def cut_up(bands: IntArray, starts: IntArray, ends: IntArray, *, queries: bool) -> tuple[IntArray, IntArray, IntArray]:
    """Cuts like `cut`, and also returns the number of the band that each piece was cut from."""
    columns, number, origin = cut_columns(bands, starts, ends, queries=queries)
    boxes = tight(columns)
    kept = boxes[1] > boxes[0]
    return np.ascontiguousarray(boxes[:, kept].T), number[kept], origin[kept]


def cut_columns(
    bands: IntArray, starts: IntArray, ends: IntArray, *, queries: bool
) -> tuple[IntArray, IntArray, IntArray]:
    """Cuts like `cut_up`, into pieces `[6, n]` that are not tight; some may be empty."""
    first, last = (0, 1) if queries else (2, 3)
    lowest, count = ranges_met(bands, starts, ends, queries=queries)
    origin = np.repeat(np.arange(len(bands)), count)
    number = np.arange(origin.size) + np.repeat(lowest - np.cumsum(count) + count, count)
    pieces = np.repeat(np.ascontiguousarray(bands.T), count, axis=1)
    np.maximum(pieces[first], starts[number], out=pieces[first])
    np.minimum(pieces[last], ends[number], out=pieces[last])
    return pieces, number, origin


def ranges_met(bands: IntArray, starts: IntArray, ends: IntArray, *, queries: bool) -> tuple[IntArray, IntArray]:
    """Returns `[n]` the first of the ranges that each band meets along one axis, and the number of those; see `cut`."""
    first, last = (0, 1) if queries else (2, 3)
    lowest = np.searchsorted(ends, bands[:, first], side="right")
    return lowest, np.maximum(np.searchsorted(starts, bands[:, last], side="left") - lowest, 0)


def ranges_seen(bands: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the keys that tight bands see, as starts and ends of the fewest ranges, in rising order."""
    starts, ends, _ = ranges_seen_by_ranks(bands, np.array([0, len(bands)]))
    return starts, ends


def ranges_seen_by_ranks(bands: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Returns `ranges_seen` of bands grouped by rank: starts and ends, grouped likewise, and the groups' offsets."""
    return unions(bands[:, 2:4], offsets)


def unions(ranges: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the fewest ranges that cover those of each rank: starts and ends, grouped by rank, and new offsets."""
    rank = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    apart = rank * (int(ranges[:, 1].max(initial=0)) + 1)  # so that ranges of different ranks do not touch
    starts, ends = ranges[:, 0] + apart, ranges[:, 1] + apart
    order = np.argsort(starts, kind="stable")
    starts, ends, apart, rank = starts[order], np.maximum.accumulate(ends[order]), apart[order], rank[order]
    first = np.ones(starts.size, dtype=bool)
    np.greater(starts[1:], ends[:-1], out=first[1:])
    last = np.append(first[1:], True)[: starts.size]
    return (starts - apart)[first], (ends - apart)[last], np.searchsorted(rank[first], np.arange(offsets.size))


def moved(bands: IntArray, queries: IntArray | int, keys: IntArray | int) -> IntArray:
    """Shifts both axes: query `i` becomes `i + queries`, key `j` becomes `j + keys`."""
    q0, q1, k0, k1, lo, hi = bands.T
    shift = np.asarray(keys) - np.asarray(queries)
    return np.stack([q0 + queries, q1 + queries, k0 + keys, k1 + keys, _bound(lo, shift), _bound(hi, shift)], axis=1)


def _bound(bound: IntArray, shift: IntArray) -> IntArray:
    return np.where(np.abs(bound) >= UNBOUNDED, bound, bound + shift)


def canonical(bands: IntArray) -> IntArray:
    """Cuts bands until their edges are straight: the first key that a query sees is `k_start` or rises with the query.

    The same holds for the last key. Each band is cut where an edge bends, into at most three; a bound that no longer
    binds is put out of reach. The results are full, causal (ending in the corner), inverse causal or both.
    """
    pieces = shrink(bands)
    q0, q1, k0, k1, lo, hi = pieces.T
    bends = np.sort(np.stack([np.clip(k0 - lo, q0, q1), np.clip(k1 - hi, q0, q1)], axis=1), axis=1)
    edges = np.concatenate([q0[:, None], bends, q1[:, None]], axis=1)
    parts = []
    for part in range(3):
        piece = pieces.copy()
        piece[:, 0], piece[:, 1] = edges[:, part], edges[:, part + 1]
        parts.append(tight_boxes(piece))
    cut_up = np.stack(parts, axis=1).reshape(-1, 6)
    return unbound(cut_up[_not_empty(cut_up)])


def unbound(bands: IntArray) -> IntArray:
    """Puts bounds of tight bands out of reach where they cut nothing off, so that equal bands have equal rows."""
    q0, q1, k0, k1, lo, hi = bands.T
    lo = np.where(q1 - 1 + lo <= k0, -UNBOUNDED, lo)
    hi = np.where(q0 + hi >= k1 - 1, UNBOUNDED, hi)
    return np.stack([q0, q1, k0, k1, lo, hi], axis=1)


# Unions are computed from edges. A band's first key stays, then rises by one a query; its last key rises, then stays:
# so the values of both edges at the first and the last query define the band.
#
#     edges       [n, 6] int64: q_start, q_end, left edge at the first and at the last query, right edge at the
#                               first and at the last query, which is one past the last key


def disjoint(bands: IntArray, barriers: IntArray = NO_BARRIERS) -> IntArray:
    """Returns the pairs of bands that may overlap as disjoint tight bands, joined as far as possible.

    Bands that share no query with another are left as they are. A group of `n` that do share queries is cut at each
    query where one of them begins, ends, bends or crosses another: `n * n` pieces if all overlap.

    Args:
        bands: `[n, 6]` in any order.
        barriers: queries at which every band must end, such as the first ones of documents.
    """
    bands = shrink(bands)
    shared = _sharing_queries(bands)
    return joined(np.concatenate([bands[~shared], _flattened(bands[shared])]), barriers)


def joined(bands: IntArray, barriers: IntArray = NO_BARRIERS) -> IntArray:
    """Joins disjoint bands into fewer ones, where one ends and another continues it; all bands end at `barriers`."""
    pieces = _edges(shrink(bands))
    kept = np.ones(len(pieces), dtype=bool)
    heads, tails = _continued(pieces, barriers)
    while heads.size:
        # In a chain of pieces every second one absorbs the next: the length of a chain halves in each round.
        linked = np.union1d(heads, tails)
        head, tail = np.searchsorted(linked, heads), np.searchsorted(linked, tails)
        taken = _places_in_chains(head, tail, linked.size)[head] % 2 == 0
        into, gone = heads[taken], tails[taken]
        pieces[into[:, None], [1, 3, 5]] = pieces[gone[:, None], [1, 3, 5]]
        kept[gone] = False
        # What it joins bends a piece no less, so it goes on only where the absorbed piece did.
        linked[tail[taken]] = into
        heads, tails = linked[head[~taken]], tails[~taken]
        fits = _goes_on(pieces[heads], pieces[tails])
        heads, tails = heads[fits], tails[fits]
    return _bands_from_edges(pieces[kept])


def _edges(bands: IntArray) -> IntArray:
    q0, q1, k0, k1, lo, hi = bands.T
    left = np.maximum(k0, q0 + lo), np.maximum(k0, q1 - 1 + lo)
    right = np.minimum(k1, q0 + hi + 1), np.minimum(k1, q1 + hi)
    return np.stack([q0, q1, *left, *right], axis=1)


def _bands_from_edges(edges: IntArray) -> IntArray:
    q0, q1, l0, l1, r0, r1 = edges.T
    lo = np.where(l1 > l0, l1 - q1 + 1, -UNBOUNDED)
    hi = np.where(r1 > r0, r0 - q0 - 1, UNBOUNDED)
    return np.stack([q0, q1, l0, r1, lo, hi], axis=1)


def _sharing_queries(bands: IntArray) -> BoolArray:
    """Returns `[n]` True for bands in a group of several whose query ranges overlap in a chain."""
    order = np.argsort(bands[:, 0], kind="stable")
    begins = np.ones(len(bands), dtype=bool)
    begins[1:] = bands[order[1:], 0] >= np.maximum.accumulate(bands[order, 1])[:-1]
    group = np.cumsum(begins) - 1
    shared = np.empty(len(bands), dtype=bool)
    shared[order] = np.bincount(group)[group] > 1
    return shared


def _flattened(bands: IntArray) -> IntArray:
    """Returns the union of tight bands, cut into query ranges in which no two edges cross, so that key intervals
    merge.
    """
    straight = canonical(bands)
    breaks = np.unique(straight[:, :2])
    pieces, number = cut(straight, breaks[:-1], breaks[1:], queries=True)
    breaks = np.union1d(breaks, _crossings(_edges(pieces), number))
    pieces, number = cut(pieces, breaks[:-1], breaks[1:], queries=True)
    return _bands_from_edges(_merged(_edges(pieces), number))


def _crossings(pieces: IntArray, number: IntArray) -> IntArray:
    """Returns the queries, except the first of a range, at which a rising edge meets a level one of the same range."""
    q0, _, l0, l1, r0, r1 = pieces.T
    begin, end = np.concatenate([l0, r0]), np.concatenate([l1, r1])
    number, query = np.tile(number, 2), np.tile(q0, 2)
    level = begin == end
    heights = np.unique(begin[level])
    at = np.unique(number[level] * heights.size + np.searchsorted(heights, begin[level]))
    number, query, begin, end = (values[~level] for values in (number, query, begin, end))
    lowest, highest = (
        np.searchsorted(at, number * heights.size + np.searchsorted(heights, edge, side="right"))
        for edge in (begin, end)
    )
    count = highest - lowest
    met = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(lowest, count)
    return np.repeat(query - begin, count) + heights[at[met] % max(heights.size, 1)]


def _merged(pieces: IntArray, number: IntArray) -> IntArray:
    """Returns the union of edges; those of one number cover the same queries and do not cross."""
    by_right = np.lexsort((pieces[:, 5], pieces[:, 4], number))
    rank = np.empty_like(by_right)
    rank[by_right] = np.arange(by_right.size)
    order = np.lexsort((pieces[:, 3], pieces[:, 2], number))
    # The number comes first in both orders, so the furthest right edge so far is one of the same range.
    reach = pieces[by_right[np.maximum.accumulate(rank[order])], 4:]
    pieces, number = pieces[order], number[order]
    begins = np.ones(len(pieces) + 1, dtype=bool)
    begins[1:-1] = (number[1:] != number[:-1]) | (pieces[1:, 2:4] > reach[:-1]).any(axis=1)
    return np.concatenate([pieces[begins[:-1], :4], reach[begins[1:]]], axis=1)


def _continued(pieces: IntArray, barriers: IntArray) -> tuple[IntArray, IntArray]:
    """Returns pairs of a head and the tail that continues it; each piece is the head, and the tail, of at most one
    pair.
    """
    count = len(pieces)
    query, left = np.concatenate([pieces[:, 1], pieces[:, 0]]), np.concatenate([pieces[:, 3], pieces[:, 2]])
    is_tail = np.arange(2 * count) >= count
    order = np.lexsort((is_tail, left, query))
    fits = ~is_tail[order[:-1]] & is_tail[order[1:]] & (query[order[:-1]] == query[order[1:]])
    heads, tails = order[:-1][fits], order[1:][fits] - count
    fits = _goes_on(pieces[heads], pieces[tails]) & ~np.isin(pieces[heads, 1], barriers)
    return heads[fits], tails[fits]


def _places_in_chains(heads: IntArray, tails: IntArray, count: int) -> IntArray:
    """Returns `[count]` the number of links before each piece, in a logarithmic number of steps."""
    before, place = np.arange(count), np.zeros(count, dtype=np.int64)
    before[tails], place[tails] = heads, 1
    while (place[before] > 0).any():
        place, before = place + place[before], before[before]
    return place


def _goes_on(head: IntArray, tail: IntArray) -> BoolArray:
    """Returns True where the left edge still stays and then rises, and the right edge rises and then stays."""
    steps_of_head, steps_of_tail = head[:, 1] - head[:, 0] - 1, tail[:, 1] - tail[:, 0] - 1
    left, right = tail[:, 2] - head[:, 3], tail[:, 4] - head[:, 5]
    left_stays = (left == 0) & (head[:, 3] == head[:, 2])
    left_rises = (left == 1) & (tail[:, 3] - tail[:, 2] == steps_of_tail)
    right_stays = (right == 0) & (tail[:, 5] == tail[:, 4])
    right_rises = (right == 1) & (head[:, 5] - head[:, 4] == steps_of_head)
    return (left_stays | left_rises) & (right_stays | right_rises)
