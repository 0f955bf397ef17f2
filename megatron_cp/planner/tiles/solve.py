"""`solve`: finds an answer to a tile problem and measures it against a bound."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from megatron_cp.errors import ArgumentError, as_number, checked_integer
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.memo import frozen
from megatron_cp.planner.tiles import exact, fast
from megatron_cp.planner.tiles.bounds import lower_bound
from megatron_cp.planner.tiles.problem import TileProblem, cost, volumes


@dataclass(frozen=True, eq=False)
class Solution:
    """An assignment of tiles to ranks.

    Attributes:
        ranks: `[tiles]` the rank that computes each tile.
        sent, received: `[num_ranks]` bytes to and from other ranks.
        optimal: no answer has a busiest rank with less, which is proven.
        bound: a lower bound on the busiest rank's bytes in any answer, those between hosts weighted.
        load_cap: the most work that a rank was allowed.
        seconds: the time that the search took.
    """

    ranks: IntArray
    sent: IntArray
    received: IntArray
    optimal: bool
    bound: int
    load_cap: int
    seconds: float


def solve(problem: TileProblem, *, search_seconds: float = 0.0, steps: int = fast.USUAL_STEPS) -> Solution:
    """Assigns every tile to a rank so that the busiest rank sends and receives little.

    Equal arguments give equal answers on every rank and in every process.

    Args:
        problem: the tiles.
        search_seconds: the approximate time of the exact stage, on a core of its own; 0 for the fast stage alone. It
            needs OR-Tools, the extra `solver`.
        steps: random moves of the fast stage; fewer for a problem that is not worth a second.

    Raises:
        ArgumentError: no answer is found under the load cap, or OR-Tools is not installed.
    """
    began = time.perf_counter()
    if not isinstance(problem, TileProblem):
        raise ArgumentError("problem", problem, "a TileProblem, as from tiles_of(mask, layout, weights=...)")
    if not 0 <= as_number(search_seconds) < np.inf:
        raise ArgumentError("search_seconds", search_seconds, "a number of seconds of at least 0")
    bound = lower_bound(problem)
    ranks = fast.search(problem, bound, checked_integer("steps", steps, 1))
    if search_seconds:
        ranks, bound = exact.search(problem, ranks, seconds=search_seconds, bound=bound)
    ranks = frozen(ranks)
    sent, received = volumes(problem, ranks)
    is_best = cost(problem, ranks) <= bound
    return Solution(ranks, sent, received, is_best, bound, problem.load_cap, time.perf_counter() - began)
