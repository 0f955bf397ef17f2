"""`RowTransfers`: carries out the instructions of an attention's program that move rows between ranks.

Packed rows are in the group's buffers, and received rows in memory of the transport. The program
(`plan/attention_program.py`) says which rows go where, and when; this file lays out each kind of rows in a message.

Shapes: `t` own rows without pad rows, `s` rows of the current keys or queries, `b` batch (absent for packed THD), `h`
query heads and `g` key/value heads of a head chunk, `d` and `v` their sizes.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cp.exchange.coding import decode_together, encode_together
from megatron_cp.exchange.device import CallTables, on_device
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.arguments import accumulation_dtype, narrow
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import Message, Pending
from megatron_cp.executor.trace import NO_RANGE, profiling
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.attention_program import (
    Allocate,
    ComputeOwn,
    ComputeRemote,
    Instruction,
    MergeRows,
    Order,
    PackRows,
    Release,
    Start,
    Wait,
)
from megatron_cp.plan.flows import Fetch, PassOn, Return
from megatron_cp.plan.head_chunks import HeadChunk
from megatron_cp.plan.payloads import Payload

Keys = tuple[Tensor, Tensor]  # `[s, (b,) g, d]` keys and `[s, (b,) g, v]` values of a chunk's heads


class AttendOnRank(NamedTuple):
    """An `Attend` step on one rank.

    Attributes:
        step: the step.
        kv_rank, head_rank: the rank's coordinates: whose queries and keys it has, and which heads.
        comm: the ranks of one `head_rank`, and the transport between them.
    """

    step: Attend
    kv_rank: int
    head_rank: int
    comm: Communicator


# Names of the rows that travel, in errors and in ranges of a profiler.
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


class Bound(NamedTuple):
    """An instruction on one rank, with the values that would otherwise be looked up in each step.

    Attributes:
        chunk: the heads that it works on.
        rows: number of rows of the buffer that it takes.
        columns: for each tensor in a row, its heads and the size of a head.
        dtype: type of the buffer: "own" for that of keys, "sums" for at least fp32, "codes" for coded keys, "bytes" for
            columns of several types.
        picked: rows to select, on the device; None if rows are not selected.
        pieces: for each rank that returned rows: their index, the first of them in the message, and their number.
        counts: rows to and from each rank, in an all-to-all.
        neighbours: the ranks before and after this one, in a ring.
    """

    do: Any
    chunk: HeadChunk
    rows: int = 0
    columns: tuple[tuple[int, int], ...] = ()
    dtype: str = "own"
    picked: Tensor | None = None
    pieces: tuple[tuple[Tensor, int, int], ...] = ()
    counts: SplitCounts | None = None
    neighbours: tuple[int, int] | None = None
    name: str = ""


def bound_program(
    step: Attend, kv_rank: int, head_rank: int, device: torch.device, coded: int, tables: CallTables | None = None, *,
    forward: bool,
) -> tuple[Bound, ...]:  # fmt: skip
    """Returns a direction's program on one rank, with its tables on a device. Made once for all layers of a batch.

    Keys travel in `coded` bytes each; 0 for their own type. `tables` are used in place of its own.
    """

    def make() -> tuple[Bound, ...]:
        program, chunks = step.program(forward=forward), step.chunks(head_rank)
        return tuple(_bind(step, do, kv_rank, chunks[do.part.chunk], device, coded, tables) for do in program)

    heads = step.partition.heads[head_rank]
    key = ("bound program", forward, kv_rank, heads, step.partition.groups[head_rank], device, coded)
    return (step if tables is None else tables).memo(key, make)


def _bind(
    step: Attend, do: Instruction, kv_rank: int, chunk: HeadChunk, device: torch.device, coded: int,
    tables: CallTables | None,
) -> Bound:  # fmt: skip
    heads, groups, (key, value) = chunk.heads.stop - chunk.heads.start, chunk.num_groups, step.key_features

    def index(flow: Fetch, name: str) -> Tensor:
        if tables is None:
            return flow_index(flow, kv_rank, name, device)
        return tables.flows[do.part.stage.number][name]

    bound = Bound(do, chunk)
    if isinstance(do, PackRows | Start | Order | Allocate | MergeRows):
        columns = {
            Payload.PARTIALS: ((heads, step.value_head_dim), (heads, 1)),
            Payload.QUERY_GRADIENTS: ((heads, step.head_dim),), Payload.QUERIES: (), Payload.QUERIES_AND_GRADIENTS: (),
        }.get(do.payload, ((groups, key), (groups, value)))  # fmt: skip
        dtype = "sums" if do.payload.is_summed else "own" if columns else "bytes"
        if coded and do.payload is Payload.KEYS:
            columns, dtype = ((groups, coded),), "codes"
        bound = bound._replace(columns=columns, dtype=dtype, name=_ERROR_NAMES.get(do.payload, ""))
    match do:
        case PackRows(flow=None):
            return bound._replace(rows=int(step.keys.token_counts[kv_rank]))
        case PackRows(flow=Return() as flow) | Allocate(like=None, flow=Fetch() as flow):
            sent_back = flow if isinstance(flow, Return) else Return(flow)
            return bound._replace(rows=sum(sent_back.split_counts.sent_by(kv_rank)))
        case PackRows(flow=Fetch() as flow):
            rows = flow.message_rows(kv_rank).sent
            assert rows is not None
            return bound._replace(rows=rows, picked=None if flow.equal_shares else index(flow, "send_rows"))
        case Start(flow=PassOn() as flow, payload=payload):
            name = f"{_RING_NAMES[payload]} of stage {flow.hops} of {flow.size}"
            neighbours = (kv_rank - 1) % flow.size, (kv_rank + 1) % flow.size
            return bound._replace(rows=flow.rows_received(kv_rank), name=name, neighbours=neighbours)
        case Start(flow=Fetch() | Return() as flow):
            shares = isinstance(flow, Fetch) and flow.equal_shares
            return bound._replace(
                rows=flow.message_rows(kv_rank).received, counts=None if shares else flow.split_counts
            )
        case Order(flow=flow):
            table = flow.order_table(kv_rank) if tables is None else flow.order_name
            fetch = flow.fetch if isinstance(flow, Return) else flow
            return bound._replace(picked=None if table is None else index(fetch, table))
        case MergeRows(flow=Return(fetch=fetch)):
            counts = fetch.tables(kv_rank).send_counts.tolist()
            firsts = itertools.accumulate(counts, initial=0)
            pieces = zip(index(fetch, "send_rows").split(counts), firsts, counts, strict=False)
            return bound._replace(pieces=tuple(piece for piece in pieces if piece[2]))
    return bound


class RowTransfers(ABC):
    """Moves rows for one direction of an attention on one rank; subclasses compute and merge.

    Args:
        at: the attention.
        keys: `[t, (b,) g, d]` and `[t, (b,) g, v]` own keys and values, all heads of the rank.
        leaving: the columns of own queries that are sent to other ranks, each `[t, (b,) h, size]`.
        codes: `[t, (b,) g, bytes]` of `coded_keys`, which are sent in place of the keys; None if these are.
    """

    def __init__(
        self, at: AttendOnRank, keys: Keys, leaving: Sequence[Tensor], codes: Tensor | None = None, *, forward: bool
    ) -> None:
        self.step, self.kv_rank, head_rank, self.comm = at
        (self.k, self.v), self.codes = keys, codes
        self.leaving, self.forward = leaving, forward
        self.tiles = (self.comm.tables or self.step).tiles
        self.acc_dtype = accumulation_dtype(self.k.dtype)
        self.buffers: dict[int, Tensor] = {}
        self._pending: dict[int, Pending] = {}
        self._own_block: int | None = None  # the buffer of own keys that a ring passes on
        self._decoded: tuple[int, Keys] | None = None  # of the buffer whose keys meet own queries next
        self._batch = self.k.shape[1:-2]
        coded = 0 if codes is None else codes.shape[-1]
        self._program = bound_program(
            self.step, self.kv_rank, head_rank, self.k.device, coded, self.comm.tables, forward=forward
        )

    def run(self) -> None:
        """Executes the program in order; under a profiler, with a range for each step."""
        methods = self.methods
        if not profiling():
            for bound in self._program:
                methods[type(bound.do)](self, bound)
            return
        for (name, what, numbers), group in itertools.groupby(self._program, self._range):
            traced = self.comm.traced(name, what, forward=self.forward, chunk=numbers[0], stage=numbers[1])
            with traced if name else NO_RANGE:
                for bound in group:
                    methods[type(bound.do)](self, bound)

    def pack(self, bound: Bound) -> None:
        """Packs own keys, or the columns of own queries that are sent, into a buffer of the group."""
        do, chunk = bound.do, bound.chunk
        buffer = self.buffers[do.buffer] = self._acquire(bound, bound.rows)
        if do.payload is Payload.KEYS and do.flow is None:
            self._own_block = do.buffer
        if do.source is not None:
            rows = self.buffers[do.source]
            buffer.copy_(rows) if bound.picked is None else torch.index_select(rows, 0, bound.picked, out=buffer)
            return
        if do.payload is Payload.KEYS:
            keys = (self.k, self.v) if self.codes is None else (self.codes,)
            own: Sequence[Tensor] = [narrow(x, -2, chunk.groups) for x in keys]
        else:
            own = [narrow(x, -2, chunk.heads) for x in self.leaving]
        if bound.picked is None:  # backends gather equal shares only: rows after the own ones are padding
            for target, source in zip(
                self.columns(narrow(buffer, 0, slice(0, self.k.shape[0])), bound), own, strict=True
            ):
                target.copy_(source)
            return
        for target, source in zip(self.columns(buffer, bound), own, strict=True):
            torch.index_select(source, 0, bound.picked, out=target)

    def start(self, bound: Bound) -> None:
        """Starts a transfer into memory of the transport."""
        do, comm = bound.do, self.comm
        source = self.buffers[do.source]
        received = self.buffers[do.buffer] = comm.acquire_like(source, bound.rows, *source.shape[1:])
        if bound.neighbours is not None:
            before, after = bound.neighbours
            pending = comm.start_messages(
                [Message(source.view(-1), after)], [Message(received.view(-1), before)], bound.name
            )
        elif bound.counts is None:
            pending = comm.start_all_gather(received.view(-1), source.view(-1), bound.name)
        else:
            counts = bound.counts.times(source.shape[1:].numel())
            pending = comm.start_all_to_all(received.view(-1), source.view(-1), counts, bound.name)
        self._pending[do.buffer] = pending

    def wait(self, bound: Bound) -> None:
        """Waits for a transfer."""
        self._pending.pop(bound.do.buffer).wait()

    def order(self, bound: Bound) -> None:
        """Copies rows into another buffer in the required order, unless they are in it already."""
        if bound.picked is None:
            return
        rows = self.buffers[bound.do.buffer]
        ordered = self.comm.buffers.acquire_like(rows, bound.picked.shape[0], *rows.shape[1:])
        torch.index_select(rows, 0, bound.picked, out=ordered)
        self.comm.release(rows)
        self.buffers[bound.do.buffer] = ordered

    def allocate(self, bound: Bound) -> None:
        """Takes an uninitialised buffer of the group."""
        like = bound.do.like
        self.buffers[bound.do.buffer] = self._acquire(bound, bound.rows if like is None else len(self.buffers[like]))

    def release(self, bound: Bound) -> None:
        """Returns a buffer to the group or the transport that it was taken from."""
        self.comm.release(self.buffers.pop(bound.do.buffer))

    @abstractmethod
    def compute(self, bound: Bound) -> None:
        """Computes the tiles of own queries."""

    @abstractmethod
    def compute_remote(self, bound: Bound) -> None:
        """Computes the tiles of other ranks' queries."""

    @abstractmethod
    def merge(self, bound: Bound) -> None:
        """Adds returned rows to the own ones."""

    methods: dict[type, Callable[[Any, Any], None]]

    def __init_subclass__(cls) -> None:
        cls.methods = {
            PackRows: cls.pack, Start: cls.start, Wait: cls.wait, Order: cls.order, Allocate: cls.allocate,
            Release: cls.release, ComputeOwn: cls.compute, ComputeRemote: cls.compute_remote, MergeRows: cls.merge,
        }  # fmt: skip

    # -- the layout of rows in a message ------------------------------------------------------------------------------

    def keys(self, number: int | None, chunk: HeadChunk, *, again: bool = False) -> Keys:
        """Returns the keys and values in a buffer, decoded if they are coded; or the own ones.

        Args:
            number: the buffer, or None for own keys.
            chunk: the heads.
            again: True if the next call is for the same keys, which are then decoded once.
        """
        if number is None or (self.codes is not None and number == self._own_block):
            return narrow(self.k, -2, chunk.groups), narrow(self.v, -2, chunk.groups)
        if self.codes is None:
            return self.uncoded_keys(number, chunk)
        before, self._decoded = self._decoded, None
        if before is not None and before[0] == number:
            return before[1]
        message = self.buffers[number]
        codes = message.view(*message.shape[:-1], chunk.num_groups, self.codes.shape[-1])
        found = decoded_keys(self.step, codes, self.k.dtype)
        self._decoded = (number, found) if again else None
        return found

    def uncoded_keys(self, number: int, chunk: HeadChunk) -> Keys:
        """Returns the keys and values, or their gradients, in a buffer."""
        message, heads, d, v = self.buffers[number], chunk.num_groups, self.k.shape[-1], self.v.shape[-1]
        keys, values = message.split_with_sizes([heads * d, heads * v], -1)
        shape = message.shape[:-1]
        return keys.view(*shape, heads, d), values.view(*shape, heads, v)

    def queries(self, number: int, chunk: HeadChunk) -> list[Tensor]:
        """Returns the columns of remote queries in a buffer."""
        return self._byte_columns(self.buffers[number], chunk)

    def columns(self, message: Tensor, bound: Bound) -> list[Tensor]:
        """Returns a view `[s, (b,) heads, size]` of each tensor in a message."""
        if bound.dtype == "bytes":
            return self._byte_columns(message, bound.chunk)
        shape, columns = message.shape[:-1], bound.columns
        parts = message.split_with_sizes([heads * size for heads, size in columns], -1)
        return [part.view(*shape, *column) for part, column in zip(parts, columns, strict=True)]

    def _byte_columns(self, message: Tensor, chunk: HeadChunk) -> list[Tensor]:
        """Returns views of a message of bytes, with the types of `leaving`."""
        found, first, heads = list[Tensor](), 0, chunk.heads.stop - chunk.heads.start
        for x in self.leaving:
            if not heads:  # no view of no bytes
                found.append(x.new_empty(*message.shape[:-1], 0, x.shape[-1]))
                continue
            last = first + heads * x.shape[-1] * x.itemsize
            found.append(message[..., first:last].view(x.dtype).unflatten(-1, (heads, x.shape[-1])))
            first = last
        return found

    def _acquire(self, bound: Bound, rows: int) -> Tensor:
        if bound.dtype == "bytes":  # columns one after another, padded to a multiple of the widest element
            heads, widest = bound.chunk.heads.stop - bound.chunk.heads.start, max(x.itemsize for x in self.leaving)
            width = -(-sum(heads * x.shape[-1] * x.itemsize for x in self.leaving) // widest) * widest
            return self.comm.buffers.acquire_like(self.k, rows, *self._batch, width, dtype=torch.uint8)
        width = 0
        for heads, size in bound.columns:
            width += heads * size
        dtype = {"sums": self.acc_dtype, "codes": torch.uint8}.get(bound.dtype, self.k.dtype)
        return self.comm.buffers.acquire_like(self.k, rows, *self._batch, width, dtype=dtype)

    # -- ranges of a profiler ------------------------------------------------------------------------------------------

    def _range(self, bound: Bound) -> tuple[str, str, tuple[tuple[int, int], tuple[int, int]]]:
        """Returns the name of an instruction's range, empty for none; consecutive instructions share a range."""
        do: Instruction = bound.do
        stage, chunk = do.part
        numbers = (chunk, self.step.head_chunks), (stage.number, len(self.step.stages_in(forward=self.forward)))
        match do:
            case PackRows(payload=payload) | Start(payload=payload) | Order(payload=payload, flow=Return()):
                return "send", _RANGE_NAMES[payload], numbers
            case Wait(payload=payload):
                return "wait", _RANGE_NAMES[payload], numbers
            case Order(payload=Payload.KEYS):
                return "unpack", "k,v", numbers
            case MergeRows(payload=Payload.KEY_GRADIENTS):
                return "sum", "dk,dv", numbers
            case ComputeOwn():
                return "attend", "", numbers
            case ComputeRemote():
                return "attend", "remote queries", numbers
        return "", "", numbers


def flow_index(flow: Fetch, kv_rank: int, name: str, device: torch.device) -> Tensor:
    """Returns a table of a fetch on a device.

    Args:
        kv_rank: this rank's; ignored for "shares".
        name: "send_rows", "order" or "inverse", of `FetchTables`; or "shares", the places of rows among equal shares,
            which are the same for every rank.
    """
    if name == "shares":
        return flow.memo((name, device), lambda: on_device(flow.shares(), device))
    return flow.memo((name, kv_rank, device), lambda: on_device(getattr(flow.tables(kv_rank), name), device))


def coded_keys(step: Attend, k: Tensor, v: Tensor) -> Tensor | None:
    """Returns own keys and values as bytes, `[t, (b,) g, bytes]`; None where they travel in their own type."""
    coded = step.coded_bytes(k.element_size())
    return encode_together((k, v), step.codec.forward, coded) if step.codec is not None and coded else None


def decoded_keys(step: Attend, codes: Tensor, dtype: torch.dtype) -> Keys:
    """Returns the keys and values that `coded_keys` coded, in the type that they had."""
    assert step.codec is not None
    k, v = decode_together(codes, step.key_features, step.codec.forward, dtype)
    return k, v


def prepare_transfers(step: Attend, kv_rank: int, head_rank: int, device: torch.device) -> None:
    """Makes the programs, and the tables that their transfers use, so that no layer of 16-bit activations has to."""
    for forward in (True, False):
        bound_program(step, kv_rank, head_rank, device, step.coded_bytes(2), forward=forward)
