"""Chooses among candidates, the schemes of an attention with their options, by predicted time.

Each candidate is priced by a sum. The simulator plays those whose sum is near the least one; the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_cp.layout import Layout
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import SCHEMES, Scheme
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.price import Programs, described, priced, program_on, summed

# A candidate with a bias is chosen only if it is predicted to be faster by so much: a factor, and milliseconds. A head
# exchange gives the bits of one rank; a kernel that returns its results in bf16 rounds once where all keys are present,
# and in a ring once a stage. Tiles are searched for every batch.
_KEYS_BIAS, _STAGES_BIAS, _TILES_BIAS = (1.01, 0.02), (1.04, 0.1), (1.05, 0.1)
_NO_BIAS = (1.0, 0.0)
_REASONS = {
    _KEYS_BIAS: "keys that are fetched are not summed in one rank's order",
    _STAGES_BIAS: "a ring rounds once a stage",
    _TILES_BIAS: "tiles are searched for with every batch",
    _NO_BIAS: "more head chunks must gain 0.05 ms",
}
# Candidates are played whose sum is at most so many times the least one, and so many milliseconds more. Those whose
# forward is further behind are not summed backward.
_NEAR, _NEARLY = 1.25, 0.1
_BACKWARD = 2.5  # times forward: five products for two, since backward computes scores again
CHUNKS = (1, 2, 4)
_CHUNKS_BIAS = 0.05  # milliseconds of another number of head chunks than a scheme has by itself
# With more fragments in a layout a plan takes seconds: then one candidate is played, and those whose ranks fetch ranges
# of keys are left out, since their tables would have as many ranges.
VERY_MANY = 200_000


def priced_candidates(
    candidates: Sequence[Plan], on: Machine, topology: Topology, item_size: int,
    known: Sequence[tuple[Price, Plan]] = (),
) -> list[tuple[Price, Plan]]:  # fmt: skip
    """Returns the candidates with their prices, together with those in `known`, the one to choose first."""
    very_many = bool(candidates) and candidates[0].layout.starts.size > VERY_MANY
    if very_many:
        few = [plan for plan in candidates if plan.attend is not None and not plan.attend.fetches_ranges]
        candidates = few or candidates
    found = [*known]
    sums = _sums_of(candidates, on, topology, item_size)
    least = min([price.total for price, _ in known if price.is_played] + [each.price.total for each in sums])
    nearest = min(sums, key=lambda each: _biased_cost(each.price.total, each.plan), default=None)
    for each in sums:
        price = each.price
        if each is nearest or (price.total <= _NEAR * least + _NEARLY and not very_many):
            price = _played(each.plan, on, topology, item_size, each.programs)
        found.append((price, each.plan))
    return sorted(found, key=_place)


def milliseconds_for_tiles(best: tuple[Price, Plan]) -> float:
    """Returns the milliseconds below which assigned tiles are chosen instead of the best other candidate."""
    factor, more = _TILES_BIAS
    return (_biased_cost(best[0].total, best[1]) - more) / factor


def best_chunks(
    found: Sequence[tuple[Price, Plan]], with_chunks: Callable[[Plan, int], Plan | None], on: Machine,
    topology: Topology, item_size: int,
) -> list[tuple[Price, Plan]]:  # fmt: skip
    """Returns the candidates in as many head chunks as are predicted to be fastest, the one to choose first.

    Those are tried that chunks could make the first: of n times as many chunks at least 1 / n of what is exposed stays
    exposed, and of fewer too, where starts of transfers are exposed. Of very many fragments the first one alone is
    tried.
    """
    first, tried = found[0], list(found)
    most = _biased_cost(first[0].total, first[1])
    for price, plan in found[:1] if first[1].layout.starts.size > VERY_MANY else found:
        present = plan.num_chunks
        for chunks in CHUNKS if price.is_played else ():
            least = price.total - price.exposed * (1 - min(chunks, present) / max(chunks, present))
            if chunks != present and (plan is first[1] or _biased_cost(least, plan, chunks) < most):
                other = with_chunks(plan, chunks)
                tried += [] if other is None else [(_played(other, on, topology, item_size), other)]
    by_name: dict[tuple[str, int, str], list[tuple[Price, Plan]]] = {}
    for pair in sorted(tried, key=_place):
        by_name.setdefault(_name_of(pair), []).append(pair)
    # One candidate in several numbers of chunks: the fastest, in the place of the one that counts as the least.
    return [min(pairs, key=lambda pair: (not pair[0].is_played, pair[0].total)) for pairs in by_name.values()]


def degrees_to_try(scheme: Scheme, layout: Layout, asked: int | None, topology: Topology) -> list[int | None]:
    """Returns the degrees among which "auto" chooses; with very many fragments or tiles, the ranks of a host only."""
    if asked is not None or not scheme.is_product:
        return [asked]
    is_many = layout.starts.size > VERY_MANY or scheme.assigns_tiles
    degrees: list[int | None] = [degree for degree in range(2, layout.cp_size) if layout.cp_size % degree == 0]
    if not is_many:
        return degrees
    host = topology.hosts.count(topology.hosts[0])
    return [degree for degree in degrees if degree == host] or degrees[:1]


class _Sum(NamedTuple):
    """The price of a candidate by a sum, in as many chunks as it may have.

    Attributes:
        programs: those of both directions; None for a candidate that is far behind in forward.
    """

    plan: Plan
    price: Price
    programs: Programs | None


def _sums_of(candidates: Sequence[Plan], on: Machine, topology: Topology, item_size: int) -> list[_Sum]:
    """Returns the sums of candidates."""
    ahead = [program_on(plan, on, topology, item_size, forward=True) for plan in candidates]
    times = [1e3 * summed(program, on, topology, _parts(plan)) for plan, program in zip(candidates, ahead, strict=True)]
    most, words, found = _NEAR * min(times, default=0.0) + _NEARLY, described(on, topology), list[_Sum]()
    for plan, program, forward in zip(candidates, ahead, times, strict=True):
        back = program_on(plan, on, topology, item_size, forward=False) if forward <= most else None
        backward = _BACKWARD * forward if back is None else 1e3 * summed(back, on, topology, _parts(plan))
        sent = max(plan.bytes_sent(item_size, forward=True))
        price = Price(plan.scheme, forward, backward, sent, is_sum=True, hardware=words, detail=detail_of(plan))
        found.append(_Sum(plan, price, None if back is None else (program, back)))
    return found


def _parts(plan: Plan) -> float:
    """Returns by how many times the head chunks of a plan may grow."""
    most, present = min(CHUNKS[-1], plan.partition.most_groups), plan.num_chunks
    return max(most / present, 1.0) if SCHEMES[plan.scheme].takes_chunks else 1.0


def _played(
    plan: Plan, on: Machine, topology: Topology, item_size: int, programs: Programs | None = None
) -> Price:  # fmt: skip
    return replace(priced(plan, on, topology, item_size=item_size, programs=programs), detail=detail_of(plan))


def _place(pair: tuple[Price, Plan]) -> tuple[bool, float]:
    return not pair[0].is_played, _biased_cost(pair[0].total, pair[1])


def _name_of(pair: tuple[Price, Plan]) -> tuple[str, int, str]:
    assert pair[1].attend is not None
    return pair[1].scheme, pair[1].ulysses_degree, pair[1].attend.latent_mode


def reason(chosen: tuple[Price, Plan], others: Sequence[tuple[Price, Plan]]) -> str:
    """Explains the choice of a candidate although another is predicted to be faster; empty where none is."""
    simulated = [pair for pair in others if pair[0].is_played]
    price, plan = min(simulated, key=lambda pair: pair[0].total, default=chosen)
    if price.total >= chosen[0].total:
        return ""
    counts = [f"{each.scheme}{each.detail} counts as {_describe_bias(of)}" for each, of in (chosen, (price, plan))]
    return f"{' and '.join(counts)}, since {_REASONS[_bias(plan)]}"


def _describe_bias(plan: Plan) -> str:
    factor, more = _bias(plan)
    more += _chunks_bias(plan, plan.num_chunks)
    return f"{factor:g} times its prediction and {more:g} ms" if more else "predicted"


def detail_of(plan: Plan) -> str:
    """Describes the degree, the chunks and the mode of latents of a plan, which its scheme's name does not say."""
    assert plan.attend is not None
    degree = describe_degree(SCHEMES[plan.scheme], plan.ulysses_degree)
    chunks = plan.num_chunks
    mode = plan.attend.latent_mode
    return degree + (f", {chunks} chunks" if chunks > 1 else "") + (f", {mode}" if mode else "")


def describe_degree(scheme: Scheme, degree: int | None) -> str:
    """Describes the number of ranks that exchange heads, for schemes that combine two exchanges."""
    return f" (u = {degree})" if scheme.is_product else ""


def _biased_cost(milliseconds: float, plan: Plan, chunks: int | None = None) -> float:
    """Returns the milliseconds as which a candidate counts, in its own number of head chunks or in another."""
    factor, more = _bias(plan)
    return milliseconds * factor + more + _chunks_bias(plan, chunks or plan.num_chunks)


def _chunks_bias(plan: Plan, chunks: int) -> float:
    usual = min(2, plan.partition.most_groups) if SCHEMES[plan.scheme].chunks_keys else 1
    return 0.0 if chunks == usual else _CHUNKS_BIAS


def _bias(plan: Plan) -> tuple[float, float]:
    assert plan.attend is not None
    if plan.attend.num_kv_ranks == 1:
        return _NO_BIAS
    if plan.attend.tiled is not None:
        return _TILES_BIAS
    return _STAGES_BIAS if plan.attend.num_stages > 1 else _KEYS_BIAS
