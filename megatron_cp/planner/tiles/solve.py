"""`solve`: an answer to a tile problem, and how good it is."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from megatron_cp.errors import ArgumentError, as_number
from megatron_cp.layout.memo import frozen
from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.tiles.fast import search
from megatron_cp.planner.tiles.problem import TileProblem, check, volumes


@dataclass(frozen=True, eq=False)
class Solution:
    """Who computes which tile.

    Attributes:
        ranks: `[tiles]` the rank of each.
        sent, received: `[num_ranks]` bytes to and from others.
        optimal: whether no answer to the problem has a busiest rank with less, which is proven.
        bound: bytes that the busiest rank sends or receives in any answer, those between hosts weighted; 0 where none
            is known.
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


def solve(problem: TileProblem, *, search_seconds: float = 0.0) -> Solution:
    """Gives every tile to a rank so that the busiest sends and receives little.

    Args:
        problem: the tiles.
        search_seconds: how long the exact stage may search; 0 for the fast stage alone.

    Raises:
        ArgumentError: no answer is found under the load cap.
    """
    began = time.perf_counter()
    if not isinstance(problem, TileProblem):
        raise ArgumentError("problem", problem, "a TileProblem, as from tiles_of(mask, layout, weights=...)")
    if not 0 <= as_number(search_seconds) < np.inf:
        raise ArgumentError("search_seconds", search_seconds, "a number of seconds of at least 0")
    ranks = frozen(check(problem, search(problem)))
    sent, received = volumes(problem, ranks)
    return Solution(ranks, sent, received, False, 0, problem.load_cap, time.perf_counter() - began)
