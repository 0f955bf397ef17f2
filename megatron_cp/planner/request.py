"""`Request`: an attention on a batch that is to be planned, and `Choice`: one way to run it. A request plans a choice.

`plan_attention` makes a request of its arguments. Where these leave the choice open, `choose` compares the plans of
several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import HeadPartition, Section, Sections, partition_heads
from megatron_cp.layout import Layout, Mask
from megatron_cp.layout.rank_sets import merge_ranks
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.latent import Latent
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import SCHEMES, Scheme
from megatron_cp.plan.selection import Selection, travelling_features
from megatron_cp.plan.steps import Step, ToHeads, ToTokens
from megatron_cp.plan.tile_assignment import TiledWork
from megatron_cp.plan.transport import Transport
from megatron_cp.planner.checks import checked_chunks, checked_codec, exchange_of, no_chunks
from megatron_cp.planner.predict.hardware import Setting
from megatron_cp.planner.tiled import assigned_tiles

UNCODED_CHOICE = "Keys among which queries choose are never coded: leave out the codec."


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of a softmax attention layer.

    Attributes:
        heads, kv_heads: query heads, and the key/value heads that they share.
        head_dim, value_head_dim: features of a query or key head, and of a value head.
        latent: features of the shared key and of the latent from which keys and values are made; None without latents.
        selection: the keys that queries choose among those that the mask shows; None if they attend to all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    latent: tuple[int, int] | None
    selection: Selection | None

    def travelling_heads(self, latent_mode: str) -> int:
        """Returns the key/value heads that travel; latents, and keys among which queries choose, travel as one."""
        if self.selection is not None:
            return 1
        if self.latent is None:
            return self.kv_heads
        return self.heads if latent_mode == "heads" else 1

    def sections(self, partition: HeadPartition, latent_mode: str) -> tuple[Section, Section, Section]:
        """Returns the queries, keys and values as they travel."""
        latent = None if latent_mode == "heads" else self.latent
        key, value = travelling_features(self.head_dim, self.value_head_dim, latent, self.selection)
        kv_heads = self.travelling_heads(latent_mode)
        return (
            Section("q", self.heads, self.head_dim, partition.heads),
            Section("k", kv_heads, key, partition.groups),
            Section("v", kv_heads, value, partition.groups),
        )


@dataclass(frozen=True)
class Choice:
    """A way to run an attention.

    Attributes:
        scheme: the scheme; None if it is to be chosen.
        ulysses_degree: the number of ranks that exchange heads; None for the scheme's own.
        head_chunks: the parts in which heads travel; None for the scheme's own.
        codec: the codec of messages.
        transport: the transport of messages.
        latent_mode: one of `LATENT_MODES`; without latents it means nothing.
    """

    scheme: Scheme | None
    ulysses_degree: int | None
    head_chunks: int | None
    codec: str
    transport: Transport
    latent_mode: str


@dataclass(frozen=True)
class Request:
    """An attention on a batch that is to be planned.

    Attributes:
        layout, kv_layout: the layouts of queries and of keys.
        mask: the keys that each query sees.
        shape: the sizes of the layer.
        setting: the machine and the ranks.
        search_seconds: the time limit of a search for tiles, in each direction.
    """

    layout: Layout
    kv_layout: Layout
    mask: Mask
    shape: AttentionShape
    setting: Setting
    search_seconds: float

    @property
    def key(self) -> tuple[Any, ...]:
        """The fields that identify a request to its layout, which must not keep itself."""
        return (*self._key_of_batch, self.shape, self.setting, self.search_seconds)

    @property
    def _key_of_batch(self) -> tuple[Any, ...]:
        return self.mask, None if self.kv_layout == self.layout else self.kv_layout

    def plan(self, choice: Choice, others: Sequence[Plan] = ()) -> Plan:
        """Returns the plan of a choice, without notes; it shares tables with one of `others` of the same degree."""
        assert choice.scheme is not None
        kv_heads = self.shape.travelling_heads(choice.latent_mode)
        degree = _checked_degree(choice.scheme, self.layout.cp_size, kv_heads, choice.ulysses_degree)
        partition = partition_heads(self.shape.heads, kv_heads, degree)
        sections = self.shape.sections(partition, choice.latent_mode)
        plan = Plan(
            "attention", choice.scheme.name, self.layout, Sections(sections), partition, self.mask,
            self._steps(choice, choice.scheme, partition, *sections), transport=choice.transport,
        )  # fmt: skip
        alike = next((other for other in others if other.ulysses_degree == degree), None)
        if alike is not None:
            assert plan.attend is not None
            assert alike.attend is not None
            plan.attend.share_seen(alike.attend)
        return plan

    def _steps(
        self, choice: Choice, scheme: Scheme, partition: HeadPartition, q: Section, k: Section, v: Section
    ) -> tuple[Step, ...]:
        """Returns the steps: the attention, between two head exchanges if the scheme has them."""
        layout, kv_layout, shape = self.layout, self.kv_layout, self.shape
        chunks = _head_chunks(choice.head_chunks, scheme, partition)
        codec = checked_codec(choice.codec, scheme.name, "" if shape.selection is None else UNCODED_CHOICE)
        degree = len(partition.heads)
        # A head exchange on one rank only sorts tokens, so that results have the bits of several ranks.
        in_order = layout.in_stream_order and kv_layout.in_stream_order
        exchanged = degree > 1 or (not scheme.exchanges_keys and not in_order)
        queries, keys = (
            Layout.contiguous(each.packing, 1) if exchanged and degree == 1 else merge_ranks(each, degree)
            for each in (layout, kv_layout)
        )
        parts, key_chunks = (1, chunks) if scheme.chunks_keys or degree == 1 else (chunks, 1)
        sizes, latent = (shape.head_dim, shape.value_head_dim), None
        if shape.latent is not None:
            shared, rank = shape.latent
            latent = Latent(shared, rank, sum(sizes) - shared, choice.latent_mode)
            sizes = (shared + rank, rank) if choice.latent_mode == "absorb" else sizes
        hosts = self.setting.topology.hosts
        attend = Attend(
            self.mask, queries, keys, partition, scheme.kv_schedule, *sizes, key_chunks, latent=latent,
            hosts=hosts[::degree] if scheme.goes_by_host else (), selection=shape.selection,
            codec=codec if queries.cp_size > 1 else None,
        )  # fmt: skip
        if scheme.assigns_tiles and queries.cp_size > 1:
            attend = replace(attend, tiled=self._tiles(attend))
        if not exchanged:
            return (attend,)

        def exchange(layout: Layout, *blocks: Section) -> Exchange:
            return exchange_of(layout, Sections(blocks), partition, parts, codec)

        inbound = (
            (ToHeads(exchange(layout, q), (0, 1)), ToHeads(exchange(kv_layout, k, v), (1, 3)))
            if kv_layout != layout
            else (ToHeads(exchange(layout, q, k, v), (0, 3)),)
        )
        out = Section("out", q.num_heads, shape.value_head_dim, partition.heads)
        return (*inbound, attend, ToTokens(exchange(layout, out)))

    def _tiles(self, step: Attend) -> TiledWork:
        """Returns the assigned tiles, which are searched once for each batch, layer shape and mask."""
        sizes = (step.partition, step.head_dim, step.value_head_dim, step.latent, step.codec)
        _, topology, item_size = self.setting
        # The same for all numbers of head chunks.
        key = ("tiles", *self._key_of_batch, *sizes, topology, item_size, self.search_seconds)
        found: TiledWork = self.layout.memo(key, lambda: assigned_tiles(step, topology, item_size, self.search_seconds))
        return found


def _checked_degree(scheme: Scheme, cp_size: int, kv_heads: int, ulysses_degree: int | None) -> int:
    """Returns the degree of a scheme: the number of neighbouring ranks that exchange heads.

    Raises:
        ArgumentError: the scheme has another degree, or the number of ranks no such divisor.
    """
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


def _head_chunks(asked: int | None, scheme: Scheme, partition: HeadPartition) -> int:
    if asked is None:
        return min(2, partition.most_groups) if scheme.chunks_keys else 1
    if not scheme.takes_chunks:
        others = [other.name for other in SCHEMES.values() if other.takes_chunks]
        return no_chunks(asked, scheme.name, f"It passes on all heads of a key at once: use {' or '.join(others)}.")
    return checked_chunks(asked, partition, "key/value head")
