"""`plan_linear`: from a batch and a linear layer to the steps that run it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.exchange.codec import Codec
from megatron_cp.exchange.sections import HeadPartition, Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.plan import Plan, Price, Redistribution
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import Compute, Step, ToHeads, ToTokens
from megatron_cp.plan.transport import COLLECTIVE, Transport, checked_transport
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.checks import (
    check_layout,
    checked_chunks,
    checked_codec,
    checked_heads,
    exchange_of,
    no_chunks,
    notes_of,
)
from megatron_cp.planner.predict.cost import H100, Hardware, lower_bound, priced

MAX_CONV_WIDTH = 64  # far beyond any model; a halo and its tables grow with it


@dataclass(frozen=True)
class LinearShape:
    """A linear layer's heads, in one vocabulary: of Mamba-2, B and C are keys and queries, x is values.

    Attributes:
        kind: of the layer.
        heads: each with a state `[key_dim, value_dim]`; of conv1d its channels.
        groups: key heads, each read by consecutive heads.
        key_dim, value_dim: features of a key and of a value head.
        conv_width: taps of the convolution.
    """

    kind: str
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def is_delta(self) -> bool:
        return self.kind in ("gdn", "kda")

    def sections(self, partition: HeadPartition) -> Sections:
        """What travels, in the order of the operation's features; the first ones are convolved."""
        if self.kind == "conv1d":
            return Sections((Section("x", self.heads, 1, partition.heads),))
        keys = {"head_dim": self.key_dim, "num_heads": self.groups, "ranges": partition.groups}
        values = {"head_dim": self.value_dim, "num_heads": self.heads, "ranges": partition.heads}
        each = {"head_dim": 1, "num_heads": self.heads, "ranges": partition.heads, "exact": True}
        table = {
            "gdn": {"q": keys, "k": keys, "v": values, "beta": each, "alpha": each},
            "kda": {"q": keys, "k": keys, "v": values, "g": {**each, "head_dim": self.key_dim}, "beta": each},
            "mamba": {"x": values, "B": keys, "C": keys, "dt": each},
        }
        return Sections(tuple(Section(name, **section) for name, section in table[self.kind].items()))  # type: ignore[arg-type]

    @property
    def state_size(self) -> int:
        """Elements of all heads' states; 0 where there is none."""
        return 0 if self.kind == "conv1d" else self.heads * self.key_dim * self.value_dim

    @property
    def channels(self) -> int:
        """Features that are convolved."""
        return self.heads if self.kind == "conv1d" else 2 * self.groups * self.key_dim + self.heads * self.value_dim


def plan_linear(
    packing: Packing,
    layout: Layout,
    kind: str = "gdn",
    *,
    heads: int | None = None,
    key_heads: int | None = None,
    groups: int | None = None,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    state: int | None = None,
    channels: int | None = None,
    conv_width: int = 4,
    mode: str = "auto",
    hidden_size: int | None = None,
    layers: int = 1,
    hardware: Hardware = H100,
    item_size: int = 2,
    head_chunks: int | None = None,
    transport: Transport | str = COLLECTIVE,
    codec: str = "none",
) -> Plan:
    """How to run a linear layer over a batch.

        headwise      whole documents on a share of the heads: one exchange in, one out
        chunkwise     all heads on own tokens: a halo for the convolution, one exchange of state maps
        redistribute  chunkwise in a layout of few fragments, to which hidden states move around a run of layers

    Args:
        packing: the documents; the state starts anew with each.
        layout: who holds which tokens.
        kind: "gdn" (Gated DeltaNet, arXiv 2412.06464), "kda" (Kimi Delta Attention, arXiv 2510.26692), "mamba"
            (Mamba-2, arXiv 2405.21060), or "conv1d", the causal convolution alone.
        heads: value heads, each with a state of its own; not of conv1d.
        key_heads: of gdn and kda, query/key heads, a divisor of `heads`; `heads` if None.
        groups: of mamba, groups of B and C, a divisor of `heads`; 1 if None.
        head_dim: features of a query or key head; of mamba, of a head of x.
        value_head_dim: of gdn and kda, features of a value head; `head_dim` if None.
        state: of mamba, the size of the state, which are the features of B and C.
        channels: of conv1d.
        conv_width: taps of the mixer's convolution; nothing of it concerns the bare rules.
        mode: one of the above, or "auto", which takes the way that is predicted to be fastest.
        hidden_size: features of the hidden states, where they can be redistributed; None where not. The plan's `layout`
            may then be another than the given one, which is its `hidden_layout`; `relayout` moves hidden states
            between the two.
        layers: how many linear layers share such a redistribution.
        hardware, item_size: what predictions assume: rates, and the bytes of an activation.
        head_chunks: parts in which headwise's heads travel, each while the one before is computed; at most as many as a
            rank has key heads, 1 if None. Of no other mode: those refuse more than one.
        transport: how messages travel; see `plan_attention`.
        codec: how headwise's heads are coded while they change places; see `plan_attention`. Gates, decays and step
            sizes travel as they are. Of no other mode: those refuse one.

    Where "auto" takes another mode than headwise, head chunks and codec are unused, and a note of the plan says so.

    Raises:
        ArgumentError: an argument that does not fit the others, or that no mode here can run.
    """
    require("kind", kind)
    require("mode", mode)
    check_layout(packing, layout)
    shape = _shape(
        kind, conv_width, heads=heads, key_heads=key_heads, groups=groups, head_dim=head_dim,
        value_head_dim=value_head_dim, state=state, channels=channels,
    )  # fmt: skip
    layers = checked_integer("layers", layers, 1)
    if hidden_size is not None:
        hidden_size = checked_integer("hidden_size", hidden_size, 1)
    if layout.cp_size == 1 and mode in ("auto", "redistribute"):
        mode = "headwise"  # nothing moves, and a model may be run on one rank with the options of several
    if mode == "redistribute" and hidden_size is None:
        raise ArgumentError("hidden_size", None, "the features of the hidden states", "A redistribution moves those.")
    if layers > 1 and hidden_size is None:
        raise ArgumentError("layers", layers, "1 without hidden_size", "They share a redistribution of hidden states.")
    if not isinstance(hardware, Hardware):
        raise ArgumentError("hardware", hardware, "rates, as in megatron_cp.planner.predict.cost.H100")
    item_size = checked_integer("item_size", item_size, 1)
    transport = checked_transport(transport, layout.cp_size)
    exchanges = mode in ("headwise", "auto")
    remedy = "" if exchanges else "Only heads that change places are coded: use headwise."
    if kind == "conv1d":
        remedy = "It has single channels, which are no shorter coded: leave the codec out."
    coding = checked_codec(codec, kind if kind == "conv1d" else mode, remedy)
    partition = partition_heads(shape.heads, shape.groups, layout.cp_size)
    chunks = 1
    if head_chunks is not None and exchanges:
        chunks = checked_chunks(head_chunks, partition, group_name(kind))
        chunks = chunks if layout.cp_size > 1 else 1
    elif head_chunks is not None:
        chunks = no_chunks(head_chunks, mode, "Only heads that change places go in chunks: use headwise.")
    if mode == "redistribute" and contiguous_like(layout) == layout:
        mode = "chunkwise"  # already there
    makers = {
        "headwise": lambda: _headwise(layout, shape, partition, chunks, coding),
        "chunkwise": lambda: _chunkwise(layout, shape),
        "redistribute": lambda: _redistributed(layout, shape, hidden_size or 1, layers),
    }
    plans: list[tuple[Price, Plan | None]] = []
    for name, make in makers.items():
        if mode not in ("auto", name) or (
            mode == "auto" and name == "redistribute" and not _can_redistribute(layout, hidden_size)
        ):
            continue
        bound = lower_bound(layout, shape.state_size, hardware) if mode == "auto" and name == "chunkwise" else None
        if bound is not None and _total(bound) > _total(plans[0][0]):
            plans.append((bound, None))  # making the plan and its tables would take longer than it is worth
            continue
        plan = make()
        plans.append((replace(priced(plan, hardware, item_size=item_size), scheme=name), plan))
    plans.sort(key=lambda pair: _total(pair[0]))
    chosen = next(plan for _, plan in plans if plan is not None)
    if chosen.partition.idle_ranks:
        warnings.warn(chosen.notes[0], stacklevel=2)
    way = "redistribute" if chosen.redistribution else chosen.scheme
    notes = (*chosen.notes, *_notes(chosen), *(unused(way, codec, chunks) if way != "headwise" else ()))
    return replace(chosen, notes=notes, prices=tuple(price for price, _ in plans), transport=transport)


def _redistributed(layout: Layout, shape: LinearShape, hidden_size: int, layers: int) -> Plan:
    return replace(
        _chunkwise(contiguous_like(layout), shape), redistribution=Redistribution(layout, hidden_size, layers)
    )


def contiguous_like(layout: Layout) -> Layout:
    """Contiguous ranges with the rows of `layout` otherwise: where chunkwise has fewest segments."""

    def make() -> Layout:
        contiguous = Layout.contiguous(layout.packing, layout.cp_size, align=layout.align)
        return contiguous.padded(align=layout.align, min_rows=layout.min_rows)

    found: Layout = layout.memo(("contiguous",), make)
    return found


def _can_redistribute(layout: Layout, hidden_size: int | None) -> bool:
    return hidden_size is not None and contiguous_like(layout) != layout


def _total(price: Price) -> float:
    return price.forward + price.backward


def _headwise(layout: Layout, shape: LinearShape, partition: HeadPartition, chunks: int, codec: Codec | None) -> Plan:
    sections = shape.sections(partition)
    arriving = ToHeads(exchange_of(layout, sections, partition, chunks, codec), (0, len(sections.blocks)))
    out = Section("out", shape.heads, 1 if shape.kind == "conv1d" else shape.value_dim, partition.heads)
    local = [Compute(name) for name in (("conv",) if shape.kind == "conv1d" else ("conv", "gates", "rule"))]
    steps: tuple[Step, ...] = (
        arriving,
        *local,
        ToTokens(exchange_of(layout, Sections((out,)), partition, chunks, codec)),
    )
    head = {"conv1d": "channel", "mamba": "head"}.get(shape.kind, "value head")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # said where the plan is chosen
        notes = notes_of(partition, layout, head, group_name(shape.kind), "; chunkwise uses them all")
    return Plan(
        shape.kind, "headwise", layout, sections, partition, None, steps, notes=notes, conv_width=shape.conv_width
    )  # fmt: skip


def _chunkwise(layout: Layout, shape: LinearShape) -> Plan:
    partition = partition_heads(shape.heads, shape.groups, 1)
    halo = Halo(layout, shape.conv_width, shape.channels)
    scan = Scan(layout, shape.heads, shape.key_dim, shape.value_dim, shape.is_delta)
    steps: tuple[Step, ...] = (halo,) if shape.kind == "conv1d" else (halo, Compute("gates"), scan)
    return Plan(
        shape.kind, "chunkwise", layout, shape.sections(partition), partition, None, steps, conv_width=shape.conv_width
    )  # fmt: skip


def _notes(plan: Plan) -> tuple[str, ...]:
    if plan.redistribution is None:
        return ()
    run = (
        f"a run of {plan.redistribution.layers} linear layers"
        if plan.redistribution.layers > 1
        else "this linear layer"
    )
    return (f"hidden states are redistributed to contiguous ranges around {run}, and back after it",)


def unused(way: str, codec: str, head_chunks: int | None) -> tuple[str, ...]:
    """A note about what was asked of a head exchange where the way that was chosen has none."""
    asked = [
        *([f"codec {codec}"] if codec != "none" else []),
        *([f"{head_chunks} head chunks"] if head_chunks and head_chunks > 1 else []),
    ]
    if not asked:
        return ()
    are = "is" if asked[-1].startswith("codec") else "are"
    return (f"{' and '.join(asked)} {are} unused: {way} was chosen, which exchanges no heads; headwise uses them",)


def group_name(kind: str) -> str:
    """What heads of a kind of layer share."""
    return {"conv1d": "channel", "mamba": "group of B and C"}.get(kind, "key head")


_OF_KIND = {
    "gdn": ("heads", "key_heads", "head_dim", "value_head_dim"),
    "kda": ("heads", "key_heads", "head_dim", "value_head_dim"),
    "mamba": ("heads", "groups", "head_dim", "state"),
    "conv1d": ("channels",),
}
_NEEDED = {"gdn": ("heads", "head_dim"), "mamba": ("heads", "head_dim", "state"), "conv1d": ("channels",)}


def _shape(kind: str, conv_width: int, **given: int | None) -> LinearShape:
    for name, value in given.items():
        if value is not None and name not in _OF_KIND[kind]:
            raise ArgumentError(name, value, f"None for {kind}, which takes {', '.join(_OF_KIND[kind])}")
        if value is None and name in _NEEDED.get(kind, _NEEDED["gdn"]):
            raise ArgumentError(name, None, f"an integer of at least 1: {kind} needs it")
    width = checked_integer("conv_width", conv_width, 1, MAX_CONV_WIDTH)
    if kind == "conv1d":
        channels = checked_integer("channels", given["channels"], 1)
        return LinearShape(kind, channels, channels, 1, 1, width)
    heads, head_dim = given["heads"], checked_integer("head_dim", given["head_dim"], 1)
    assert heads is not None
    if kind == "mamba":
        heads, groups = checked_heads(heads=heads, groups=1 if given["groups"] is None else given["groups"])
        return LinearShape(kind, heads, groups, checked_integer("state", given["state"], 1), head_dim, width)
    value_dim = head_dim
    if given["value_head_dim"] is not None:
        value_dim = checked_integer("value_head_dim", given["value_head_dim"], 1)
    heads, groups = checked_heads(heads=heads, key_heads=heads if given["key_heads"] is None else given["key_heads"])
    return LinearShape(kind, heads, groups, head_dim, value_dim, width)
