"""The fast stage: grids, components and longest-first as starts, then local moves.

Deterministic: the same problem has the same answer on every rank, in every process.
"""

from __future__ import annotations

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.tiles.anneal import Axis, Chains, Moves
from megatron_cp.planner.tiles.problem import TileProblem, loads, longest_first
from megatron_cp.planner.tiles.starts import repaired, starts

_CHAINS, USUAL_STEPS = 64, 8000  # about a second on one core, for 64 tiles on 8 ranks
_STEPS_A_TILE = 200  # a limit, so that small problems take milliseconds
_ENTRIES = 1 << 18  # limit on a table of counts: fewer chains where there are many lines and ranks
_FEW_RANKS = 16  # above, twice as many steps


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
    moves = _moves(problem)
    lines = sum(axis.owners.size for axis in moves.axes)
    count = int(np.clip(_ENTRIES // (lines * problem.num_ranks), 4, _CHAINS))
    answers = _best(moves, starts(rows, columns, problem.work, problem.num_ranks), max(count // 2, 1))
    answers = _feasible(problem, answers)
    chains = Chains(moves, answers[:, np.arange(count) % answers.shape[1]], seed=1)
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


def _best(moves: Moves, answers: IntArray, count: int) -> IntArray:
    """Returns the `count` answers with the least energy, which includes work above the load cap."""
    chains = Chains(moves, answers, seed=0)
    chains.scale = max(float(chains.volumes.max(axis=(0, 1)).min()), 1.0)
    return answers[:, np.argsort(chains.energies(), kind="stable")[:count]]


def _moves(problem: TileProblem) -> Moves:
    costs = [each.astype(np.float64) for each in problem.line_costs]
    axes = (
        Axis(problem.tile_rows, problem.rows.owners, costs[0], costs[1]),
        Axis(problem.tile_columns, problem.columns.owners, costs[2], costs[3]),
    )
    return Moves(problem.num_ranks, axes, problem.work, problem.load_cap, problem.pair_cost.astype(np.float64))
