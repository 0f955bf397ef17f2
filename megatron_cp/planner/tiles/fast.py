"""The fast stage: grids, components and longest-first as starts, then local moves; hosts first where there are many.

Deterministic: the same problem has the same answer on every rank, in every process.
"""

from __future__ import annotations

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.tiles.anneal import Axis, Chains, Moves
from megatron_cp.planner.tiles.problem import Chunks, TileProblem, loads, longest_first
from megatron_cp.planner.tiles.starts import repaired, starts

_CHAINS, USUAL_STEPS = 64, 8000  # about a second on one core, for 64 tiles on 8 ranks
_STEPS_A_TILE = 200  # at most, so that small problems take milliseconds
_ENTRIES = 1 << 18  # of the tables of counts: fewer chains where there are many lines and ranks
_FEW_RANKS = 16  # above, groups of ranks come first
_LINES_A_GROUP = 6  # as many rows and columns has each group of ranks where groups come first


def search(problem: TileProblem, bound: int = 0, steps: int = USUAL_STEPS) -> IntArray:
    """`[tiles]` who computes each.

    Args:
        problem: the tiles.
        bound: a cost that is good enough to stop at.
        steps: random moves of each answer.

    Raises:
        ArgumentError: no answer is found under the load cap.
    """
    if problem.num_tiles == 0 or problem.num_ranks == 1:
        return np.zeros(problem.num_tiles, dtype=np.int64)
    groups = _groups(problem)
    rows, columns = problem.rows.owners[problem.tile_rows], problem.columns.owners[problem.tile_columns]
    answers = starts(rows, columns, problem.work, problem.num_ranks)
    moves = _moves(problem)
    chains = _chain_count(moves)
    answers = _best(moves, answers, max(chains // 2, 1))
    if groups is not None:
        answers = np.concatenate([_by_groups(problem, groups, steps)[:, None], answers], axis=1)
    own = steps if groups is None else steps // 2
    found = _improved(moves, _feasible(problem, answers), chains, own, bound)
    if found is None:
        raise _too_tight(problem)
    return found


def _too_tight(problem: TileProblem) -> ArgumentError:
    reached = int(loads(problem, longest_first(problem.work, problem.num_ranks)).max())
    mean = -(-problem.total // problem.num_ranks)
    remedy = f"The mean is {mean} pairs; tiles of fewer tokens allow less."
    return ArgumentError("load_cap", problem.load_cap, f"at least {reached} with these tiles", remedy)


def _feasible(problem: TileProblem, answers: IntArray) -> IntArray:
    """The answers, and the first few of them repaired."""
    mended = [repaired(problem, answers[:, number]) for number in range(min(answers.shape[1], 4))]
    mended.append(repaired(problem, longest_first(problem.work, problem.num_ranks)))
    kept = [answer for answer in mended if answer is not None]
    return np.concatenate([np.stack(kept, axis=1), answers], axis=1) if kept else answers


def _improved(moves: Moves, answers: IntArray, chains: int, steps: int, enough: int = 0) -> IntArray | None:
    """The best of what random moves make of some answers, each the start of several chains."""
    found = Chains(moves, answers[:, np.arange(chains) % answers.shape[1]], seed=1)
    found.run(min(steps, _STEPS_A_TILE * moves.work.size), enough)
    return found.best if np.isfinite(found.best_cost) else None


def _best(moves: Moves, answers: IntArray, count: int) -> IntArray:
    """The answers with the least energy, work above the load cap included."""
    chains = Chains(moves, answers, seed=0)
    chains.scale = max(float(chains.volumes.max(axis=(0, 1)).min()), 1.0)
    return answers[:, np.argsort(chains.energies(), kind="stable")[:count]]


def _chain_count(moves: Moves) -> int:
    lines = sum(axis.owners.size for axis in moves.axes)
    return int(np.clip(_ENTRIES // (lines * moves.num_ranks), 4, _CHAINS))


def _moves(problem: TileProblem) -> Moves:
    """The whole problem, for moves."""
    costs = [each.astype(np.float64) for each in problem.line_costs]
    axes = (
        Axis(problem.tile_rows, problem.rows.owners, costs[0], costs[1]),
        Axis(problem.tile_columns, problem.columns.owners, costs[2], costs[3]),
    )
    caps = np.full(problem.num_ranks, problem.load_cap)
    return Moves(problem.num_ranks, axes, problem.work, caps, problem.pair_cost.astype(np.float64))


# -- groups of ranks first ---------------------------------------------------------------------------------------------


def _groups(problem: TileProblem) -> IntArray | None:
    """`[num_ranks]` the group of each rank: its host, or one of about as many as each then has ranks."""
    if problem.hosts is not None and problem.hosts.max(initial=0) > 0:
        return np.unique(problem.hosts, return_inverse=True)[1]
    size = problem.num_ranks
    if size <= _FEW_RANKS:
        return None
    count = round(size**0.5)
    return np.arange(size) * count // size


def _by_groups(problem: TileProblem, groups: IntArray, steps: int) -> IntArray:
    """Tiles to groups of ranks, then those of each group to its ranks."""
    group_of_tile = _tiles_to_groups(problem, groups, steps)
    ranks = np.empty(problem.num_tiles, dtype=np.int64)
    for group in range(int(groups.max()) + 1):
        tiles, members = np.flatnonzero(group_of_tile == group), np.flatnonzero(groups == group)
        if tiles.size:
            ranks[tiles] = members[_within_group(problem, groups, tiles, members, steps)]
    return ranks


def _tiles_to_groups(problem: TileProblem, groups: IntArray, steps: int) -> IntArray:
    """`[tiles]` found on coarser tiles: each group has few rows and columns."""
    count = int(groups.max()) + 1
    rows, columns = (_coarse(chunks, groups) for chunks in (problem.rows, problem.columns))
    number, inverse = np.unique(
        rows[0][problem.tile_rows] * columns[1].owners.size + columns[0][problem.tile_columns], return_inverse=True
    )
    work = np.zeros(number.size, dtype=np.int64)
    np.add.at(work, inverse, problem.work)
    tile_rows, tile_columns = np.divmod(number, columns[1].owners.size)
    members = np.bincount(groups)
    mean = -(-problem.total * members // problem.num_ranks)
    caps = np.maximum(members * problem.load_cap, mean + int(work.max()))
    coarse = TileProblem(count, rows[1], columns[1], tile_rows, tile_columns, work, problem.weights,
                         load_cap=int(caps.max()))  # fmt: skip
    moves = _moves(coarse)
    moves = Moves(count, moves.axes, work, caps, moves.pair_cost)
    answers = starts(rows[1].owners[tile_rows], columns[1].owners[tile_columns], work, count)
    chains = _chain_count(moves)
    found = _improved(moves, _feasible(coarse, _best(moves, answers, chains)), chains, steps // 2)
    return (answers[:, 0] if found is None else found)[inverse]


def _coarse(chunks: Chunks, groups: IntArray) -> tuple[IntArray, Chunks]:
    """Chunks of one group merged to few, each of neighbours: the new chunk of each, and the new chunks."""
    owner = groups[chunks.owners]
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=int(groups.max()) + 1)
    place = np.arange(order.size) - np.repeat(np.cumsum(counts) - counts, counts)
    part = place * _LINES_A_GROUP // np.maximum(np.repeat(counts, counts), _LINES_A_GROUP)
    key = np.empty_like(owner)
    key[order] = owner[order] * _LINES_A_GROUP + part
    kept, new = np.unique(key, return_inverse=True)
    return new, Chunks(chunks.starts, chunks.total, new[chunks.chunk_of_range], kept // _LINES_A_GROUP)


def _within_group(problem: TileProblem, groups: IntArray, tiles: IntArray, members: IntArray, steps: int) -> IntArray:
    """Which member of a group computes each of its tiles. Lines of other groups cost every member that has them."""
    if members.size == 1:
        return np.zeros(tiles.size, dtype=np.int64)
    order = np.argsort(groups, kind="stable")
    place = np.empty_like(order)  # of each rank in its group
    place[order] = np.arange(order.size) - np.searchsorted(groups[order], groups[order])
    local = np.full(problem.num_ranks, members.size)
    local[members] = np.arange(members.size)
    axes, stand_ins, costs = [], [], problem.line_costs
    for lines, chunks, out, back in (
        (problem.tile_rows, problem.rows, costs[0], costs[1]),
        (problem.tile_columns, problem.columns, costs[2], costs[3]),
    ):
        kept, own = np.unique(lines[tiles], return_inverse=True)
        axes.append(Axis(own, local[chunks.owners[kept]], out[kept].astype(float), back[kept].astype(float)))
        stand_ins.append(place[chunks.owners[lines[tiles]]] % members.size)
    pair_cost = np.full((members.size + 1, members.size + 1), float(problem.host_cost))
    pair_cost[:-1, :-1] = problem.pair_cost[np.ix_(members, members)]
    mean = -(-int(problem.work[tiles].sum()) // members.size)
    cap = max(problem.load_cap, mean)
    moves = Moves(members.size, (axes[0], axes[1]), problem.work[tiles], np.full(members.size, cap), pair_cost)
    answers = starts(stand_ins[0], stand_ins[1], problem.work[tiles], members.size)
    chains = _chain_count(moves)
    found = _improved(moves, _best(moves, answers, chains), chains, steps // 4)
    return answers[:, 0] if found is None else found
