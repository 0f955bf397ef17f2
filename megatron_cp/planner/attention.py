"""`plan_attention`: from a batch and a layer of softmax attention to the steps that run it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.exchange.codec import Codec
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import HeadPartition, Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.layout import FILLED
from megatron_cp.layout.mask import Mask
from megatron_cp.layout.rank_sets import merge_ranks
from megatron_cp.plan.assignment import TiledWork
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import AUTO, SCHEMES, Scheme, scheme_named
from megatron_cp.plan.steps import Step, ToHeads, ToTokens
from megatron_cp.plan.transport import COLLECTIVE, Transport, checked_transport
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.checks import (
    check_layout,
    check_mask,
    checked_chunks,
    checked_codec,
    checked_heads,
    checked_topology,
    exchange_of,
    many_bands,
    no_chunks,
    notes_of,
)
from megatron_cp.planner.predict.hardware import Machine, Topology, machine
from megatron_cp.planner.rounds import best_rounds, plan_in_rounds
from megatron_cp.planner.tiled import TileSearch, assigned_tiles, checked_search, hopeless_tiles, notes_of_search
from megatron_cp.planner.weigh import VERY_MANY, detail_of, in_best_chunks, rule_of, weighed, words_of_degree


def plan_attention(
    packing: Packing,
    layout: Layout,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    value_head_dim: int | None = None,
    mask: Mask | None = None,
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
    """How to run softmax attention over a batch.

    A scheme is a head exchange among `u` neighbouring ranks (DeepSpeed Ulysses, arXiv 2309.14509) and a schedule by
    which keys and values travel between the `cp_size / u` groups of such ranks:

        a2a              u = cp_size: nothing else travels
        p2p              u = 1, keys pass round a ring (arXiv 2310.01889)
        all_gather       u = 1, every rank gathers all keys (Llama 3, arXiv 2407.21783)
        exact            u = 1, every rank receives the keys that its queries see and no others
        tiled            u = 1, tiles of the mask are assigned to ranks, evenly and so that little travels: keys, and
                         queries whose partial results go home (after UltraAttn, doi 10.1145/3712285.3759894)
        a2a+p2p, a2a+all_gather, a2a+exact, a2a+tiled    1 < u < cp_size

    Args:
        packing: the documents.
        layout: who holds which tokens of q and the output, and of k and v.
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`; `heads` if None.
        head_dim: features of a query or key head.
        value_head_dim: features of a value head; `head_dim` if None.
        mask: which keys a query sees; causal in each document if None, or full if keys are given a packing or a layout.
        kv_packing, kv_layout: for cross-attention, the documents of the keys (as many as those of the queries) and who
            holds them; None for self-attention.
        scheme: one of the above, or "auto", which takes the way that is predicted to be fastest: the scheme, its degree
            and, where that is left open, the number of head chunks.
        ulysses_degree: `u`, for the last four; the largest divisor of `cp_size` by which the key/value heads can be
            shared out evenly if None. With "auto", that of the ways to choose from.
        head_chunks: parts in which heads travel, while the one before is computed: keys of all_gather, exact, tiled
            and their products with a2a, where None is 2 if a rank has as many key/value heads; heads of the exchange in
            a2a and a2a+p2p, where None is 1. At most as many as a rank has key/value heads.
        transport: how messages travel: "collective", "pairwise" or a `Transport`, which hierarchical takes.
        codec: how heads are coded while they change places: "none", "fp8" (E4M3), "fp8_e5m2" (gradients in E5M2) or
            "int8", each with a scale for each token and head.
        hardware: on what "auto" predicts: a preset such as "h100", its file, or a `Machine`; "h100" if None.
        topology: where the ranks are; full hosts of that machine if None.
        item_size: bytes of an activation, for predictions, and for the tiles of tiled, which weigh what
            travels.
        search_seconds: how long tiled and a2a+tiled may search for better tiles, forward and backward each, beyond what
            they find within seconds: with OR-Tools, which the extra `solver` brings. All ranks find the same. "auto"
            weighs the two only if this is above 0, since they take seconds to plan; other schemes refuse a search.
        search_cache: a folder with what searches found before, for all ranks the same; None for none.

    Raises:
        ArgumentError: an argument that does not fit the others, or that no scheme here can run.
    """
    require("scheme", scheme)
    check_layout(packing, layout)
    # By what was asked for, not by whether lengths happen to be equal: the default mask must not depend on the batch.
    is_cross = kv_packing is not None or kv_layout is not None
    kv_packing, kv_layout = _key_side(packing, layout, kv_packing, kv_layout)
    if mask is None:
        mask = Mask.full(packing, kv_packing) if is_cross else Mask.causal(packing)
    check_mask(mask, layout, kv_layout, is_cross=is_cross)
    head_dim = checked_integer("head_dim", head_dim, 1)
    value_head_dim = head_dim if value_head_dim is None else checked_integer("value_head_dim", value_head_dim, 1)
    given = {"head_chunks": head_chunks, "ulysses_degree": ulysses_degree}
    for name, value in given.items():
        if value is not None:
            checked_integer(name, value, 1)
    require("codec", codec)
    heads, kv_heads = checked_heads(heads=heads, kv_heads=heads if kv_heads is None else kv_heads)
    transport = checked_transport(transport, layout.cp_size)
    item_size, on = checked_integer("item_size", item_size, 1), machine(hardware)
    topology = checked_topology(topology, on, layout.cp_size, transport)
    search = checked_search(search_seconds, search_cache, [scheme], item_size=item_size)
    request = _Request(
        layout, kv_layout, mask, heads, kv_heads, head_dim, value_head_dim, head_chunks, codec, transport, topology,
        search, on,
    )  # fmt: skip
    if scheme != AUTO or layout.cp_size == 1 or layout.remembers(FILLED):
        return request.plan(scheme_named(scheme), ulysses_degree)
    key, looked_at = ("auto", *request.key, ulysses_degree, on, topology), list[Plan]()
    found: _Choice = layout.memo(key, lambda: _cheapest(request, ulysses_degree, on, topology, looked_at))
    # Made once more where it was found, from the same tables: its notes are said aloud now.
    chosen = replace(request, head_chunks=found.head_chunks).plan(found.way, found.degree, looked_at)
    return replace(chosen, prices=found.prices, notes=(*chosen.notes, *found.notes))


_OF_SEARCH = ("search_seconds", "search_cache")  # arguments that only ways with assigned tiles read
_OF_WAYS = ("ulysses_degree", "head_chunks", "codec")  # arguments that rule out ways: as who gave them wants


class _Choice(NamedTuple):
    """What "auto" takes. No plan: a layout remembers it, which plans refer to."""

    way: Scheme
    degree: int | None
    head_chunks: int | None
    prices: tuple[Price, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Request:
    """What was asked for, but for the scheme."""

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

    def tiles(self, step: Attend) -> TiledWork:
        """Who computes which tile: searched once for each batch, layer shape and mask."""
        keys = None if self.kv_layout == self.layout else self.kv_layout
        sizes = (step.partition, self.head_dim, self.value_head_dim)
        key = ("tiles", self.mask, keys, *sizes, self.topology, self.search)  # whatever the chunks of heads
        found: TiledWork = self.layout.memo(key, lambda: assigned_tiles(step, self.topology, self.search))
        return found

    def in_rounds(self, plan: Plan) -> Plan:
        """A plan with assigned tiles, their rows in as many rounds as are predicted to be fastest."""
        if plan.attend is None or plan.attend.tiled is None:
            return plan
        on, topology, item_size = self.on, self.topology, self.search.item_size
        key = ("rounds", *self.key, on, topology, plan.scheme, plan.ulysses_degree, plan.attend.head_chunks)
        rounds, schedules = self.layout.memo(key, lambda: best_rounds(plan, on, topology, item_size))
        return plan_in_rounds(plan, rounds, schedules)

    @property
    def key(self) -> tuple[Any, ...]:
        """All of it but the layout."""
        keys = None if self.kv_layout == self.layout else self.kv_layout
        sizes = (self.heads, self.kv_heads, self.head_dim, self.value_head_dim)
        return (keys, self.mask, *sizes, self.head_chunks, self.codec, self.transport, self.search)

    def plan(self, way: Scheme, ulysses_degree: int | None, others: Sequence[Plan] = ()) -> Plan:
        """The plan of one scheme, which takes what queries see from another one in whose heads are spread alike."""
        degree = _degree(way, self.layout.cp_size, self.kv_heads, ulysses_degree)
        partition = partition_heads(self.heads, self.kv_heads, degree)
        q = Section("q", self.heads, self.head_dim, partition.heads)
        k = Section("k", self.kv_heads, self.head_dim, partition.groups)
        v = Section("v", self.kv_heads, self.value_head_dim, partition.groups)
        chunks = _head_chunks(self.head_chunks, way, partition)
        coding = checked_codec(self.codec, way.name, "" if way.takes_codec else _codec_remedy())
        steps = _steps(way, self.layout, self.kv_layout, self.mask, partition, (q, k, v), chunks, coding, self.tiles)
        attend = next(step for step in steps if isinstance(step, Attend))
        for other in others:
            if other.attend is not None and other.ulysses_degree == degree:
                attend.share_seen(other.attend)
                break
        notes = notes_of(partition, self.layout, "head", "key/value head", "; exact and p2p use them all", stacklevel=4)
        notes += many_bands(attend, way)
        plan = Plan(
            "attention", way.name, self.layout, Sections((q, k, v)), partition, self.mask, steps, notes,
            transport=self.transport,
        )  # fmt: skip
        return self.in_rounds(replace(plan, notes=(*notes, *notes_of_search(plan))))

    def with_chunks(self, plan: Plan, chunks: int) -> Plan | None:
        """The same way in so many head chunks; None where it cannot be, or was asked for otherwise."""
        way = SCHEMES[plan.scheme]
        if self.head_chunks is not None or not way.takes_chunks or chunks > plan.partition.most_groups:
            return None
        return replace(self, head_chunks=chunks).plan(way, plan.ulysses_degree, [plan])


def _cheapest(
    request: _Request, ulysses_degree: int | None, on: Machine, topology: Topology, ways: list[Plan]
) -> _Choice:
    """The way that is predicted to be fastest, with the prices of all.

    Args:
        request, ulysses_degree, on, topology: see `plan_attention`.
        ways: gets the plans of all.
    """
    item_size = request.search.item_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # said of the one that is taken
        refused = _add_ways(request, _ways(request.layout, ulysses_degree, topology, tiles=False), ways)
        others, skipped, not_tiled = list[tuple[Price, Plan]](), list[Price](), _Refusals()
        if request.search.seconds:
            others = weighed(ways, on, topology, item_size) if ways else []
            of_tiles = _ways(request.layout, ulysses_degree, topology, tiles=True)
            skipped = hopeless_tiles(of_tiles, ways, others, on, topology, item_size)
            names = [(price.scheme, price.detail) for price in skipped]
            hopeful = [pair for pair in of_tiles if (pair[0].name, words_of_degree(*pair)) not in names]
            not_tiled = _add_ways(request, hopeful, ways)
        if not ways:
            raise (not_tiled or refused)[0][1]
        new = [plan for plan in ways if not others or (plan.attend is not None and plan.attend.tiled is not None)]
        found = weighed(new, on, topology, item_size, others)
        found = in_best_chunks(found, request.with_chunks, on, topology, item_size)
        price, plan = found[0]
    way, chunks = SCHEMES[plan.scheme], request.head_chunks
    if chunks is None and way.takes_chunks:
        assert plan.attend is not None
        chunks = max(plan.head_chunks, plan.attend.head_chunks)
    degree = plan.ulysses_degree if way.is_product else None
    price = replace(price, rule=rule_of((price, plan), found[1:]))
    prices = (price, *(other for other, _ in found[1:]), *skipped)
    return _Choice(way, degree, chunks, prices, (*_left_out(not_tiled), *_not_searched(ways, plan)))


def _ways(
    layout: Layout, ulysses_degree: int | None, topology: Topology, *, tiles: bool
) -> list[tuple[Scheme, int | None]]:
    """The schemes and degrees among which "auto" chooses: those that assign tiles, or the others."""
    schemes = [way for way in SCHEMES.values() if way.assigns_tiles == tiles]
    return [(way, degree) for way in schemes for degree in _degrees(way, layout, ulysses_degree, topology)]


_Refusals = list[tuple[str, ArgumentError]]


def _add_ways(request: _Request, wanted: Sequence[tuple[Scheme, int | None]], ways: list[Plan]) -> _Refusals:
    """Appends the plans of ways; the refusals of those that cannot be, with their names."""
    refused = _Refusals()
    for way, degree in wanted:
        try:
            ways.append(request.plan(way, degree, ways))
        except ArgumentError as error:
            if error.argument in _OF_SEARCH:  # the search that was asked for is impossible, not this way alone
                raise
            refused.append((way.name + words_of_degree(way, degree), error))
    return refused


def _left_out(refused: _Refusals) -> tuple[str, ...]:
    """A note for each reason that the batch itself gives against ways that a search was to weigh."""
    reasons: dict[str, list[str]] = {}
    for name, error in refused:
        if error.argument not in _OF_WAYS:
            reasons.setdefault(str(error), []).append(name)
    return tuple(f"left out: {', '.join(names)}, for {reason}" for reason, names in reasons.items())


def _not_searched(ways: Sequence[Plan], chosen: Plan) -> tuple[str, ...]:
    """What the searches of the ways that were not taken could not do: a plan says that of itself."""
    others = [plan for plan in ways if (plan.scheme, plan.ulysses_degree) != (chosen.scheme, chosen.ulysses_degree)]
    return tuple(f"{plan.scheme}{detail_of(plan)}: {note}" for plan in others for note in notes_of_search(plan))


def _degrees(way: Scheme, layout: Layout, asked: int | None, topology: Topology) -> list[int | None]:
    """The degrees among which "auto" chooses; of very many fragments, and of tiles, the ranks of a host."""
    if asked is not None or not way.is_product:
        return [asked]
    is_many = layout.starts.size > VERY_MANY or way.assigns_tiles
    degrees: list[int | None] = [degree for degree in range(2, layout.cp_size) if layout.cp_size % degree == 0]
    if not is_many:
        return degrees
    host = topology.hosts.count(topology.hosts[0])
    return [degree for degree in degrees if degree == host] or degrees[:1]


def _steps(
    scheme: Scheme, layout: Layout, kv_layout: Layout, mask: Mask, partition: HeadPartition,
    blocks: tuple[Section, Section, Section], chunks: int, codec: Codec | None,
    tiles: Callable[[Attend], TiledWork],
) -> tuple[Step, ...]:  # fmt: skip
    """The attention, between two head exchanges where there are some.

    Args:
        tiles: assigns those of a step, where the scheme wants that.
    """
    q, k, v = blocks
    degree = len(partition.heads)
    # A head exchange on one rank only puts tokens in order, which gives the bits of several ranks.
    in_order = layout.in_stream_order and kv_layout.in_stream_order
    exchanged = degree > 1 or (not scheme.exchanges_keys and not in_order)
    queries, keys = (
        Layout.contiguous(each.packing, 1) if exchanged and degree == 1 else merge_ranks(each, degree)
        for each in (layout, kv_layout)
    )
    parts, of_keys = (1, chunks) if scheme.chunks_keys or degree == 1 else (chunks, 1)
    attend = Attend(mask, queries, keys, partition, scheme.kv_schedule, q.head_dim, v.head_dim, of_keys)
    if scheme.assigns_tiles and queries.cp_size > 1:
        attend = replace(attend, tiled=tiles(attend))
    if not exchanged:
        return (attend,)

    def exchange(layout: Layout, *blocks: Section, section_major: bool = False) -> Exchange:
        return exchange_of(layout, Sections(blocks), partition, parts, codec, section_major=section_major)

    inbound = (
        (ToHeads(exchange(layout, q), (0, 1)), ToHeads(exchange(kv_layout, k, v), (1, 3)))
        if kv_layout != layout
        else (ToHeads(exchange(layout, q, k, v), (0, 3)),)
    )
    out = Section("out", q.num_heads, v.head_dim, partition.heads)
    return (*inbound, attend, ToTokens(exchange(layout, out, section_major=True)))


def _degree(scheme: Scheme, cp_size: int, kv_heads: int, ulysses_degree: int | None) -> int:
    """How many ranks exchange heads with one another."""
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
        # As many as share the key/value heads evenly; else as many as leave no rank without one.
        even, some = (
            [d for d in divisors if fits(d)] for fits in (lambda d: kv_heads % d == 0, lambda d: d <= kv_heads)
        )
        return max(even or some or divisors[:1])
    if checked_integer("ulysses_degree", ulysses_degree, 1) not in divisors:
        raise ArgumentError("ulysses_degree", ulysses_degree, " or ".join(map(str, divisors)), f"For {scheme.name}.")
    return ulysses_degree


def _codec_remedy() -> str:
    names = " or ".join(scheme.name for scheme in SCHEMES.values() if scheme.takes_codec)
    return f"Only heads that change places are coded: use {names}."


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
    """The documents and the layout of the keys: those of the queries where none are given."""
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
