"""`assigned_tiles`: who computes which tile of an attention, forward and backward. No torch in here."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_cp.errors import ArgumentError, as_number
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.assignment import AssignmentQuality, TileAssignment, TiledWork
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.predict.bound import exchange_seconds
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.tiles import TileProblem, TileWeights, bands_by_rank, solve, tiles_of
from megatron_cp.planner.tiles.bounds import lower_bound, lower_bound_of_seconds
from megatron_cp.planner.tiles.fast import USUAL_STEPS

_LONGEST_SEARCH = 86_400  # a day
_MOST_PAIRS = 1 << 52  # which sums of work hold exactly
_PAIRS_A_STEP = 1000  # visible pairs for each random move of the search: all moves from 4,000 causal tokens on
_MOST_HOST_COST = 64  # bytes within a host that one between hosts may be worth


class TileSearch(NamedTuple):
    """How long, and for what, tiles are assigned.

    Attributes:
        item_size: bytes of an element.
        seconds: that the exact stage may take for each direction; 0 for the fast stage alone.
        cache: a directory with what searches found before; None for none.
    """

    item_size: int = 2
    seconds: float = 0.0
    cache: str | None = None


def checked_seconds(search_seconds: object) -> float:
    """How long tiles may be searched for, if that is a time.

    Raises:
        ArgumentError: it is none.
    """
    if not 0 <= as_number(search_seconds) <= _LONGEST_SEARCH:
        raise ArgumentError("search_seconds", search_seconds, f"seconds from 0 to {_LONGEST_SEARCH}")
    return as_number(search_seconds)


def checked_search(item_size: int, search_seconds: object, search_cache: str | os.PathLike[str] | None) -> TileSearch:
    """How tiles are searched for.

    Raises:
        ArgumentError: no time, or no name of a folder.
    """
    if search_cache is not None and not isinstance(search_cache, str | os.PathLike):
        raise ArgumentError("search_cache", search_cache, "a folder's name, or None")
    folder = None if search_cache is None else os.fspath(search_cache)
    return TileSearch(item_size, checked_seconds(search_seconds), folder)


USUAL_SEARCH = TileSearch()


def assigned_tiles(step: Attend, topology: Topology | None, search: TileSearch) -> TiledWork:
    """Tiles assigned so that the busiest KV rank sends and receives little under even work.

    The same on every rank, from the same arguments: nothing is sent.

    Args:
        step: the attention, whose stages are not read.
        topology: where ranks are; None for one host.
        search: how.

    Raises:
        ArgumentError: a mask with more pairs than are counted, or that the layouts cut into too many tiles.
    """
    if step.mask.area >= _MOST_PAIRS:
        remedy = "Take exact or p2p, which count nothing."
        raise ArgumentError("scheme", "tiled", f"a mask of fewer than {_MOST_PAIRS} visible pairs", remedy)
    # A mask that is computed in microseconds is not worth a second of search.
    steps, found = int(np.clip(step.mask.area // _PAIRS_A_STEP, 50, USUAL_STEPS)), []
    for forward in (True, False):
        problem = _problem(step, topology, search.item_size, forward=forward)
        solution = solve(problem, search_seconds=search.seconds, cache=search.cache, steps=steps)
        assignment = TileAssignment(*bands_by_rank(step.mask, problem, solution.ranks))
        most = int(max(solution.sent.max(initial=0), solution.received.max(initial=0)))
        # The search weighs hosts; what is said is bytes.
        bound = solution.bound if problem.hosts is None else lower_bound(problem.on_one_host())
        known = AssignmentQuality(most, bound, most <= bound, solution.load_cap, solution.seconds)
        found.append((assignment, known))
    (forward_tiles, first), (backward_tiles, second) = found
    return TiledWork(forward_tiles, backward_tiles, solutions=(first, second))


def bound_of_tiles(alike: Plan, on: Machine, topology: Topology, item_size: int, enough: float) -> tuple[float, float]:
    """Milliseconds that any assignment of tiles takes at least, forward and backward: of work, and of transfers.

    It takes milliseconds where a search takes seconds: whether a search can be worth it is known before.

    Args:
        alike: a plan of the same heads whose keys are fetched.
        on, topology: the machine, and where the ranks are.
        item_size: bytes of an activation.
        enough: milliseconds of both directions from which on no more is asked: then transfers are not looked at.

    Raises:
        ArgumentError: a mask that the layouts cut into too many tiles.
    """
    step = alike.attend
    assert step is not None
    exchanged = float(exchange_seconds(alike, topology, item_size).min(initial=0.0))
    heads = max(hi - lo for lo, hi in step.partition.heads)
    size, value, hardware = step.head_dim, step.value_head_dim, on.hardware
    rates, found = list[float](), list[float]()
    for forward in (True, False):
        each = 2 * (size + value) if forward else 2 * (3 * size + 2 * value)
        rate = hardware.attention_rate((size + value) // 2, forward=forward) / hardware.slower(item_size)
        rates.append(rate / (heads * each))
        found.append(step.mask.area / step.num_kv_ranks / rates[-1])
    if 1e3 * (sum(found) + 2 * exchanged) < enough:
        for number, forward in enumerate((True, False)):
            problem = _problem(step, topology, item_size, forward=forward)
            # Over hosts in two hops a byte that comes from another host may reach its rank by the links of its own.
            least = _least_seconds(problem, rates[number], topology, by_proxies=bool(alike.transport.hosts))
            found[number] = max(found[number], least)
    return 1e3 * (exchanged + found[0]), 1e3 * (exchanged + found[1])


def _least_seconds(problem: TileProblem, pairs_per_second: float, topology: Topology, *, by_proxies: bool) -> float:
    """Seconds that the busiest rank computes, or that a port of it is busy, whatever the answer.

    A rank's two ports, for its host and for others, work at the same time: together they move a byte as fast as both,
    and the busier one has at least half of what both take one after the other.
    """
    within, between = topology.within.bandwidth, topology.between.bandwidth
    fastest = within + between if topology.num_hosts > 1 else within
    alone = problem.on_one_host()
    bounds = [lower_bound_of_seconds(alone, pairs_per_second=pairs_per_second, bytes_per_second=fastest)]
    if problem.hosts is not None and not by_proxies:
        # A byte between hosts is weighted by a whole number, which may be more than what it takes longer.
        fastest = 2 * within * max(1.0, problem.host_cost * between / within)
        bounds.append(lower_bound_of_seconds(problem, pairs_per_second=pairs_per_second, bytes_per_second=fastest))
    return max(max(each.values()) for each in bounds)


def _problem(step: Attend, topology: Topology | None, item_size: int, *, forward: bool) -> TileProblem:
    hosts, host_cost = (None, 1) if topology is None else _hosts(step, topology)
    weights = _weights(step, item_size, forward=forward)
    return tiles_of(step.mask, step.queries, step.keys, weights=weights, hosts=hosts, host_cost=host_cost)


def _weights(step: Attend, item_size: int, *, forward: bool) -> TileWeights:
    """Bytes of a row, each of the head rank that has most of it; all head ranks of a KV rank have the same tiles."""
    names = ("visitors", "results", "keys") if forward else ("visitors and gradients", "gradients of visitors", "keys")
    step = replace(step, head_chunks=1)  # chunks round rows up, and must not change who computes what
    rows = [[step.row_bytes(name, rank, item_size) for name in names] for rank in range(step.num_head_ranks)]
    row_in, row_back, col_in = (max(of_ranks) for of_ranks in zip(*rows, strict=True))
    return TileWeights(row_in, row_back, col_in, 0 if forward else col_in)


def _hosts(step: Attend, topology: Topology) -> tuple[IntArray | None, int]:
    """The host of each KV rank, and how much dearer a byte between hosts is; none where its ranks are on several."""
    of_ranks = np.array(topology.hosts).reshape(step.num_kv_ranks, -1)
    if topology.num_hosts == 1 or (of_ranks != of_ranks[:, :1]).any():
        return None, 1
    ratio = topology.within.bandwidth / topology.between.bandwidth
    return np.unique(of_ranks[:, 0], return_inverse=True)[1], int(np.clip(round(ratio), 1, _MOST_HOST_COST))
