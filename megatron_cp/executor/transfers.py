"""`RowTransfers`: carries out the instructions of an attention's program that move rows between ranks.

What is packed is in the group's buffers, and what arrives in memory of the transport. Which rows go where, and when, is
the program's (`plan/program.py`); this file knows how each kind of rows lies in a message.

Shapes: `t` own rows without pad rows, `s` rows at hand, `b` batch (absent for packed THD), `h` query heads and `g`
key/value heads of a head chunk, `d` and `v` their sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.arguments import part_of, summed_in
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import Message, Pending
from megatron_cp.executor.trace import profiling
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.flows import Fetch, PassOn, Return, RowFlow
from megatron_cp.plan.head_chunks import HeadChunk
from megatron_cp.plan.payloads import Payload
from megatron_cp.plan.program import (
    Allocate,
    Compute,
    ComputeRemote,
    Instruction,
    Merge,
    Order,
    Pack,
    Release,
    Start,
    Wait,
)

Keys = tuple[Tensor, Tensor]  # `[s, (b,) g, d]` keys and `[s, (b,) g, v]` values of a chunk's heads

# How errors, and a profiler's ranges, name what travels.
_ERROR_NAMES = {
    Payload.KEYS: "keys and values of other ranks",
    Payload.KEY_GRADIENTS: "gradients of gathered keys and values",
    Payload.QUERIES: "queries of assigned tiles",
    Payload.PARTIALS: "partial outputs of assigned tiles",
    Payload.QUERIES_AND_GRADIENTS: "queries and output gradients of assigned tiles",
    Payload.QUERY_GRADIENTS: "query gradients of assigned tiles",
}
_RING_NAMES = {
    Payload.KEYS: "keys and values", Payload.KEY_GRADIENT_SUMS: "gradients of keys and values"
}  # fmt: skip
_RANGE_NAMES = _ERROR_NAMES | {
    Payload.KEYS: "k,v", Payload.KEY_GRADIENTS: "dk,dv", Payload.KEY_GRADIENT_SUMS: "dk,dv"
}  # fmt: skip


class RowTransfers:
    """One direction of an attention on one rank: subclasses compute and merge, this class moves rows.

    Args:
        step: the attention.
        kv_rank, head_rank: of this rank.
        comm: the ranks of one `head_rank`, and the transport between them.
        k, v: `[t, (b,) g, d]` and `[t, (b,) g, v]` the own keys and values, all heads of the rank.
        leaving: the columns of own queries that other ranks are sent, each `[t, (b,) h, size]`.
        forward: the direction.
    """

    def __init__(
        self, step: Attend, kv_rank: int, head_rank: int, comm: Communicator, k: Tensor, v: Tensor,
        leaving: Sequence[Tensor], *, forward: bool,
    ) -> None:  # fmt: skip
        self.step, self.kv_rank, self.comm, self.k, self.v = step, kv_rank, comm, k, v
        self.leaving, self.forward = leaving, forward
        self.chunks = step.chunks(head_rank)
        self.acc_dtype = summed_in(k.dtype)
        self.buffers: dict[int, Tensor] = {}
        self._pending: dict[int, Pending] = {}

    def run(self) -> None:
        """Carries out the program, in order; under a profiler, with a range for each step."""
        program, methods = self.step.program(forward=self.forward), self.methods
        if not profiling():
            for instruction in program:
                methods[type(instruction)](self, instruction)
            return
        for (name, what, numbers), group in itertools.groupby(program, self._range):
            if not name:
                for instruction in group:
                    methods[type(instruction)](self, instruction)
                continue
            with self.comm.traced(name, what, forward=self.forward, chunk=numbers[0], stage=numbers[1]):
                for instruction in group:
                    methods[type(instruction)](self, instruction)

    def pack(self, do: Pack) -> None:
        """Packs own keys, or what leaves of own queries, into a buffer of the group."""
        chunk, flow = self.chunks[do.part.chunk], do.flow
        rows = len(self.k) if flow is None else flow.message_rows(self.kv_rank).sent
        assert rows is not None
        if do.payload is Payload.KEYS:
            own: Sequence[Tensor] = self.own_keys(chunk)
            buffer = self._allocate(rows, do.payload, chunk)
        else:
            own = [part_of(x, -2, chunk.heads) for x in self.leaving]
            buffer = self.comm.buffers.acquire_like(
                self.leaving[-1], *self._message_shape(rows, chunk), dtype=torch.uint8
            )
        self.buffers[do.buffer] = buffer
        if flow is None or flow.equal_shares:  # backends gather equal shares only: the rows behind own ones are filling
            for target, source in zip(self.columns(buffer[: len(self.k)], do.payload, chunk), own, strict=True):
                target.copy_(source)
            return
        index = flow_index(flow, self.kv_rank, "send_rows", buffer.device)
        for target, source in zip(self.columns(buffer, do.payload, chunk), own, strict=True):
            torch.index_select(source, 0, index, out=target)

    def start(self, do: Start) -> None:
        """Starts a transfer into memory of the transport."""
        source, flow, comm = self.buffers[do.source], do.flow, self.comm
        received = comm.acquire_like(source, flow.message_rows(self.kv_rank).received, *source.shape[1:])
        self.buffers[do.buffer] = received
        if isinstance(flow, PassOn):
            size, name = flow.size, f"{_RING_NAMES[do.payload]} of stage {flow.hops} of {flow.size}"
            sends = [Message(source.view(-1), (self.kv_rank + 1) % size)]
            receives = [Message(received.view(-1), (self.kv_rank - 1) % size)]
            self._pending[do.buffer] = comm.start_messages(sends, receives, name)
            return
        name = _ERROR_NAMES[do.payload]
        if isinstance(flow, Fetch) and flow.equal_shares:
            self._pending[do.buffer] = comm.start_all_gather(received.view(-1), source.view(-1), name)
            return
        assert isinstance(flow, Fetch | Return)
        counts = flow.split_counts.times(source.shape[1:].numel())
        self._pending[do.buffer] = comm.start_all_to_all(received.view(-1), source.view(-1), counts, name)

    def wait(self, do: Wait) -> None:
        """Waits for a transfer."""
        self._pending.pop(do.buffer).wait()

    def order(self, do: Order) -> None:
        """Copies rows into another buffer in the order that is asked for, where they are not in it."""
        name = do.flow.order_table(self.kv_rank)
        if name is None:
            return
        rows = self.buffers[do.buffer]
        index = flow_index(do.flow.fetch if isinstance(do.flow, Return) else do.flow, self.kv_rank, name, rows.device)
        ordered = self.comm.buffers.acquire_like(rows, len(index), *rows.shape[1:])
        torch.index_select(rows, 0, index, out=ordered)
        self.comm.release(rows)
        self.buffers[do.buffer] = ordered

    def allocate(self, do: Allocate) -> None:
        """Takes an unwritten buffer of the group."""
        self.buffers[do.buffer] = self._allocate(len(self.buffers[do.like]), do.payload, self.chunks[do.part.chunk])

    def release(self, do: Release) -> None:
        """Gives a buffer back to where it came from."""
        self.comm.release(self.buffers.pop(do.buffer))

    def compute(self, do: Compute) -> None:
        """Computes the tiles of own queries."""
        raise NotImplementedError

    def compute_remote(self, do: ComputeRemote) -> None:
        """Computes the tiles of other ranks' queries."""
        raise NotImplementedError

    def merge(self, do: Merge) -> None:
        """Adds rows that have come back."""
        raise NotImplementedError

    methods: dict[type[Instruction], Callable[[Any, Any], None]]

    def __init_subclass__(cls) -> None:
        cls.methods = {
            Pack: cls.pack, Start: cls.start, Wait: cls.wait, Order: cls.order, Allocate: cls.allocate,
            Release: cls.release, Compute: cls.compute, ComputeRemote: cls.compute_remote, Merge: cls.merge,
        }  # fmt: skip

    # -- how rows lie in a message -------------------------------------------------------------------------------------

    def own_keys(self, chunk: HeadChunk) -> Keys:
        """Returns the own keys and values of a chunk's heads."""
        return part_of(self.k, -2, chunk.groups), part_of(self.v, -2, chunk.groups)

    def keys(self, number: int | None, chunk: HeadChunk) -> Keys:
        """Returns the keys and values of a buffer, or the own ones."""
        if number is None:
            return self.own_keys(chunk)
        keys, values = self.columns(self.buffers[number], Payload.KEYS, chunk)
        return keys, values

    def columns(self, message: Tensor, payload: Payload, chunk: HeadChunk) -> list[Tensor]:
        """Returns views `[s, (b,) heads, size]` of what a message holds."""
        heads, (d, v) = chunk.heads.stop - chunk.heads.start, (self.k.shape[-1], self.v.shape[-1])
        match payload:
            case Payload.KEYS | Payload.KEY_GRADIENTS | Payload.KEY_GRADIENT_SUMS:
                sizes: tuple[int, ...] = (d, v)
                heads = chunk.num_groups
            case Payload.PARTIALS:
                sizes = (v, 1)
            case Payload.QUERY_GRADIENTS:
                sizes = (d,)
            case _:
                return self._byte_columns(message, heads)
        parts = message.split([heads * size for size in sizes], -1) if len(sizes) > 1 else (message,)
        return [part.unflatten(-1, (heads, size)) for part, size in zip(parts, sizes, strict=True)]

    def _byte_columns(self, message: Tensor, heads: int) -> list[Tensor]:
        """Returns views of a message of bytes, whose columns have the types of `leaving`."""
        found, first = list[Tensor](), 0
        for x in self.leaving:
            if not heads:  # no view of no bytes
                found.append(x.new_empty(*message.shape[:-1], 0, x.shape[-1]))
                continue
            last = first + heads * x.shape[-1] * x.itemsize
            found.append(message[..., first:last].view(x.dtype).unflatten(-1, (heads, x.shape[-1])))
            first = last
        return found

    def _message_shape(self, rows: int, chunk: HeadChunk) -> tuple[int, ...]:
        """Returns the shape of a message of bytes: columns one behind the other, filled up to the widest element."""
        heads, widest = chunk.heads.stop - chunk.heads.start, max(x.itemsize for x in self.leaving)
        width = -(-sum(heads * x.shape[-1] * x.itemsize for x in self.leaving) // widest) * widest
        return rows, *self.k.shape[1:-2], width

    def _allocate(self, rows: int, payload: Payload, chunk: HeadChunk) -> Tensor:
        heads, (d, v) = chunk.heads.stop - chunk.heads.start, (self.k.shape[-1], self.v.shape[-1])
        width = {Payload.PARTIALS: heads * (v + 1), Payload.QUERY_GRADIENTS: heads * d}.get(
            payload, chunk.num_groups * (d + v)
        )
        dtype = self.acc_dtype if payload.is_summed else self.k.dtype
        return self.comm.buffers.acquire_like(self.k, rows, *self.k.shape[1:-2], width, dtype=dtype)

    # -- ranges of a profiler ------------------------------------------------------------------------------------------

    def _range(self, do: Instruction) -> tuple[str, str, tuple[tuple[int, int], tuple[int, int]]]:
        """Returns the name of an instruction's range, empty for none: instructions in a row share one."""
        stage, chunk = do.part
        numbers = (chunk, self.step.head_chunks), (stage.number, len(self.step.stages_of(forward=self.forward)))
        match do:
            case Pack(payload=payload) | Start(payload=payload) | Order(payload=payload, flow=Return()):
                return "send", _RANGE_NAMES[payload], numbers
            case Wait(payload=payload):
                return "wait", _RANGE_NAMES[payload], numbers
            case Order(payload=Payload.KEYS):
                return "unpack", "k,v", numbers
            case Merge(payload=Payload.KEY_GRADIENTS):
                return "sum", "dk,dv", numbers
            case Compute():
                return "attend", "", numbers
            case ComputeRemote():
                return "attend", "remote queries", numbers
        return "", "", numbers


def rows_by_rank(run: RowTransfers, do: Merge) -> list[tuple[Tensor, Tensor]]:
    """Returns, rank after rank, the own rows that came back from it, as an index, and the rows themselves."""
    assert do.flow is not None
    fetch, received = do.flow.fetch, run.buffers[do.buffer]
    counts = fetch.tables(run.kv_rank).send_counts.tolist()
    index = flow_index(fetch, run.kv_rank, "send_rows", received.device)
    pieces = zip(index.split(counts), received.split(counts), strict=True)
    return [(rows, piece) for rows, piece in pieces if len(rows)]


def flow_index(flow: Fetch, kv_rank: int, name: str, device: torch.device) -> Tensor:
    """Returns a table of a fetch on a device; where rows stand among equal shares is the same for every rank.

    Args:
        flow: the fetch.
        kv_rank: of this rank.
        name: "send_rows", "order" or "inverse", of `FetchTables`; or "shares".
        device: where the table lies.
    """
    if name == "shares":
        return flow.memo((name, device), lambda: on_device(flow.shares(), device))
    return flow.memo((name, kv_rank, device), lambda: on_device(getattr(flow.tables(kv_rank), name), device))


def prepare_transfers(step: Attend, kv_rank: int, device: torch.device) -> None:
    """Makes the programs, and the tables that their transfers use, so that no layer has to."""
    for forward in (True, False):
        for do in step.program(forward=forward):
            flow: RowFlow | None = getattr(do, "flow", None)
            if isinstance(flow, Fetch):
                _ = flow.split_counts
                flow_index(flow, kv_rank, "send_rows", device)
            if isinstance(do, Order):
                name = do.flow.order_table(kv_rank)
                if name is not None:
                    flow_index(do.flow.fetch if isinstance(do.flow, Return) else do.flow, kv_rank, name, device)
