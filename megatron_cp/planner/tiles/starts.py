"""The first answers of the fast stage: grids of ranks, and assignment tile by tile."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.tiles.problem import TileProblem, longest_first

_SHUFFLES = 12  # random orders of ranks for each grid


def starts(rows: IntArray, columns: IntArray, work: IntArray, size: int) -> IntArray:
    """Returns first answers, some of which have too much work on a rank.

    A grid of R x C ranks has groups of rows and groups of columns: a tile goes to the rank in the group of its row's
    owner and in that of its column's. A grid of n x 1 moves no query, one of 1 x n no key; ranks of a grid between the
    two receive less where the mask is dense.

    Args:
        rows, columns: `[tiles]` the owner of each tile's row and column.
        work: `[tiles]` visible pairs of each tile.
        size: the number of ranks.

    Returns:
        `[tiles, answers]`; the first is the longest-first assignment, which keeps the default load cap.
    """
    random = np.random.Generator(np.random.PCG64(5))
    natural = np.arange(size)
    orders = [natural, _component_order(rows, columns, size)]
    found = [longest_first(work, size)]
    for count in range(1, size + 1):
        if size % count:
            continue
        turns = [natural.reshape(count, -1).T.ravel(), natural.reshape(-1, count).T.ravel()]
        shuffles = [random.permutation(size) for _ in range(_SHUFFLES if 1 < count < size else 0)]
        found += [_grid_assignment(order, count, rows, columns) for order in (*orders, *turns, *shuffles)]
    answers = np.stack(found, axis=1)
    _, first = np.unique(answers, axis=1, return_index=True)
    return answers[:, np.sort(first)]


def _grid_assignment(order: IntArray, num_rows: int, rows: IntArray, columns: IntArray) -> IntArray:
    """Assigns each tile to the cell of its owners; `order` lists the ranks of the cells in `num_rows` rows."""
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    width = order.size // num_rows
    return order[place[rows] // width * width + place[columns] % width]


def _component_order(rows: IntArray, columns: IntArray, size: int) -> IntArray:
    """Orders ranks so that those whose queries see each other's keys, directly or not, are adjacent."""
    label = np.arange(size)
    while True:
        lowest = label.copy()
        np.minimum.at(lowest, rows, label[columns])
        np.minimum.at(lowest, columns, label[rows])
        if np.array_equal(lowest, label):
            return np.argsort(label, kind="stable")
        label = lowest


def repaired(problem: TileProblem, ranks_of_tiles: IntArray) -> IntArray | None:
    """Moves tiles from ranks with too much work to others, by the cheapest move each time.

    Returns:
        The new answer; None where a rank keeps too much because no tile fits elsewhere.
    """
    size, ranks = problem.num_ranks, ranks_of_tiles.copy()
    load = np.zeros(size, dtype=np.int64)
    np.add.at(load, ranks, problem.work)
    axes = _axes(problem)
    at = [np.zeros((owners.size, size), dtype=np.int64) for _, owners, _ in axes]
    for count, (lines, _, _) in zip(at, axes, strict=True):
        np.add.at(count, (lines, ranks), 1)
    while (load > problem.load_cap).any():
        source = int(load.argmax())
        tiles = np.flatnonzero(ranks == source)
        fits = load[None] + problem.work[tiles, None] <= problem.load_cap
        if not fits.any():
            return None
        tile, target = _cheapest(problem, axes, at, tiles, source, fits)
        ranks[tile] = target
        load[source] -= problem.work[tile]
        load[target] += problem.work[tile]
        for count, (lines, _, _) in zip(at, axes, strict=True):
            count[lines[tile], source] -= 1
            count[lines[tile], target] += 1
    return ranks


def _axes(problem: TileProblem) -> list[tuple[IntArray, IntArray, IntArray]]:
    """Returns, for rows and for columns, the line of each tile, the lines' owners and their costs both ways."""
    costs = problem.line_costs
    return [
        (problem.tile_rows, problem.rows.owners, costs[0] + costs[1]),
        (problem.tile_columns, problem.columns.owners, costs[2] + costs[3]),
    ]


def _cheapest(
    problem: TileProblem, axes: list[tuple[IntArray, IntArray, IntArray]], at: list[IntArray], tiles: IntArray,
    source: int, fits: NDArray[np.bool_],
) -> tuple[int, int]:  # fmt: skip
    """Returns the tile and the target rank of the move that adds the fewest bytes for each unit of work."""
    added = np.zeros(fits.shape)
    for count, (lines, owners, costs) in zip(at, axes, strict=True):
        own = lines[tiles]
        comes = (count[own] == 0) * problem.pair_cost[owners[own]]
        leaves = (count[own, source] == 1) * problem.pair_cost[owners[own], source]
        added += (comes - leaves[:, None]) * costs[own, None]
    share = np.where(fits, np.where(added > 0, added / problem.work[tiles, None], added), np.inf)
    tile, target = np.divmod(int(share.argmin()), share.shape[1])
    return int(tiles[tile]), int(target)
