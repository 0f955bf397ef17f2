"""`GraphTables`: memory for the tables of any pack that fits, so that one CUDA graph of a step serves all packs.

A graph repeats the launches of the pack that it was captured with: the same addresses, and the same sizes. So every
pack is padded to one number of tokens and of documents, all tables get the same shapes, and each pack's are copied to
the same addresses, by one copy from pinned memory:

    slots = GraphTables(capacity_tokens=32768, capacity_documents=64, cp_size=4)
    for pack in packs:
        layout = slots.layout(pack.packing)
        batch = shard_batch(pack.tokens, layout, group, slots=kinds, device="cuda", into=slots)
        graph.replay()                                   # or, the first time, run eagerly and then capture

The padding is one document of tokens without labels: it gets zeros from attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.exchange.device import LOAD_AGAIN, CallTables, fill_tables, indexed
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.block_masks import is_block_table
from megatron_cp.layout.filled_layout import FilledLayout
from megatron_cp.layout.mask import is_named
from megatron_cp.layout.packing import lengthened
from megatron_cp.layout.segments import Segments
from megatron_cp.layout.tiles import Tiles
from megatron_cp.linear.kernels.common.chunks import FixedChunks, fixed_chunks
from megatron_cp.linear.kernels.conv import fixed_heads, fixed_history
from megatron_cp.linear.kernels.fla import fixed_documents
from megatron_cp.plan.flows import Fetch
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import AUTO, MODES, SCHEMES, LinearMode, Scheme
from megatron_cp.planner.batch import AttentionSpec, BatchPlan, Slot
from megatron_cp.softmax.kernels.common.fixed_calls import FixedCalls, Pattern
from megatron_cp.softmax.kernels.common.varlen_calls import LoadedTiles

HostTables = dict[str, NDArray]

_LAYOUTS = ("zigzag", "contiguous")
_ALIGNMENT = 16  # bytes


class GraphTables:
    """Tables on a device that one pack after another is loaded into.

    Packs may be loaded for attention by all schemes but `tiled`, `a2a+tiled` and `exact_by_host`, and for linear layers
    that are headwise, or chunkwise in a contiguous layout. Masks are those in which every document has the same bands:
    `causal`, `full` and windows; causal and full where keys travel. A spec gives them by name, as `Mask.window(...)`
    and the like over the pack's own documents, or by a function of these that makes one. Where keys travel, documents
    need a multiple of 2 * cp_size tokens, so that every rank has an equal share of each, and messages have one size:
    `align_documents` pads them. The padding of a document follows its tokens, so a mask under which they see it
    (`full`, a window to the right) is refused for packs with such documents.

    Args:
        capacity_tokens: tokens of every padded pack; a multiple of `cp_size`.
        capacity_documents: the most documents of a pack.
        cp_size: the number of ranks.
        align_documents: documents are padded to a multiple of this number of tokens. Causal and linear layers see no
            difference; layers that see ahead take only packs whose documents are such multiples already.
        longest: tokens of the longest document of any pack, for which kernels make room; `capacity_tokens` if None. It
            is padded like documents.
        layout: "zigzag" or "contiguous".

    Raises:
        ArgumentError: sizes that do not fit each other.
    """

    def __init__(
        self, capacity_tokens: int, capacity_documents: int, cp_size: int, *, align_documents: int = 1,
        longest: int | None = None, layout: str = "zigzag",
    ) -> None:  # fmt: skip
        self.capacity_tokens = checked_integer("capacity_tokens", capacity_tokens, 1)
        self.capacity_documents = checked_integer("capacity_documents", capacity_documents, 1)
        self.cp_size = checked_integer("cp_size", cp_size, 1)
        self.align_documents = checked_integer("align_documents", align_documents, 1)
        longest = capacity_tokens if longest is None else checked_integer("longest", longest, 1, capacity_tokens)
        self.longest = -(-longest // self.align_documents) * self.align_documents
        for divisor, name in ((cp_size, "cp_size"), (align_documents, "align_documents")):
            if capacity_tokens % divisor:
                raise ArgumentError("capacity_tokens", capacity_tokens, f"a multiple of {name}, which is {divisor}")
        if not isinstance(layout, str) or layout not in _LAYOUTS:
            remedy = "A graph repeats the launches of one layout for every pack." if str(layout) == AUTO else ""
            raise ArgumentError("layout", layout, " or ".join(_LAYOUTS), remedy)
        self._layout_name = layout
        self._memory: _TableMemory | None = None
        self._patterns: dict[tuple[int, int], Pattern] = {}
        self._kinds: list[Slot] = []
        self._messages: list[Any] = []
        self._steps: dict[int, tuple[Any, ...]] = {}
        self._place: tuple[int, torch.device] | None = None
        self._loaded: Callable[[], BatchPlan | None] = lambda: None

    def layout(self, lengths: Packing | Iterable[int]) -> Layout:
        """Returns the layout of a padded pack, with `capacity_tokens / cp_size` tokens on every rank.

        Args:
            lengths: the pack's documents, or their lengths.

        Raises:
            ArgumentError: more tokens or documents than there is room for, or documents that branch.
        """
        given = lengths if isinstance(lengths, Packing) else Packing(lengths)
        given.refuse_branches("lengths", given, "no GraphTables")
        step = self.align_documents
        sizes = -(-given.lengths // step) * step
        remedy = "Make larger GraphTables, and capture the step again."
        if given.num_documents > self.capacity_documents:
            most = f"at most {self.capacity_documents} documents"
            raise ArgumentError("lengths", f"{given.num_documents} documents", most, remedy)
        if sizes.sum() > self.capacity_tokens:
            filled = f", filled up to multiples of {step}" if step > 1 else ""
            given_tokens = f"documents of {int(sizes.sum())} tokens{filled}"
            raise ArgumentError("lengths", given_tokens, f"at most {self.capacity_tokens} tokens", remedy)
        if sizes.max() > self.longest:
            most = f"documents of at most {self.longest} tokens"
            raise ArgumentError("lengths", f"a document of {int(sizes.max())} tokens", most, remedy)
        if not given.total:
            raise ArgumentError("lengths", given.lengths.tolist(), "at least one token")
        spare = np.zeros(self.capacity_documents - given.num_documents, dtype=np.int64)
        packing = Packing(np.concatenate([sizes, spare, [self.capacity_tokens - sizes.sum()]]))
        made = getattr(Layout, self._layout_name)(packing, self.cp_size)
        keeps_order = self._layout_name == "contiguous" or self.cp_size == 1
        return FilledLayout(made, given, self._room, keeps_order=keeps_order)

    @property
    def _room(self) -> tuple[Any, ...]:
        """The sizes that packs are padded to."""
        sizes = (self.capacity_tokens, self.capacity_documents, self.cp_size, self.align_documents, self.longest)
        return (*sizes, self._layout_name)

    def load(
        self, plans: BatchPlan, rank: int, device: torch.device, rows: Mapping[str, NDArray] | None = None
    ) -> dict[str, Tensor]:
        """Copies the tables of a pack's plans into this memory, which graphs read, and layers with `plans.plan(slot)`.

        The copy is queued on the current stream, which must be the one that the layers run in. The host does not wait.

        Args:
            plans: of a layout of `layout`, for the same kinds of layers in every pack.
            rank: the rank of this process.
            device: the device of the tables.
            rows: further arrays that a step reads and that change from pack to pack, such as a rank's tokens.

        Returns:
            `rows` on the device, always in the same memory.

        Raises:
            ArgumentError: plans that graphs cannot serve, or of other shapes than those that were loaded before.
        """
        documents_of(self, plans.layout)
        rank = checked_integer("rank", rank, 0, self.cp_size - 1)
        if not isinstance(device, torch.device) or device.type not in ("cpu", "cuda"):
            raise ArgumentError("device", device, "a torch.device of type cpu or cuda")
        if rows is not None and not (isinstance(rows, Mapping) and all(map(_is_table, rows.values()))):
            raise ArgumentError("rows", rows, "numpy arrays by name")
        place = (rank, indexed(device))
        kinds = [_named(slot, plan) for slot, plan in zip(plans.kinds, plans.plans, strict=True)]
        if self._memory is None:
            self._learn(kinds, plans.plans, rank)
            self._place, self._kinds = place, kinds
            self._messages = [_messages(plan) for plan in plans.plans]
        if place != self._place:
            given, before = (f"rank {rank} on {device}" for rank, device in (place, self._place or place))
            raise ArgumentError(
                "device", given, f"{before}, as was loaded before", "Make separate GraphTables for this device."
            )
        if kinds != self._kinds:
            remedy = "A graph serves packs with the same kinds of layers: make separate GraphTables for others."
            raise ArgumentError("slots", kinds, f"{self._kinds}, as were loaded before", remedy)
        for plan, before in zip(plans.plans, self._messages, strict=True):
            if (sent := _messages(plan)) != before:
                remedy = "A graph serves packs that ranks exchange in the same way: name the scheme of each layer."
                raise ArgumentError("plans", f"messages {sent}", f"{before}, as were loaded before", remedy)
        calls = [self._calls(number, plan, rank) for number, plan in enumerate(plans.plans)]
        tables = self._tables(plans, rank, calls) | {f"rows {name}": values for name, values in (rows or {}).items()}
        if self._memory is None:
            self._memory = _TableMemory(tables, place[1])
        views = self._memory.load(tables)
        if plans is not self._loaded():
            self._memory.pack = object()
        plans._use_tables(self._call_tables(n, plan, views, calls[n][1]) for n, plan in enumerate(plans.plans))
        self._loaded = weakref.ref(plans)  # a batch that is no longer used is not kept
        return {name: views[f"rows {name}"] for name in rows or {}}

    def check_loaded(self, plans: BatchPlan) -> None:
        """Raises unless the tables in memory are those of the given plans: a graph would move rows by those of others.

        Raises:
            ArgumentError: others have been loaded since, or these never.
        """
        if not isinstance(plans, BatchPlan):
            raise ArgumentError("plans", plans, "a BatchPlan, such as that of a LocalBatch")
        if plans is not self._loaded():
            what = "none" if self._memory is None else "those of another pack"
            given = f"plans that are not in the slots, which have {what}"
            raise ArgumentError("plans", given, "those loaded last", LOAD_AGAIN)

    def _learn(self, kinds: Sequence[Slot], plans: Sequence[Plan], rank: int) -> None:
        """Learns what all packs share from a pack of one document with the most tokens, and checks it on another
        pack.
        """
        for slot, plan in zip(kinds, plans, strict=True):
            self._check_kind(slot, plan)
        step, self._steps = self.align_documents, {}
        one = BatchPlan(self.layout([self.longest]), kinds)
        several = BatchPlan(self.layout([step] * min(self.capacity_documents, self.capacity_tokens // step)), kinds)
        stream = Layout.contiguous(Packing([self.capacity_tokens]), self.cp_size)
        for number, (slot, plan) in enumerate(zip(kinds, plans, strict=True)):
            if plan.recurrent_steps:
                self._steps[number] = tuple(replace(step, layout=stream) for step in plan.recurrent_steps)
            if not isinstance(slot, AttentionSpec):
                continue
            try:
                self._learn_pattern(number, one.plan(slot), rank)
                found = [_shapes(self._calls(number, packs.plan(slot), rank)[0]) for packs in (one, several)]
            except ArgumentError as error:
                raise _no_pattern(slot.mask) from error
            if found[0] != found[1]:
                raise _no_pattern(slot.mask)

    def _learn_pattern(self, number: int, plan: Plan, rank: int) -> None:
        """Stores the bands of a pack's only document, for each stage."""
        assert plan.attend is not None
        for stage in plan.attend.stages:
            tiles = plan.attend.tiles(rank // plan.ulysses_degree, stage)
            bands = tiles.bands
            if plan.packing.lengths[-1]:  # half of the bands are the padding's
                bands = bands[: len(bands) // 2]
            self._patterns[number, stage.number] = Pattern.from_bands(bands, len(tiles.q_tokens), len(tiles.k_tokens))

    def _check_kind(self, slot: Slot, plan: Plan) -> None:
        """Raises for layers that cannot be captured for every pack, naming the option."""
        ways: Mapping[str, Scheme | LinearMode] = SCHEMES if isinstance(slot, AttentionSpec) else MODES
        name, way = "scheme" if isinstance(slot, AttentionSpec) else "mode", ways[plan.strategy]
        if not way.sends_alike:
            remedy = "Its messages change from pack to pack: run this layer outside the graph, or in another way."
            allowed = ", ".join(name for name, way in ways.items() if way.sends_alike)
            taken = plan.strategy
            raise ArgumentError(name, taken, f"{allowed}, said by name", remedy)
        if plan.attend is not None and plan.attend.selection is not None:
            remedy = "The keys that queries choose differ from pack to pack: run this layer outside the graph."
            raise ArgumentError("slots", "attention to chosen keys", "attention to all keys of a mask", remedy)
        # Blocks are cut by a document's own length, which padding changes.
        if isinstance(slot, AttentionSpec) and is_block_table(str(slot.mask)):
            raise _no_pattern(slot.mask)
        if self.cp_size == 1:
            return
        if isinstance(way, LinearMode) and plan.recurrent_steps and self._layout_name != _LAYOUTS[1]:
            remedy = "A rank then continues one document of the rank before it, whatever the documents are."
            raise ArgumentError("layout", self._layout_name, f"{_LAYOUTS[1]} with {plan.scheme}", remedy)
        if not isinstance(way, Scheme) or not way.exchanges_keys:
            return
        remedy = f"With {plan.scheme} every rank must have as many rows of a document as the others."
        if self._layout_name != _LAYOUTS[0]:
            raise ArgumentError("layout", self._layout_name, f"{_LAYOUTS[0]} with {plan.scheme}", remedy)
        if self.align_documents % (2 * self.cp_size):
            allowed = f"a multiple of 2 * cp_size = {2 * self.cp_size}"
            raise ArgumentError("align_documents", self.align_documents, allowed, remedy)

    @staticmethod
    def _tables(plans: BatchPlan, rank: int, calls: Sequence[tuple[HostTables, Any]]) -> HostTables:
        found: HostTables = {}
        for number, plan in enumerate(plans.plans):
            own = {f"order {name}": table for name, table in _order_tables(plan, rank).items()}
            own |= calls[number][0] | _flow_tables(plan, rank)
            if plan.recurrent_steps:
                own |= _segment_tables(plan, rank)
            elif plan.kind in KINDS and KINDS[plan.kind].has_state:
                own |= {f"chunks {name}": table for name, table in fixed_chunks(plan.rule_packing).items()}
                own |= {f"fla {name}": table for name, table in fixed_documents(plan.rule_packing).items()}
            if plan.kind in KINDS and KINDS[plan.kind].convolved and not plan.recurrent_steps:
                own |= fixed_heads(plan.packing, plan.conv_width)
            found |= {f"{number} {name}": table for name, table in own.items()}
        return found

    def _calls(self, number: int, plan: Plan, rank: int) -> tuple[HostTables, list[tuple[Tiles, FixedCalls]]]:
        """Returns the tables of an attention, and its kernel calls in each stage."""
        tables: HostTables = {}
        made = []
        for stage in plan.attend.stages if plan.attend is not None else ():
            assert plan.attend is not None
            tiles = plan.attend.tiles(rank // plan.ulysses_degree, stage)
            sizes = (self.capacity_documents, len(tiles.q_tokens), len(tiles.k_tokens))
            documents = np.flatnonzero(plan.packing.lengths[:-1])
            calls = FixedCalls(tiles.bands, self._patterns[number, stage.number], len(documents), *sizes)
            calls.check_documents(tiles.bands, documents, plan.packing.documents_of, tiles.q_tokens, tiles.k_tokens)
            tables |= {f"stage {stage.number} {name}": table for name, table in calls.tables().items()}
            made.append((tiles, calls))
        return tables, made

    def _call_tables(
        self, number: int, plan: Plan, views: Mapping[str, Tensor], calls: Sequence[tuple[Tiles, FixedCalls]]
    ) -> CallTables:
        """Returns a plan's tables in this memory."""
        assert self._memory is not None
        own, linear = _with_prefix(views, f"{number} "), dict[str, Any]()
        if steps := self._steps.get(number):
            linear |= {"steps": steps, "history": _with_prefix(own, "history ")}
        if chunks := _with_prefix(own, "chunks "):
            assert self._place is not None
            past, future = (bool(steps) and self._place[0] != end for end in (0, self.cp_size - 1))
            fixed = FixedChunks(chunks, past=past, future=future)
            linear |= {"chunks": fixed, "documents": _with_prefix(own, "fla ")}
        if heads := _with_prefix(own, "heads "):
            linear["heads"] = [heads[str(back)] for back in range(plan.conv_width)]
        tiles: list[Tiles] = [
            LoadedTiles(tiles, fixed.on_device(_with_prefix(own, f"stage {stage} ")))
            for stage, (tiles, fixed) in enumerate(calls)
        ]
        flows = {stage: _with_prefix(own, f"flow {stage} ") for stage in range(len(tiles))}
        return CallTables(self._memory, self._memory.pack, _with_prefix(own, "order "), tiles, flows, linear)


def documents_of(slots: GraphTables, layout: Layout) -> Packing:
    """Returns the documents that `GraphTables.layout` made a layout for."""
    if not isinstance(layout, FilledLayout) or layout.room != slots._room:
        remedy = "Make the layout by layout(lengths) of these GraphTables."
        raise ArgumentError("layout", layout, f"one that is filled up to {slots.capacity_tokens} tokens", remedy)
    return layout.given


def is_padded_to_capacity(layout: Layout) -> bool:
    """Returns True if `GraphTables.layout` made the layout."""
    return isinstance(layout, FilledLayout)


def pad_to_capacity(values: Tensor, slots: GraphTables, layout: Layout, fill: float) -> Tensor:
    """Returns values `[total]` of a pack's tokens as `[capacity_tokens]`, with `fill` in the padding."""
    given = documents_of(slots, layout)
    starts = layout.packing.cu_seqlens[: given.num_documents]
    places = np.repeat(starts - given.cu_seqlens[:-1], given.lengths) + np.arange(given.total)
    filled = values.new_full((slots.capacity_tokens,), fill)
    filled[torch.from_numpy(places)] = values
    return filled


def _with_prefix(tables: Mapping[str, Any], start: str) -> dict[str, Any]:
    return {name.removeprefix(start): table for name, table in tables.items() if name.startswith(start)}


def _order_tables(plan: Plan, rank: int) -> HostTables:
    """Returns the tables by which the head side puts rows in stream order, and back."""
    exchange = next((exchange for exchange, _ in plan.exchanges(forward=True)), None)
    layout = None if exchange is None else exchange.subgroup(rank // plan.ulysses_degree).layout
    if layout is None or layout.in_stream_order:
        return {}
    return {name: getattr(layout, name).astype(np.int32) for name in ("order", "inverse_order")}


def _flow_tables(plan: Plan, rank: int) -> HostTables:
    """Returns the tables of the keys that a rank fetches and sends, and of the gradients that return."""
    found = dict[str, Any]()
    for number, fetch in _fetches(plan).items():
        tables = fetch.fixed_tables(rank // plan.ulysses_degree)
        found |= {f"flow {number} {name}": table.astype(np.int32) for name, table in tables.items()}
    return found


def _fetches(plan: Plan) -> dict[int, Fetch]:
    """Returns how keys are fetched, for each stage in which they are."""
    stages = () if plan.attend is None else plan.attend.stages
    return {stage.number: stage.keys for stage in stages if isinstance(stage.keys, Fetch)}


def _messages(plan: Plan) -> tuple[str, dict[int, list[list[int]]]]:
    """Returns the scheme, and the rows of keys from each rank to each in each stage: a graph repeats both."""
    return plan.strategy, {stage: fetch.split_counts.counts.tolist() for stage, fetch in _fetches(plan).items()}


def _segment_tables(plan: Plan, rank: int) -> HostTables:
    """Returns the tables of a chunkwise layer: where documents begin among a rank's tokens, and before them.

    Ranks pass on states and halos as if the stream were one document, so that messages are the same for every pack.
    """
    segments = Segments.from_layout(plan.layout)
    local, kind, start = segments.local(rank), KINDS[plan.kind], int(plan.layout.starts[rank])
    spare = np.zeros(plan.packing.num_documents - local.ids.size, dtype=np.int64)
    pieces, found = Packing(np.concatenate([local.packing.lengths, spare])), dict[str, Any]()
    if kind.has_state:
        chunks = fixed_chunks(lengthened(pieces, plan.steps_a_token), continued=bool(local.past[0]))
        found |= {f"chunks {name}": table for name, table in chunks.items()}
    if kind.convolved:
        history = fixed_history(plan.packing, start, pieces.total, plan.conv_width)
        found |= fixed_heads(pieces, plan.conv_width)
        found |= {f"history {name}": table for name, table in history.items()}
    return found


def _named(slot: Slot, plan: Plan) -> Slot:
    """Returns the slot with its mask by name: a `Mask`, or what a function makes, is of one pack alone."""
    if not isinstance(slot, AttentionSpec) or isinstance(slot.mask, str):
        return slot
    assert plan.mask is not None
    if not is_named(plan.mask):
        raise _no_pattern(plan.mask.name)
    return replace(slot, mask=plan.mask.name)


def _no_pattern(mask: object) -> ArgumentError:
    remedy = "Under other masks, documents differ in more than their length: run this layer outside the graph."
    return ArgumentError("mask", mask, "causal, full or a window; causal or full where keys travel", remedy)


def _shapes(tables: HostTables) -> dict[str, Any]:
    return {name: (table.shape, table.dtype) for name, table in tables.items()}


class _TableMemory:
    """Adjacent tables on a device, and two copies in pinned memory: one is filled while the other is copied."""

    def __init__(self, tables: HostTables, device: torch.device) -> None:
        self._shapes = _shapes(tables)
        self._places, end = {}, 0
        for name, table in tables.items():
            self._places[name] = slice(end, end + table.nbytes)
            end += -(-table.nbytes // _ALIGNMENT) * _ALIGNMENT
        pinned = device.type == "cuda"
        with torch.inference_mode(False):  # tables outlive an evaluation, and autograd saves no inference tensor
            self._device = torch.empty(end, dtype=torch.uint8, device=device)
            self._hosts = [torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2)]
            self.views = dict[str, Tensor]()
            for name, table in tables.items():  # a view of another type is one too
                dtype = torch.from_numpy(np.empty(0, table.dtype)).dtype
                self.views[name] = self._device[self._places[name]].view(dtype).view(table.shape)
        self._copied: list[Any] = [None, None]
        self.device, self.pack = device, object()

    def load(self, tables: HostTables) -> dict[str, Tensor]:
        """Copies the tables, and returns their views on the device."""
        shapes = _shapes(tables)
        if shapes != self._shapes:
            name = next(name for name in {**shapes, **self._shapes} if shapes.get(name) != self._shapes.get(name))
            given, before = f"a table {name!r} of {shapes.get(name)}", f"{self._shapes.get(name)}, as was loaded before"
            remedy = "A graph serves packs of the same layers with tables of the same shapes."
            raise ArgumentError("plans", given, before, remedy)
        host, event = self._hosts[0], self._copied[0]
        if event is not None:
            event.synchronize()  # the load before the last, complete unless loads are faster than steps
        host_bytes = host.numpy()
        for name, table in tables.items():
            host_bytes[self._places[name]] = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
        fill_tables(self._device, host)
        if self._device.is_cuda:
            self._copied[0] = torch.cuda.Event()
            self._copied[0].record()
        self._hosts.reverse()
        self._copied.reverse()
        return self.views


def _is_table(values: object) -> bool:
    return isinstance(values, np.ndarray) and values.dtype.kind in "biuf"
