"""Chooses among candidates, the schemes of an attention with their options, by predicted time.

Each candidate is priced by a sum. The simulator plays those whose sum is near the least one; the fastest is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import SCHEMES, Scheme
from megatron_cp.planner.predict.hardware import Setting, Topology
from megatron_cp.planner.predict.price import Workloads, described, priced, summed, workload_in
from megatron_cp.planner.request import Choice, Request
from megatron_cp.planner.tiled import bound_of_tiles, notes_of_search

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
_FILTERS = ("ulysses_degree", "head_chunks", "codec")  # arguments by which a user rules out candidates


class Candidate(NamedTuple):
    """A plan with its price."""

    price: Price
    plan: Plan

    @property
    def cost(self) -> float:
        """The milliseconds as which it counts."""
        return _biased_cost(self.price.total, self.plan)

    @property
    def place(self) -> tuple[bool, float]:
        """The key by which candidates are sorted, the one to choose first."""
        return not self.price.is_played, self.cost

    @property
    def way(self) -> tuple[str, int, str]:
        """The candidate without its number of head chunks."""
        return self.plan.scheme, self.plan.ulysses_degree, _attend(self.plan).latent_mode


class Chosen(NamedTuple):
    """The choice of "auto". It holds no plan, since plans refer to the layout that keeps it.

    Attributes:
        choice: the choice.
        prices: those of all candidates, the chosen one's first.
        notes: the reasons why candidates were left out, and the limits of searches of the others.
    """

    choice: Choice
    prices: tuple[Price, ...]
    notes: tuple[str, ...]


def fastest(request: Request, asked: Choice, modes: Sequence[str]) -> Plan:
    """Returns the plan that is predicted to be fastest, with the prices and notes of the choice.

    Args:
        request: the attention.
        asked: the choice, as far as the user has made it: its scheme is None for all schemes; those of one scheme are
            compared in as many head chunks as it has by itself.
        modes: the modes of latents to compare.
    """
    planned = list[Plan]()
    key = ("auto", *request.key, asked, *modes)
    chosen: Chosen = request.layout.memo(key, lambda: _chosen(request, asked, modes, planned))
    return replace(request.plan(chosen.choice, planned), prices=chosen.prices, notes=chosen.notes)


def _chosen(request: Request, asked: Choice, modes: Sequence[str], planned: list[Plan]) -> Chosen:
    """Chooses the candidate that is predicted to be fastest, and appends the plans of all to `planned`."""
    setting, is_open = request.setting, asked.scheme is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of searches for tiles: notes say the same
        ways = _ways(request, asked, tiles=False) if is_open else [asked]
        refused = [
            each
            for mode in modes
            for each in _add_plans(request, [replace(way, latent_mode=mode) for way in ways], planned)
        ]
        untiled, hopeless, not_tiled = list[Candidate](), dict[Choice, Price](), list[_Refusal]()
        if is_open and request.search_seconds and request.shape.selection is None:
            untiled = priced_candidates(planned, setting) if planned else []
            tiled = _ways(request, replace(asked, latent_mode=modes[0]), tiles=True)
            hopeless = _hopeless(tiled, planned, untiled[0], setting) if untiled else {}
            not_tiled = _add_plans(request, [way for way in tiled if way not in hopeless], planned)
        if not planned:
            raise (not_tiled or refused)[0].error
        new = [plan for plan in planned if not untiled or _attend(plan).tiled is not None]
        found = priced_candidates(new, setting, untiled)
        if is_open:
            found = _best_chunks(found, lambda plan, chunks: _in_chunks(request, asked, plan, chunks), setting)
    best, *others = found
    chunks = asked.head_chunks
    if chunks is None and SCHEMES[best.plan.scheme].takes_chunks:
        chunks = best.plan.num_chunks
    price = replace(best.price, reason=_reason(best, others))
    prices = (price, *(other.price for other in others), *hopeless.values())
    notes = (*_refusal_notes(not_tiled), *_search_notes(planned, best.plan))
    return Chosen(_choice_of(best.plan, asked, chunks), prices, notes)


# -- the candidates ----------------------------------------------------------------------------------------------------


def _ways(request: Request, asked: Choice, *, tiles: bool) -> list[Choice]:
    """Returns the choices that "auto" compares first, in one part: of schemes that assign tiles, or of the others."""
    topology, cp_size = request.setting.topology, request.layout.cp_size
    shared = 1 < topology.num_hosts < cp_size  # several hosts, one of which has several ranks
    schemes = [s for s in SCHEMES.values() if s.assigns_tiles == tiles and (shared or not s.goes_by_host)]
    if request.shape.selection is not None:
        schemes = [scheme for scheme in schemes if scheme.brings_all_keys]
    return [
        replace(asked, scheme=scheme, ulysses_degree=degree, head_chunks=asked.head_chunks or 1)
        for scheme in schemes
        for degree in degrees_to_try(scheme, request.layout, asked.ulysses_degree, topology)
    ]


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


class _Refusal(NamedTuple):
    """A choice that cannot be planned, and why."""

    choice: Choice
    error: ArgumentError


def _add_plans(request: Request, choices: Sequence[Choice], into: list[Plan]) -> list[_Refusal]:
    """Appends the plans of choices; returns those that cannot be planned."""
    refused = []
    for choice in choices:
        try:
            into.append(request.plan(choice, into))
        except ArgumentError as error:
            if error.argument == "search_seconds":  # the search is impossible for all candidates
                raise
            refused.append(_Refusal(choice, error))
    return refused


def _hopeless(
    tiled: Sequence[Choice], planned: Sequence[Plan], best: Candidate, setting: Setting
) -> dict[Choice, Price]:
    """Returns the choices with tiles that no search makes fast enough to be chosen, with bounds as prices.

    Args:
        tiled: the choices.
        planned: the plans of the others.
        best: the one of these to choose.
        setting: the machine and the ranks.
    """
    found = {}
    factor, more = _TILES_BIAS
    enough = (best.cost - more) / factor  # milliseconds below which assigned tiles are chosen instead
    for choice in tiled:
        alike = next((plan for plan in planned if _shares_heads(plan, choice)), None)
        if alike is None:
            continue
        try:
            forward, backward = bound_of_tiles(alike, setting, enough)
        except ArgumentError:  # too many tiles: planning them raises it again
            continue
        if forward + backward >= enough:
            assert choice.scheme is not None
            words, detail = described(*setting[:2]), _describe_degree(choice.scheme, choice.ulysses_degree)
            found[choice] = Price(choice.scheme.name, forward, backward, 0, True, words, detail=detail)
    return found


def _shares_heads(plan: Plan, choice: Choice) -> bool:
    """Tells whether a plan fetches keys and gives each rank the same heads as a choice with tiles."""
    assert choice.scheme is not None
    scheme, attend = SCHEMES[plan.scheme], _attend(plan)
    is_alike = scheme.chunks_keys and attend.num_kv_ranks > 1 and attend.latent_mode in ("", choice.latent_mode)
    return (
        is_alike
        and plan.ulysses_degree == (choice.ulysses_degree or 1)
        and (scheme.is_product == choice.scheme.is_product)
    )


# -- prices ------------------------------------------------------------------------------------------------------------


def priced_candidates(plans: Sequence[Plan], setting: Setting, known: Sequence[Candidate] = ()) -> list[Candidate]:
    """Returns plans with their prices, together with the candidates in `known`, the one to choose first."""
    very_many = bool(plans) and plans[0].layout.starts.size > VERY_MANY
    if very_many:
        plans = [plan for plan in plans if not _attend(plan).fetches_ranges] or plans
    found = [*known]
    sums = _sums_of(plans, setting)
    least = min([each.price.total for each in known if each.price.is_played] + [each.price.total for each in sums])
    nearest = min(sums, key=lambda each: _biased_cost(each.price.total, each.plan), default=None)
    for each in sums:
        price = each.price
        if each is nearest or (price.total <= _NEAR * least + _NEARLY and not very_many):
            price = _played(each.plan, setting, each.workloads)
        found.append(Candidate(price, each.plan))
    return sorted(found, key=lambda candidate: candidate.place)


class _Sum(NamedTuple):
    """The price of a plan by a sum, in as many chunks as it may have.

    Attributes:
        workloads: those of both directions; None for a plan that is far behind in forward.
    """

    plan: Plan
    price: Price
    workloads: Workloads | None


def _sums_of(plans: Sequence[Plan], setting: Setting) -> list[_Sum]:
    """Returns the sums of plans."""
    ahead = [workload_in(setting, plan, forward=True) for plan in plans]
    times = [1e3 * summed(workload, setting, _parts(plan)) for plan, workload in zip(plans, ahead, strict=True)]
    most, words, found = _NEAR * min(times, default=0.0) + _NEARLY, described(*setting[:2]), list[_Sum]()
    for plan, workload, forward in zip(plans, ahead, times, strict=True):
        back = workload_in(setting, plan, forward=False) if forward <= most else None
        backward = _BACKWARD * forward if back is None else 1e3 * summed(back, setting, _parts(plan))
        sent = max(plan.bytes_sent(setting.item_size, forward=True))
        price = Price(plan.scheme, forward, backward, sent, is_sum=True, hardware=words, detail=detail_of(plan))
        found.append(_Sum(plan, price, None if back is None else (workload, back)))
    return found


def _parts(plan: Plan) -> float:
    """Returns by how many times the head chunks of a plan may grow."""
    most, present = min(CHUNKS[-1], plan.partition.most_groups), plan.num_chunks
    return max(most / present, 1.0) if SCHEMES[plan.scheme].takes_chunks else 1.0


def _played(plan: Plan, setting: Setting, workloads: Workloads | None = None) -> Price:
    on, topology, item_size = setting
    return replace(priced(plan, on, topology, item_size=item_size, workloads=workloads), detail=detail_of(plan))


def _biased_cost(milliseconds: float, plan: Plan, chunks: int | None = None) -> float:
    """Returns the milliseconds as which a plan counts, in its own number of head chunks or in another."""
    factor, more = _bias(plan)
    return milliseconds * factor + more + _chunks_bias(plan, chunks or plan.num_chunks)


def _chunks_bias(plan: Plan, chunks: int) -> float:
    usual = min(2, plan.partition.most_groups) if SCHEMES[plan.scheme].chunks_keys else 1
    return 0.0 if chunks == usual else _CHUNKS_BIAS


def _bias(plan: Plan) -> tuple[float, float]:
    attend = _attend(plan)
    if attend.num_kv_ranks == 1:
        return _NO_BIAS
    if attend.tiled is not None:
        return _TILES_BIAS
    return _STAGES_BIAS if attend.num_stages > 1 else _KEYS_BIAS


def _attend(plan: Plan) -> Attend:
    assert plan.attend is not None
    return plan.attend


# -- head chunks -------------------------------------------------------------------------------------------------------


def _best_chunks(
    found: Sequence[Candidate], with_chunks: Callable[[Plan, int], Plan | None], setting: Setting
) -> list[Candidate]:
    """Returns the candidates in as many head chunks as are predicted to be fastest, the one to choose first.

    Those are tried that chunks could make the first: of n times as many chunks at least 1 / n of what is exposed stays
    exposed, and of fewer too, where starts of transfers are exposed. Of very many fragments the first one alone is
    tried.
    """
    first, tried = found[0], list(found)
    for price, plan in found[:1] if first.plan.layout.starts.size > VERY_MANY else found:
        present = plan.num_chunks
        for chunks in CHUNKS if price.is_played else ():
            least = price.total - price.exposed * (1 - min(chunks, present) / max(chunks, present))
            if chunks != present and (plan is first.plan or _biased_cost(least, plan, chunks) < first.cost):
                other = with_chunks(plan, chunks)
                tried += [] if other is None else [Candidate(_played(other, setting), other)]
    by_way: dict[tuple[str, int, str], list[Candidate]] = {}
    for candidate in sorted(tried, key=lambda candidate: candidate.place):
        by_way.setdefault(candidate.way, []).append(candidate)
    # One way in several numbers of chunks: the fastest, in the place of the one that counts as the least.
    return [min(alike, key=lambda each: (not each.price.is_played, each.price.total)) for alike in by_way.values()]


def _in_chunks(request: Request, asked: Choice, plan: Plan, chunks: int) -> Plan | None:
    """Returns the plan in so many head chunks; None if it cannot have them, or the user fixed another number."""
    if asked.head_chunks is not None or not SCHEMES[plan.scheme].takes_chunks or chunks > plan.partition.most_groups:
        return None
    return request.plan(_choice_of(plan, asked, chunks), [plan])


def _choice_of(plan: Plan, asked: Choice, head_chunks: int | None) -> Choice:
    """Returns the choice of a plan that was made of `asked`, in so many head chunks."""
    return replace(
        asked, scheme=SCHEMES[plan.scheme], ulysses_degree=plan.ulysses_degree, head_chunks=head_chunks,
        latent_mode=_attend(plan).latent_mode or asked.latent_mode,
    )  # fmt: skip


# -- words -------------------------------------------------------------------------------------------------------------


def _reason(chosen: Candidate, others: Sequence[Candidate]) -> str:
    """Explains the choice of a candidate although another is predicted to be faster; empty where none is."""
    played = [each for each in others if each.price.is_played]
    quickest = min(played, key=lambda each: each.price.total, default=chosen)
    if quickest.price.total >= chosen.price.total:
        return ""
    added = [f"{bias} to {price.scheme}{price.detail}" for price, plan in (chosen, quickest) if (bias := _added(plan))]
    return f"auto adds {' and '.join(added)}, since {_REASONS[_bias(quickest.plan)]}"


def _added(plan: Plan) -> str:
    """Describes what is added to the prediction of a plan before plans are compared; empty for nothing."""
    factor, more = _bias(plan)
    more += _chunks_bias(plan, plan.num_chunks)
    return " and ".join([f"{factor - 1:.0%}"] * (factor > 1) + [f"{more:g} ms"] * (more > 0))


def detail_of(plan: Plan) -> str:
    """Describes the degree, the chunks and the mode of latents of a plan, which its scheme's name does not say."""
    chunks, mode = plan.num_chunks, _attend(plan).latent_mode
    degree = _describe_degree(SCHEMES[plan.scheme], plan.ulysses_degree)
    return degree + (f", {chunks} chunks" if chunks > 1 else "") + (f", {mode}" if mode else "")


def _describe_degree(scheme: Scheme, degree: int | None) -> str:
    """Describes the number of ranks that exchange heads, for schemes that combine two exchanges."""
    return f" (u = {degree})" if scheme.is_product else ""


def _refusal_notes(refused: Sequence[_Refusal]) -> tuple[str, ...]:
    """Returns a note for each reason, not given by the user, that ruled out candidates with tiles."""
    causes: dict[str, list[str]] = {}
    for choice, error in refused:
        if error.argument not in _FILTERS:
            assert choice.scheme is not None
            name = choice.scheme.name + _describe_degree(choice.scheme, choice.ulysses_degree)
            causes.setdefault(str(error), []).append(name)
    return tuple(f"left out: {', '.join(names)}, for {cause}" for cause, names in causes.items())


def _search_notes(planned: Sequence[Plan], chosen: Plan) -> tuple[str, ...]:
    """Returns notes on the limits of searches of the other candidates; the chosen plan has its own."""
    own = chosen.scheme, chosen.ulysses_degree
    others = [plan for plan in planned if (plan.scheme, plan.ulysses_degree) != own]
    return tuple(f"{plan.scheme}{detail_of(plan)}: {note}" for plan in others for note in notes_of_search(plan))
