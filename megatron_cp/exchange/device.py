"""Copies of host tables to a device that neither block the host nor are read too early by any stream."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.tiles import Tiles
from megatron_cp.torch_private import raw_stream

LOAD_AGAIN = (
    "Shard the batch with into=slots right before its step. Batches that exist at the same time need separate slots."
)


def indexed(device: torch.device) -> torch.device:
    """Returns the device as tensors report it: "cuda" becomes the current one of several."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def on_device(table: NDArray, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Returns a copy of a host table on `device`.

    It goes through pinned memory to CUDA, since a copy from pageable memory makes the host wait for the stream.
    """
    if dtype == torch.int32 and table.size and not -(2**31) <= int(table.min()) <= int(table.max()) < 2**31:
        largest = max(int(table.max()), -int(table.min()))
        remedy = "Tables on a device count in 32 bits: use smaller packs."
        raise ArgumentError("packing", f"one whose tables count to {largest}", "fewer than 2**31 tokens", remedy)
    with torch.inference_mode(False):  # tables outlive an evaluation, and autograd saves no inference tensor
        host = torch.tensor(table, dtype=dtype)
        if device.type != "cuda":
            return host.to(device)
        if torch.cuda.is_current_stream_capturing():
            remedy = "Run the step once eagerly, with the same shapes, before you capture it."
            raise ArgumentError("stream", "one that is being captured", "tables that were made before", remedy)
        copy = host.pin_memory().to(device, non_blocking=True)
    _live_tables.add(copy)
    return copy


def moved(host: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device` without making the host wait."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def fill_tables(target: Tensor, source: Tensor) -> None:
    """Copies tables from pinned memory to device memory that held others before; streams wait as for new ones.

    Call it in the stream that reads the tables: that stream must have read the previous ones before this copy.
    """
    target.copy_(source, non_blocking=True)
    if target.is_cuda:
        _live_tables.add(target)


def order_tables(device: torch.device) -> None:
    """Makes the current stream wait for the copies of tables that other streams have made so far.

    A batch may be sharded, and its plans prepared, in a stream that runs ahead of the layers' stream. The memory of its
    tables is also not reused before the layers' stream has read it.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        stream = raw_stream(index)
        # Called several times in every layer, almost always without new tables.
        if _live_tables.ordered.get((index, stream)) != _live_tables.numbers.get(index):
            _live_tables.order(index, stream)


def current_stream(device: torch.device) -> int:
    """Returns the handle of a CUDA device's current stream, 0 for the host; torch's own object takes ten times as
    long.
    """
    if device.type != "cuda":
        return 0
    return raw_stream(torch.cuda.current_device() if device.index is None else device.index)


@dataclass(frozen=True, eq=False)
class CallTables(Memo):
    """The tables of one rank's calls with one plan, in memory that holds one pack after another; see `GraphTables`.

    Without them an operation makes its own tables and keeps them for the batch.

    Attributes:
        pack: identifies the pack; `memory.pack` is that of the pack loaded last.
        orders: "order" and "inverse_order" of the exchange's layout, where rows are not in stream order.
        stage_tiles: attention's tiles in each stage, with their kernel calls.
        flows: for each stage whose keys are fetched, the tables of `Fetch.fixed_tables` by name.
        linear: what kernels of linear layers read, by the names that they use.
    """

    memory: Any
    pack: object
    orders: Mapping[str, Tensor]
    stage_tiles: list[Tiles]
    flows: Mapping[int, Mapping[str, Tensor]]
    linear: Mapping[str, Any]

    def tiles(self, _kv_rank: int, stage: Any) -> Tiles:
        """Returns this rank's tiles of a stage, like `Attend.tiles`."""
        return self.stage_tiles[stage.number]

    def check(self) -> None:
        """Raises if another pack has been loaded: its tables, and its batch's tokens, are in the memory now."""
        if self.memory.pack is not self.pack:
            raise ArgumentError("plan", "one of a pack before the last one loaded", "one of the last", LOAD_AGAIN)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a plan that is pickled leaves its tables behind


class _LiveTables:
    """The live tables on CUDA devices, by the stream that copied them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: defaultdict[int, dict[int, dict[int, _Table]]] = defaultdict(dict)  # by device, stream and id
        self.numbers: dict[int, int] = {}  # tables made so far, by device
        self.ordered: dict[tuple[int, int], int] = {}  # tables waited for, by device and stream

    def add(self, copy: Tensor) -> None:
        stream, index = torch.cuda.current_stream(copy.device), copy.device.index
        event = torch.cuda.Event()
        event.record(stream)
        with self._lock:
            number = self.numbers.get(index, 0) + 1
            tables = self._made[index].setdefault(stream.cuda_stream, {})
            key = id(copy)
            # Without the lock, since the thread that drops the tensor may hold it.
            reference = weakref.ref(copy, lambda _: tables.pop(key, None))
            tables[key] = _Table(reference, event, number)
            self.numbers[index] = number  # set last, so that a reader of the number finds the table

    def order(self, index: int, reader: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # capture began with a device synchronisation, and a graph cannot wait for earlier events
        with self._lock:
            number, last, made = self.numbers[index], self.ordered.get((index, reader), 0), self._made[index]
            others = [
                table for maker, tables in made.items() if maker != reader
                for table in list(tables.values()) if table.number > last
            ]  # fmt: skip
            stream = torch.cuda.current_stream(index)
            for table in others:
                copy = table.copy()
                if copy is not None:
                    stream.wait_event(table.event)
                    copy.record_stream(stream)
            self.ordered[index, reader] = number  # set last, so that another thread of this stream has waited too


class _Table:
    """A table by weak reference, so that it lives only as long as its user."""

    def __init__(self, copy: weakref.ref[Tensor], event: torch.cuda.Event, number: int) -> None:
        self.copy, self.event, self.number = copy, event, number


_live_tables = _LiveTables()
