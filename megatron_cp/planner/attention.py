"""`plan_attention`: plans a softmax attention layer on a batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_cp.errors import ArgumentError, checked_integer, checked_size
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import HeadPartition, Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.filled_layout import FilledLayout
from megatron_cp.layout.mask import Mask
from megatron_cp.layout.mask_like import MaskLike, mask_over
from megatron_cp.layout.rank_sets import merge_ranks
from megatron_cp.plan.assignment import TiledWork
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.latent import Latent
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import AUTO, SCHEMES, Scheme, scheme_named
from megatron_cp.plan.selection import Selection, checked_selection, travelling_features
from megatron_cp.plan.steps import Step, ToHeads, ToTokens
from megatron_cp.plan.transport import COLLECTIVE, Transport, checked_transport
from megatron_cp.planner.capabilities import hints_keywords, require
from megatron_cp.planner.checks import (
    UNCODED_CHOICE,
    check_layout,
    check_mask,
    checked_blocks,
    checked_chunks,
    checked_codec,
    checked_degree,
    checked_heads,
    checked_item_size,
    checked_latent,
    checked_latent_mode,
    checked_machine,
    exchange_of,
    latent_modes,
    many_bands,
    no_chunks,
    notes_of,
)
from megatron_cp.planner.choose import (
    best_chunks,
    degrees_to_try,
    describe_degree,
    detail_of,
    priced_candidates,
    reason,
)
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.machine_files import machine
from megatron_cp.planner.tiled import TileSearch, assigned_tiles, checked_search, hopeless_tiles, notes_of_search


@hints_keywords
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
    block: int | None = None,
    latent_mode: str | None = None,
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
) -> Plan:
    """Plans a softmax attention layer on a batch.

    A scheme is a head exchange among `u` neighbouring ranks (DeepSpeed Ulysses, arXiv 2309.14509) and a schedule by
    which keys and values travel between the `cp_size / u` groups of such ranks:

        a2a              u = cp_size: nothing else travels
        p2p              u = 1, keys pass round a ring (arXiv 2310.01889)
        all_gather       u = 1, every rank gathers all keys (Llama 3, arXiv 2407.21783)
        exact            u = 1, every rank receives the keys that its queries see and no others
        exact_by_host    exact over several hosts: a key crosses once to each other host that sees it, and goes on there
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
            (64, 512); None for `attention`.
        latent_mode: "expand": latents travel and are expanded where they arrive; "absorb": latents travel and queries
            are multiplied by the up-projection; "heads": keys and values travel; "auto": whichever is predicted to be
            fastest. If None, "auto" with scheme "auto", else "expand".
        topk: for `sparse_attention`, the most keys that a query attends to; None where it attends to all that the mask
            shows. Only schemes that bring all keys of a query at once can do it: exact,
            exact_by_host and all_gather.
        indexer: heads and features of the indexer that chooses these keys, such as (64, 128), whose keys travel too;
            None where the caller has chosen them.
        block: with `topk`, the keys of a block, counted from the start of each document: each query head then chooses
            `topk` blocks for itself, as in MoBA, under a causal mask. None where keys are chosen one by one.
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
        transport: the transport of messages: "collective", "pairwise", "shared_memory", "symmetric_memory", or a
            `Transport`, which hierarchical needs.
        codec: the codec of messages: "none", "fp8" (E4M3), "fp8_e5m2" (gradients of exchanged heads in E5M2) or "int8",
            each with a scale for each token and head. Coded are the heads of an exchange, and their gradients; and
            keys and values, or latents, that travel, once by their owner: every rank, the owner too, computes with the
            decoded ones. The gradients of keys are not coded.
        hardware: the machine of predictions: a preset such as "h100", its file, or a `Machine`; "h100" if None.
        topology: the hosts of the ranks; full hosts of that machine if None.
        item_size: bytes of an activation, for predictions and for the bytes of tiles.
        search_seconds: the time limit, for each of forward and backward, of a further search for better tiles in tiled
            and a2a+tiled, with OR-Tools (the extra `solver`). All ranks find the same. "auto" compares these two
            schemes only if this is above 0, since they take seconds to plan; other schemes refuse a search.

    Raises:
        ArgumentError: an argument that does not fit the others or that no scheme can run.
    """
    scheme, codec = require("scheme", scheme), require("codec", codec)
    check_layout(packing, layout)
    # The arguments decide, not equal lengths by chance: the default mask must not depend on the batch.
    is_cross = kv_packing is not None or kv_layout is not None
    kv_packing, kv_layout = _key_side(packing, layout, kv_packing, kv_layout)
    if mask is None:
        mask = Mask.full(packing, kv_packing) if is_cross else Mask.causal(packing)
    mask = mask_over(packing, mask, kv_packing)
    check_mask(mask, layout, kv_layout, is_cross=is_cross)
    for name, value in {"head_chunks": head_chunks, "ulysses_degree": ulysses_degree}.items():
        if value is not None:
            checked_integer(name, value, 1)
    heads, kv_heads = checked_heads(heads=heads, kv_heads=heads if kv_heads is None else kv_heads)
    head_dim = checked_size("head_dim", head_dim, heads)
    value_head_dim = head_dim if value_head_dim is None else checked_size("value_head_dim", value_head_dim, heads)
    transport = checked_transport(transport, layout.cp_size)
    item_size, on = checked_item_size(item_size), machine(hardware)
    on, topology = checked_machine(transport, on, topology, layout.cp_size)
    search = checked_search(search_seconds, [scheme], item_size=item_size)
    latent_mode = checked_latent_mode(latent_mode, latent)
    latent = None if latent is None else checked_latent(latent, heads, kv_heads, head_dim)
    selection = checked_blocks(mask, checked_selection(topk, indexer, block, kv_heads if latent is None else 1, scheme))
    request = _Request(
        layout, kv_layout, mask, heads, kv_heads if selection is None else 1, head_dim, value_head_dim, head_chunks,
        codec, transport, topology, search, on, latent, selection,
    )  # fmt: skip
    selects, wanted = selection is not None, None if scheme == AUTO else scheme_named(scheme)
    modes = latent_modes(latent_mode, scheme, latent, on, selects=selects)
    if layout.cp_size == 1 or isinstance(layout, FilledLayout):
        modes, wanted = modes[:1], scheme_named(scheme, selects=selects)
    if wanted is not None and len(modes) == 1:
        return request.in_mode(modes[0]).plan(wanted, ulysses_degree)
    return _chosen(request, modes, wanted, ulysses_degree)


def _chosen(request: _Request, modes: tuple[str, ...], scheme: Scheme | None, ulysses_degree: int | None) -> Plan:
    """Returns the plan of the candidate that is predicted to be fastest; see `_cheapest`."""
    key, planned = ("auto", *request.key, scheme, modes, ulysses_degree), list[Plan]()
    found: _Choice = request.layout.memo(key, lambda: _cheapest(request, modes, scheme, ulysses_degree, planned))
    # The plan is made again, from the same tables, so that its warnings are given now.
    chosen = replace(request, head_chunks=found.head_chunks).in_mode(found.latent_mode)
    plan = chosen.plan(found.scheme, found.degree, planned)
    return replace(plan, prices=found.prices, notes=(*plan.notes, *found.notes))


_FILTERS = ("ulysses_degree", "head_chunks", "codec")  # arguments by which a user rules out candidates


class _Choice(NamedTuple):
    """The choice of "auto". It holds no plan, since plans refer to the layout that keeps it."""

    scheme: Scheme
    degree: int | None
    head_chunks: int | None
    latent_mode: str
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
    latent_mode: str = "expand"

    def in_mode(self, latent_mode: str) -> _Request:
        """Returns the request with one of `LATENT_MODES`; without latents, itself."""
        if self.latent is None:
            return self
        return replace(self, latent_mode=latent_mode, kv_heads=self.heads if latent_mode == "heads" else 1)

    def tiles(self, step: Attend) -> TiledWork:
        """Returns the assigned tiles, which are searched once for each batch, layer shape and mask."""
        keys = None if self.kv_layout == self.layout else self.kv_layout
        sizes = (step.partition, self.head_dim, self.value_head_dim, self.latent, self.latent_mode, self.codec)
        key = ("tiles", self.mask, keys, *sizes, self.topology, self.search)  # the same for all numbers of head chunks
        found: TiledWork = self.layout.memo(key, lambda: assigned_tiles(step, self.topology, self.search))
        return found

    @property
    def key(self) -> tuple[Any, ...]:
        """The fields that identify a request to one layout."""
        keys = None if self.kv_layout == self.layout else self.kv_layout
        heads = (self.heads, self.kv_heads, self.head_dim, self.value_head_dim)
        sizes = (*heads, self.latent, self.latent_mode, self.selection)
        options = (self.head_chunks, self.codec, self.transport, self.search, self.on, self.topology)
        return (keys, self.mask, *sizes, *options)

    def plan(self, scheme: Scheme, ulysses_degree: int | None, others: Sequence[Plan] = ()) -> Plan:
        """Plans a scheme, and shares tables with one of `others` of the same degree."""
        degree = checked_degree(scheme, self.layout.cp_size, self.kv_heads, ulysses_degree)
        partition = partition_heads(self.heads, self.kv_heads, degree)
        q = Section("q", self.heads, self.head_dim, partition.heads)
        latent = None if self.latent_mode == "heads" else self.latent
        key, value = travelling_features(self.head_dim, self.value_head_dim, latent, self.selection)
        k, v = (Section(name, self.kv_heads, size, partition.groups) for name, size in (("k", key), ("v", value)))
        steps = self._steps(scheme, partition, q, k, v)
        attend = next(step for step in steps if isinstance(step, Attend))
        for other in others:
            if other.attend is not None and other.ulysses_degree == degree:
                attend.share_seen(other.attend)
                break
        notes = notes_of(partition, self.layout, "head", "key/value head", "; exact and p2p use them all", stacklevel=5)
        notes += many_bands(attend, scheme)
        plan = Plan(
            "attention", scheme.name, self.layout, Sections((q, k, v)), partition, self.mask, steps, notes,
            transport=self.transport,
        )  # fmt: skip
        return replace(plan, notes=(*notes, *notes_of_search(plan)))

    def _steps(self, scheme: Scheme, partition: HeadPartition, q: Section, k: Section, v: Section) -> tuple[Step, ...]:
        """Returns the steps: the attention, between two head exchanges if the scheme has them."""
        layout, kv_layout = self.layout, self.kv_layout
        chunks = _head_chunks(self.head_chunks, scheme, partition)
        codec = checked_codec(self.codec, scheme.name, "" if self.selection is None else UNCODED_CHOICE)
        degree = len(partition.heads)
        # A head exchange on one rank only sorts tokens, so that results have the bits of several ranks.
        in_order = layout.in_stream_order and kv_layout.in_stream_order
        exchanged = degree > 1 or (not scheme.exchanges_keys and not in_order)
        queries, keys = (
            Layout.contiguous(each.packing, 1) if exchanged and degree == 1 else merge_ranks(each, degree)
            for each in (layout, kv_layout)
        )
        parts, key_chunks = (1, chunks) if scheme.chunks_keys or degree == 1 else (chunks, 1)
        sizes, latent = (self.head_dim, self.value_head_dim), None
        if self.latent is not None:
            shared, rank = self.latent
            latent = Latent(shared, rank, sum(sizes) - shared, self.latent_mode)
            sizes = (shared + rank, rank) if self.latent_mode == "absorb" else sizes
        attend = Attend(
            self.mask, queries, keys, partition, scheme.kv_schedule, *sizes, key_chunks, latent=latent,
            hosts=self.topology.hosts[::degree] if scheme.goes_by_host else (), selection=self.selection,
            codec=codec if queries.cp_size > 1 else None,
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
        assert plan.attend is not None
        chunked = replace(self, head_chunks=chunks).in_mode(plan.attend.latent_mode)
        return chunked.plan(scheme, plan.ulysses_degree, [plan])


def _cheapest(
    request: _Request, modes: tuple[str, ...], scheme: Scheme | None, ulysses_degree: int | None,
    candidates: list[Plan],
) -> _Choice:  # fmt: skip
    """Chooses the candidate that is predicted to be fastest, and appends the plans of all to `candidates`.

    Args:
        modes: the modes of latents to compare.
        scheme: the scheme whose modes are compared, in as many head chunks as it has by itself; None for all schemes.
    """
    on, topology, item_size = request.on, request.topology, request.search.item_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # repeated when the chosen candidate is planned
        untiled = [(scheme, ulysses_degree)] if scheme is not None else _schemes_to_try(
            request.layout, ulysses_degree, topology, tiles=False
        )  # fmt: skip
        untiled = [pair for pair in untiled if request.selection is None or pair[0].brings_all_keys]
        # Heads of all schemes travel in one part at first; of a scheme that is given, in as many as it has by itself.
        first = request if scheme is not None else replace(request, head_chunks=request.head_chunks or 1)
        refused = [each for mode in modes for each in _add_candidates(first.in_mode(mode), untiled, candidates)]
        others, skipped, not_tiled = list[tuple[Price, Plan]](), list[Price](), _Refusals()
        if request.search.seconds and scheme is None and request.selection is None:
            request = request.in_mode(modes[0])
            others = priced_candidates(candidates, on, topology, item_size) if candidates else []
            tiled = _schemes_to_try(request.layout, ulysses_degree, topology, tiles=True)
            alike = [plan for plan in candidates if plan.attend is None or plan.attend.latent_mode in ("", modes[0])]
            skipped = hopeless_tiles(tiled, alike, others, on, topology, item_size)
            names = [(price.scheme, price.detail) for price in skipped]
            hopeful = [pair for pair in tiled if (pair[0].name, describe_degree(*pair)) not in names]
            not_tiled = _add_candidates(first.in_mode(modes[0]), hopeful, candidates)
        if not candidates:
            raise (not_tiled or refused)[0][1]
        new = [plan for plan in candidates if not others or (plan.attend is not None and plan.attend.tiled is not None)]
        found = priced_candidates(new, on, topology, item_size, others)
        if scheme is None:
            found = best_chunks(found, request.with_chunks, on, topology, item_size)
        price, plan = found[0]
    assert plan.attend is not None
    scheme, chunks = SCHEMES[plan.scheme], request.head_chunks
    if chunks is None and scheme.takes_chunks:
        chunks = plan.num_chunks
    degree = plan.ulysses_degree if scheme.is_product else None
    price = replace(price, reason=reason((price, plan), found[1:]))
    prices = (price, *(other for other, _ in found[1:]), *skipped)
    notes = (*_refusal_notes(not_tiled), *_search_notes(candidates, plan))
    return _Choice(scheme, degree, chunks, plan.attend.latent_mode, prices, notes)


def _schemes_to_try(
    layout: Layout, ulysses_degree: int | None, topology: Topology, *, tiles: bool
) -> list[tuple[Scheme, int | None]]:
    """Returns the schemes and degrees among which "auto" chooses: those that assign tiles, or the others."""
    shared = 1 < topology.num_hosts < layout.cp_size  # several hosts, one of which has several ranks
    schemes = [s for s in SCHEMES.values() if s.assigns_tiles == tiles and (shared or not s.goes_by_host)]
    return [
        (scheme, degree) for scheme in schemes for degree in degrees_to_try(scheme, layout, ulysses_degree, topology)
    ]


_Refusals = list[tuple[str, ArgumentError]]


def _add_candidates(request: _Request, wanted: Sequence[tuple[Scheme, int | None]], into: list[Plan]) -> _Refusals:
    """Appends the plans of candidates; returns the names and the refusals of those that cannot be planned."""
    refused = _Refusals()
    for scheme, degree in wanted:
        try:
            into.append(request.plan(scheme, degree, into))
        except ArgumentError as error:
            if error.argument == "search_seconds":  # the search is impossible for all candidates
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
