"""`assigned_tiles`: makes the problems of `tiles/` of an attention, forward and backward, and a plan's work of answers.

No torch in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from megatron_cp.errors import ArgumentError, as_number
from megatron_cp.extras import install
from megatron_cp.layout import Layout
from megatron_cp.layout.array_types import BoolArray, IntArray
from megatron_cp.layout.bands import cut
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.payloads import Payload
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import AUTO, SCHEMES, may_assign_tiles
from megatron_cp.plan.tile_assignment import AssignmentQuality, TileAssignment, TiledWork
from megatron_cp.planner.predict.hardware import Setting, Topology
from megatron_cp.planner.predict.kernel_times import pair_rate
from megatron_cp.planner.tiles import Solution, TileProblem, TileWeights, bands_by_rank, solve, tiles_of
from megatron_cp.planner.tiles.bounds import lower_bound, lower_bound_of_seconds
from megatron_cp.planner.tiles.cuts import USUAL_TILES
from megatron_cp.planner.tiles.exact import beyond_solver
from megatron_cp.planner.tiles.fast import USUAL_STEPS
from megatron_cp.planner.tiles.problem import volumes

# Runs of visible blocks in the rows of a table, or bands of other masks. Tables may change with each batch and are
# planned while it is loaded. With many runs each random move of the search matters little: of 300 runs, and of 1,600,
# four times as many moves save a twentieth of the bytes at best (benchmarks/results/block_tables.md).
MOST_RUNS, _FEW_RUNS = 1 << 14, 128
_TILES_OF_TABLES, _MOVES_OF_TABLES, _LEAST_MOVES = 2048, 1 << 17, 200
_LONGEST_SEARCH = 86_400  # a day
_MOST_PAIRS = 1 << 52  # below, sums of work are exact
_PAIRS_A_STEP = 1000  # visible pairs for each random move; 4,000 causal tokens get all moves
# With so many keys a query, as where tokens are generated, queries travel to all keys: nothing is left to search for.
_FEW_QUERIES = 16
_MOST_HOST_COST = 64  # the highest cost of a byte between hosts, in bytes within a host


def checked_search(search_seconds: object, schemes: Iterable[str], *, name: str = "search_seconds") -> float:
    """Checks and returns the seconds of a search for tiles.

    Args:
        search_seconds: the time limit of the exact stage for each direction; 0 for the fast stage alone.
        schemes: the schemes of all attention layers that are given this search; one of them must assign tiles.
        name: the user's name of the first argument.

    Raises:
        ArgumentError: an invalid time, a search that no layer uses, or one without OR-Tools.
    """
    seconds = as_number(search_seconds)
    if not 0 <= seconds <= _LONGEST_SEARCH:
        raise ArgumentError(name, search_seconds, f"seconds from 0 to {_LONGEST_SEARCH}")
    schemes = list(dict.fromkeys(schemes))
    if seconds and not any(map(may_assign_tiles, schemes)):
        takers = " or ".join([*(scheme.name for scheme in SCHEMES.values() if scheme.assigns_tiles), AUTO])
        remedy = f"No layer here assigns tiles to ranks: use {takers} for attention."
        where = f"with {' and '.join(schemes)}" if schemes else "without attention"
        raise ArgumentError(name, search_seconds, f"0 {where}", remedy)
    # Refused here, since "auto" would only leave out a scheme that cannot be planned.
    if seconds and find_spec("ortools") is None:
        remedy = f"OR-Tools is not installed: {install('solver')}. The fast stage works without it."
        raise ArgumentError(name, search_seconds, "0 without OR-Tools", remedy)
    return seconds


def assigned_tiles(step: Attend, topology: Topology, item_size: int, search_seconds: float) -> TiledWork:
    """Assigns tiles so that work is even and the busiest KV rank sends and receives little.

    Equal arguments give equal results on every rank: nothing is sent.

    Args:
        step: the attention, whose stages are not read.
        topology: the hosts of the ranks.
        item_size: bytes of an element.
        search_seconds: the time limit of the exact stage for each direction; 0 for the fast stage alone.

    Raises:
        ArgumentError: a mask with too many pairs or runs of blocks, or that the layouts cut into too many tiles; a
            search without OR-Tools.
    """
    if step.mask.area >= _MOST_PAIRS:
        remedy = "Use exact or p2p, which do not count pairs."
        raise ArgumentError("scheme", "tiled", f"a mask of fewer than {_MOST_PAIRS} visible pairs", remedy)
    if not search_seconds and step.queries.packing.total * _FEW_QUERIES <= step.keys.packing.total:
        return _at_keys(step)
    directions, most_steps = _directions(step, topology, item_size)
    # A mask that is computed in microseconds is not worth a second of search.
    steps, found = int(np.clip(step.mask.area // _PAIRS_A_STEP, 50, most_steps)), []
    for direction in directions:
        solution = solve(direction.problem, search_seconds=search_seconds, steps=steps)
        assignment = TileAssignment(*bands_by_rank(step.mask, direction.problem, solution.ranks))
        quality = _quality(direction, solution)
        # The plan has the note too: warnings are off while "auto" chooses.
        is_short = search_seconds > 0 and not solution.optimal
        found.append((assignment, replace(quality, note=beyond_solver(direction.problem) if is_short else "")))
    (forward_tiles, first), (backward_tiles, second) = found
    return TiledWork(forward_tiles, backward_tiles, solutions=(first, second))


def notes_of_search(plan: Plan) -> tuple[str, ...]:
    """Returns notes on the limits of the search for a plan's tiles; none for a plan without assigned tiles."""
    return tuple(dict.fromkeys(found.note for found in plan.solutions if found.note))


def _at_keys(step: Attend) -> TiledWork:
    """Assigns every tile to the rank that holds its keys, which is found at once."""
    found = []
    for rank in range(step.keys.cp_size):
        own = slice(*step.keys.fragment_offsets[rank : rank + 2])
        order = np.argsort(step.keys.starts[own])
        found.append(cut(step.mask.bands, step.keys.starts[own][order], step.keys.ends[own][order], queries=False)[0])
    assignment = TileAssignment(np.concatenate(found), np.cumsum([0, *map(len, found)]))
    return TiledWork(assignment, assignment)


class _Direction(NamedTuple):
    """The assignment problem of forward or of backward.

    Attributes:
        problem: the problem to search, with the largest bytes of a row on any head rank, for each kind of bytes.
        weights: the different weights of head ranks. All head ranks of a KV rank have the same tiles.
    """

    problem: TileProblem
    weights: tuple[TileWeights, ...]


def _quality(direction: _Direction, solution: Solution) -> AssignmentQuality:
    """Measures an answer in true bytes, without weights of hosts, on the head rank that sends or receives most."""
    problem, most, bound = direction.problem, 0, 0
    is_searched = problem.hosts is None and direction.weights == (problem.weights,)
    for weights in direction.weights:
        alone = problem if is_searched else problem.single_host().with_weights(weights)
        most = max(most, *(int(each.max(initial=0)) for each in volumes(alone, solution.ranks)))
        bound = max(bound, solution.bound if is_searched else lower_bound(alone))
    return AssignmentQuality(most, bound, most <= bound, solution.load_cap, solution.seconds)


def _directions(step: Attend, topology: Topology, item_size: int) -> tuple[list[_Direction], int]:
    """Returns the problems of forward and backward, over the same tiles, and the most random moves of their search."""
    runs = _checked_runs(step)
    hosts, host_cost = _hosts(step, topology)
    most_tiles, most_steps = USUAL_TILES, USUAL_STEPS
    if runs > _FEW_RUNS:
        most_tiles, most_steps = _TILES_OF_TABLES, max(_MOVES_OF_TABLES // runs, _LEAST_MOVES)
    both = [_weights_of_head_ranks(step, item_size, forward=forward) for forward in (True, False)]
    tiles = tiles_of(
        step.mask, step.queries, step.keys, weights=both[0][0], hosts=hosts, host_cost=host_cost,
        usual_tiles=most_tiles,
    )  # fmt: skip
    return [_Direction(tiles.with_weights(_largest(weights)), weights) for weights in both], most_steps


def _checked_runs(step: Attend) -> int:
    """Returns the number of runs of blocks to plan; refuses so many that a loader of batches would wait for long."""
    count = int(_is_spread(step.mask.bands, step.queries, step.keys).sum())
    if count > MOST_RUNS:
        allowed = f"at most {MOST_RUNS} runs of blocks, or bands of other masks, that no rank holds alone"
        remedy = "Use larger blocks, or exact or p2p, which assign no tiles."
        raise ArgumentError("mask", f"{count} runs", allowed, remedy)
    return count


def _is_spread(bands: IntArray, queries: Layout, keys: Layout) -> BoolArray:
    """Returns `[n]`: True where several ranks hold the queries and keys of a band."""
    ranks, changes = [], []
    for layout, (begin, end) in ((queries, bands[:, :2].T), (keys, bands[:, 2:4].T)):
        starts = np.sort(layout.starts)
        owners = layout.located(starts)[0]
        changed = np.cumsum(np.append(0, owners[1:] != owners[:-1]))
        first, last = (np.searchsorted(starts, places, side="right") - 1 for places in (begin, end - 1))
        ranks.append(owners[first])
        changes.append(changed[first] != changed[last])
    return changes[0] | changes[1] | (ranks[0] != ranks[1])


def bound_of_tiles(alike: Plan, setting: Setting, enough: float) -> tuple[float, float]:
    """Returns lower bounds on the milliseconds of any assignment of tiles, forward and backward.

    It takes milliseconds where a search takes seconds, so hopeless searches can be skipped. The bound is for the tiles
    of the mask under their load cap, in as many chunks of heads as `alike` has, without its head exchange.

    Args:
        alike: a plan with the same heads whose keys are fetched.
        setting: the machine and the ranks.
        enough: milliseconds of both directions; if work alone takes as long, transfers are not computed.

    Raises:
        ArgumentError: a mask that the layouts cut into too many tiles.
    """
    step = alike.attend
    assert step is not None
    heads = max(hi - lo for lo, hi in step.partition.heads)
    rates, found = list[float](), list[float]()
    for forward in (True, False):
        rates.append(pair_rate(step, setting.rates(forward=forward)) / heads)
        found.append(step.mask.area / step.num_kv_ranks / rates[-1])
    if 1e3 * sum(found) < enough:
        # With two hops, a byte from another host may reach its rank by the links within its host.
        proxied = bool(alike.transport.hosts)
        _, topology, item_size = setting
        for number, (problem, head_rank_weights) in enumerate(_directions(step, topology, item_size)[0]):
            for weights in head_rank_weights:
                least = _least_seconds(problem.with_weights(weights), rates[number], topology, proxied=proxied)
                found[number] = max(found[number], least)
    return 1e3 * found[0], 1e3 * found[1]


def _least_seconds(problem: TileProblem, pairs_per_second: float, topology: Topology, *, proxied: bool) -> float:
    """Returns a lower bound on the seconds of the busiest rank's work, or of its ports, for any answer.

    A rank's two ports, for its host and for others, work at the same time: in a second they move at most the sum of
    both rates, in weighted bytes at most the sum of both weighted rates.
    """
    within, between = topology.within.bandwidth, topology.between.bandwidth
    fastest = within + between if topology.num_hosts > 1 else within
    alone = problem.single_host()
    bounds = [lower_bound_of_seconds(alone, pairs_per_second=pairs_per_second, bytes_per_second=fastest)]
    if problem.hosts is not None and not proxied:
        fastest = within + problem.host_cost * between
        bounds.append(lower_bound_of_seconds(problem, pairs_per_second=pairs_per_second, bytes_per_second=fastest))
    return max(max(each.values()) for each in bounds)


def _weights_of_head_ranks(step: Attend, item_size: int, *, forward: bool) -> tuple[TileWeights, ...]:
    """Returns the different bytes of a row on head ranks."""
    remote = (
        (Payload.QUERIES, Payload.PARTIALS) if forward else (Payload.QUERIES_AND_GRADIENTS, Payload.QUERY_GRADIENTS)
    )
    step = replace(step, head_chunks=1)  # chunks round rows up, which must not change the assignment
    rows = [
        [step.row_bytes(each, rank, item_size) for each in (*remote, Payload.KEYS)]
        for rank in range(step.num_head_ranks)
    ]
    found = (TileWeights(row_in, row_back, key, 0 if forward else key) for row_in, row_back, key in rows)
    return tuple(dict.fromkeys(found))


def _largest(weights: tuple[TileWeights, ...]) -> TileWeights:
    """Returns the largest bytes of each kind, with which tiles are searched; they may be of different head ranks."""
    return TileWeights(**{name: max(getattr(each, name) for each in weights) for name in vars(weights[0])})


def _hosts(step: Attend, topology: Topology) -> tuple[IntArray | None, int]:
    """Returns each KV rank's host and the cost of a byte between hosts; None and 1 for one host or split KV ranks."""
    rank_hosts = np.array(topology.hosts).reshape(step.num_kv_ranks, -1)
    if topology.num_hosts == 1 or (rank_hosts != rank_hosts[:, :1]).any():
        return None, 1
    ratio = topology.within.bandwidth / topology.between.bandwidth
    return np.unique(rank_hosts[:, 0], return_inverse=True)[1], int(np.clip(round(ratio), 1, _MOST_HOST_COST))
