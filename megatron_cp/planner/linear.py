"""`plan_linear`: plans a linear layer on a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_cp.errors import MAX_FEATURES, ArgumentError, checked_integer, checked_size
from megatron_cp.exchange.codec import Codec
from megatron_cp.exchange.sections import HeadPartition, Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.kinds import KINDS, Argument, Dim, LinearKind, Per, SectionKind
from megatron_cp.plan.plan import Plan, Price, Redistribution
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.schemes import AUTO, CHUNKWISE, HEADWISE, MODES, REDISTRIBUTE, LinearMode, may_exchange_heads
from megatron_cp.plan.steps import Compute, Step, ToHeads, ToTokens
from megatron_cp.plan.transport import COLLECTIVE, Transport, checked_transport
from megatron_cp.planner.capabilities import hints_keywords, require
from megatron_cp.planner.checks import (
    check_layout,
    checked_chunks,
    checked_codec,
    checked_heads,
    checked_setting,
    exchange_of,
    no_chunks,
    notes_on_heads,
)
from megatron_cp.planner.predict.hardware import Machine, Setting, Topology
from megatron_cp.planner.predict.price import priced, state_bounds
from megatron_cp.planner.predict.walk import gathers_over_hosts

MAX_STEPS = 64  # far beyond any model; each is a section of an exchange
MAX_CONV_WIDTH = 64  # far beyond any model; a halo and its tables grow with it


@dataclass(frozen=True)
class LinearShape:
    """The sizes of a linear layer.

    Attributes:
        kind: the kind of the layer.
        heads: the number of heads, each with a state `[key_dim, value_dim]`; for conv1d the number of channels.
        groups: the number of key heads, each read by consecutive heads.
        key_dim, value_dim: features of a key and of a value head.
        conv_width: taps of the convolution.
        steps: steps of the recurrence that a token makes.
    """

    kind: LinearKind
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    conv_width: int
    steps: int = 1

    def sections(self, partition: HeadPartition) -> Sections:
        """Returns the sections that travel, in the order of the operation's features; the first ones are convolved."""
        kinds = self.kind.sections
        return Sections(
            tuple(self._section(each, name, partition) for each in kinds for name in each.names(self.steps))
        )

    def _section(self, section: SectionKind, name: str, partition: HeadPartition) -> Section:
        dims = {Dim.KEY: self.key_dim, Dim.VALUE: self.value_dim, Dim.ONE: 1}
        heads, ranges = (self.groups, partition.groups) if section.per is Per.GROUP else (self.heads, partition.heads)
        return Section(name, heads, dims[section.dim], ranges, exact=section.exact)

    @property
    def state_size(self) -> int:
        """The elements of all heads' states; 0 for a kind without states."""
        return self.heads * self.key_dim * self.value_dim if self.kind.has_state else 0

    @property
    def channels(self) -> int:
        """The number of features that are convolved."""
        blocks = self.sections(partition_heads(self.heads, self.groups, 1)).blocks
        return sum(block.width for block in blocks[: self.kind.num_convolved(len(blocks))])


@hints_keywords
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
    num_householder: int | None = None,
    conv_width: int = 4,
    mode: str = "auto",
    hidden_size: int | None = None,
    layers: int = 1,
    hardware: Machine | str | None = None,
    topology: Topology | None = None,
    item_size: int = 2,
    head_chunks: int | None = None,
    transport: Transport | str = COLLECTIVE,
    codec: str = "none",
) -> Plan:
    """Plans a linear layer on a batch.

        headwise      whole documents on a share of the heads: one exchange in, one out
        chunkwise     all heads on own tokens: a halo for the convolution, one exchange of state maps
        redistribute  chunkwise in a layout of few fragments, to which hidden states move around a run of layers

    Args:
        packing: the documents; the state is reset at the start of each.
        layout: the assignment of tokens to ranks.
        kind: "gdn" (Gated DeltaNet, arXiv 2412.06464), "kda" (Kimi Delta Attention, arXiv 2510.26692), "gdn2"
            (Gated DeltaNet-2, arXiv 2605.22791), "gdp" (Gated DeltaProduct, arXiv 2502.10297), "mamba" (Mamba-2, arXiv
            2405.21060), or "conv1d", the causal convolution alone.
        heads: value heads, each with a state of its own; not for conv1d.
        key_heads: query/key heads of the delta rules (gdn, kda, gdn2 and gdp), a divisor of `heads`; `heads` if None.
        groups: groups of B and C of mamba, a divisor of `heads`; 1 if None.
        head_dim: features of a query or key head; for mamba, of a head of x.
        value_head_dim: features of a value head of the delta rules; `head_dim` if None.
        state: the size of mamba's state, the features of B and C.
        channels: the number of channels of conv1d.
        num_householder: steps of the delta rule that a token of gdp makes; 1 if None.
        conv_width: taps of the mixer's convolution; the bare rules do not use it.
        mode: one of the above, or "auto", which takes the mode that is predicted to be fastest.
        hidden_size: features of the hidden states, if they may be redistributed; else None. The plan's `layout` may
            then differ from the given one, which is its `hidden_layout`: `relayout` moves hidden states between the
            two, and operations take `plan.inside` for the rows in between.
        layers: the number of linear layers that share such a redistribution.
        hardware: the machine of predictions: a preset such as "h100", its file, or a `Machine`; "h100" if None.
        topology: the hosts of the ranks; full hosts of that machine if None.
        item_size: bytes of an activation, for predictions.
        head_chunks: parts in which headwise's heads travel, each while the one before is computed; at most as many as a
            rank has key heads, 1 if None. Other modes refuse more than one.
        transport: the transport of messages; see `plan_attention`.
        codec: the codec of headwise's heads in messages; see `plan_attention`. Gates, decays and step sizes are not
            coded. Other modes refuse a codec.

    Where "auto" takes another mode than headwise, head chunks and codec are unused, and a note of the plan says so.

    Raises:
        ArgumentError: an argument that does not fit the others, or that no mode can run.
    """
    kind, mode = require("kind", kind), require("mode", mode)
    record = KINDS[kind]
    check_layout(packing, layout)
    shape = linear_shape(
        kind, conv_width, heads=heads, key_heads=key_heads, groups=groups, head_dim=head_dim,
        value_head_dim=value_head_dim, state=state, channels=channels, num_householder=num_householder,
    )  # fmt: skip
    layers = checked_integer("layers", layers, 1)
    if hidden_size is not None:
        hidden_size = checked_integer("hidden_size", hidden_size, 1, MAX_FEATURES)
    mode = _mode(mode, layout, hidden_size, layers)
    transport = checked_transport(transport, layout.cp_size)
    setting = checked_setting(transport, hardware, topology, item_size, layout.cp_size)
    partition = partition_heads(shape.heads, shape.groups, layout.cp_size)
    coding, chunks = _coding(record, mode, codec), _chunks(record, mode, head_chunks, partition)
    if mode == REDISTRIBUTE.name and contiguous_like(layout) == layout:
        mode = CHUNKWISE.name  # hidden states have that layout already
    makers: dict[LinearMode, Callable[[], Plan]] = {
        HEADWISE: lambda: _headwise(layout, shape, partition, chunks, coding),
        CHUNKWISE: lambda: _chunkwise(layout, shape),
        REDISTRIBUTE: lambda: _redistributed(layout, shape, hidden_size or 1, layers),
    }
    if mode != AUTO:
        makers = {MODES[mode]: makers[MODES[mode]]}
    elif hidden_size is None or contiguous_like(layout) == layout:
        del makers[REDISTRIBUTE]
    candidates = _priced_candidates(makers, transport, setting)
    chosen = next(plan for _, plan in candidates if plan is not None)
    taken = REDISTRIBUTE if chosen.redistribution else MODES[chosen.scheme]
    notes = notes_on_heads(chosen.partition, chosen.cp_size, record.head, record.group, "chunkwise uses them all")
    if chosen.partition.idle_ranks:
        warnings.warn(notes[0], stacklevel=3)
    notes += _note_on_redistribution(chosen)
    notes += () if taken.exchanges_heads else unused(taken.name, codec, chunks)
    return replace(chosen, notes=notes, prices=tuple(price for price, _ in candidates))


def _mode(asked: str, layout: Layout, hidden_size: int | None, layers: int) -> str:
    """Returns the mode to plan, and refuses arguments that a redistribution lacks or does not use."""
    redistributes = asked != AUTO and MODES[asked].redistributes
    if layout.cp_size == 1 and (asked == AUTO or redistributes):
        return HEADWISE.name  # nothing moves, and a model may be run on one rank with the options of several
    if redistributes and hidden_size is None:
        raise ArgumentError("hidden_size", None, "the features of the hidden states", "A redistribution moves those.")
    if layers > 1 and hidden_size is None:
        raise ArgumentError("layers", layers, "1 without hidden_size", "They share a redistribution of hidden states.")
    return asked


def _coding(kind: LinearKind, mode: str, codec: str) -> Codec | None:
    remedy = "" if may_exchange_heads(mode) else "A codec is only for heads of an exchange: use headwise."
    if not kind.takes_codec:
        remedy = "Its heads are single channels, which a codec cannot shorten: leave out the codec."
    return checked_codec(codec, mode if kind.takes_codec else kind.name, remedy)


def _chunks(kind: LinearKind, mode: str, asked: int | None, partition: HeadPartition) -> int:
    if asked is None:
        return 1
    if not may_exchange_heads(mode):
        return no_chunks(asked, mode, "Only heads of an exchange travel in chunks: use headwise.")
    chunks = checked_chunks(asked, partition, kind.group)
    return chunks if len(partition.heads) > 1 else 1


def _priced_candidates(
    makers: dict[LinearMode, Callable[[], Plan]], transport: Transport, setting: Setting
) -> list[tuple[Price, Plan | None]]:
    """Returns candidates' prices and plans, the cheapest first; no plan where a bound of the price ruled it out."""
    found: list[tuple[Price, Plan | None]] = []
    on, topology, item_size = setting
    for mode, make in makers.items():
        plan = replace(make(), transport=transport)
        if found and mode is CHUNKWISE:
            best, _ = found[0]
            bound = next((bound for bound in state_bounds(plan, setting) if bound.total > best.total), None)
            if bound is not None:
                found.append((bound, None))  # a full prediction would take longer and not change the choice
                continue
        ways = [plan, *_with_maps(plan, setting)]
        prices = [priced(each, on, topology, item_size=item_size) for each in ways]
        price, plan = min(zip(prices, ways, strict=True), key=lambda pair: pair[0].total)
        found.append((replace(price, scheme=mode.name, detail=", maps gathered" if plan is not ways[0] else ""), plan))
    return sorted(found, key=lambda pair: pair[0].total)


def _with_maps(plan: Plan, setting: Setting) -> list[Plan]:
    """Returns a chunkwise plan with its maps gathered, where that may be faster; nothing elsewhere.

    An all-gather sends a map to every rank, but over several hosts of devices only once to each host.
    """
    *before, scan = plan.steps
    hardware, hosts = setting.machine.hardware, setting.topology.hosts
    if not isinstance(scan, Scan) or not scan.crosses or not gathers_over_hosts(plan, hardware, hosts):
        return []
    return [replace(plan, steps=(*before, replace(scan, gathers=True)))]


def _redistributed(layout: Layout, shape: LinearShape, hidden_size: int, layers: int) -> Plan:
    return replace(
        _chunkwise(contiguous_like(layout), shape), redistribution=Redistribution(layout, hidden_size, layers)
    )


def contiguous_like(layout: Layout) -> Layout:
    """Returns contiguous ranges with the padding of `layout`, in which chunkwise has the fewest segments."""

    def make() -> Layout:
        contiguous = Layout.contiguous(layout.packing, layout.cp_size, align=layout.align)
        return contiguous.padded(align=layout.align, min_rows=layout.min_rows)

    found: Layout = layout.memo(("contiguous",), make)
    return found


def _headwise(layout: Layout, shape: LinearShape, partition: HeadPartition, chunks: int, codec: Codec | None) -> Plan:
    sections = shape.sections(partition)
    arriving = ToHeads(exchange_of(layout, sections, partition, chunks, codec), (0, len(sections.blocks)))
    out = Section("out", shape.heads, shape.value_dim, partition.heads)
    local = [Compute(name) for name in shape.kind.stages]
    steps: tuple[Step, ...] = (
        arriving,
        *local,
        ToTokens(exchange_of(layout, Sections((out,)), partition, chunks, codec)),
    )
    return Plan(shape.kind.name, HEADWISE.name, layout, sections, partition, None, steps, conv_width=shape.conv_width)


def _chunkwise(layout: Layout, shape: LinearShape) -> Plan:
    partition = partition_heads(shape.heads, shape.groups, 1)
    halo = (Halo(layout, shape.conv_width, shape.channels),) if shape.kind.convolved else ()
    scan = Scan(layout, shape.heads, shape.key_dim, shape.value_dim, shape.kind.is_dense)
    steps: tuple[Step, ...] = (*halo, Compute("gates"), scan) if shape.kind.has_state else halo
    return Plan(
        shape.kind.name, CHUNKWISE.name, layout, shape.sections(partition), partition, None, steps,
        conv_width=shape.conv_width,
    )  # fmt: skip


def _note_on_redistribution(plan: Plan) -> tuple[str, ...]:
    if plan.redistribution is None:
        return ()
    run = (
        f"a run of {plan.redistribution.layers} linear layers"
        if plan.redistribution.layers > 1
        else "this linear layer"
    )
    return (f"hidden states are redistributed to contiguous ranges around {run}, and back after it",)


def unused(mode: str, codec: str, head_chunks: int | None) -> tuple[str, ...]:
    """Returns a note on options of a head exchange that the chosen mode does not use."""
    asked = [
        *([f"codec {codec}"] if codec != "none" else []),
        *([f"{head_chunks} head chunks"] if head_chunks and head_chunks > 1 else []),
    ]
    if not asked:
        return ()
    are = "is" if asked[-1].startswith("codec") else "are"
    return (f"{' and '.join(asked)} {are} unused: {mode} was chosen, which exchanges no heads; headwise uses them",)


def linear_shape(name: str, conv_width: int, **given: int | None) -> LinearShape:
    """Converts the sizes that `plan_linear` takes for a kind of layer to a `LinearShape`.

    Raises:
        ArgumentError: a size that the kind does not have, a missing one, or one that is no positive integer.
    """
    kind = KINDS[name]
    names = {argument.name: argument for argument in kind.arguments}
    for argument_name, value in given.items():
        if value is not None and argument_name not in names:
            raise ArgumentError(argument_name, value, f"None for {name}, which takes {', '.join(names)}")
        if value is None and argument_name in names and names[argument_name].default is None:
            raise ArgumentError(argument_name, None, f"an integer of at least 1: {name} needs it")
    width, sizes = checked_integer("conv_width", conv_width, 1, MAX_CONV_WIDTH), dict[str, int]()
    for argument in kind.arguments:
        value, default = given.get(argument.name), argument.default
        if value is None:
            sizes[argument.field] = sizes[default] if isinstance(default, str) else default or 1
        else:
            sizes[argument.field] = _checked(kind, argument, value, sizes)
    if "groups" in sizes:
        checked_heads(**{kind.argument(field) or field: sizes[field] for field in ("heads", "groups")})
    heads = sizes["heads"]
    return LinearShape(
        kind,
        heads,
        sizes.get("groups", heads),
        sizes.get("key_dim", 1),
        sizes.get("value_dim", 1),
        width,
        sizes.get("steps", 1),
    )


def _checked(kind: LinearKind, argument: Argument, value: int, sizes: dict[str, int]) -> int:
    """Returns a size that was given, after a check; `sizes` are those before it."""
    if argument.field == "steps":
        return checked_integer(argument.name, value, 1, MAX_STEPS)
    if not kind.has_state:
        return checked_integer(argument.name, value, 1, MAX_FEATURES)  # channels are features of all heads
    return checked_size(argument.name, value, sizes["heads"] if argument.field in ("key_dim", "value_dim") else 1)
