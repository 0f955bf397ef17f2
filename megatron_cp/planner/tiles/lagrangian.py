"""Bounds bytes by Lagrangian relaxation, with OR-Tools (the extra `solver`). docs/tiles.md has the argument.

A *pattern* is a set of tiles that one rank may compute. At prices of tiles, of bytes received and of bytes sent, each
rank takes by itself the pattern that earns the most; what all of them earn bounds the bytes of every answer. Prices
come from a linear program over the patterns seen so far (column generation), in a box around the best prices.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.tiles.problem import TileProblem, cost

FloatArray = NDArray[np.float64]
_SCALE = 10**4  # prices are whole multiples of 1 / _SCALE, so that the bound is of integers
_EXACT = 2**53  # below, doubles hold every whole number
_HIGHEST = 8  # limit on the sum of tile prices, in units of all ranks if each sends as much as the start's busiest
_SEED = 7
_FIRST_ROUNDS, _MOST_ROUNDS = 7, 1000
_LONGEST, _SHORTEST = 0.3, 0.005  # time of one rank's pattern (CP-SAT's deterministic): limit; least that is counted
_BOX, _SMALLEST_BOX, _LARGEST_BOX = 0.3, 1e-4, 5.0  # largest change of prices, in mean prices
_CONVERGED = 0.005  # share of the bound; a smaller promise of the linear program is not worth a round


@dataclass(frozen=True, eq=False)
class _Prices:
    """The prices of tiles, `[tiles]`, and of a unit that each rank receives, and sends, `[ranks]`."""

    tiles: FloatArray
    received: FloatArray
    sent: FloatArray

    def all(self) -> FloatArray:
        return np.concatenate([self.tiles, self.received, self.sent])


class _Lines:
    """All rows, then all columns, with their costs in units of the greatest common divisor."""

    def __init__(self, problem: TileProblem) -> None:
        self.problem = problem
        self.unit = max(int(np.gcd.reduce(np.concatenate(problem.line_costs))), 1)
        costs = [each // self.unit for each in problem.line_costs]
        self.tile_lines = np.stack([problem.tile_rows, problem.tile_columns + problem.rows.owners.size])
        self.owners = np.concatenate([problem.rows.owners, problem.columns.owners])
        self.out, self.back = np.concatenate([costs[0], costs[2]]), np.concatenate([costs[1], costs[3]])

    def costs(self, rank: int, received: IntArray, sent: IntArray) -> IntArray:
        """Returns `[lines]` the price that a rank pays for each line, for what it and the owner send and receive."""
        factor = self.problem.pair_cost[self.owners, rank]
        out = self.out * (sent[self.owners] + received[rank])
        return factor * (out + self.back * (sent[rank] + received[self.owners]))

    def volumes(self, number: int, tiles: IntArray) -> tuple[IntArray, IntArray]:
        """Returns `[ranks]` the units that each receives, and sends, if rank `number` has these tiles."""
        lines = np.unique(self.tile_lines[:, tiles])
        owners, received = self.owners[lines], np.zeros(self.problem.num_ranks, dtype=np.int64)
        sent, rank = received.copy(), np.full_like(owners, number)
        factor = self.problem.pair_cost[owners, rank]
        for units, source, target in (
            (self.out[lines] * factor, owners, rank), (self.back[lines] * factor, rank, owners),
        ):  # fmt: skip
            np.add.at(sent, source, units)
            np.add.at(received, target, units)
        return received, sent


class _Pricing:
    """The integer program of one rank: the pattern that earns the most.

    Args:
        solver: OR-Tools' `cp_model`.
        lines: rows and columns.
        rank: the rank that takes the pattern.
        most: the most units that the rank may receive, and send, for foreign lines.
    """

    def __init__(self, solver: Any, lines: _Lines, rank: int, most: int) -> None:
        problem, weighted_sum = lines.problem, solver.LinearExpr.weighted_sum
        self.solver_module, self.model = solver, solver.CpModel()
        model = self.model
        self.tiles = [model.new_bool_var("") for _ in range(problem.num_tiles)]
        self.foreign = np.flatnonzero(lines.owners != rank)
        has = {line: model.new_bool_var("") for line in self.foreign.tolist()}
        self.has = list(has.values())
        for tile_lines in lines.tile_lines.tolist():
            for tile, line in zip(self.tiles, tile_lines, strict=True):
                if line in has:
                    model.add_implication(tile, has[line])
        model.add(weighted_sum(self.tiles, problem.work.tolist()) <= problem.load_cap)
        factor = problem.pair_cost[lines.owners[self.foreign], rank]
        for units in (lines.out, lines.back):
            model.add(weighted_sum(self.has, (units[self.foreign] * factor).tolist()) <= most)
        self.solver = solver.CpSolver()
        parameters = self.solver.parameters
        parameters.num_workers, parameters.random_seed = 1, _SEED
        # Full linear relaxation helped most in experiments (30 times as fast on `star`); presolve takes longer than it
        # saves.
        parameters.linearization_level, parameters.cp_model_presolve = 2, False
        parameters.max_deterministic_time = _LONGEST

    def best(self, prices: IntArray, costs: IntArray) -> tuple[int, IntArray, float]:
        """Returns an upper bound on what a pattern earns, a good pattern, and the solver's deterministic time."""
        values = np.concatenate([prices, -costs[self.foreign]])
        self.model.maximize(self.solver_module.LinearExpr.weighted_sum(self.tiles + self.has, values.tolist()))
        status = self.solver.solve(self.model)
        spent = max(float(self.solver.response_proto.deterministic_time), _SHORTEST)
        if status not in (self.solver_module.OPTIMAL, self.solver_module.FEASIBLE):
            return int(prices.sum()), np.empty(0, dtype=np.int64), spent  # no pattern earns more than all tiles
        chosen = np.flatnonzero([self.solver.value(tile) for tile in self.tiles])
        return max(math.ceil(self.solver.best_objective_bound), 0), chosen, spent


class _Master:
    """The restricted master program: covers all tiles by shares of known patterns, with the least maximal volume."""

    def __init__(self, solver: Any, lines: _Lines) -> None:
        self.lines, self.program, self.known = lines, solver.Solver.CreateSolver("GLOP"), set[tuple[int, bytes]]()
        program, size = self.program, lines.problem.num_ranks
        program.SuppressOutput()
        self.from_scratch = solver.MPSolverParameters()  # GLOP often fails from the last basis with other costs
        self.from_scratch.SetIntegerParam(self.from_scratch.INCREMENTALITY, self.from_scratch.INCREMENTALITY_OFF)
        self.infinity = program.infinity()
        self.objective = program.Objective()
        self.objective.SetMinimization()
        self.tiles = [program.Constraint(1, 1) for _ in range(lines.problem.num_tiles)]
        self.received, self.sent = ([program.Constraint(0, 0) for _ in range(size)] for _ in range(2))
        self.convexity = [program.Constraint(-self.infinity, 1) for _ in range(size)]
        most, self.box = self._variable(), []
        self.objective.SetCoefficient(most, 1)
        for constraint in self.received + self.sent:
            constraint.SetCoefficient(most, 1)
        for constraint in self.tiles + self.received + self.sent:
            above, below = self._variable(), self._variable()  # their costs limit the constraint's price
            constraint.SetCoefficient(above, 1)
            constraint.SetCoefficient(below, -1)
            self.box.append((above, below))

    def _variable(self) -> Any:
        return self.program.NumVar(0, self.infinity, "")

    def add(self, rank: int, tiles: IntArray) -> None:
        """Adds a pattern of a rank, unless it is known."""
        if (rank, tiles.tobytes()) in self.known:
            return
        self.known.add((rank, tiles.tobytes()))
        part = self._variable()
        self.convexity[rank].SetCoefficient(part, 1)
        for tile in tiles.tolist():
            self.tiles[tile].SetCoefficient(part, 1)
        for constraints, units in zip((self.received, self.sent), self.lines.volumes(rank, tiles), strict=True):
            for each in np.flatnonzero(units).tolist():
                constraints[each].SetCoefficient(part, -float(units[each]))

    def prices(self, center: _Prices, reach: FloatArray) -> tuple[float, _Prices] | None:
        """Returns the bound that these patterns promise, and its prices, no further from the center than `reach`.

        None where GLOP finds no optimum, because numbers are too far apart for floats.
        """
        around = center.all()
        for (above, below), most, least in zip(self.box, around + reach, np.maximum(around - reach, 0), strict=True):
            self.objective.SetCoefficient(above, float(most))
            self.objective.SetCoefficient(below, -float(least))
        if self.program.Solve(self.from_scratch) != self.program.OPTIMAL:
            return None
        found = [
            np.maximum([constraint.dual_value() for constraint in constraints], 0.0)
            for constraints in (self.tiles, self.received, self.sent)
        ]
        return float(self.objective.Value()), _Prices(*found)


class _Bound:
    """The search for prices: the best bound so far, and the time that is left."""

    def __init__(self, problem: TileProblem, start: IntArray, budget: float) -> None:
        cp_model = importlib.import_module("ortools.sat.python.cp_model")
        self.lines, self.budget = _Lines(problem), budget
        self.most = cost(problem, start) // self.lines.unit - 1  # a better answer has at most this
        self.master = _Master(importlib.import_module("ortools.linear_solver.pywraplp"), self.lines)
        self.pricing = [_Pricing(cp_model, self.lines, rank, self.most) for rank in range(problem.num_ranks)]
        self.highest = _HIGHEST * problem.num_ranks * (self.most + 1)
        self.value, self.least = -math.inf, 0
        for rank in range(problem.num_ranks):
            self.master.add(rank, np.flatnonzero(start == rank))

    def ended(self) -> bool:
        """Tells whether the start is proven best or time is up."""
        return self.least > self.most or self.budget <= 0

    def round(self, prices: _Prices) -> tuple[float, int]:
        """Returns the bound at these prices, in units, and the work of the patterns that earn the most."""
        tiles, received, sent = (
            np.round(each * _SCALE).astype(np.int64) for each in (prices.tiles, prices.received, prices.sent)
        )
        earned, work, weight = int(tiles.sum()), 0, int(received.sum() + sent.sum())
        for rank, pricing in enumerate(self.pricing):
            if self.budget <= 0 or weight == 0:
                return -math.inf, work
            most, chosen, spent = pricing.best(tiles, self.lines.costs(rank, received, sent))
            self.budget -= spent
            self.master.add(rank, chosen)
            earned, work = earned - most, work + int(self.lines.problem.work[chosen].sum())
        self.least = max(self.least, -(-earned // weight))
        return earned / weight, work

    def first_prices(self) -> _Prices:
        """Returns prices in proportion to work, at which ranks take about all of it: the best of a few."""
        problem = self.lines.problem
        even = np.full(problem.num_ranks, 0.5 / problem.num_ranks)
        # Equal prices have many best patterns, which slow the solver down.
        uneven = problem.work * np.random.Generator(np.random.PCG64(_SEED)).uniform(0.9, 1.1, problem.num_tiles)
        low, high = 0.0, 4.0 * max(self.most, 1) * problem.num_ranks / problem.total
        center = _Prices(high / 2 * uneven, even, even)
        for _ in range(_FIRST_ROUNDS):
            prices = _Prices((low + high) / 2 * uneven, even, even)
            value, work = self.round(prices)
            if value > self.value:
                self.value, center = value, prices
            low, high = (low, (low + high) / 2) if work > problem.total else ((low + high) / 2, high)
        return center

    def improve(self, center: _Prices) -> None:
        """Moves the prices while the bound rises."""
        box, mean = _BOX, np.full(center.tiles.size, center.tiles.mean())
        scale = np.concatenate([mean, center.received, center.sent])
        for _ in range(_MOST_ROUNDS):
            if self.ended():
                return
            found = self.master.prices(center, box * scale)
            if found is None or found[1].tiles.sum() > self.highest:
                box *= 0.7  # another program, which GLOP may solve
                continue
            promised, prices = found
            inside = bool((np.abs(prices.all() - center.all()) < box * scale - 1e-9).all())
            value, _ = self.round(prices)
            if value > self.value:
                box *= 1.5 if value - self.value >= 0.3 * (promised - self.value) else 1.0
                self.value, center = value, prices
            else:
                box = max(0.8 * box, _SMALLEST_BOX)
            if promised - self.value < _CONVERGED * max(self.value, 1.0):
                if inside or box > _LARGEST_BOX:
                    return
                box *= 4


def lagrangian_bound(problem: TileProblem, start: IntArray, *, budget: float) -> tuple[int, float]:
    """Returns a lower bound on the busiest rank's weighted bytes, at most the start's cost, and the budget left.

    The bound is 0 where integers of 64 bits or doubles would not hold it.

    Args:
        problem: the tiles.
        start: `[tiles]` an answer that keeps the load cap.
        budget: the limit in CP-SAT's deterministic time, so that equal calls find equal bounds.
    """
    found = _Bound(problem, start, budget)
    lines = 2 * problem.host_cost * int(found.lines.out.sum() + found.lines.back.sum())
    if _SCALE * (found.highest + lines) >= _EXACT:
        return 0, budget
    found.improve(found.first_prices())
    return min(found.least, found.most + 1) * found.lines.unit, max(found.budget, 0.0)
