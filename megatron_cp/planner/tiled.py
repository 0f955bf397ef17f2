"""`assigned_tiles`: who computes which tile of an attention, forward and backward. No torch in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp.errors import ArgumentError, as_number
from megatron_cp.extras import install
from megatron_cp.layout import Layout
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.assignment import AssignmentQuality, TileAssignment, TiledWork
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.payloads import Payload
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import AUTO, SCHEMES, Scheme, may_assign_tiles
from megatron_cp.planner.predict.bound import exchange_seconds
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.kernels import pair_rate
from megatron_cp.planner.predict.price import described
from megatron_cp.planner.tiles import Solution, TileProblem, TileWeights, bands_by_rank, solve, tiles_of
from megatron_cp.planner.tiles.bounds import lower_bound, lower_bound_of_seconds
from megatron_cp.planner.tiles.cache import checked_directory
from megatron_cp.planner.tiles.cuts import USUAL_TILES
from megatron_cp.planner.tiles.exact import beyond_solver
from megatron_cp.planner.tiles.fast import USUAL_STEPS
from megatron_cp.planner.tiles.problem import volumes
from megatron_cp.planner.weigh import milliseconds_for_tiles, words_of_degree

# Runs of visible blocks in the rows of a table, or bands of other masks. Tables may change with each batch and are
# planned while it is loaded. With many runs each random move of the search matters little: of 300 runs, and of 1,600,
# four times as many moves save a twentieth of the bytes at best (benchmarks/results/block_tables.md).
MOST_RUNS, _FEW_RUNS = 1 << 14, 128
_TILES_OF_TABLES, _MOVES_OF_TABLES, _LEAST_MOVES = 2048, 1 << 17, 200
_LONGEST_SEARCH = 86_400  # a day
_MOST_PAIRS = 1 << 52  # which sums of work hold exactly
_PAIRS_A_STEP = 1000  # visible pairs for each random move of the search: all moves from 4,000 causal tokens on
_MOST_HOST_COST = 64  # bytes within a host that one between hosts may be worth


_NAMES = ("search_seconds", "search_cache")


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


def checked_search(
    search_seconds: object, search_cache: object, ways: Iterable[str], *, item_size: int = 2,
    names: tuple[str, str] = _NAMES,
) -> TileSearch:  # fmt: skip
    """How tiles are searched for.

    Args:
        search_seconds: that the exact stage may take for each direction; 0 for the fast stage alone.
        search_cache: a folder's name; None for none.
        ways: the schemes of all layers that are given this search, of which one must assign tiles; none of linear
            layers.
        item_size: bytes of an element.
        names: how the user spells the first two.

    Raises:
        ArgumentError: no time, no name of a folder, a search that no layer reads, or one without OR-Tools and without a
            folder of answers.
    """
    seconds = as_number(search_seconds)
    if not 0 <= seconds <= _LONGEST_SEARCH:
        raise ArgumentError(names[0], search_seconds, f"seconds from 0 to {_LONGEST_SEARCH}")
    folder = checked_directory(search_cache, names[1])
    if seconds or folder is not None:
        _refuse_unread((names[0], search_seconds, "0") if seconds else (names[1], search_cache, "None"), ways)
    # Said here: where "auto" chooses, a scheme that cannot be planned is only left out.
    if seconds and folder is None and find_spec("ortools") is None:
        remedy = f"OR-Tools is not installed: {install('solver')}. The fast stage needs none."
        raise ArgumentError(names[0], search_seconds, f"0, or a {names[1]} with answers to read", remedy)
    return TileSearch(item_size, seconds, None if folder is None else str(folder))


def _refuse_unread(given: tuple[str, object, str], ways: Iterable[str]) -> None:
    """Refuses a search, with its name, its value and what is allowed, that no layer reads."""
    ways = list(dict.fromkeys(ways))
    if any(map(may_assign_tiles, ways)):
        return
    name, value, none = given
    takers = " or ".join([*(way.name for way in SCHEMES.values() if way.assigns_tiles), AUTO])
    remedy = f"No layer here assigns tiles to ranks: take {takers} for attention."
    where = f"with {' and '.join(ways)}" if ways else "without attention"
    raise ArgumentError(name, value, f"{none} {where}", remedy)


def assigned_tiles(step: Attend, topology: Topology | None, search: TileSearch) -> TiledWork:
    """Tiles assigned so that the busiest KV rank sends and receives little under even work.

    The same on every rank, from the same arguments: nothing is sent.

    Args:
        step: the attention, whose stages are not read.
        topology: where ranks are; None for one host.
        search: how.

    Raises:
        ArgumentError: a mask with more pairs than are counted or more runs of blocks than are planned, or that the
            layouts cut into too many tiles; a search without OR-Tools; a cache that cannot be used.
    """
    if step.mask.area >= _MOST_PAIRS:
        remedy = "Take exact or p2p, which count nothing."
        raise ArgumentError("scheme", "tiled", f"a mask of fewer than {_MOST_PAIRS} visible pairs", remedy)
    directions, most_steps = _directions(step, topology, search.item_size)
    # A mask that is computed in microseconds is not worth a second of search.
    steps, found = int(np.clip(step.mask.area // _PAIRS_A_STEP, 50, most_steps)), []
    for direction in directions:
        solution = _solved(direction.problem, search, steps)
        assignment = TileAssignment(*bands_by_rank(step.mask, direction.problem, solution.ranks))
        quality = _quality(direction, solution)
        # Said in the plan too: a warning is not heard by who reads a plan that auto made.
        is_short = search.seconds > 0 and not solution.optimal
        found.append((assignment, replace(quality, note=beyond_solver(direction.problem) if is_short else "")))
    (forward_tiles, first), (backward_tiles, second) = found
    return TiledWork(forward_tiles, backward_tiles, solutions=(first, second))


def notes_of_search(plan: Plan) -> tuple[str, ...]:
    """What the search for a plan's tiles could not do; nothing of a plan without assigned tiles."""
    solutions = plan.attend.tiled.solutions if plan.attend is not None and plan.attend.tiled is not None else ()
    return tuple(dict.fromkeys(found.note for found in solutions if found.note))


class _Direction(NamedTuple):
    """Who is to compute which tile, forward or backward.

    Attributes:
        problem: that is searched, with a row's bytes of the head rank that has most of each kind.
        weights: of each head rank, each once. All head ranks of a KV rank have the same tiles.
    """

    problem: TileProblem
    weights: tuple[TileWeights, ...]


def _quality(direction: _Direction, solution: Solution) -> AssignmentQuality:
    """In bytes, where the search weighs hosts, and of true head ranks: of the one that sends or receives most."""
    problem, most, bound = direction.problem, 0, 0
    is_searched = problem.hosts is None and direction.weights == (problem.weights,)
    for weights in direction.weights:
        alone = problem if is_searched else problem.on_one_host().with_weights(weights)
        most = max(most, *(int(each.max(initial=0)) for each in volumes(alone, solution.ranks)))
        bound = max(bound, solution.bound if is_searched else lower_bound(alone))
    return AssignmentQuality(most, bound, most <= bound, solution.load_cap, solution.seconds)


def _directions(step: Attend, topology: Topology | None, item_size: int) -> tuple[list[_Direction], int]:
    """Forward and backward, of the same tiles, and how many random moves their search is worth."""
    runs = _checked_runs(step)
    hosts, host_cost = (None, 1) if topology is None else _hosts(step, topology)
    most_tiles, most_steps = USUAL_TILES, USUAL_STEPS
    if runs > _FEW_RUNS:
        most_tiles, most_steps = _TILES_OF_TABLES, max(_MOVES_OF_TABLES // runs, _LEAST_MOVES)
    both = [_weights_of_head_ranks(step, item_size, forward=forward) for forward in (True, False)]
    cut = tiles_of(
        step.mask, step.queries, step.keys, weights=both[0][0], hosts=hosts, host_cost=host_cost,
        usual_tiles=most_tiles,
    )  # fmt: skip
    return [_Direction(cut.with_weights(_largest(weights)), weights) for weights in both], most_steps


def _solved(problem: TileProblem, search: TileSearch, steps: int) -> Solution:
    try:
        return solve(problem, search_seconds=search.seconds, cache=search.cache, steps=steps)
    except ArgumentError as error:
        if error.argument != "cache":
            raise
        # As callers of plans spell it.
        raise ArgumentError("search_cache", error.given, error.allowed, error.remedy) from None


def _checked_runs(step: Attend) -> int:
    """How many runs of blocks are to be planned, if a loader of batches need not wait for long."""
    count = int(_is_spread(step.mask.bands, step.queries, step.keys).sum())
    if count > MOST_RUNS:
        allowed = f"at most {MOST_RUNS} runs of blocks, or bands of other masks, that no rank holds alone"
        remedy = "Take larger blocks, or exact or p2p, which assign no tiles."
        raise ArgumentError("mask", f"{count} runs", allowed, remedy)
    return count


def _is_spread(bands: IntArray, queries: Layout, keys: Layout) -> NDArray[np.bool_]:
    """`[n]` whether the ranges of queries and keys that bands lie in are held by several ranks."""
    ranks, changes = [], []
    for layout, (begin, end) in ((queries, bands[:, :2].T), (keys, bands[:, 2:4].T)):
        starts = np.sort(layout.starts)
        owners = layout.located(starts)[0]
        changed = np.cumsum(np.append(0, owners[1:] != owners[:-1]))
        first, last = (np.searchsorted(starts, places, side="right") - 1 for places in (begin, end - 1))
        ranks.append(owners[first])
        changes.append(changed[first] != changed[last])
    return changes[0] | changes[1] | (ranks[0] != ranks[1])


def bound_of_tiles(alike: Plan, on: Machine, topology: Topology, item_size: int, enough: float) -> tuple[float, float]:
    """Milliseconds that any assignment of tiles takes at least, forward and backward: of work, and of transfers.

    Of the tiles that the mask is cut into, under their load cap, in as many chunks of heads as `alike` has. It takes
    milliseconds where a search takes seconds: whether a search can be worth it is known before.

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
    rates, found = list[float](), list[float]()
    for forward in (True, False):
        rates.append(pair_rate(step, on.hardware, item_size, forward=forward) / heads)
        found.append(step.mask.area / step.num_kv_ranks / rates[-1])
    if 1e3 * (sum(found) + 2 * exchanged) < enough:
        # Over hosts in two hops a byte that comes from another host may reach its rank by the links of its own.
        by_proxies = bool(alike.transport.hosts)
        for number, (problem, of_head_ranks) in enumerate(_directions(step, topology, item_size)[0]):
            for weights in of_head_ranks:
                least = _least_seconds(problem.with_weights(weights), rates[number], topology, by_proxies=by_proxies)
                found[number] = max(found[number], least)
    return 1e3 * (exchanged + found[0]), 1e3 * (exchanged + found[1])


def hopeless_tiles(
    of_tiles: Sequence[tuple[Scheme, int | None]], ways: Sequence[Plan], others: Sequence[tuple[Price, Plan]],
    on: Machine, topology: Topology, item_size: int,
) -> list[Price]:  # fmt: skip
    """The ways of tiles that no search makes fast enough to be taken, with what they take at least."""
    found = []
    for way, degree in of_tiles if others else ():
        alike = next((plan for plan in ways if _shares_heads(plan, way, degree)), None)
        if alike is None:
            continue
        enough = milliseconds_for_tiles(others[0])
        try:
            forward, backward = bound_of_tiles(alike, on, topology, item_size, enough)
        except ArgumentError:  # too many tiles, as planning them says
            continue
        if forward + backward >= enough:
            machine_words, detail = described(on, topology), words_of_degree(way, degree)
            found.append(Price(way.name, forward, backward, 0, True, machine_words, detail=detail))
    return found


def _shares_heads(plan: Plan, way: Scheme, degree: int | None) -> bool:
    """Whether a plan's keys are fetched by ranks that have the heads that they have with tiles."""
    is_alike = SCHEMES[plan.scheme].chunks_keys and plan.attend is not None and plan.attend.num_kv_ranks > 1
    return is_alike and plan.ulysses_degree == (degree or 1) and SCHEMES[plan.scheme].is_product == way.is_product


def _least_seconds(problem: TileProblem, pairs_per_second: float, topology: Topology, *, by_proxies: bool) -> float:
    """Seconds that the busiest rank computes, or that a port of it is busy, whatever the answer.

    A rank's two ports, for its host and for others, work at the same time: in a second they move no more than both
    rates together, and of weighted bytes no more than both rates, each with its weight.
    """
    within, between = topology.within.bandwidth, topology.between.bandwidth
    fastest = within + between if topology.num_hosts > 1 else within
    alone = problem.on_one_host()
    bounds = [lower_bound_of_seconds(alone, pairs_per_second=pairs_per_second, bytes_per_second=fastest)]
    if problem.hosts is not None and not by_proxies:
        fastest = within + problem.host_cost * between
        bounds.append(lower_bound_of_seconds(problem, pairs_per_second=pairs_per_second, bytes_per_second=fastest))
    return max(max(each.values()) for each in bounds)


def _weights_of_head_ranks(step: Attend, item_size: int, *, forward: bool) -> tuple[TileWeights, ...]:
    """Bytes of a row of each head rank, each once."""
    remote = (
        (Payload.QUERIES, Payload.PARTIALS) if forward else (Payload.QUERIES_AND_GRADIENTS, Payload.QUERY_GRADIENTS)
    )
    step = replace(step, head_chunks=1)  # chunks round rows up, and must not change who computes what
    rows = [
        [step.row_bytes(each, rank, item_size) for each in (*remote, Payload.KEYS)]
        for rank in range(step.num_head_ranks)
    ]
    found = (TileWeights(row_in, row_back, key, 0 if forward else key) for row_in, row_back, key in rows)
    return tuple(dict.fromkeys(found))


def _largest(weights: tuple[TileWeights, ...]) -> TileWeights:
    """What is searched with: the most of each kind of bytes. No head rank need have the most of all kinds."""
    return TileWeights(**{name: max(getattr(each, name) for each in weights) for name in vars(weights[0])})


def _hosts(step: Attend, topology: Topology) -> tuple[IntArray | None, int]:
    """The host of each KV rank, and how much dearer a byte between hosts is; none where its ranks are on several."""
    of_ranks = np.array(topology.hosts).reshape(step.num_kv_ranks, -1)
    if topology.num_hosts == 1 or (of_ranks != of_ranks[:, :1]).any():
        return None, 1
    ratio = topology.within.bandwidth / topology.between.bandwidth
    return np.unique(of_ranks[:, 0], return_inverse=True)[1], int(np.clip(round(ratio), 1, _MOST_HOST_COST))
