"""`solve`: finds an answer to a tile problem and measures it against a bound."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from megatron_cp.errors import ArgumentError, as_number, checked_integer
from megatron_cp.layout.memo import frozen
from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.tiles import exact, fast
from megatron_cp.planner.tiles.bounds import lower_bound
from megatron_cp.planner.tiles.cache import Answer, checked_directory, read, write
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


def solve(
    problem: TileProblem, *, search_seconds: float = 0.0, cache: str | os.PathLike[str] | None = None,
    steps: int = fast.USUAL_STEPS,
) -> Solution:  # fmt: skip
    """Assigns every tile to a rank so that the busiest rank sends and receives little.

    Equal arguments give equal answers on every rank and in every process, as long as a cache has the same files.

    Args:
        problem: the tiles.
        search_seconds: the approximate time of the exact stage, on a core of its own; 0 for the fast stage alone. It
            needs OR-Tools, the extra `solver`.
        cache: a directory with answers to problems that were solved before; it is created if it does not exist. An
            answer is taken from it if its search was allowed as many seconds and steps.
        steps: random moves of the fast stage; fewer for a problem that is not worth a second.

    Raises:
        ArgumentError: no answer is found under the load cap, OR-Tools is not installed, or the cache has an answer that
            does not fit the problem.
    """
    began = time.perf_counter()
    if not isinstance(problem, TileProblem):
        raise ArgumentError("problem", problem, "a TileProblem, as from tiles_of(mask, layout, weights=...)")
    if not 0 <= as_number(search_seconds) < np.inf:
        raise ArgumentError("search_seconds", search_seconds, "a number of seconds of at least 0")
    directory = checked_directory(cache)
    answer = None if directory is None else read(directory, problem)
    steps = checked_integer("steps", steps, 1)
    if answer is not None and answer.steps < steps:
        answer = None
    if answer is None or (answer.search_seconds < search_seconds and answer.bound < cost(problem, answer.ranks)):
        answer = _searched(problem, search_seconds, answer, steps)
        if directory is not None:
            write(directory, problem, answer)
    ranks = frozen(answer.ranks)
    sent, received = volumes(problem, ranks)
    reached = cost(problem, ranks)
    return Solution(
        ranks, sent, received, reached <= answer.bound, answer.bound, problem.load_cap, time.perf_counter() - began
    )


def _searched(problem: TileProblem, seconds: float, known: Answer | None, steps: int) -> Answer:
    """Runs the fast stage, unless an answer is known, and the exact stage if it has time."""
    bound = max(lower_bound(problem), 0 if known is None else known.bound)
    start = fast.search(problem, bound, steps) if known is None else known.ranks
    if seconds == 0:
        return Answer(start, bound, seconds, steps)
    found = exact.search(problem, start, seconds=seconds, bound=bound)
    return Answer(found.ranks, found.bound, seconds, steps)
