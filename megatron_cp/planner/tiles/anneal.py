"""Improves many answers side by side by random moves, in numpy: the local moves of the fast stage.

A *chain* is an answer. A step draws one move for every chain: a tile, or all tiles that a rank has of a row or
column, go to another rank. It is kept if the chain's energy falls, or does not rise by more than a random threshold
that falls from step to step. Energy is the sum of fourth, later eighth, powers of what ranks send and receive,
which the busiest dominate, and of work above the load cap.

All ranks must find the same. So there is no clock in here, random numbers are those of a fixed seed, and floats are
only added, multiplied, divided and compared, in an order that does not depend on the machine: chains are the last axis
of every array, and sums go along others.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megatron_cp.layout.array_types import BoolArray, FloatArray, IntArray
from megatron_cp.planner.tiles.problem import Lines, TileProblem

# Chosen by experiments on tables of six masks: a higher price of overload, a higher power from the start, or more
# chains with fewer steps leave the busiest rank with an eighth more.
_OVERLOAD = 5.0  # energy of a rank with twice the load cap
_BITS, _DRAWS = 31, 6  # bits of a random number; random numbers of a chain in a step
_SEGMENTS = 12  # after each, the worst chains restart from the best answer
_STEEP = 9  # from this segment on, energy uses eighth powers
_HOT, _COOLING = 0.5, 0.628  # the first scale of the threshold, and its factor from segment to segment: ends at 0.003


class Chains:
    """Several answers side by side, with the loads and volumes of their ranks.

    Args:
        problem: the problem.
        answers: `[tiles, chains]` the rank of each tile.
        seed: the seed of random moves.
    """

    def __init__(self, problem: TileProblem, answers: IntArray, seed: int) -> None:
        self.problem, self.random = problem, np.random.Generator(np.random.PCG64(seed))
        tiles, self.count = answers.shape
        self.all = np.arange(self.count)
        self.work = np.append(problem.work, 0).astype(np.float64)
        self.lines = [np.append(axis.line_of_tile, 0) for axis in problem.axes]
        self.ranks = np.concatenate([answers, np.full((1, self.count), -1)])
        self._count()
        self.best, self.best_cost = np.full(tiles, -1), np.inf
        self.scale, self.squarings = 1.0, 2
        self._keep_best()

    @cached_property
    def tiles_of_lines(self) -> list[IntArray]:
        """The tiles of each line, for each axis; see `_tiles_of_lines`."""
        return [_tiles_of_lines(axis) for axis in self.problem.axes]

    def _count(self) -> None:
        """Counts tiles, volumes and loads of all answers from scratch."""
        size = self.problem.num_ranks
        held = self.ranks[:-1]
        self.tiles_at = []  # for each axis [lines, ranks, chains] the number of tiles of a line on a rank
        self.volumes = np.zeros((2, size, self.count))  # sent, received
        for axis in self.problem.axes:
            count = np.zeros((axis.owners.size, size, self.count), dtype=np.int32)
            np.add.at(count, (axis.line_of_tile[:, None], held, self.all), 1)
            self.tiles_at.append(count)
            line, rank, chain = np.nonzero(count)
            self._move_lines(self.volumes, axis, line, rank, chain, np.ones(line.size))
        self.loads = np.zeros((size, self.count))
        np.add.at(self.loads, (held, self.all), self.work[:-1, None])

    def _move_lines(
        self, into: FloatArray, axis: Lines, line: IntArray, rank: IntArray, chain: IntArray, sign: FloatArray
    ) -> None:
        """Adds the costs of lines that ranks gain or, with a negative sign, lose."""
        owner = axis.owners[line]
        factor = sign * self.problem.pair_cost[owner, rank]
        out, back = axis.out[line] * factor, axis.back[line] * factor
        place = np.concatenate([owner * self.count + chain, rank * self.count + chain])
        shape = (self.problem.num_ranks, self.count)
        for number, costs in enumerate(((out, back), (back, out))):
            into[number] += np.bincount(place, np.concatenate(costs), shape[0] * shape[1]).reshape(shape)

    def costs(self) -> FloatArray:
        """Returns `[chains]` the largest volume of a rank; infinite where a rank has too much work."""
        most = self.volumes.max(axis=(0, 1))
        return np.where(self.loads.max(axis=0) <= self.problem.load_cap, most, np.inf)

    def energy(self, volumes: FloatArray, loads: FloatArray) -> FloatArray:
        """Returns `[chains]` the energy of such volumes and loads."""
        share = volumes.reshape(-1, self.count) * (1 / self.scale)
        for _ in range(self.squarings):
            share *= share
        above = np.maximum(loads * (1 / max(self.problem.load_cap, 1)) - 1.0, 0.0)
        # The excess of work, plus a constant where there is any, so that a small excess is not free.
        return share.sum(axis=0) + _OVERLOAD * (above + 0.02 * (above > 0)).sum(axis=0)

    def energies(self) -> FloatArray:
        """Returns `[chains]` the energy of the present answers."""
        return self.energy(self.volumes, self.loads)

    def run(self, steps: int, enough: int = 0) -> None:
        """Draws moves, with a threshold that falls, until `steps` are made or an answer costs no more than `enough`."""
        each, heat = max(steps // _SEGMENTS, 1), _HOT
        for segment in range(_SEGMENTS):
            if self.best_cost <= enough:
                return
            self.scale, self.squarings = self._scale(), 2 + (segment >= _STEEP)
            self.now = self.energies()
            numbers = self.random.integers(0, 1 << _BITS, (each, _DRAWS, self.count))
            for step in range(each):
                self._step(step % 2, heat, numbers[step], single=step % 4 < 2)
            heat *= _COOLING
            if segment < _SEGMENTS - 1:
                self._replace_worst()

    def _scale(self) -> float:
        if np.isfinite(self.best_cost) and self.best_cost > 0:
            return float(self.best_cost)
        return max(float(self.volumes.max(axis=(0, 1)).min()), 1.0)

    def _step(self, number: int, heat: float, numbers: IntArray, *, single: bool) -> None:
        """Draws a move for each chain, of one tile or of all tiles that a rank has of a line, and keeps the good ones.

        Args:
            number: the axis of the line.
            heat: the scale of the threshold.
            numbers: `[_DRAWS, chains]` random numbers of `_BITS` bits.
            single: move one tile only.
        """
        axis, tiles = self.problem.axes[number], self.work.size - 1
        tile = _below(numbers[0], tiles)
        source, target = self.ranks[tile, self.all], self._targets(tile, numbers[1:-1])
        line = axis.line_of_tile[tile]
        members = tile[None] if single else self.tiles_of_lines[number][:, line]
        chosen = self.ranks[members, self.all] == source
        chosen &= source != target
        place, chain = np.nonzero(chosen)
        moved = members[place, chain]
        volumes, loads = self.volumes.copy(), self.loads.copy()
        self._update_volumes(volumes, number, line, source, target, chosen.sum(axis=0), moved, chain)
        work = (self.work[members] * chosen).sum(axis=0)
        loads[source, self.all] -= work
        loads[target, self.all] += work
        after = self.energy(volumes, loads)
        threshold = numbers[-1] * 2.0**-_BITS
        threshold = heat * (1 - threshold) / (threshold + 0.05)
        kept = (after - self.now <= threshold) & (source != target)
        self._apply(kept, number, line, source, target, moved, chain)
        self.volumes = np.where(kept, volumes, self.volumes)
        self.loads = np.where(kept, loads, self.loads)
        self.now = np.where(kept, after, self.now)
        self._keep_best()

    def _targets(self, tile: IntArray, numbers: IntArray) -> IntArray:
        """Draws a target rank for each tile: an owner, a rank with other tiles of the line, or any rank."""
        draw, target = _below(numbers[0], 8), _below(numbers[1], self.problem.num_ranks)
        for number, axis in enumerate(self.problem.axes):
            lines, table = axis.line_of_tile[tile], self.tiles_of_lines[number]
            target = np.where(draw == number, axis.owners[lines], target)
            place = _below(numbers[2 + number], len(table))
            other = self.ranks[table[place, lines], self.all]
            target = np.where((draw // 2 == number + 1) & (other >= 0), other, target)
        return target

    def _update_volumes(
        self, volumes: FloatArray, number: int, line: IntArray, source: IntArray, target: IntArray,
        count: IntArray, moved: IntArray, chain: IntArray,
    ) -> None:  # fmt: skip
        """Updates volumes by the lines that the ranks of a move lose and gain."""
        own, cross = self.tiles_at[number], self.tiles_at[1 - number]
        axis, other = self.problem.axes[number], self.problem.axes[1 - number]
        leaves = (own[line, source, self.all] == count) & (count > 0)
        comes = (own[line, target, self.all] == 0) & (count > 0)
        self._change(volumes, axis, line, source, target, self.all, leaves, comes)
        across, begin, end = self.lines[1 - number][moved], source[chain], target[chain]
        leaves, comes = cross[across, begin, chain] == 1, cross[across, end, chain] == 0
        self._change(volumes, other, across, begin, end, chain, leaves, comes)

    def _change(
        self, volumes: FloatArray, axis: Lines, line: IntArray, source: IntArray, target: IntArray, chain: IntArray,
        leaves: BoolArray, comes: BoolArray,
    ) -> None:  # fmt: skip
        lines, chains = np.concatenate([line[leaves], line[comes]]), np.concatenate([chain[leaves], chain[comes]])
        ranks = np.concatenate([source[leaves], target[comes]])
        sign = np.ones(lines.size)
        sign[: int(leaves.sum())] = -1
        self._move_lines(volumes, axis, lines, ranks, chains, sign)

    def _apply(
        self, kept: BoolArray, number: int, line: IntArray, source: IntArray, target: IntArray,
        moved: IntArray, chain: IntArray,
    ) -> None:  # fmt: skip
        """Moves the tiles of the chains that accept their move."""
        taken = kept[chain]
        moved, chain = moved[taken], chain[taken]
        begin, end = source[chain], target[chain]
        self.ranks[moved, chain] = end
        own, cross = self.tiles_at[number], self.tiles_at[1 - number]
        across = self.lines[1 - number][moved]
        cross[across, begin, chain] -= 1
        cross[across, end, chain] += 1
        count = np.bincount(chain, minlength=self.count).astype(np.int32)
        own[line, source, self.all] -= count
        own[line, target, self.all] += count

    def _keep_best(self) -> None:
        costs = self.costs()
        least = int(costs.argmin())
        if costs[least] < self.best_cost:
            self.best, self.best_cost = self.ranks[:-1, least].copy(), float(costs[least])

    def _replace_worst(self) -> None:
        """Restarts the quarter of chains with the most energy from the best answer so far."""
        worst = np.argsort(-self.now, kind="stable")[: self.count // 4]
        if worst.size and np.isfinite(self.best_cost):
            self.ranks[:-1, worst] = self.best[:, None]
            self._count()


def _below(numbers: IntArray, limit: int) -> IntArray:
    """Scales random numbers of `_BITS` bits to the range from 0 up to, but not including, `limit`."""
    return numbers * limit >> _BITS


def _tiles_of_lines(axis: Lines) -> IntArray:
    """Returns `[longest, lines]` the tiles of each line, padded with the number of tiles, which is no tile."""
    order = np.argsort(axis.line_of_tile, kind="stable")
    lines = axis.line_of_tile[order]
    counts = np.bincount(lines, minlength=axis.owners.size)
    place = np.arange(order.size) - (np.cumsum(counts) - counts)[lines]
    found = np.full((int(counts.max(initial=0)), axis.owners.size), order.size)
    found[place, lines] = order
    return found
