"""`Cache`: keys, values and states of documents whose tokens are computed in several calls.

The tokens of one call are a *step*: a packing of every document's new tokens, none for some, in any layout. A rank's
keys stay where they were computed. So the keys of a step are those of a layout in which each rank holds the rows of
earlier steps, in their order, and then its new ones: new queries attend to them as in cross-attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.exchange.device import on_device
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.fragments import MAX_CP_SIZE
from megatron_cp.layout.packing import IntArray, host_array, is_integral
from megatron_cp.plan.plan import Plan

Ranges = tuple[tuple[int, int], ...]

# New pieces of a document on a rank, on average, before its rows are put together: kernels compute piece by piece.
_MOST_PIECES = 8


class CacheStep(NamedTuple):
    """The tokens of one call of all layers.

    Attributes:
        number: counted from 1; 0 before the first step.
    """

    number: int
    layout: Layout | None
    kv_layout: Layout | None

    def begun(self) -> Layout:
        """Returns the layout of the step's tokens."""
        if self.layout is None:
            raise ArgumentError("cache", "a Cache before its first step", "one after extend(layout)")
        return self.layout


class Cache:
    """Keys, values and states of the tokens so far, for layers that continue documents; the same calls on every rank.

    A step begins with `extend`, which takes the layout of the new tokens. Then every layer is called once, with
    `cache=cache.layer(number)`: `attention` stores the new keys and values and attends to all of them, linear layers
    start from the state after earlier steps and keep the state after this one. Results are those of one call with all
    tokens. Nothing is sent that such a call would not send, except that `chunkwise` gives every rank the states and
    the last inputs of the convolution of all documents.

    A cache is for inference: layers refuse it where gradients are computed.

    Args:
        num_documents: documents of every step, until `add` or `drop` changes their number.
        cp_size: the number of ranks.
        block_size: rows by which a layer's memory for keys and values grows, at least; larger ones grow by a quarter.

    Attributes:
        lengths: `[documents]` tokens so far, those of the current step included.

    Raises:
        ArgumentError: a number that is no integer of at least 1.

    Example:
        >>> cache = Cache(2)
        >>> for lengths in ([3, 2], [1, 1]):
        ...     layout = Layout.contiguous(Packing(lengths), 1)
        ...     keys = cache.extend(layout)
        >>> keys.packing.lengths.tolist(), cache.positions(0).tolist()
        ([4, 3], [3, 2])
    """

    def __init__(self, num_documents: int, cp_size: int = 1, *, block_size: int = 256) -> None:
        self.num_documents = checked_integer("num_documents", num_documents, 1)
        self.cp_size = checked_integer("cp_size", cp_size, 1, MAX_CP_SIZE)
        self.block_size = checked_integer("block_size", block_size, 1)
        self.lengths: IntArray = np.zeros(self.num_documents, dtype=np.int64)
        self._step = CacheStep(0, None, None)
        self._layers: dict[int, LayerCache] = {}
        self._pieces: list[IntArray] = [np.empty((0, 3), dtype=np.int64)] * self.cp_size  # document, start, end
        self._sorted_pieces = [0] * self.cp_size  # how many there were when rows were last put together

    def extend(self, layout: Layout) -> Layout:
        """Begins a step.

        Args:
            layout: the ranks that compute and then hold each new token.

        Returns:
            The layout of the keys of all tokens so far, for `plan_attention`: `kv_packing=keys.packing,
            kv_layout=keys`, with `mask="causal"` or another mask whose last query sees the last key.

        Raises:
            ArgumentError: a layout over other numbers of documents or ranks, documents that branch, or layers that
                have not been called in the step before.
        """
        if not isinstance(layout, Layout) or layout.cp_size != self.cp_size:
            given = f"one over {layout.cp_size}" if isinstance(layout, Layout) else layout
            raise ArgumentError("layout", given, f"a layout of the new tokens over {self.cp_size} ranks")
        packing = layout.packing
        packing.refuse_branches("layout", layout, "one without a cache", "A cache has one state a document.")
        if packing.num_documents != self.num_documents:
            allowed = f"one of the cache's {self.num_documents} documents, of no tokens where there is nothing new"
            raise ArgumentError("layout", f"a layout of {packing.num_documents} documents", allowed)
        self._check_between_steps("extend")
        new = [len(pieces) - before for pieces, before in zip(self._pieces, self._sorted_pieces, strict=True)]
        if max(new) > _MOST_PIECES * self.num_documents:
            self._select([np.lexsort((pieces[:, 1], pieces[:, 0])) for pieces in self._pieces])
        starts = self.lengths - packing.cu_seqlens[:-1]  # from places in the stream to positions in documents
        for rank in range(self.cp_size):
            added = []
            for start, end in layout.fragments_of(rank):
                while start < end:
                    document = int(np.searchsorted(packing.cu_seqlens, start, side="right")) - 1
                    stop = min(end, int(packing.cu_seqlens[document + 1]))
                    shift = int(starts[document])
                    added.append((document, start + shift, stop + shift))
                    start = stop
            self._pieces[rank] = _joined(np.concatenate([self._pieces[rank], np.reshape(added, (-1, 3)).astype(int)]))
        self.lengths = self.lengths + packing.lengths
        held, pieces = Packing(self.lengths), np.concatenate(self._pieces)
        begins, counts = held.cu_seqlens[pieces[:, 0]], np.cumsum([0, *map(len, self._pieces)])
        keys = Layout(held, begins + pieces[:, 1], begins + pieces[:, 2], counts)
        self._step = CacheStep(self._step.number + 1, layout, keys)
        for layer in self._layers.values():
            layer.current = self._step
        return keys

    @property
    def layout(self) -> Layout | None:
        """The layout of the current step's tokens; None before the first one."""
        return self._step.layout

    @property
    def kv_layout(self) -> Layout | None:
        """The layout of the keys of all tokens so far; None before the first step."""
        return self._step.kv_layout

    def positions(self, rank: int) -> IntArray:
        """Returns `[rows]` the position of each of a rank's rows of this step in its document; 0 in pad rows.

        Raises:
            ArgumentError: no step has begun, or a number that is no rank.
        """
        layout = self._step.begun()
        rank = checked_integer("rank", rank, 0, self.cp_size - 1)
        documents = layout.document_ids(rank)
        before = (self.lengths - layout.packing.lengths)[np.maximum(documents, 0)]
        return layout.positions(rank) + np.where(documents < 0, 0, before)

    def decode_layout(self) -> Layout:
        """Returns a layout of one new token a document, each on the rank that then holds the fewest keys."""
        counts = [int((pieces[:, 2] - pieces[:, 1]).sum()) for pieces in self._pieces]
        fragments: list[list[tuple[int, int]]] = [[] for _ in counts]
        for document in range(self.num_documents):
            rank = counts.index(min(counts))
            counts[rank] += 1
            fragments[rank].append((document, document + 1))
        return Layout.from_fragments(Packing([1] * self.num_documents), fragments)

    def layer(self, number: int) -> LayerCache:
        """Returns the part of one layer, for its argument `cache`; every layer of a model has a number of its own.

        Raises:
            ArgumentError: no integer of at least 0.
        """
        return self._layers.setdefault(checked_integer("number", number, 0), LayerCache(self._step, self.block_size))

    def add(self, count: int = 1) -> None:
        """Adds documents without tokens, behind the others.

        Raises:
            ArgumentError: no integer of at least 1, or layers that have not been called in this step.
        """
        count = checked_integer("count", count, 1)
        self._check_between_steps("add")
        self.lengths = np.append(self.lengths, np.zeros(count, dtype=np.int64))
        self.num_documents += count
        for layer in self._layers.values():
            layer.select_documents(None, count)

    def drop(self, documents: Iterable[int]) -> None:
        """Drops documents, with their keys and states; the others keep their order.

        Raises:
            ArgumentError: numbers of no documents, all documents, or layers that have not been called in this step.
        """
        given = host_array("documents", documents)
        fits = given.ndim == 1 and (not given.size or is_integral(given))
        if not fits or (given.size and not 0 <= given.min() <= given.max() < self.num_documents):
            raise ArgumentError("documents", given.tolist(), f"integers from 0 to {self.num_documents - 1}")
        kept = np.setdiff1d(np.arange(self.num_documents), given)
        if not kept.size:
            raise ArgumentError("documents", given.tolist(), "not all of them", "Make a new Cache instead.")
        self._check_between_steps("drop")
        self._select([np.flatnonzero(np.isin(pieces[:, 0], kept)) for pieces in self._pieces])
        for pieces in self._pieces:
            pieces[:, 0] = np.searchsorted(kept, pieces[:, 0])
        self.lengths, self.num_documents = self.lengths[kept], int(kept.size)
        for layer in self._layers.values():
            layer.select_documents(kept, 0)

    def _check_between_steps(self, call: str) -> None:
        late = [number for number, layer in self._layers.items() if layer.step != self._step.number]
        if late:
            given = f"a Cache whose layer {late[0]} has not been called in step {self._step.number}"
            raise ArgumentError("cache", given, f"{call} after all layers of a step")

    def _select(self, kept: list[IntArray]) -> None:
        """Keeps some pieces of every rank, in the given order, and moves the rows of all layers."""
        for rank, numbers in enumerate(kept):
            pieces = self._pieces[rank]
            sizes = pieces[:, 2] - pieces[:, 1]
            firsts = np.cumsum(sizes) - sizes
            rows = [np.arange(firsts[number], firsts[number] + sizes[number]) for number in numbers]
            for layer in self._layers.values():
                layer.select_rows(rank, np.concatenate([np.empty(0, dtype=np.int64), *rows]))
            self._pieces[rank] = _joined(pieces[numbers])
        self._sorted_pieces = list(map(len, self._pieces))


def _joined(pieces: IntArray) -> IntArray:
    """Joins neighbours `document, start, end` that continue each other."""
    if not len(pieces):
        return pieces
    goes_on = (pieces[1:, 0] == pieces[:-1, 0]) & (pieces[1:, 1] == pieces[:-1, 2])
    first = np.flatnonzero(np.append(True, ~goes_on))
    last = np.append(first[1:], len(pieces)) - 1
    return np.stack([pieces[first, 0], pieces[first, 1], pieces[last, 2]], 1)


class StateShape(NamedTuple):
    """The shape of a state: `[documents, channels, *rest]`, of which a rank keeps a range of the channels.

    Attributes:
        ranges: each rank's first channel, and one past its last.
    """

    ranges: Ranges
    rest: tuple[int, ...]
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        """The number of channels of all ranks."""
        return max(last for _, last in self.ranges)


class LayerCache:
    """The part of a `Cache` that belongs to one layer, made by `Cache.layer`: rows of keys and values, or states.

    Attributes:
        current: the current step of the cache. Without the cache itself, which has the layer: a cycle would keep the
            memory until garbage collection.
        step: the number of the last step in which the layer was called.
    """

    def __init__(self, current: CacheStep, block_size: int) -> None:
        self.current, self.block_size, self.step = current, block_size, 0
        self._rank, self._count = 0, 0
        self._rows: list[Tensor] = []  # with spare rows behind the first `_count`
        self._states: dict[str, tuple[StateShape, Tensor]] = {}

    # -- keys and values -----------------------------------------------------------------------------------------------

    def check_rows(self, plan: Plan, tensors: Sequence[Tensor]) -> None:
        """Refuses a plan that is not one of this step, and new rows unlike those before."""
        layout = self._checked_step(plan, bool(self._states), "states, of a linear layer")
        expected = self.current.kv_layout
        assert expected is not None
        if plan.layout != layout or plan.kv_layout != expected:
            side, given, allowed = (
                ("queries in", plan.layout, layout) if plan.layout != layout else
                ("keys in", plan.kv_layout, expected)
            )  # fmt: skip
            remedy = (
                'Plan each step with mask="causal", kv_packing=keys.packing, kv_layout=keys, where keys ='
                " cache.extend(layout)."
            )
            raise ArgumentError("cache", f"a plan with {side} {given!r}", f"one with {side} {allowed!r}", remedy)
        for stored, tensor in zip(self._rows, tensors, strict=False):
            _check_like("keys and values", stored, tensor, stored.shape[1:], tensor.shape[1:])

    def append(self, rank: int, *tensors: Tensor) -> list[Tensor]:
        """Stores the new rows of this step, without pad rows, and returns all rows, in the order of `kv_layout`."""
        layout = self.current.begun()
        new = int(layout.token_counts[rank])
        total = self._count + new
        if not self._rows or total > len(self._rows[0]):
            room = -(-max(total, self._count + self._count // 4) // self.block_size) * self.block_size
            before = self._rows or [tensor[:0] for tensor in tensors]
            self._rank, self._rows = rank, [_moved(rows[: self._count], room) for rows in before]
        for rows, tensor in zip(self._rows, tensors, strict=True):
            rows[self._count : total] = tensor[:new]
        self._count, self.step = total, self.current.number
        return [rows[:total] for rows in self._rows]

    def select_rows(self, rank: int, kept: IntArray) -> None:
        """Keeps some of the rows, in the given order, if they are of that rank."""
        if self._rows and self._rank == rank:
            index = on_device(kept, self._rows[0].device, torch.int64)
            self._rows = [_moved(rows.index_select(0, index), len(rows)) for rows in self._rows]
            self._count = int(kept.size)

    # -- states --------------------------------------------------------------------------------------------------------

    def check_states(self, plan: Plan, shapes: Mapping[str, StateShape], like: Tensor) -> None:
        """Refuses a plan that is not one of this step, and states unlike those of earlier steps."""
        layout = self._checked_step(plan, bool(self._rows), "keys and values, of an attention")
        if plan.packing != layout.packing:
            remedy = "Plan each step with the packing of its layout."
            raise ArgumentError("cache", f"a plan of {plan.packing!r}", f"one of {layout.packing!r}", remedy)
        if self._states and self._states.keys() != shapes.keys():
            given, allowed = (", ".join(names) or "none" for names in (shapes, self._states))
            raise ArgumentError("cache", f"a call with states {given}", f"one with {allowed}, as in earlier steps")
        for name, (held, tensor) in self._states.items():
            wanted = shapes[name]
            _check_like(f"state {name}", tensor, like, (*held.rest, held.dtype), (*wanted.rest, wanted.dtype), False)
            if held.channels != wanted.channels:
                given, allowed = (f"state {name} of {each.channels}" for each in (wanted, held))
                raise ArgumentError("cache", given, f"{allowed} heads or channels, as in earlier steps")
            if any(a > c or b < d for (a, b), (c, d) in zip(held.ranges, wanted.ranges, strict=True) if d > c):
                remedy = "A rank then keeps its own heads alone: go on headwise, or begin with chunkwise steps."
                raise ArgumentError("cache", "a chunkwise step after a headwise one", "headwise steps", remedy)

    def begin_states(self, rank: int, shapes: Mapping[str, StateShape], like: Tensor) -> None:
        """Makes the states of zero, or keeps the range of the channels that this rank computes from now on."""
        documents = self.current.begun().packing.num_documents
        for name, shape in shapes.items():
            (first, last), found = shape.ranges[rank], self._states.get(name)
            with torch.inference_mode(False):  # later steps, in any mode, write to it
                if found is None:
                    state = like.new_zeros(documents, last - first, *shape.rest, dtype=shape.dtype)
                elif found[0].ranges == shape.ranges:
                    continue
                else:
                    begin = found[0].ranges[rank][0] if last > first else first
                    state = found[1][:, first - begin : last - begin].clone()
            self._states[name] = shape, state
        self._rank = rank

    def state(self, name: str, first: int, last: int) -> Tensor:
        """Returns a view of the state of some channels, `[documents, last - first, ...]`."""
        shape, tensor = self._states[name]
        begin = shape.ranges[self._rank][0]
        return tensor[:, first - begin : last - begin]

    def end_step(self) -> None:
        """Counts the step, after all states have been written."""
        self.step = self.current.number

    def select_documents(self, kept: IntArray | None, added: int) -> None:
        """Keeps some documents' states, all if None, and adds others of zero."""
        with torch.inference_mode(False):  # as above
            for name, (shape, tensor) in self._states.items():
                if kept is not None:
                    tensor = tensor.index_select(0, on_device(kept, tensor.device, torch.int64))
                self._states[name] = shape, torch.cat([tensor, tensor.new_zeros(added, *tensor.shape[1:])])

    # -- both ----------------------------------------------------------------------------------------------------------

    def _checked_step(self, plan: Plan, is_other: bool, other: str) -> Layout:
        layout, number = self.current.begun(), self.current.number
        if is_other:
            raise ArgumentError("cache", f"a layer with {other}", "one of this kind, or a new number")
        if plan.tables is not None:
            raise ArgumentError("cache", "a plan with GraphTables", "a plan without", "A cache grows in every step.")
        if (plan.packing.num_documents, plan.cp_size) != (layout.packing.num_documents, layout.cp_size):
            given = f"a plan of {plan.packing.num_documents} documents over {plan.cp_size} ranks"
            allowed = f"one of {layout.packing.num_documents} documents over {layout.cp_size} ranks"
            raise ArgumentError("cache", given, allowed)
        if self.step != number - 1:
            given = f"a layer that was last called in step {self.step}, in step {number}"
            raise ArgumentError("cache", given, "one call of each layer in each step", "Give each layer a number.")
        return layout


def checked_cache(cache: object) -> LayerCache:
    """Returns the cache of a call after checking its type."""
    if not isinstance(cache, LayerCache):
        remedy = "This is the cache of all layers." if isinstance(cache, Cache) else ""
        raise ArgumentError("cache", cache, "a layer of a Cache, such as cache.layer(0)", remedy)
    return cache


def refuse_gradients(tensors: Iterable[Tensor | None]) -> None:
    """Raises an error for a call with a cache that would compute gradients."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        given = "a cache, and tensors that require grad"
        raise ArgumentError("cache", given, "None where gradients are computed", "Call it under torch.no_grad().")


def _check_like(
    what: str, stored: Tensor, tensor: Tensor, held: Sequence[object], given: Sequence[object], same_dtype: bool = True
) -> None:
    if (
        tuple(held) == tuple(given)
        and stored.device == tensor.device
        and (stored.dtype == tensor.dtype or not same_dtype)
    ):
        return
    allowed = f"{stored.dtype} {list(held)} on {stored.device}, as in earlier steps"
    raise ArgumentError("cache", f"{what}: {tensor.dtype} {list(given)} on {tensor.device}", allowed)


def _moved(rows: Tensor, room: int) -> Tensor:
    """Copies rows to new memory with room for more, which later steps write to in any mode."""
    with torch.inference_mode(False):
        found = rows.new_empty(room, *rows.shape[1:])
    found[: len(rows)] = rows
    return found
