"""The exact stage: the problem as an integer program for OR-Tools' CP-SAT, the extra `solver`.

    x[tile, rank]     the rank computes the tile; one rank a tile
    row[i, rank]      the rank has a tile of row i: implied by x; columns likewise
    load              the sum of work * x of each rank is at most the load cap
    z                 is least, and at least what each rank sends and what it receives, sums of costs * row, * column

A line that its owner computes a tile of costs nothing there, so there are variables for foreign ranks alone. Ranks
that own nothing may change places: of such answers one is searched. The solver finds other symmetries by itself.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.extras import install
from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.tiles import fast
from megatron_cp.planner.tiles.lagrangian import lagrangian_bound
from megatron_cp.planner.tiles.problem import TileProblem, cost, loads

MOST_CHOICES = 1 << 16  # of a tile and a rank: the program of more takes minutes to write down
_SEED = 7
_UNITS_A_SECOND = 0.5  # of CP-SAT's deterministic time: measured on a core of two that were busy
_MOVES_A_SECOND = 1500  # of each answer of the fast stage, where ranks are many: measured on one core, 64 ranks


@dataclass(frozen=True, eq=False)
class Exact:
    """What the solver found.

    Attributes:
        ranks: `[tiles]` the best answer.
        optimal: whether it is proven that none costs less.
        bound: that no answer costs less than.
    """

    ranks: IntArray
    optimal: bool
    bound: int


def search(problem: TileProblem, start: IntArray, *, seconds: float, bound: int = 0) -> Exact:
    """Improves an answer until it is proven best or time is up. The same answer for the same arguments.

    Args:
        problem: the tiles.
        start: `[tiles]` an answer that keeps the load cap.
        seconds: about how long; counted in what the solver does, not by a clock, so that every rank and every run
            ends with the same answer.
        bound: a cost that no answer is below.

    Raises:
        ArgumentError: OR-Tools is not installed.
    """
    model_of = _solver()
    reached = cost(problem, start)
    if reached <= bound or problem.num_tiles == 0:
        return Exact(start, True, reached)
    if text := beyond_solver(problem):
        warnings.warn(f"{text}.", stacklevel=3)
        longer = fast.search(problem, bound, fast.USUAL_STEPS + int(seconds * _MOVES_A_SECOND))
        return Exact(longer if cost(problem, longer) < reached else start, False, bound)
    budget = seconds * _UNITS_A_SECOND
    # At most half of the time is for the bound; what that leaves is for answers.
    lagrangian, left = lagrangian_bound(problem, start, budget=budget / 2)
    bound = max(bound, lagrangian)
    if reached <= bound:
        return Exact(start, True, reached)
    unit = max(int(np.gcd.reduce(np.concatenate(problem.line_costs))), 1)  # divides all costs: small ones are quicker
    model = _Model(model_of, problem, unit, -(-bound // unit), reached // unit)
    model.hint(_ordered(problem, start))
    solver = model_of.CpSolver()
    solver.parameters.num_workers = 8
    solver.parameters.interleave_search = True  # several strategies in turns, in one thread: so that the order is fixed
    solver.parameters.random_seed = _SEED
    solver.parameters.max_deterministic_time = budget / 2 + left
    solver.parameters.max_time_in_seconds = 60 * seconds + 60
    status = solver.solve(model.model)
    if status != model_of.OPTIMAL and solver.wall_time >= solver.parameters.max_time_in_seconds:
        # A clock, which would end ranks at different answers.
        remedy = "Search for less time, or once alone into a cache that all ranks read."
        raise ArgumentError("search_seconds", seconds, f"what ends within {60 * seconds + 60:g} s by the clock", remedy)
    if status not in (model_of.OPTIMAL, model_of.FEASIBLE):
        # The start is an answer, so none was found only because time was up.
        assert status == model_of.UNKNOWN, solver.status_name(status)
        return Exact(start, False, bound)
    ranks = model.answer(solver)
    found = cost(problem, ranks)
    least = max(bound, round(solver.best_objective_bound) * unit)
    if found >= reached:
        ranks, found = start, reached
    return Exact(ranks, found <= least, min(least, found))


def beyond_solver(problem: TileProblem) -> str:
    """Why a problem is too large for the solver, and what a search does instead; empty where it is not."""
    if problem.num_tiles * problem.num_ranks <= MOST_CHOICES:
        return ""
    text = f"{problem.num_tiles} tiles on {problem.num_ranks} ranks are more than {MOST_CHOICES} choices"
    return f"{text}: the search makes random moves alone, and proves nothing"


def _solver() -> Any:
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        remedy = f"Install it: {install('solver')}. Without it search_seconds=0 takes the fast stage alone."
        raise ArgumentError(
            "search_seconds", "a search, without OR-Tools", "0 where it is not installed", remedy
        ) from None


def _interchangeable(problem: TileProblem) -> list[list[int]]:
    """Sets of ranks of one host that own nothing."""
    host = np.zeros(problem.num_ranks, dtype=np.int64) if problem.hosts is None else problem.hosts
    owning = np.union1d(problem.rows.owners, problem.columns.owners)
    free = np.setdiff1d(np.arange(problem.num_ranks), owning)
    return [free[host[free] == each].tolist() for each in np.unique(host[free])]


def _ordered(problem: TileProblem, ranks: IntArray) -> IntArray:
    """The answer with interchangeable ranks in the order of their work, as the program wants them."""
    name, work = np.arange(problem.num_ranks), loads(problem, ranks)
    for same in _interchangeable(problem):
        name[np.array(same)[np.argsort(-work[same], kind="stable")]] = same
    return name[ranks]


class _Model:
    """The integer program, in units that divide all costs."""

    def __init__(self, solver: Any, problem: TileProblem, unit: int, least: int, most: int) -> None:
        self.problem, self.unit, size = problem, unit, problem.num_ranks
        self.model = model = solver.CpModel()
        self.tile = [[model.new_bool_var("") for _ in range(size)] for _ in range(problem.num_tiles)]
        self.most = model.new_int_var(least, most, "most")
        sent: list[list[Any]] = [[] for _ in range(size)]
        received: list[list[Any]] = [[] for _ in range(size)]
        costs = [each // unit for each in problem.line_costs]
        for lines, chunks, out, back in (
            (problem.tile_rows, problem.rows, costs[0], costs[1]),
            (problem.tile_columns, problem.columns, costs[2], costs[3]),
        ):
            self._add_lines(lines, chunks.owners, out.tolist(), back.tolist(), sent, received)
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
        """Which foreign ranks have tiles of a row or column, and what that costs them and its owner."""
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
        """Of ranks that own nothing and share a host, each has no less work than the next."""
        problem, model = self.problem, self.model
        for same in _interchangeable(problem):
            loads = [
                sum(int(work) * line[rank] for work, line in zip(problem.work, self.tile, strict=True)) for rank in same
            ]
            for first, second in itertools.pairwise(loads):
                model.add(first >= second)

    def hint(self, ranks: IntArray) -> None:
        """Begins the search at an answer."""
        for line, chosen in zip(self.tile, ranks.tolist(), strict=True):
            for rank, variable in enumerate(line):
                self.model.add_hint(variable, rank == chosen)

    def answer(self, solver: Any) -> IntArray:
        """`[tiles]` of what the solver holds."""
        return np.array([[solver.value(each) for each in line] for line in self.tile]).argmax(axis=1)
