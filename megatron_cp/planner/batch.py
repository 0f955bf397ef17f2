"""`BatchPlan`: the plans of one microbatch, one for each kind of layer in the model."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, KeysView, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_cp.errors import MAX_FEATURES, ArgumentError, checked_integer, checked_size
from megatron_cp.exchange.sections import partition_heads
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.block_masks import is_block_table
from megatron_cp.layout.filled_layout import FilledLayout
from megatron_cp.layout.mask import MASKS_ALLOWED, MaskLike, is_mask_function, is_named, mask_over
from megatron_cp.layout.memo import frozen
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import AUTO, REDISTRIBUTE, may_exchange_heads
from megatron_cp.plan.selection import checked_selection
from megatron_cp.plan.transport import COLLECTIVE, Transport
from megatron_cp.planner.attention import checked_latent, checked_latent_mode, plan_attention
from megatron_cp.planner.capabilities import hints_keywords, require
from megatron_cp.planner.checks import checked_codec, checked_heads, checked_item_size
from megatron_cp.planner.linear import MAX_CONV_WIDTH, MAX_STEPS, plan_linear, unused
from megatron_cp.planner.predict.hardware import Machine, Topology
from megatron_cp.planner.predict.machine_files import machine
from megatron_cp.planner.request import UNCODED_CHOICE
from megatron_cp.planner.tiled import checked_search

if TYPE_CHECKING:
    from megatron_cp.exchange.device import CallTables


@hints_keywords
@dataclass(frozen=True)
class AttentionSpec:
    """The arguments of a softmax attention layer's plan, except the batch. See `plan_attention`.

    Layers with equal specs share a plan. A spec is fixed when a module is built. Where they are not given, `kv_heads`
    is `heads`, which `latent` needs, and `value_head_dim` is `head_dim`. `mask` is a spelling of `Mask.named`, or for a
    mask of your own a function that makes it from a batch's packing; a `Mask` serves the one packing that it is over.

    Example:
        >>> AttentionSpec(heads=8, kv_heads=2, head_dim=64).value_head_dim
        64
    """

    heads: int
    kv_heads: int = None  # type: ignore[assignment]  # an integer once the spec is made
    head_dim: int = None  # type: ignore[assignment]  # has no default, but may stand behind one
    value_head_dim: int = None  # type: ignore[assignment]
    mask: MaskLike = "causal"
    scheme: str = "auto"
    ulysses_degree: int | None = None
    head_chunks: int | None = None
    transport: Transport | str = COLLECTIVE
    codec: str = "none"
    hardware: Machine | str | None = None
    topology: Topology | None = None
    item_size: int = 2
    search_seconds: float = 0.0
    latent: tuple[int, int] | None = None
    topk: int | None = None
    indexer: tuple[int, int] | None = None
    block: int | None = None
    latent_mode: str | None = None

    def __post_init__(self) -> None:
        for name, default in (("kv_heads", self.heads), ("value_head_dim", self.head_dim)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        _check_sizes(self, ("heads", "kv_heads", "head_dim", "value_head_dim"), ("ulysses_degree", "head_chunks"))
        checked_heads(heads=self.heads, kv_heads=self.kv_heads)
        _check_topology(self.topology)
        object.__setattr__(self, "latent_mode", checked_latent_mode(self.latent_mode, self.latent))
        if self.latent is not None:
            object.__setattr__(self, "latent", checked_latent(self.latent, self.heads, self.kv_heads, self.head_dim))
        for name in ("scheme", "codec"):
            object.__setattr__(self, name, require(name, getattr(self, name)))
        selection = checked_selection(self.topk, self.indexer, self.block, self.kv_heads, self.scheme)
        checked_codec(self.codec, self.scheme, "" if selection is None else UNCODED_CHOICE)
        if self.indexer is not None:
            object.__setattr__(self, "indexer", tuple(self.indexer))
        checked_search(self.search_seconds, [self.scheme])
        object.__setattr__(self, "hardware", machine(self.hardware))
        if isinstance(self.mask, str):  # unknown names are refused before there is a batch
            object.__setattr__(self, "mask", Mask.named(Packing([1]), self.mask).name)
        elif not isinstance(self.mask, Mask) and not is_mask_function(self.mask):
            raise ArgumentError("mask", self.mask, MASKS_ALLOWED)
        # A transport by name and the same by value make equal specs.
        object.__setattr__(self, "transport", Transport.named(self.transport))

    def plan(self, layout: Layout, lengths: Sequence[int] | IntArray | None = None) -> Plan:
        """Plans the layer over a layout; `lengths` are those of the documents without pads, see `BatchPlan`."""
        _check_layout(layout)
        options = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        if lengths is not None and is_mask_function(self.mask):  # which shall not take pads for tokens
            Mask.causal(layout.packing).unpadded(lengths)  # refuses lengths that do not fit the documents
            options["mask"] = _among_pads(mask_over(Packing(lengths), self.mask), layout.packing)
        elif lengths is None and isinstance(layout, FilledLayout):
            options["mask"] = _among_fill(self.mask, layout)
        else:
            mask = mask_over(layout.packing, self.mask)
            options["mask"] = mask if lengths is None else mask.unpadded(lengths)
        return plan_attention(layout.packing, layout, **options)


def _among_fill(mask: MaskLike, layout: FilledLayout) -> Mask:
    """Returns a mask over the given documents for those that `GraphTables` fills up; by its name, as graphs need it,
    where it has one.
    """
    if isinstance(mask, str) or (isinstance(mask, Mask) and mask.packing == layout.packing):
        return mask_over(layout.packing, mask)
    made = mask_over(layout.given, mask)
    if is_named(made) and not is_block_table(made.name):  # blocks are cut by a document's own length
        return Mask.named(layout.packing, made.name)
    return _among_pads(made, layout.packing)


def _among_pads(mask: Mask, packing: Packing) -> Mask:
    """Returns the mask for the same documents with pads at their ends, which see nothing and are not seen."""
    own, bands = mask.packing.cu_seqlens, mask.bands.copy()
    shifts = packing.cu_seqlens[: own.size] - own
    bands[:, :4] += shifts[mask.packing.documents_of(bands[:, 0])][:, None]
    return Mask(packing, packing, bands, f"{mask.name} of {mask.packing.total} tokens")


@hints_keywords
@dataclass(frozen=True)
class LinearSpec:
    """The arguments of a linear layer's plan, except the batch. See `plan_linear`.

    Sizes that a kind does not have, such as the key heads of a bare convolution, are not read.

    Attributes:
        heads: value heads, each with a state of its own.
        key_heads: query/key heads of gdn, kda, gdn2 and gdp; groups of B and C of mamba.
        head_dim: features of a key head; for mamba, of B and C, which is the size of the state.
        value_head_dim: features of a value head; for mamba, of a head of x.
        conv_width: taps of the convolution.
        mode: a value of `--linear-cp-mode`.
        hidden_size: the model's hidden size, if hidden states may be redistributed around this layer's run of linear
            layers; else None.
        item_size: bytes of an activation, for predictions.
        head_chunks: the most head chunks of headwise; a rank may have fewer key heads.
        hardware, topology: the machine of predictions; see `plan_attention`.
        transport, codec: see `plan_attention`. Only headwise uses the codec and head chunks; a note of the plan says
            that other modes do not.
        run: the specs of the run's layers, this one's among them and each as often as it occurs, without runs of their
            own; they are redistributed together or not at all. Empty for a single layer.
        num_householder: steps of the delta rule that a token of gdp makes.
    """

    kind: str
    heads: int
    key_heads: int
    head_dim: int
    value_head_dim: int
    conv_width: int = 4
    mode: str = "auto"
    hidden_size: int | None = None
    item_size: int = 2
    head_chunks: int | None = None
    transport: Transport | str = COLLECTIVE
    codec: str = "none"
    run: tuple[LinearSpec, ...] = ()
    hardware: Machine | str | None = None
    topology: Topology | None = None
    num_householder: int = 1

    def __post_init__(self) -> None:
        for name in ("kind", "mode", "codec"):
            object.__setattr__(self, name, require(name, getattr(self, name)))
        record = KINDS[self.kind]
        sizes = ("heads", "key_heads", "head_dim", "value_head_dim") if record.has_state else ()
        _check_sizes(self, sizes, ("head_chunks",))
        checked_integer("heads", self.heads, 1, MAX_FEATURES)  # the channels of a bare convolution
        checked_integer("conv_width", self.conv_width, 1, MAX_CONV_WIDTH)
        if self.hidden_size is not None:
            checked_integer("hidden_size", self.hidden_size, 1, MAX_FEATURES)
        if checked_integer("num_householder", self.num_householder, 1, MAX_STEPS) > 1 and not record.argument("steps"):
            raise ArgumentError("num_householder", self.num_householder, f"1 for {self.kind}", "It is of gdp.")
        if record.argument("groups"):
            checked_heads(heads=self.heads, key_heads=self.key_heads)
        _check_topology(self.topology)
        if not isinstance(self.run, tuple) or not all(isinstance(slot, LinearSpec) for slot in self.run):
            raise ArgumentError("run", self.run, "a tuple of the slots of the run's layers")
        object.__setattr__(self, "transport", Transport.named(self.transport))
        object.__setattr__(self, "hardware", machine(self.hardware))

    def plan(self, layout: Layout) -> Plan:
        _check_layout(layout)
        if self.mode != AUTO or not self.run:
            return self._plan(layout, self.mode)
        own = self._prices(layout)
        redistributed = direct = 0.0
        for slot, count in Counter(self.run).items():
            prices = replace(slot, hidden_size=self.hidden_size, run=self.run)._prices(layout)
            times = {price.scheme: price.forward + price.backward for price in prices}
            redistributed += count * times.pop(REDISTRIBUTE.name, math.inf)
            direct += count * min(times.values())
        own_totals = [price.total for price in own]
        chosen = next(price for price in own if (price.scheme == REDISTRIBUTE.name) == (redistributed < direct))
        best = self._plan(layout, chosen.scheme)
        reason = "all linear layers of a run are redistributed, or none" if chosen.total > min(own_totals) else ""
        return replace(best, prices=(replace(chosen, reason=reason), *(price for price in own if price is not chosen)))

    def _prices(self, layout: Layout) -> tuple[Price, ...]:
        """Returns the prices of the layer's candidates, the cheapest first; the layout keeps them."""
        found: tuple[Price, ...] = layout.memo(("prices", self), lambda: self._plan(layout, AUTO).prices)
        return found

    def _plan(self, layout: Layout, mode: str) -> Plan:
        sizes = {
            "heads": self.heads, "groups": self.key_heads, "key_dim": self.head_dim, "value_dim": self.value_head_dim,
            "steps": self.num_householder,
        }  # fmt: skip
        kind = KINDS[self.kind]
        named: dict[str, Any] = {size.name: sizes[size.field] for size in kind.arguments}
        groups = self.key_heads if kind.argument("groups") else self.heads
        exchanges = may_exchange_heads(mode)
        chunks = self.head_chunks if exchanges else None
        if chunks is not None:
            chunks = min(chunks, partition_heads(self.heads, groups, layout.cp_size).most_groups)
        plan = plan_linear(
            layout.packing, layout, self.kind, **named, conv_width=self.conv_width,
            mode=mode, hidden_size=self.hidden_size, layers=max(len(self.run), 1),
            item_size=self.item_size, head_chunks=chunks, transport=self.transport,
            codec=self.codec if exchanges else "none", hardware=self.hardware,
            topology=self.topology,
        )  # fmt: skip
        if exchanges or layout.cp_size == 1:
            return plan
        return replace(plan, notes=(*plan.notes, *unused(mode, self.codec, self.head_chunks)))


Slot = AttentionSpec | LinearSpec


def _check_sizes(slot: Slot, sizes: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Refuses sizes of a spec that no layer has, and numbers of parts that are no integers of at least 1."""
    for name in sizes:
        checked_size(name, getattr(slot, name), slot.heads if name.endswith("dim") else 1)
    for name in optional:
        if getattr(slot, name) is not None:
            checked_integer(name, getattr(slot, name), 1)
    checked_item_size(slot.item_size)


def _check_topology(topology: Topology | None) -> None:
    if topology is not None and not isinstance(topology, Topology):
        raise ArgumentError("topology", topology, "a Topology, or None")


def _check_layout(layout: Layout) -> None:
    if not isinstance(layout, Layout):
        raise ArgumentError("layout", layout, "a layout, such as Layout.zigzag(packing, cp_size)")


def checked_slot(argument: str, slot: Slot) -> Slot:
    """Returns the spec of a layer after checking its type."""
    if not isinstance(slot, AttentionSpec | LinearSpec):
        raise ArgumentError(
            argument, slot, "an AttentionSpec or a LinearSpec", "A layer of cp.nn has its own as layer.slot."
        )
    return slot


class BatchPlan:
    """The plans of one microbatch over one layout. Made once, on the host, where the batch is sharded.

    Args:
        layout: the assignment of tokens to ranks.
        slots: the specs of the model's layers. A spec that is missing here is planned when its first layer runs.
        lengths: the tokens of each document without its pads, if documents end in pads, which are rows of the layout
            like any token. Attention ignores pads and returns zeros for them. Linear layers are causal, so pads cost
            them time alone.

    Example:
        >>> layout = Layout.zigzag(Packing([700, 1, 300]), cp_size=4)
        >>> plans = BatchPlan(layout, [AttentionSpec(heads=8, kv_heads=2, head_dim=64)])
        >>> [plan.scheme for plan in plans.plans]
        ['a2a']
    """

    def __init__(
        self, layout: Layout, slots: Iterable[Slot] = (), *, lengths: Sequence[int] | IntArray | None = None
    ) -> None:
        _check_layout(layout)
        if isinstance(slots, Set) and not isinstance(slots, KeysView):
            remedy = "A set has another order in each process, and ranks compare plans in order: use dict.fromkeys."
            raise ArgumentError("slots", f"a {type(slots).__name__}", "slots in an order", remedy)
        slots = [checked_slot(f"slots[{number}]", slot) for number, slot in enumerate(slots)]
        if lengths is not None:
            Mask.causal(layout.packing).unpadded(lengths)  # refuses lengths that do not fit the documents
            lengths = frozen(np.array(lengths, np.int64))  # read again when a spec is planned later
        self.layout, self.lengths = layout, lengths
        self._plans = {slot: self._made(slot) for slot in dict.fromkeys(slots)}
        self._inside: dict[Layout, BatchPlan] = {}

    @property
    def cp_size(self) -> int:
        return self.layout.cp_size

    @property
    def plans(self) -> list[Plan]:
        return list(self._plans.values())

    @property
    def kinds(self) -> list[Slot]:
        """The specs of the planned layers, in the order of `plans`."""
        return list(self._plans)

    def plan(self, slot: Slot) -> Plan:
        """Returns the plan of every layer with this spec."""
        found = self._plans.get(checked_slot("slot", slot))
        if found is None:
            found = self._plans[slot] = self._made(slot)
        return found

    def inside(self, slot: Slot) -> BatchPlan:
        """Returns the plans of the layers in a run whose hidden states are redistributed for `slot`.

        Their layout is that of the moved hidden states. It is this batch's plans where nothing is redistributed.
        """
        plan = self.plan(slot)
        if plan.hidden_layout is None:
            return self
        found = self._inside.get(plan.layout)
        if found is None:
            found = self._inside[plan.layout] = BatchPlan(plan.layout, lengths=self.lengths)
        found._plans[slot] = plan.inside
        return found

    def _use_tables(self, tables: Iterable[CallTables]) -> None:
        """Replaces the plans by plans with these tables, one for each of `plans`."""
        for (slot, plan), own in zip(self._plans.copy().items(), tables, strict=True):
            self._plans[slot] = replace(plan, tables=own)
            self._plans[slot].share_memo(plan)

    def _made(self, slot: Slot) -> Plan:
        return slot.plan(self.layout, self.lengths) if isinstance(slot, AttentionSpec) else slot.plan(self.layout)

    def fingerprint(self) -> bytes:
        """Returns 16 bytes that are equal on two ranks exactly when all their plans are (up to hash collisions)."""
        return hashlib.blake2b("\n".join(self.describe()).encode(), digest_size=16).digest()

    def describe(self) -> list[str]:
        """Returns the layout and every plan as lines of text, which ranks compare when their plans differ."""
        lines = self.layout.describe()
        for number, plan in enumerate(self.plans):
            lines += [f"slot {number}, {line}" for line in plan.describe(beside=self.layout)]
        return lines
