"""Cuts a mask into tiles, and turns an assignment of tiles into the bands that each rank computes."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout import Layout, Mask
from megatron_cp.layout import bands as band
from megatron_cp.layout.array_types import IntArray
from megatron_cp.planner.tiles.problem import AxisChunks, TileProblem, TileWeights, check, default_load_cap

MOST_PIECES = 1 << 22  # pieces of bands cut at all chunks; numpy takes seconds for them
USUAL_TILES = 1 << 14  # above, chunks of one owner are merged
# Tiles are cut, if that helps, until none has more than 1 / _SHARE of the mean work. With 4, causal receives 15 % more;
# with 8, strided and global_local are cut finer than moves can use.
_SHARE = 5
_RANGES_A_RANK = 16  # limit on the mean number of ranges that cutting makes


class _CutBands(NamedTuple):
    """Bands cut at the ranges of both axes, `[n]` each: the band, the range of rows and of columns, visible pairs."""

    band: IntArray
    row: IntArray
    column: IntArray
    work: IntArray


def tiles_of(
    mask: Mask,
    queries: Layout,
    keys: Layout | None = None,
    *,
    weights: TileWeights,
    imbalance: float = 1.05,
    load_cap: int | None = None,
    hosts: IntArray | None = None,
    host_cost: int = 1,
    usual_tiles: int = USUAL_TILES,
) -> TileProblem:
    """Cuts a mask into tiles.

    Chunks begin where a rank's fragment does, where a document does and where a band of the mask does. A chunk of a
    tile with more than a fifth of the mean work is halved, up to 16 ranges a rank. Where there are more tiles than
    `usual_tiles`, and where documents lie on one rank only, chunks of one owner are merged.

    Args:
        mask: the visible pairs.
        queries, keys: the layouts of query and key rows; None for the same layout.
        weights: bytes of a token.
        imbalance: the busiest rank's work over the mean, as far as tiles allow that.
        load_cap: the most pairs of one rank; replaces `imbalance`.
        hosts, host_cost: as in `TileProblem`.
        usual_tiles: above so many, chunks of one owner are merged, down to one chunk of rows and one of columns.

    Raises:
        ArgumentError: layouts of other documents or numbers of ranks than the mask's, or of so many fragments that
            a mask is cut into more than 2**22 pieces or 2**16 tiles.

    Example:
        >>> from megatron_cp.layout import Packing
        >>> packing = Packing([16])
        >>> layout = Layout.contiguous(packing, 4)
        >>> problem = tiles_of(Mask.causal(packing), layout, weights=TileWeights(1, 1, 2, 0))
        >>> problem.num_tiles, problem.total, problem.load_cap
        (36, 136, 35)
    """
    keys = queries if keys is None else keys
    _check_layouts(mask, queries, keys)
    size = queries.cp_size
    row_starts, column_starts = _edges(mask.bands[:, :2], queries), _edges(mask.bands[:, 2:4], keys)
    row_starts, column_starts, pieces = _halved(mask, row_starts, column_starts, size)
    owners = queries.located(row_starts)[0], keys.located(column_starts)[0]
    for groups in (_RANGES_A_RANK, 8, 4, 2, 1):
        row_chunks, column_chunks = _merge(pieces, owners, size, groups)
        tile, work = _tiles(row_chunks[pieces.row], column_chunks[pieces.column], pieces.work, column_chunks)
        if work.size <= usual_tiles:
            break
    rows = _chunks(row_starts, queries, row_chunks, owners[0])
    columns = _chunks(column_starts, keys, column_chunks, owners[1])
    cap = default_load_cap(work, size, imbalance) if load_cap is None else load_cap
    return TileProblem(
        size, rows, columns, *np.divmod(tile, columns.owners.size), work, weights,
        load_cap=cap, hosts=hosts, host_cost=host_cost,
    )  # fmt: skip


def bands_by_rank(mask: Mask, problem: TileProblem, ranks_of_tiles: IntArray) -> tuple[IntArray, IntArray]:
    """Splits the mask into bands by the rank that computes them.

    Args:
        mask: the mask from which the problem was made.
        problem: the tiles.
        ranks_of_tiles: `[tiles]` the rank that computes each tile.

    Returns:
        `[n, 6]` disjoint bands over the streams (see `layout/bands.py`), rank after rank and each rank's in the order
        of first queries, which together are the mask; and `[num_ranks + 1]` where those of each rank begin.

    Raises:
        ArgumentError: a mask that the problem was not made of, or an answer that does not fit it.
    """
    ranks = check(problem, ranks_of_tiles)
    rows, columns = problem.rows, problem.columns
    if (rows.total, columns.total) != (mask.packing.total, mask.kv_packing.total) or mask.area != problem.total:
        raise ArgumentError("mask", mask, f"the mask that the problem was made of, with {problem.total} pairs")
    pieces = _cut(mask, rows.starts, columns.starts)
    width = columns.owners.size
    number_of_pair = problem.tile_rows * width + problem.tile_columns
    order = np.argsort(number_of_pair)
    pair = rows.chunk_of_range[pieces.row] * width + columns.chunk_of_range[pieces.column]
    found = np.minimum(np.searchsorted(number_of_pair[order], pair), order.size - 1)
    if pair.size and not np.array_equal(number_of_pair[order[found]], pair):
        raise ArgumentError("mask", mask, "the mask that the problem was made of")
    rank = ranks[order[found]]
    runs, rank = _runs_of_columns(mask, pieces, rank, problem)
    offsets = np.searchsorted(rank, np.arange(problem.num_ranks + 1))
    barriers = mask.packing.barriers
    parts = [band.joined(runs[first:last], barriers) for first, last in itertools.pairwise(offsets.tolist())]
    parts = [part[np.lexsort((part[:, 2], part[:, 0]))] for part in parts]
    return np.concatenate(parts), np.concatenate([[0], np.cumsum([len(part) for part in parts])])


def _runs_of_columns(mask: Mask, pieces: _CutBands, rank: IntArray, problem: TileProblem) -> tuple[IntArray, IntArray]:
    """Joins pieces of one band, range of rows and rank that are adjacent along the keys; returns bands and ranks."""
    order = np.lexsort((pieces.column, pieces.row, pieces.band, rank))
    number, row, column, rank = pieces.band[order], pieces.row[order], pieces.column[order], rank[order]
    first = np.ones(order.size, dtype=bool)
    same = (number[1:] == number[:-1]) & (row[1:] == row[:-1]) & (rank[1:] == rank[:-1])
    first[1:] = ~(same & (column[1:] == column[:-1] + 1))
    last = np.append(first[1:], True)[: order.size]
    row_ends = np.append(problem.rows.starts[1:], problem.rows.total)
    column_ends = np.append(problem.columns.starts[1:], problem.columns.total)
    runs = mask.bands[number[first]]
    runs[:, 0] = np.maximum(runs[:, 0], problem.rows.starts[row[first]])
    runs[:, 1] = np.minimum(runs[:, 1], row_ends[row[first]])
    runs[:, 2] = np.maximum(runs[:, 2], problem.columns.starts[column[first]])
    runs[:, 3] = np.minimum(runs[:, 3], column_ends[column[last]])
    return band.tight_boxes(runs), rank[first]


# -- where chunks begin ------------------------------------------------------------------------------------------------


def _edges(ranges: IntArray, layout: Layout) -> IntArray:
    """Returns the sorted places where fragments or bands begin or end, without the end of the stream."""
    found = np.unique(np.concatenate([[0], layout.starts, ranges.ravel()]))
    return found[found < layout.packing.total]


def _halved(mask: Mask, rows: IntArray, columns: IntArray, size: int) -> tuple[IntArray, IntArray, _CutBands]:
    """Returns the edges, halving ranges of tiles with too much work, and the mask cut at them."""
    limit, most = mask.area // (_SHARE * size), _RANGES_A_RANK * size
    while True:
        pieces = _cut(mask, rows, columns)
        large = pieces.work > limit
        if not large.any() or max(rows.size, columns.size) > most:
            return rows, columns, pieces
        more_rows = _middles(rows, mask.packing.total, pieces.row[large])
        more_columns = _middles(columns, mask.kv_packing.total, pieces.column[large])
        if not more_rows.size + more_columns.size:
            return rows, columns, pieces
        rows, columns = np.union1d(rows, more_rows), np.union1d(columns, more_columns)


def _middles(starts: IntArray, total: int, numbers: IntArray) -> IntArray:
    """Returns the middles of the numbered ranges that have two tokens or more."""
    numbers = np.unique(numbers)
    begin, end = starts[numbers], np.append(starts[1:], total)[numbers]
    return ((begin + end) // 2)[end - begin > 1]


def _cut(mask: Mask, rows: IntArray, columns: IntArray) -> _CutBands:
    pieces, row, number = _cut_axis(mask.bands, rows, mask.packing.total, queries=True)
    pieces, column, inner = _cut_axis(pieces, columns, mask.kv_packing.total, queries=False)
    return _CutBands(number[inner], row[inner], column, band.areas(pieces))


def _cut_axis(bands: IntArray, starts: IntArray, total: int, *, queries: bool) -> tuple[IntArray, IntArray, IntArray]:
    """Cuts bands at ranges that lie end to end, as `cut_up` does; refuses so many pieces that this takes seconds."""
    ends = np.append(starts[1:], total)
    _, count = band.ranges_met(bands, starts, ends, queries=queries)
    if int(count.sum()) > MOST_PIECES:
        remedy = "Use a contiguous or balanced layout, or another scheme: tiles are for few, long fragments."
        allowed = f"a layout that cuts the mask into at most {MOST_PIECES} pieces"
        raise ArgumentError("layout", f"{starts.size} ranges, {int(count.sum())} pieces", allowed, remedy)
    return band.cut_up(bands, starts, ends, queries=queries)


# -- chunks of several ranges ------------------------------------------------------------------------------------------


def _merge(pieces: _CutBands, owners: tuple[IntArray, IntArray], size: int, groups: int) -> tuple[IntArray, IntArray]:
    """Returns the chunk of each range of rows, and of columns.

    Ranges whose tiles all lie between one owner's own rows and columns are merged as far as a chunk stays a small part
    of the work: they travel only if work must move. Of the other ranges, each owner has at most `groups` chunks.
    """
    limit = max(int(pieces.work.sum()) // (_SHARE * size), 1)
    is_local = owners[0][pieces.row] == owners[1][pieces.column]
    found = []
    for lines, own in ((pieces.row, owners[0]), (pieces.column, owners[1])):
        work, travels = np.zeros(own.size, dtype=np.int64), np.zeros(own.size, dtype=bool)
        np.add.at(work, lines, pieces.work)
        travels[lines[~is_local]] = True
        found.append(_groups(own, travels, work, limit, groups))
    return found[0], found[1]


def _groups(owners: IntArray, travels: IntArray, work: IntArray, limit: int, groups: int) -> IntArray:
    """Returns `[ranges]` the chunk of each range, numbered in the order of first ranges."""
    chunk = np.arange(owners.size)
    for owner in np.unique(owners):
        own = owners == owner
        local, others = np.flatnonzero(own & ~travels), np.flatnonzero(own & travels)
        chunk[local] = local[_runs(work[local], limit)]
        if others.size > groups:
            share = max(-(-int(work[others].sum()) // groups), 1)
            before = np.cumsum(work[others]) - work[others]
            part = np.minimum(before // share, groups - 1)
            chunk[others] = others[np.searchsorted(part, part)]
    return np.unique(chunk, return_inverse=True)[1]


def _runs(work: IntArray, limit: int) -> IntArray:
    """Groups neighbours into runs of at most `limit` work; returns `[n]` where the run of each begins."""
    first, found, held = 0, [], 0
    for place, each in enumerate(work.tolist()):
        if held + each > limit:
            first, held = place, 0
        held += each
        found.append(first)
    return np.array(found, dtype=np.int64)


def _tiles(rows: IntArray, columns: IntArray, work: IntArray, chunks: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the tiles with visible pairs, as `row * columns + column` in rising order, and the pairs of each."""
    number, inverse = np.unique(rows * (int(chunks.max(initial=0)) + 1) + columns, return_inverse=True)
    total = np.zeros(number.size, dtype=np.int64)
    np.add.at(total, inverse, work)
    return number, total


def _chunks(starts: IntArray, layout: Layout, chunk_of_range: IntArray, owners: IntArray) -> AxisChunks:
    _, first = np.unique(chunk_of_range, return_index=True)
    return AxisChunks(starts, layout.packing.total, chunk_of_range, owners[first])


def _check_layouts(mask: Mask, queries: Layout, keys: Layout) -> None:
    if not isinstance(mask, Mask):
        raise ArgumentError("mask", mask, "a Mask, as in Mask.causal(packing)")
    for argument, layout, packing in (("queries", queries, mask.packing), ("keys", keys, mask.kv_packing)):
        if not isinstance(layout, Layout):
            raise ArgumentError(argument, layout, "a Layout, as in Layout.contiguous(packing, 8)")
        if layout.packing != packing:
            raise ArgumentError(argument, layout, f"a layout of the mask's documents, {packing}")
    checked_integer("keys", keys.cp_size, queries.cp_size, queries.cp_size)
