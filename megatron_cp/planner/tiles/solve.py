"""`solve`: an answer to a tile problem, and how good it is."""

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
    """Who computes which tile.

    Attributes:
        ranks: `[tiles]` the rank of each.
        sent, received: `[num_ranks]` bytes to and from others.
        optimal: whether no answer to the problem has a busiest rank with less, which is proven.
        bound: bytes that the busiest rank sends or receives in any answer at least, those between hosts weighted.
        load_cap: the most work of a rank that was allowed.
        seconds: that it took.
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
    """Gives every tile to a rank so that the busiest sends and receives little.

    The same answer for the same arguments, on every rank and in every process, as long as a cache has the same files.

    Args:
        problem: the tiles.
        search_seconds: about how long the exact stage may search, on a core of its own; 0 for the fast stage alone. It
            needs OR-Tools, the extra `solver`.
        cache: a directory with answers to problems that were solved before, which is made where there is none. An
            answer is taken from it if it was allowed as long a search, and as many steps.
        steps: random moves of the fast stage: fewer for a problem that is not worth a second.

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
    """Both stages, the second where there is time for it; from the answer of a shorter search, if there is one."""
    bound = max(lower_bound(problem), 0 if known is None else known.bound)
    start = fast.search(problem, bound, steps) if known is None else known.ranks
    if seconds == 0:
        return Answer(start, bound, seconds, steps)
    found = exact.search(problem, start, seconds=seconds, bound=bound)
    return Answer(found.ranks, found.bound, seconds, steps)
