"""`plan_attention`: plans a softmax attention layer on a batch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import HeadPartition, Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.filled_layout import FilledLayout
from megatron_cp.layout.mask import Mask
from megatron_cp.layout.mask_like import MaskLike, mask_over
from megatron_cp.layout.rank_sets import merge_ranks
from megatron_cp.plan.assignment import TiledWork
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import AUTO, SCHEMES, Scheme, scheme_named
from megatron_cp.plan.selection import Selection, checked_selection, travelling_features
from megatron_cp.plan.steps import Step, ToHeads, ToTokens
from megatron_cp.plan.transport import COLLECTIVE, Transport, checked_transport
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.checks import (
    check_layout,
    check_mask,
    checked_chunks,
    checked_codec,
    checked_heads,
    exchange_of,
    many_bands,
    no_chunks,
    notes_of,
    priced_for,
)
from megatron_cp.planner.choose import VERY_MANY, best_chunks, describe_degree, detail_of, priced_candidates, reason
from megatron_cp.planner.predict.hardware import Machine, Topology, machine
from megatron_cp.planner.rounds import best_rounds, plan_in_rounds
from megatron_cp.planner.tiled import TileSearch, assigned_tiles, checked_search, hopeless_tiles, notes_of_search


def plan_attention(
    packing: Packing,
    layout: Layout,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    value_head_dim: int | None = None,
    latent: tuple[int, int] | None = None,
    topk: int | None = None,
    indexer: tuple[int, int] | None = None,
    mask: MaskLike | None = None,
    kv_packing: Packing | None = None,
    kv_layout: Layout | None = None,
    scheme: str = "auto",
    ulysses_degree: int | None = None,
    head_chunks: int | None = None,
    transport: Transport | str = COLLECTIVE,
    codec: str = "none",
    hardware: Machine | str | None = None,
    topology: Topology | None = None,
    item_size: int = 2,
    search_seconds: float = 0.0,
    search_cache: str | os.PathLike[str] | None = None,
) -> Plan:
    """Plans a softmax attention layer on a batch.

    A scheme is a head exchange among `u` neighbouring ranks (DeepSpeed Ulysses, arXiv 2309.14509) and a schedule by
    which keys and values travel between the `cp_size / u` groups of such ranks:

        a2a              u = cp_size: nothing else travels
        p2p              u = 1, keys pass round a ring (arXiv 2310.01889)
        all_gather       u = 1, every rank gathers all keys (Llama 3, arXiv 2407.21783)
        exact            u = 1, every rank receives the keys that its queries see and no others
        tiled            u = 1, tiles of the mask are assigned to ranks, evenly and so that little travels: keys, and
                         queries, whose partial results return (after UltraAttn, doi 10.1145/3712285.3759894)
        a2a+p2p, a2a+all_gather, a2a+exact, a2a+tiled    1 < u < cp_size

    Args:
        packing: the documents.
        layout: the assignment of tokens to ranks, for q and the output, and for k and v.
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`; `heads` if None.
        head_dim: features of a query or key head.
        value_head_dim: features of a value head; `head_dim` if None.
        latent: for `latent_attention`, features of the shared rotary key and of the latent of a token, such as
            (64, 512), which travel in place of keys and values; None where keys and values travel.
        topk: for `sparse_attention`, the most keys that a query attends to; None where it attends to all that the mask
            shows. Only schemes that bring all keys of a query at once can do it: exact and all_gather.
        indexer: heads and features of the indexer that chooses these keys, such as (64, 128), whose keys travel too;
            None where the caller has chosen them.
        mask: the keys that each query sees: a `Mask`, a spelling of `Mask.named`, such as "window:128", or a function
            of the packing that returns a `Mask`; causal in each document if None, or full if `kv_packing` or
            `kv_layout` is given.
        kv_packing, kv_layout: for cross-attention, the documents of the keys (as many as those of the queries) and
            their layout; None for self-attention.
        scheme: one of the above, or "auto", which takes the candidate that is predicted to be fastest: the scheme, its
            degree and, unless given, the number of head chunks.
        ulysses_degree: `u`, for the last four; the largest divisor of `cp_size` by which the key/value heads can be
            shared out evenly if None. With "auto", only candidates with this degree are compared.
        head_chunks: parts in which heads travel, while the one before is computed: keys of all_gather, exact, tiled
            and their products with a2a, where None is 2 if a rank has as many key/value heads; heads of the exchange in
            a2a and a2a+p2p, where None is 1. At most as many as a rank has key/value heads.
        transport: the transport of messages: "collective", "pairwise", "shared_memory", or a `Transport`, which
            hierarchical needs.
        codec: the codec of heads in the messages of an exchange: "none", "fp8" (E4M3), "fp8_e5m2" (gradients in E5M2)
            or "int8", each with a scale for each token and head.
        hardware: the machine of predictions: a preset such as "h100", its file, or a `Machine`; "h100" if None.
        topology: the hosts of the ranks; full hosts of that machine if None.
        item_size: bytes of an activation, for predictions and for the bytes of tiles.
        search_seconds: the time limit, for each of forward and backward, of a further search for better tiles in tiled
            and a2a+tiled, with OR-Tools (the extra `solver`). All ranks find the same. "auto" compares these two
            schemes only if this is above 0, since they take seconds to plan; other schemes refuse a search.
        search_cache: a folder with results of earlier searches, the same for all ranks; None for none.

    Raises:
        ArgumentError: an argument that does not fit the others or that no scheme can run.
    """
    scheme = require("scheme", scheme)
    check_layout(packing, layout)
    # The arguments decide, not equal lengths by chance: the default mask must not depend on the batch.
    is_cross = kv_packing is not None or kv_layout is not None
    kv_packing, kv_layout = _key_side(packing, layout, kv_packing, kv_layout)
    if mask is None:
        mask = Mask.full(packing, kv_packing) if is_cross else Mask.causal(packing)
    mask = mask_over(packing, mask, kv_packing)
    check_mask(mask, layout, kv_layout, is_cross=is_cross)
    head_dim = checked_integer("head_dim", head_dim, 1)
    value_head_dim = head_dim if value_head_dim is None else checked_integer("value_head_dim", value_head_dim, 1)
    given = {"head_chunks": head_chunks, "ulysses_degree": ulysses_degree}
    for name, value in given.items():
        if value is not None:
            checked_integer(name, value, 1)
    codec = require("codec", codec)
    heads, kv_heads = checked_heads(heads=heads, kv_heads=heads if kv_heads is None else kv_heads)
    transport = checked_transport(transport, layout.cp_size)
    item_size, on = checked_integer("item_size", item_size, 1), machine(hardware)
    on, topology = priced_for(transport, on, topology, layout.cp_size)
    search = checked_search(search_seconds, search_cache, [scheme], item_size=item_size)
    if latent is not None:
        latent, kv_heads = checked_latent(latent, heads, kv_heads, head_dim), 1
    selection = checked_selection(topk, indexer, kv_heads, scheme)
    request = _Request(
        layout, kv_layout, mask, heads, kv_heads if selection is None else 1, head_dim, value_head_dim, head_chunks,
        codec, transport, topology, search, on, latent, selection,
    )  # fmt: skip
    if scheme != AUTO or layout.cp_size == 1 or isinstance(layout, FilledLayout):
        return request.plan(scheme_named(scheme, selects=selection is not None), ulysses_degree)
    key, planned = ("auto", *request.key, ulysses_degree), list[Plan]()
    found: _Choice = layout.memo(key, lambda: _cheapest(request, ulysses_degree, planned))
    # The plan is made again, from the same tables, so that its warnings are given now.
    chosen = replace(request, head_chunks=found.head_chunks).plan(found.scheme, found.degree, planned)
    return replace(chosen, prices=found.prices, notes=(*chosen.notes, *found.notes))


_SEARCH_ARGUMENTS = ("search_seconds", "search_cache")  # read by candidates with assigned tiles alone
_FILTERS = ("ulysses_degree", "head_chunks", "codec")  # arguments by which a user rules out candidates


class _Choice(NamedTuple):
    """The choice of "auto". It holds no plan, since plans refer to the layout that keeps it."""

    scheme: Scheme
    degree: int | None
    head_chunks: int | None
    prices: tuple[Price, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Request:
    """The arguments of `plan_attention` after checks, without the scheme."""

    layout: Layout
    kv_layout: Layout
    mask: Mask
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    head_chunks: int | None
    codec: str
    transport: Transport
    topology: Topology
    search: TileSearch
    on: Machine
    latent: tuple[int, int] | None
    selection: Selection | None

    def tiles(self, step: Attend) -> TiledWork:
        """Returns the assigned tiles, which are searched once for each batch, layer shape and mask."""
        keys = None if self.kv_layout == self.layout else self.kv_layout
        sizes = (step.partition, self.head_dim, self.value_head_dim, self.latent)
        key = ("tiles", self.mask, keys, *sizes, self.topology, self.search)  # the same for all numbers of head chunks
        found: TiledWork = self.layout.memo(key, lambda: assigned_tiles(step, self.topology, self.search))
        return found

    def schedule_rounds(self, plan: Plan) -> Plan:
        """Returns the plan with its tiles' rows in the number of rounds that is predicted to be fastest."""
        if plan.attend is None or plan.attend.tiled is None or not plan.attend.tiled.solutions:
            return plan  # no tiles, or those of keys that stay, whose queries all come in the first round
        key = ("rounds", *self.key, plan.scheme, plan.ulysses_degree, plan.attend.head_chunks)
        prediction = (self.on, self.topology, self.search.item_size)
        rounds, schedules = self.layout.memo(key, lambda: best_rounds(plan, *prediction))
        return plan_in_rounds(plan, rounds, schedules)

    @property
    def key(self) -> tuple[Any, ...]:
        """The fields that identify a request to one layout."""
        keys = None if self.kv_layout == self.layout else self.kv_layout
        sizes = (self.heads, self.kv_heads, self.head_dim, self.value_head_dim, self.latent, self.selection)
        options = (self.head_chunks, self.codec, self.transport, self.search, self.on, self.topology)
        return (keys, self.mask, *sizes, *options)

    def plan(self, scheme: Scheme, ulysses_degree: int | None, others: Sequence[Plan] = ()) -> Plan:
        """Plans a scheme, and shares tables with one of `others` of the same degree."""
        degree = _degree(scheme, self.layout.cp_size, self.kv_heads, ulysses_degree)
        partition = partition_heads(self.heads, self.kv_heads, degree)
        q = Section("q", self.heads, self.head_dim, partition.heads)
        key, value = travelling_features(self.head_dim, self.value_head_dim, self.latent, self.selection)
        k, v = (Section(name, self.kv_heads, size, partition.groups) for name, size in (("k", key), ("v", value)))
        steps = self._steps(scheme, partition, q, k, v)
        attend = next(step for step in steps if isinstance(step, Attend))
        for other in others:
            if other.attend is not None and other.ulysses_degree == degree:
                attend.share_seen(other.attend)
                break
        notes = notes_of(partition, self.layout, "head", "key/value head", "; exact and p2p use them all", stacklevel=4)
        notes += many_bands(attend, scheme)
        plan = Plan(
            "attention", scheme.name, self.layout, Sections((q, k, v)), partition, self.mask, steps, notes,
            transport=self.transport,
        )  # fmt: skip
        return self.schedule_rounds(replace(plan, notes=(*notes, *notes_of_search(plan))))

    def _steps(self, scheme: Scheme, partition: HeadPartition, q: Section, k: Section, v: Section) -> tuple[Step, ...]:
        """Returns the steps: the attention, between two head exchanges if the scheme has them."""
        layout, kv_layout = self.layout, self.kv_layout
        chunks = _head_chunks(self.head_chunks, scheme, partition)
        codec = checked_codec(self.codec, scheme.name, "" if scheme.takes_codec else _codec_remedy())
        degree = len(partition.heads)
        # A head exchange on one rank only sorts tokens, so that results have the bits of several ranks.
        in_order = layout.in_stream_order and kv_layout.in_stream_order
        exchanged = degree > 1 or (not scheme.exchanges_keys and not in_order)
        queries, keys = (
            Layout.contiguous(each.packing, 1) if exchanged and degree == 1 else merge_ranks(each, degree)
            for each in (layout, kv_layout)
        )
        parts, key_chunks = (1, chunks) if scheme.chunks_keys or degree == 1 else (chunks, 1)
        attend = Attend(
            self.mask, queries, keys, partition, scheme.kv_schedule, self.head_dim, self.value_head_dim, key_chunks,
            latent=self.latent, selection=self.selection,
        )  # fmt: skip
        if scheme.assigns_tiles and queries.cp_size > 1:
            attend = replace(attend, tiled=self.tiles(attend))
        if not exchanged:
            return (attend,)

        def exchange(layout: Layout, *blocks: Section, section_major: bool = False) -> Exchange:
            return exchange_of(layout, Sections(blocks), partition, parts, codec, section_major=section_major)

        inbound = (
            (ToHeads(exchange(layout, q), (0, 1)), ToHeads(exchange(kv_layout, k, v), (1, 3)))
            if kv_layout != layout
            else (ToHeads(exchange(layout, q, k, v), (0, 3)),)
        )
        out = Section("out", q.num_heads, self.value_head_dim, partition.heads)
        return (*inbound, attend, ToTokens(exchange(layout, out, section_major=True)))

    def with_chunks(self, plan: Plan, chunks: int) -> Plan | None:
        """Returns the plan in so many head chunks; None if it cannot have them, or the user fixed another number."""
        scheme = SCHEMES[plan.scheme]
        if self.head_chunks is not None or not scheme.takes_chunks or chunks > plan.partition.most_groups:
            return None
        return replace(self, head_chunks=chunks).plan(scheme, plan.ulysses_degree, [plan])


def _cheapest(request: _Request, ulysses_degree: int | None, candidates: list[Plan]) -> _Choice:
    """Chooses the candidate that is predicted to be fastest, and appends the plans of all to `candidates`."""
    on, topology, item_size = request.on, request.topology, request.search.item_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # repeated when the chosen candidate is planned
        untiled = _schemes_to_try(request.layout, ulysses_degree, topology, tiles=False)
        untiled = [pair for pair in untiled if request.selection is None or pair[0].brings_all_keys]
        refused = _add_candidates(request, untiled, candidates)
        others, skipped, not_tiled = list[tuple[Price, Plan]](), list[Price](), _Refusals()
        if request.search.seconds and request.selection is None:
            others = priced_candidates(candidates, on, topology, item_size) if candidates else []
            tiled = _schemes_to_try(request.layout, ulysses_degree, topology, tiles=True)
            skipped = hopeless_tiles(tiled, candidates, others, on, topology, item_size)
            names = [(price.scheme, price.detail) for price in skipped]
            hopeful = [pair for pair in tiled if (pair[0].name, describe_degree(*pair)) not in names]
            not_tiled = _add_candidates(request, hopeful, candidates)
        if not candidates:
            raise (not_tiled or refused)[0][1]
        new = [plan for plan in candidates if not others or (plan.attend is not None and plan.attend.tiled is not None)]
        found = priced_candidates(new, on, topology, item_size, others)
        found = best_chunks(found, request.with_chunks, on, topology, item_size)
        price, plan = found[0]
    scheme, chunks = SCHEMES[plan.scheme], request.head_chunks
    if chunks is None and scheme.takes_chunks:
        assert plan.attend is not None
        chunks = max(plan.head_chunks, plan.attend.head_chunks)
    degree = plan.ulysses_degree if scheme.is_product else None
    price = replace(price, reason=reason((price, plan), found[1:]))
    prices = (price, *(other for other, _ in found[1:]), *skipped)
    notes = (*_refusal_notes(not_tiled), *_search_notes(candidates, plan))
    return _Choice(scheme, degree, chunks, prices, notes)


def _schemes_to_try(
    layout: Layout, ulysses_degree: int | None, topology: Topology, *, tiles: bool
) -> list[tuple[Scheme, int | None]]:
    """Returns the schemes and degrees among which "auto" chooses: those that assign tiles, or the others."""
    schemes = [scheme for scheme in SCHEMES.values() if scheme.assigns_tiles == tiles]
    return [(scheme, degree) for scheme in schemes for degree in _degrees(scheme, layout, ulysses_degree, topology)]


_Refusals = list[tuple[str, ArgumentError]]


def _add_candidates(request: _Request, wanted: Sequence[tuple[Scheme, int | None]], into: list[Plan]) -> _Refusals:
    """Appends the plans of candidates; returns the names and the refusals of those that cannot be planned."""
    refused = _Refusals()
    for scheme, degree in wanted:
        try:
            into.append(request.plan(scheme, degree, into))
        except ArgumentError as error:
            if error.argument in _SEARCH_ARGUMENTS:  # the search is impossible for all candidates
                raise
            refused.append((scheme.name + describe_degree(scheme, degree), error))
    return refused


def _refusal_notes(refused: _Refusals) -> tuple[str, ...]:
    """Returns a note for each reason, not given by the user, that ruled out candidates with tiles."""
    causes: dict[str, list[str]] = {}
    for name, error in refused:
        if error.argument not in _FILTERS:
            causes.setdefault(str(error), []).append(name)
    return tuple(f"left out: {', '.join(names)}, for {cause}" for cause, names in causes.items())


def _search_notes(candidates: Sequence[Plan], chosen: Plan) -> tuple[str, ...]:
    """Returns notes on the limits of searches of the other candidates; the chosen plan has its own."""
    own = chosen.scheme, chosen.ulysses_degree
    others = [plan for plan in candidates if (plan.scheme, plan.ulysses_degree) != own]
    return tuple(f"{plan.scheme}{detail_of(plan)}: {note}" for plan in others for note in notes_of_search(plan))


def _degrees(scheme: Scheme, layout: Layout, asked: int | None, topology: Topology) -> list[int | None]:
    """Returns the degrees among which "auto" chooses; with very many fragments or tiles, the ranks of a host only."""
    if asked is not None or not scheme.is_product:
        return [asked]
    is_many = layout.starts.size > VERY_MANY or scheme.assigns_tiles
    degrees: list[int | None] = [degree for degree in range(2, layout.cp_size) if layout.cp_size % degree == 0]
    if not is_many:
        return degrees
    host = topology.hosts.count(topology.hosts[0])
    return [degree for degree in degrees if degree == host] or degrees[:1]


def _degree(scheme: Scheme, cp_size: int, kv_heads: int, ulysses_degree: int | None) -> int:
    products = [other.name for other in SCHEMES.values() if other.is_product]
    if not scheme.is_product:
        degree = cp_size if scheme.exchanges_heads else 1
        if ulysses_degree is not None:
            ulysses_degree = checked_integer("ulysses_degree", ulysses_degree, 1)
        if ulysses_degree is not None and ulysses_degree != degree:
            allowed = f"{degree} or None for {scheme.name}"
            raise ArgumentError("ulysses_degree", ulysses_degree, allowed, f"Use {' or '.join(products)}.")
        return degree
    divisors = [degree for degree in range(2, cp_size) if cp_size % degree == 0]
    if not divisors:
        remedy = f"{cp_size} has no other divisor; use a2a, {scheme.kv_schedule} or another number of ranks."
        raise ArgumentError("scheme", scheme.name, "a number of ranks that is a product, such as 4 = 2 * 2", remedy)
    if ulysses_degree is None:
        # The largest degree that shares key/value heads evenly; else the largest that leaves no rank without one.
        even, some = (
            [d for d in divisors if fits(d)] for fits in (lambda d: kv_heads % d == 0, lambda d: d <= kv_heads)
        )
        return max(even or some or divisors[:1])
    if checked_integer("ulysses_degree", ulysses_degree, 1) not in divisors:
        raise ArgumentError("ulysses_degree", ulysses_degree, " or ".join(map(str, divisors)), f"For {scheme.name}.")
    return ulysses_degree


def checked_latent(latent: object, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns the features of a shared key and of a latent after checking them.

    Raises:
        ArgumentError: other than two numbers of features, or heads that share keys.
    """
    if not isinstance(latent, tuple | list) or len(latent) != 2:
        raise ArgumentError("latent", latent, "features of the shared key and of the latent, such as (64, 512)")
    shared, rank = checked_integer("latent[0]", latent[0], 1), checked_integer("latent[1]", latent[1], 1)
    if shared >= head_dim:
        raise ArgumentError("latent", latent, f"a shared key of fewer than head_dim, {head_dim} features")
    if kv_heads != heads:
        raise ArgumentError("kv_heads", kv_heads, f"None with latent: each of {heads} heads has keys of its own")
    return shared, rank


def _codec_remedy() -> str:
    names = " or ".join(scheme.name for scheme in SCHEMES.values() if scheme.takes_codec)
    return f"Only heads of an exchange are coded: use {names}."


def _head_chunks(asked: int | None, scheme: Scheme, partition: HeadPartition) -> int:
    if asked is None:
        return min(2, partition.most_groups) if scheme.chunks_keys else 1
    if not scheme.takes_chunks:
        others = [other.name for other in SCHEMES.values() if other.takes_chunks]
        return no_chunks(asked, scheme.name, f"It passes on all heads of a key at once: use {' or '.join(others)}.")
    return checked_chunks(asked, partition, "key/value head")


def _key_side(
    packing: Packing, layout: Layout, kv_packing: Packing | None, kv_layout: Layout | None
) -> tuple[Packing, Layout]:
    """Returns the documents and the layout of the keys, by default those of the queries."""
    if kv_packing is None and kv_layout is None:
        return packing, layout
    if not isinstance(kv_packing, Packing) or kv_packing.num_documents != packing.num_documents:
        raise ArgumentError(
            "kv_packing", kv_packing, f"a Packing of {packing.num_documents} documents, as the queries'"
        )
    if not isinstance(kv_layout, Layout) or kv_layout.packing != kv_packing or kv_layout.cp_size != layout.cp_size:
        raise ArgumentError(
            "kv_layout", kv_layout, f"a layout of {kv_packing!r} over {layout.cp_size} ranks, such as Layout.zigzag"
        )
    return kv_packing, kv_layout
