"""Compares candidates, the schemes of an attention with their options, by predicted time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import SCHEMES, Scheme
from megatron_cp.planner.predict.bound import bounds_of_directions
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.price import described, priced

# A candidate with a bias is chosen only if it is predicted to be faster by so much: a factor, and milliseconds. A head
# exchange gives the bits of one rank; a kernel that returns its results in bf16 rounds once where all keys are present,
# and in a ring once a stage. Tiles are searched for every batch.
_GAIN_OF_KEYS, _GAIN_OF_STAGES, _GAIN_OF_TILES = (1.01, 0.02), (1.04, 0.1), (1.05, 0.1)
_NO_GAIN = (1.0, 0.0)
_REASONS = {
    _GAIN_OF_KEYS: "keys that are fetched are not summed in one rank's order",
    _GAIN_OF_STAGES: "a ring rounds once a stage",
    _GAIN_OF_TILES: "tiles are searched for with every batch",
}
CHUNKS = (1, 2, 4)
# With more fragments in a layout a plan takes seconds: then candidates are compared by their bounds, and those whose
# ranks fetch ranges of keys are left out, since their tables would have as many ranges.
VERY_MANY = 200_000


def weighed(
    ways: Sequence[Plan], on: Machine, topology: Topology, item_size: int, known: Sequence[tuple[Price, Plan]] = ()
) -> list[tuple[Price, Plan]]:
    """Returns the candidates with their prices, together with those in `known`, the one to choose first.

    Candidates are priced in the order of their lower bounds. From the first one on whose bound is above the best
    prediction, the bound is the price.
    """
    if ways and ways[0].layout.starts.size > VERY_MANY:
        ways = [plan for plan in ways if plan.attend is not None and not plan.attend.fetches_ranges] or ways
    bounds = [bounds_of_directions(plan, on, topology, item_size) for plan in ways]
    found = list(known)
    best = min((_handicapped(price.total, plan) for price, plan in known if not price.is_bound), default=float("inf"))
    # In the order of biased bounds, so that predictions of the first candidates rule out the later ones.
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
    """Returns the milliseconds below which assigned tiles are chosen instead of the best other candidate."""
    factor, more = _GAIN_OF_TILES
    return (_handicapped(best[0].total, best[1]) - more) / factor


def in_best_chunks(
    chosen: tuple[Price, Plan], with_chunks: Callable[[Plan, int], Plan | None], on: Machine, topology: Topology,
    item_size: int,
) -> tuple[Price, Plan]:  # fmt: skip
    """Returns the chosen candidate in the number of head chunks that is predicted to be fastest."""
    best = chosen
    for chunks in CHUNKS:
        plan = with_chunks(chosen[1], chunks)
        if plan is None or plan == chosen[1]:
            continue
        price = replace(priced(plan, on, topology, item_size=item_size), detail=detail_of(plan))
        if price.total < best[0].total:
            best = price, plan
    return best


def rule_of(chosen: tuple[Price, Plan], others: Sequence[tuple[Price, Plan]]) -> str:
    """Explains the choice of a candidate although another is predicted to be faster; empty where none is."""
    played = [pair for pair in others if not pair[0].is_bound]
    price, plan = min(played, key=lambda pair: pair[0].total, default=chosen)
    if price.total >= chosen[0].total:
        return ""
    counts = [f"{each.scheme}{each.detail} counts as {_margin(of)}" for each, of in (chosen, (price, plan))]
    return f"{' and '.join(counts)}, since {_REASONS[_gain(plan)]}"


def _margin(plan: Plan) -> str:
    """Describes the bias of a candidate."""
    factor, more = _gain(plan)
    return f"{factor:g} times its prediction and {more:g} ms" if more else "predicted"


def detail_of(plan: Plan) -> str:
    """Describes the degree and the chunks of a plan, which its scheme's name does not say."""
    assert plan.attend is not None
    degree = words_of_degree(SCHEMES[plan.scheme], plan.ulysses_degree)
    chunks = max(plan.head_chunks, plan.attend.head_chunks)
    return degree + (f", {chunks} chunks" if chunks > 1 else "")


def words_of_degree(way: Scheme, degree: int | None) -> str:
    """Describes the number of ranks that exchange heads, for schemes that combine two exchanges."""
    return f" (u = {degree})" if way.is_product else ""


def _handicapped(milliseconds: float, plan: Plan) -> float:
    factor, more = _gain(plan)
    return milliseconds * factor + more


def _gain(plan: Plan) -> tuple[float, float]:
    """Returns the bias of a candidate, as a factor and milliseconds."""
    assert plan.attend is not None
    if plan.attend.num_kv_ranks == 1:
        return _NO_GAIN
    if plan.attend.tiled is not None:
        return _GAIN_OF_TILES
    return _GAIN_OF_STAGES if plan.attend.num_stages > 1 else _GAIN_OF_KEYS
