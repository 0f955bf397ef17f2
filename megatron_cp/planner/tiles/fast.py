"""The fast stage: grids, components and longest-first as starts, then local moves.

Deterministic: the same problem has the same answer on every rank, in every process.
"""

from __future__ import annotations

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.array_types import BoolArray, IntArray
from megatron_cp.planner.tiles.anneal import Chains
from megatron_cp.planner.tiles.problem import TileProblem, loads, longest_first

_CHAINS, USUAL_STEPS = 64, 8000  # about a second on one core, for 64 tiles on 8 ranks
_STEPS_A_TILE = 200  # a limit, so that small problems take milliseconds
_ENTRIES = 1 << 18  # limit on a table of counts: fewer chains where there are many lines and ranks
_FEW_RANKS = 16  # above, twice as many steps
_SHUFFLES = 12  # random orders of ranks for each grid of the first answers


def search(problem: TileProblem, bound: int = 0, steps: int = USUAL_STEPS) -> IntArray:
    """Returns `[tiles]` the rank that computes each tile.

    Args:
        problem: the tiles.
        bound: a cost at which the search stops.
        steps: random moves of each answer.

    Raises:
        ArgumentError: no answer is found under the load cap.
    """
    if problem.num_tiles == 0 or problem.num_ranks == 1:
        return np.zeros(problem.num_tiles, dtype=np.int64)
    rows, columns = problem.rows.owners[problem.tile_rows], problem.columns.owners[problem.tile_columns]
    lines = sum(axis.owners.size for axis in problem.axes)
    count = int(np.clip(_ENTRIES // (lines * problem.num_ranks), 4, _CHAINS))
    answers = _best(problem, starts(rows, columns, problem.work, problem.num_ranks), max(count // 2, 1))
    answers = _feasible(problem, answers)
    chains = Chains(problem, answers[:, np.arange(count) % answers.shape[1]], seed=1)
    chains.run(min(steps * (1 + (problem.num_ranks > _FEW_RANKS)), _STEPS_A_TILE * problem.num_tiles), bound)
    if not np.isfinite(chains.best_cost):
        raise _too_tight(problem)
    return chains.best


def _too_tight(problem: TileProblem) -> ArgumentError:
    reached = int(loads(problem, longest_first(problem.work, problem.num_ranks)).max())
    mean = -(-problem.total // problem.num_ranks)
    remedy = f"The mean is {mean} pairs; tiles of fewer tokens allow less."
    return ArgumentError("load_cap", problem.load_cap, f"at least {reached} with these tiles", remedy)


def _feasible(problem: TileProblem, answers: IntArray) -> IntArray:
    """Adds repaired copies of the first few answers, and of longest-first assignment."""
    mended = [repaired(problem, answers[:, number]) for number in range(min(answers.shape[1], 4))]
    mended.append(repaired(problem, longest_first(problem.work, problem.num_ranks)))
    kept = [answer for answer in mended if answer is not None]
    return np.concatenate([np.stack(kept, axis=1), answers], axis=1) if kept else answers


def _best(problem: TileProblem, answers: IntArray, count: int) -> IntArray:
    """Returns the `count` answers with the least energy, which includes work above the load cap."""
    chains = Chains(problem, answers, seed=0)
    chains.scale = max(float(chains.volumes.max(axis=(0, 1)).min()), 1.0)
    return answers[:, np.argsort(chains.energies(), kind="stable")[:count]]


# -- first answers -----------------------------------------------------------------------------------------------------


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
    at = [np.zeros((axis.owners.size, size), dtype=np.int64) for axis in problem.axes]
    for count, axis in zip(at, problem.axes, strict=True):
        np.add.at(count, (axis.line_of_tile, ranks), 1)
    while (load > problem.load_cap).any():
        source = int(load.argmax())
        tiles = np.flatnonzero(ranks == source)
        fits = load[None] + problem.work[tiles, None] <= problem.load_cap
        if not fits.any():
            return None
        tile, target = _cheapest(problem, at, tiles, source, fits)
        ranks[tile] = target
        load[source] -= problem.work[tile]
        load[target] += problem.work[tile]
        for count, axis in zip(at, problem.axes, strict=True):
            count[axis.line_of_tile[tile], source] -= 1
            count[axis.line_of_tile[tile], target] += 1
    return ranks


def _cheapest(
    problem: TileProblem, at: list[IntArray], tiles: IntArray, source: int, fits: BoolArray
) -> tuple[int, int]:
    """Returns the tile and the target rank of the move that adds the fewest bytes for each unit of work."""
    added = np.zeros(fits.shape)
    for count, (lines, owners, out, back) in zip(at, problem.axes, strict=True):
        own = lines[tiles]
        comes = (count[own] == 0) * problem.pair_cost[owners[own]]
        leaves = (count[own, source] == 1) * problem.pair_cost[owners[own], source]
        added += (comes - leaves[:, None]) * (out + back)[own, None]
    share = np.where(fits, np.where(added > 0, added / problem.work[tiles, None], added), np.inf)
    tile, target = np.divmod(int(share.argmin()), share.shape[1])
    return int(tiles[tile]), int(target)
