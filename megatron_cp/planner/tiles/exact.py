"""The exact stage: solves the problem as an integer program, by OR-Tools' CP-SAT (the extra `solver`).

    x[tile, rank]     the rank computes the tile; one rank a tile
    row[i, rank]      the rank has a tile of row i: implied by x; column[j, rank] is its counterpart
    load              the sum of work * x of each rank is at most the load cap
    z                 is least, and at least what each rank sends and what it receives, sums of costs * row, * column

A line that its owner computes a tile of costs nothing there, so there are variables for foreign ranks alone. Ranks
that own nothing are interchangeable, so only one order of them is searched. The solver finds other symmetries itself.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.extras import install
from megatron_cp.layout.array_types import IntArray
from megatron_cp.planner.tiles import fast
from megatron_cp.planner.tiles.problem import TileProblem, cost, loads

MOST_CHOICES = 1 << 16  # pairs of a tile and a rank; with more, the program takes minutes to build
_SEED = 7
_UNITS_A_SECOND = 0.5  # CP-SAT's deterministic time in a second: measured on one of two busy cores
_MOVES_A_SECOND = 1500  # random moves of an answer in a second, for many ranks: measured on one core, 64 ranks


def search(problem: TileProblem, start: IntArray, *, seconds: float, bound: int = 0) -> tuple[IntArray, int]:
    """Improves an answer until it is proven best or time is up. Equal arguments give equal answers.

    Args:
        problem: the tiles.
        start: `[tiles]` an answer that keeps the load cap.
        seconds: the approximate time limit; counted in the solver's deterministic time, not by a clock, so that every
            rank and every run ends with the same answer.
        bound: a lower bound on the cost of any answer.

    Returns:
        The best answer, `[tiles]`, and the highest lower bound that is known then.

    Raises:
        ArgumentError: OR-Tools is not installed.
    """
    model_of = _solver()
    reached = cost(problem, start)
    if reached <= bound or problem.num_tiles == 0:
        return start, reached
    if text := beyond_solver(problem):
        warnings.warn(f"{text}.", stacklevel=3)
        longer = fast.search(problem, bound, fast.USUAL_STEPS + int(seconds * _MOVES_A_SECOND))
        return (longer if cost(problem, longer) < reached else start), bound
    unit = max(int(np.gcd.reduce(np.concatenate(problem.line_costs))), 1)  # divides all costs: small ones are quicker
    model = _Model(model_of, problem, unit, -(-bound // unit), reached // unit)
    model.hint(_ordered(problem, start))
    solver = model_of.CpSolver()
    solver.parameters.num_workers = 8
    solver.parameters.interleave_search = True  # strategies take turns in one thread, in a fixed order
    solver.parameters.random_seed = _SEED
    solver.parameters.max_deterministic_time = seconds * _UNITS_A_SECOND
    solver.parameters.max_time_in_seconds = 60 * seconds + 60
    status = solver.solve(model.model)
    if status != model_of.OPTIMAL and solver.wall_time >= solver.parameters.max_time_in_seconds:
        # The clock ended the search, which may give ranks different answers.
        remedy = "Search for less time, or on a machine that is less busy."
        raise ArgumentError("search_seconds", seconds, f"what ends within {60 * seconds + 60:g} s by the clock", remedy)
    if status not in (model_of.OPTIMAL, model_of.FEASIBLE):
        # The start is an answer, so the solver found none only because time was up.
        assert status == model_of.UNKNOWN, solver.status_name(status)
        return start, bound
    ranks = model.answer(solver)
    found = cost(problem, ranks)
    least = max(bound, round(solver.best_objective_bound) * unit)
    if found >= reached:
        ranks, found = start, reached
    return ranks, min(least, found)


def beyond_solver(problem: TileProblem) -> str:
    """Explains why a problem is too large for the solver, and what a search does instead; empty where it is not."""
    if problem.num_tiles * problem.num_ranks <= MOST_CHOICES:
        return ""
    text = f"{problem.num_tiles} tiles on {problem.num_ranks} ranks are more than {MOST_CHOICES} choices"
    return f"{text}: the search makes only random moves, and proves nothing"


def _solver() -> Any:
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        remedy = f"Install it: {install('solver')}. Without it, pass search_seconds=0, which uses only the fast stage."
        raise ArgumentError(
            "search_seconds", "a search, without OR-Tools", "0 where it is not installed", remedy
        ) from None


def _interchangeable(problem: TileProblem) -> list[list[int]]:
    """Returns, for each host, the ranks that own nothing."""
    host = np.zeros(problem.num_ranks, dtype=np.int64) if problem.hosts is None else problem.hosts
    owning = np.union1d(problem.rows.owners, problem.columns.owners)
    free = np.setdiff1d(np.arange(problem.num_ranks), owning)
    return [free[host[free] == each].tolist() for each in np.unique(host[free])]


def _ordered(problem: TileProblem, ranks: IntArray) -> IntArray:
    """Returns the answer with interchangeable ranks in falling order of work, as the program requires."""
    name, work = np.arange(problem.num_ranks), loads(problem, ranks)
    for same in _interchangeable(problem):
        name[np.array(same)[np.argsort(-work[same], kind="stable")]] = same
    return name[ranks]


class _Model:
    """The integer program, in units that divide all costs."""

    def __init__(self, solver: Any, problem: TileProblem, unit: int, least: int, most: int) -> None:
        self.problem, size = problem, problem.num_ranks
        self.model = model = solver.CpModel()
        self.tile = [[model.new_bool_var("") for _ in range(size)] for _ in range(problem.num_tiles)]
        self.most = model.new_int_var(least, most, "most")
        sent: list[list[Any]] = [[] for _ in range(size)]
        received: list[list[Any]] = [[] for _ in range(size)]
        for lines, owners, out, back in problem.axes:
            self._add_lines(lines, owners, (out // unit).tolist(), (back // unit).tolist(), sent, received)
        for line in self.tile:
            model.add_exactly_one(line)
        for rank in range(size):
            work = [int(work) * line[rank] for work, line in zip(problem.work, self.tile, strict=True)]
            model.add(sum(work) <= problem.load_cap)
            model.add(sum(sent[rank]) <= self.most)
            model.add(sum(received[rank]) <= self.most)
        self._break_symmetry()
        model.minimize(self.most)

    def _add_lines(
        self, lines: IntArray, owners: IntArray, out: list[int], back: list[int], sent: list[list[Any]],
        received: list[list[Any]],
    ) -> None:  # fmt: skip
        """Adds a variable for each line and foreign rank, and its cost to the rank and to the owner."""
        problem, model, size = self.problem, self.model, self.problem.num_ranks
        for line, owner in enumerate(owners.tolist()):
            tiles = np.flatnonzero(lines == line).tolist()
            for rank in range(size):
                if rank == owner or not tiles:
                    continue
                has = model.new_bool_var("")
                for tile in tiles:
                    model.add_implication(self.tile[tile][rank], has)
                factor = int(problem.pair_cost[owner, rank])
                sent[owner].append(out[line] * factor * has)
                received[rank].append(out[line] * factor * has)
                sent[rank].append(back[line] * factor * has)
                received[owner].append(back[line] * factor * has)

    def _break_symmetry(self) -> None:
        """Orders interchangeable ranks by falling work."""
        problem, model = self.problem, self.model
        for same in _interchangeable(problem):
            loads = [
                sum(int(work) * line[rank] for work, line in zip(problem.work, self.tile, strict=True)) for rank in same
            ]
            for first, second in itertools.pairwise(loads):
                model.add(first >= second)

    def hint(self, ranks: IntArray) -> None:
        """Starts the search at an answer."""
        for line, chosen in zip(self.tile, ranks.tolist(), strict=True):
            for rank, variable in enumerate(line):
                self.model.add_hint(variable, rank == chosen)

    def answer(self, solver: Any) -> IntArray:
        """Returns `[tiles]` the ranks in the solver's solution."""
        return np.array([[solver.value(each) for each in line] for line in self.tile]).argmax(axis=1)
