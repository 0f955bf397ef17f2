"""Which of several ways of running an attention is predicted to be fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import SCHEMES, Scheme
from megatron_cp.planner.predict.bound import bounds_of_directions
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.price import described, priced

# What a prediction must gain before a way is taken that another is preferred to. A head exchange gives the bits of one
# rank; a kernel that returns its results in bf16 rounds once where all keys are there, and in a ring once a stage.
# Tiles are searched for, for every batch. As factors, and in milliseconds.
_GAIN_OF_KEYS, _GAIN_OF_STAGES, _GAIN_OF_TILES = (1.01, 0.02), (1.04, 0.1), (1.05, 0.1)
_NO_GAIN = (1.0, 0.0)
_REASONS = {
    _GAIN_OF_KEYS: "keys that are fetched are not summed in one rank's order",
    _GAIN_OF_STAGES: "a ring rounds once a stage",
    _GAIN_OF_TILES: "tiles are searched for with every batch",
}
CHUNKS = (1, 2, 4)
_GAIN_OF_CHUNKS = 0.05  # milliseconds
# Fragments of a layout over which a plan takes seconds: few ways are looked at, by their bounds, and none whose ranks
# fetch ranges of keys, which would be tables of as many ranges.
VERY_MANY = 200_000


def weighed(
    ways: Sequence[Plan], on: Machine, topology: Topology, item_size: int, known: Sequence[tuple[Price, Plan]] = ()
) -> list[tuple[Price, Plan]]:
    """The ways with their prices, the one to take first, and among them those whose prices are known.

    Ways are looked at in the order of what they take at least. From the first on that takes at least as much as another
    one was predicted to take, they have that bound for a price.
    """
    if ways and ways[0].layout.starts.size > VERY_MANY:
        ways = [plan for plan in ways if plan.attend is not None and not plan.attend.fetches_ranges] or ways
    bounds = [bounds_of_directions(plan, on, topology, item_size) for plan in ways]
    found = list(known)
    best = min((_handicapped(price.total, plan) for price, plan in known if not price.is_bound), default=float("inf"))
    # The most promising first, by what decides: a way that is looked at late is ruled out by what was found before.
    in_order = sorted(zip(bounds, ways, strict=True), key=lambda pair: _handicapped(sum(pair[0]), pair[1]))
    for bound, plan in in_order:
        if _handicapped(sum(bound), plan) >= best or (found and plan.layout.starts.size > VERY_MANY):
            sent = max(plan.bytes_sent(item_size, forward=True))
            words = described(on, topology)
            price = Price(plan.scheme, *bound, sent, True, words, detail=detail_of(plan))
        else:
            price = replace(priced(plan, on, topology, item_size=item_size), detail=detail_of(plan))
            best = min(best, _handicapped(price.total, plan))
        found.append((price, plan))
    return sorted(found, key=lambda pair: (pair[0].is_bound, _handicapped(pair[0].total, pair[1])))


def milliseconds_for_tiles(best: tuple[Price, Plan]) -> float:
    """What assigned tiles must take less than, to be taken where this is the best of the other ways."""
    factor, more = _GAIN_OF_TILES
    return (_handicapped(best[0].total, best[1]) - more) / factor


def in_best_chunks(
    found: Sequence[tuple[Price, Plan]], with_chunks: Callable[[Plan, int], Plan | None], on: Machine,
    topology: Topology, item_size: int,
) -> list[tuple[Price, Plan]]:  # fmt: skip
    """Returns the candidates again, the first one in as many head chunks as are predicted to be fastest.

    Another one takes its place if it gains by head chunks what a prediction can tell.
    """
    chunked = [with_chunks(plan, chunks) for _, plan in found for chunks in CHUNKS]
    others = [plan for plan in chunked if plan is not None and all(plan != known for _, known in found)]
    by_cost = weighed(others, on, topology, item_size, found)
    name = _name_of(found[0])
    first, best = next(pair for pair in by_cost if _name_of(pair) == name), by_cost[0]
    gain = _handicapped(first[0].total, first[1]) - _handicapped(best[0].total, best[1])
    if gain <= _GAIN_OF_CHUNKS:
        return [first, *found[1:]]
    return [best, first, *(pair for pair in found[1:] if _name_of(pair) != _name_of(best))]


def _name_of(pair: tuple[Price, Plan]) -> tuple[str, int]:
    return pair[1].scheme, pair[1].ulysses_degree


def rule_of(chosen: tuple[Price, Plan], others: Sequence[tuple[Price, Plan]]) -> str:
    """Why a way was taken though one of the others is predicted to be faster; empty where none is."""
    played = [pair for pair in others if not pair[0].is_bound]
    price, plan = min(played, key=lambda pair: pair[0].total, default=chosen)
    if price.total >= chosen[0].total:
        return ""
    counts = [f"{each.scheme}{each.detail} counts as {_margin(of)}" for each, of in (chosen, (price, plan))]
    return f"{' and '.join(counts)}, since {_REASONS[_gain(plan)]}"


def _margin(plan: Plan) -> str:
    """By how much more than its prediction a way counts."""
    factor, more = _gain(plan)
    return f"{factor:g} times its prediction and {more:g} ms" if more else "predicted"


def detail_of(plan: Plan) -> str:
    """What a scheme's name leaves open."""
    assert plan.attend is not None
    degree = words_of_degree(SCHEMES[plan.scheme], plan.ulysses_degree)
    chunks = max(plan.head_chunks, plan.attend.head_chunks)
    return degree + (f", {chunks} chunks" if chunks > 1 else "")


def words_of_degree(way: Scheme, degree: int | None) -> str:
    """How many ranks exchange heads, of schemes in which that is open."""
    return f" (u = {degree})" if way.is_product else ""


def _handicapped(milliseconds: float, plan: Plan) -> float:
    factor, more = _gain(plan)
    return milliseconds * factor + more


def _gain(plan: Plan) -> tuple[float, float]:
    """What a prediction must gain before this way is taken."""
    assert plan.attend is not None
    if plan.attend.num_kv_ranks == 1:
        return _NO_GAIN
    if plan.attend.tiled is not None:
        return _GAIN_OF_TILES
    return _GAIN_OF_STAGES if plan.attend.num_stages > 1 else _GAIN_OF_KEYS
