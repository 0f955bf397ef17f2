"""Compares candidates, the schemes of an attention with their options, by predicted time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import SCHEMES, Scheme
from megatron_cp.planner.predict.bound import bound_in_chunks, bounds_of_directions
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.price import described, priced

# A candidate with a bias is chosen only if it is predicted to be faster by so much: a factor, and milliseconds. A head
# exchange gives the bits of one rank; a kernel that returns its results in bf16 rounds once where all keys are present,
# and in a ring once a stage. Tiles are searched for every batch.
_KEYS_BIAS, _STAGES_BIAS, _TILES_BIAS = (1.01, 0.02), (1.04, 0.1), (1.05, 0.1)
_NO_BIAS = (1.0, 0.0)
_REASONS = {
    _KEYS_BIAS: "keys that are fetched are not summed in one rank's order",
    _STAGES_BIAS: "a ring rounds once a stage",
    _TILES_BIAS: "tiles are searched for with every batch",
}
CHUNKS = (1, 2, 4)
_CHUNKS_BIAS = 0.05  # milliseconds
# With more fragments in a layout a plan takes seconds: then candidates are compared by their bounds, and those whose
# ranks fetch ranges of keys are left out, since their tables would have as many ranges.
VERY_MANY = 200_000


def priced_candidates(
    candidates: Sequence[Plan], on: Machine, topology: Topology, item_size: int,
    known: Sequence[tuple[Price, Plan]] = (),
) -> list[tuple[Price, Plan]]:  # fmt: skip
    """Returns the candidates with their prices, together with those in `known`, the one to choose first.

    Candidates are priced in the order of their lower bounds. From the first one on whose bound is above the best
    prediction, the bound is the price.
    """
    if candidates and candidates[0].layout.starts.size > VERY_MANY:
        few = [plan for plan in candidates if plan.attend is not None and not plan.attend.fetches_ranges]
        candidates = few or candidates
    bounds = [bounds_of_directions(plan, on, topology, item_size) for plan in candidates]
    found = list(known)
    best = min((_biased_cost(price.total, plan) for price, plan in known if not price.is_bound), default=float("inf"))
    # In the order of biased bounds, so that predictions of the first candidates rule out the later ones.
    ordered = sorted(zip(bounds, candidates, strict=True), key=lambda pair: _biased_cost(sum(pair[0]), pair[1]))
    for bound, plan in ordered:
        if _biased_cost(sum(bound), plan) >= best or (found and plan.layout.starts.size > VERY_MANY):
            sent = max(plan.bytes_sent(item_size, forward=True))
            machine_words = described(on, topology)
            price = Price(plan.scheme, *bound, sent, True, machine_words, detail=detail_of(plan))
        else:
            price = _detailed_price(plan, on, topology, item_size)
            best = min(best, _biased_cost(price.total, plan))
        found.append((price, plan))
    return sorted(found, key=lambda pair: (pair[0].is_bound, _biased_cost(pair[0].total, pair[1])))


def milliseconds_for_tiles(best: tuple[Price, Plan]) -> float:
    """Returns the milliseconds below which assigned tiles are chosen instead of the best other candidate."""
    factor, more = _TILES_BIAS
    return (_biased_cost(best[0].total, best[1]) - more) / factor


def best_chunks(
    found: Sequence[tuple[Price, Plan]], with_chunks: Callable[[Plan, int], Plan | None], on: Machine,
    topology: Topology, item_size: int,
) -> list[tuple[Price, Plan]]:  # fmt: skip
    """Returns the candidates again, the first one in as many head chunks as are predicted to be fastest.

    Another candidate replaces it if, in its own best chunks, it is faster by more than `_CHUNKS_BIAS`. Every candidate
    is tried that chunks could make the fastest. The others keep their prices. Of very many fragments the first one
    alone is tried.
    """
    if found[0][1].layout.starts.size > VERY_MANY:
        tried = [with_chunks(found[0][1], chunks) for chunks in CHUNKS if chunks != _num_chunks(found[0][1])]
        prices = [(_detailed_price(plan, on, topology, item_size), plan) for plan in tried if plan is not None]
        return [min((found[0], *prices), key=lambda pair: pair[0].total), *found[1:]]
    most = _biased_cost(found[0][0].total, found[0][1]) - _CHUNKS_BIAS
    near = [
        plan
        for price, plan in found
        if plan is found[0][1] or _biased_cost(_least(price, plan, on, topology, item_size), plan) < most
    ]
    chunked = [with_chunks(plan, chunks) for plan in near for chunks in CHUNKS if chunks != _num_chunks(plan)]
    others = [plan for plan in chunked if plan is not None]
    by_cost = priced_candidates(others, on, topology, item_size, found)
    name = _name_of(found[0])
    first, best = next(pair for pair in by_cost if _name_of(pair) == name), by_cost[0]
    gain = _biased_cost(first[0].total, first[1]) - _biased_cost(best[0].total, best[1])
    if gain <= _CHUNKS_BIAS:
        return [first, *found[1:]]
    return [best, first, *(pair for pair in found[1:] if _name_of(pair) != _name_of(best))]


def _least(price: Price, plan: Plan, on: Machine, topology: Topology, item_size: int) -> float:
    """Returns a number of milliseconds that a candidate takes at least, in any number of head chunks."""
    if SCHEMES[plan.scheme].takes_chunks:
        return bound_in_chunks(plan, on, topology, item_size)
    return price.total


def _detailed_price(plan: Plan, on: Machine, topology: Topology, item_size: int) -> Price:
    return replace(priced(plan, on, topology, item_size=item_size), detail=detail_of(plan))


def _num_chunks(plan: Plan) -> int:
    assert plan.attend is not None
    return max(plan.head_chunks, plan.attend.head_chunks)


def _name_of(pair: tuple[Price, Plan]) -> tuple[str, int, str]:
    assert pair[1].attend is not None
    return pair[1].scheme, pair[1].ulysses_degree, pair[1].attend.latent_mode


def reason(chosen: tuple[Price, Plan], others: Sequence[tuple[Price, Plan]]) -> str:
    """Explains the choice of a candidate although another is predicted to be faster; empty where none is."""
    simulated = [pair for pair in others if not pair[0].is_bound]
    price, plan = min(simulated, key=lambda pair: pair[0].total, default=chosen)
    if price.total >= chosen[0].total:
        return ""
    counts = [f"{each.scheme}{each.detail} counts as {_describe_bias(of)}" for each, of in (chosen, (price, plan))]
    return f"{' and '.join(counts)}, since {_REASONS[_bias(plan)]}"


def _describe_bias(plan: Plan) -> str:
    factor, more = _bias(plan)
    return f"{factor:g} times its prediction and {more:g} ms" if more else "predicted"


def detail_of(plan: Plan) -> str:
    """Describes the degree, the chunks and the mode of latents of a plan, which its scheme's name does not say."""
    assert plan.attend is not None
    degree = describe_degree(SCHEMES[plan.scheme], plan.ulysses_degree)
    chunks = _num_chunks(plan)
    mode = plan.attend.latent_mode
    return degree + (f", {chunks} chunks" if chunks > 1 else "") + (f", {mode}" if mode else "")


def describe_degree(scheme: Scheme, degree: int | None) -> str:
    """Describes the number of ranks that exchange heads, for schemes that combine two exchanges."""
    return f" (u = {degree})" if scheme.is_product else ""


def _biased_cost(milliseconds: float, plan: Plan) -> float:
    factor, more = _bias(plan)
    return milliseconds * factor + more


def _bias(plan: Plan) -> tuple[float, float]:
    assert plan.attend is not None
    if plan.attend.num_kv_ranks == 1:
        return _NO_BIAS
    if plan.attend.tiled is not None:
        return _TILES_BIAS
    return _STAGES_BIAS if plan.attend.num_stages > 1 else _KEYS_BIAS
