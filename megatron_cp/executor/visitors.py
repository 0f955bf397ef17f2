"""Queries that visit other ranks: how they get there, and how what was made of them comes home.

`Visitors` is to queries what `KeyTransfers` is to keys. Forward, queries go out, and partial outputs with their
log-sum-exps come home in at least fp32. Backward, what a kernel needs of a query goes out, and its gradients come home,
in the type of q, and are summed in at least fp32. Owners take in what comes home in the order of KV ranks.

Kernels are given the output for its product with its gradient alone, `rowsum(dout * out)`. So that number travels, in
place of the output, and `stand_in` makes a tensor of the same product for kernels that multiply themselves.

Shapes: `s` visiting rows, `b` batch (absent for packed THD), `h` query heads of a head chunk, `d` and `v` head sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from megatron_cp.executor.arguments import part_of, summed_in
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.fetched import fetch_index, reordered
from megatron_cp.executor.groups import Pending
from megatron_cp.executor.trace import NO_RANGE, profiling
from megatron_cp.plan.attention import Attend, Stage
from megatron_cp.plan.flows import Fetch
from megatron_cp.plan.head_chunks import HeadChunk

# Parts in which rows are worked on where that takes memory: an eighth of it for some more launches.
_PARTS = 8


@dataclass(frozen=True, eq=False)
class _OnTheWay:
    """A message and the wait for it."""

    sent: Tensor
    received: Tensor
    pending: Pending


@dataclass(frozen=True, eq=False)
class CameHome:
    """What one rank made of own queries.

    Attributes:
        chunk: of heads.
        rows: `[n]` the own queries.
        message: `[n, (b,) width]`.
    """

    chunk: HeadChunk
    rows: Tensor
    message: Tensor


class Visitors:
    """The queries of one attention that leave their ranks, in one direction.

    Args:
        step: the stages.
        kv_rank: of this rank.
        comm: the ranks of one `head_rank`, and the transport between them.
        own: what goes out of own queries, without pad rows, each `[t, (b,) heads, size]`: q; or in backward the
            log-sum-exps and row sums (of size 1, both as wide as sums are), q and dout.
        what: goes out, and comes home, for errors and ranges.
        forward: the direction.
    """

    def __init__(
        self, step: Attend, kv_rank: int, comm: Communicator, own: Sequence[Tensor], what: tuple[str, str], *,
        forward: bool,
    ) -> None:  # fmt: skip
        self._step, self._kv_rank, self._comm, self._own, self._what = step, kv_rank, comm, tuple(own), what
        self._forward = forward
        self._coming: list[_OnTheWay] = []
        self._going_home: list[tuple[Stage, HeadChunk, _OnTheWay]] = []
        self._at_hand: Tensor | None = None

    def start(self, stage: Stage, chunk: HeadChunk) -> None:
        """Sends own queries of a head chunk to the ranks that compute with them."""
        flow = self._flow(stage)
        rows, width = flow.message_rows(self._kv_rank), self._width(chunk)
        sent, received = self._bytes(rows.sent or 0, width), self._bytes(rows.received, width, landing=True)
        with self._traced("send", self._what[0], stage, chunk) if profiling() else NO_RANGE:
            index = fetch_index(flow, self._kv_rank, "send_rows", sent.device)
            for target, source in zip(self._columns(sent, chunk), self._own, strict=True):
                torch.index_select(part_of(source, -2, chunk.heads), 0, index, out=target)
            counts = flow.split_counts.times(sent.shape[1:].numel())
            pending = self._comm.start_all_to_all(received.view(-1), sent.view(-1), counts, self._what[0])
        self._coming.append(_OnTheWay(sent, received, pending))

    def arrive(self, stage: Stage, chunk: HeadChunk) -> list[Tensor]:
        """The visitors of the message that was started first, in stream order, until `leave`."""
        flow, coming = self._flow(stage), self._coming.pop(0)
        with self._traced("wait", self._what[0], stage, chunk) if profiling() else NO_RANGE:
            coming.pending.wait()
        self._comm.release(coming.sent)
        block = coming.received
        if flow.message_rows(self._kv_rank).ordered is not None:
            block = reordered(block, fetch_index(flow, self._kv_rank, "order", block.device), self._comm)
        self._at_hand = block
        return self._columns(block, chunk)

    def leave(self) -> None:
        """Visitors are computed: their memory may be used again."""
        assert self._at_hand is not None
        self._comm.release(self._at_hand)
        self._at_hand = None

    def message_like(self, visitors: int, width: int, dtype: torch.dtype) -> Tensor:
        """`[s, (b,) width]` an unwritten buffer for what goes home."""
        like = self._own[-1]
        return self._comm.buffers.acquire_like(like, visitors, *like.shape[1:-2], width, dtype=dtype)

    def start_home(self, stage: Stage, chunk: HeadChunk, message: Tensor) -> None:
        """Sends home what was made of visitors, in what `message_like` gave: it is given back."""
        flow = self._flow(stage)
        tables = flow.tables(self._kv_rank)
        with self._traced("send", self._what[1], stage, chunk) if profiling() else NO_RANGE:
            if tables.inverse is not None:
                message = reordered(message, fetch_index(flow, self._kv_rank, "inverse", message.device), self._comm)
            received = self._comm.acquire_like(message, tables.send_rows.size, *message.shape[1:])
            counts = flow.split_counts.reversed().times(message.shape[1:].numel())
            pending = self._comm.start_all_to_all(received.view(-1), message.view(-1), counts, self._what[1])
        self._going_home.append((stage, chunk, _OnTheWay(message, received, pending)))

    def come_home(self) -> Iterator[CameHome]:
        """What others made of own queries, message after message and rank after rank; each good until the next.

        All that has been sent home until now. Call it before the next is: messages of two head chunks are then alive,
        and not of all.
        """
        started, self._going_home = self._going_home, []
        for stage, chunk, coming in started:
            with self._traced("wait", self._what[1], stage, chunk) if profiling() else NO_RANGE:
                coming.pending.wait()
            self._comm.release(coming.sent)
            flow = self._flow(stage)
            counts = flow.tables(self._kv_rank).send_counts.tolist()
            index = fetch_index(flow, self._kv_rank, "send_rows", coming.received.device)
            for rows, message in zip(index.split(counts), coming.received.split(counts), strict=True):
                if len(rows):
                    yield CameHome(chunk, rows, message)
            self._comm.release(coming.received)

    def _flow(self, stage: Stage) -> Fetch:
        assert stage.remote_queries is not None
        return stage.remote_queries

    def _width(self, chunk: HeadChunk) -> int:
        """Bytes of a row: each kind of column behind the one before, and as many as the widest element divides."""
        heads, widest = chunk.heads.stop - chunk.heads.start, max(x.itemsize for x in self._own)
        return -(-sum(heads * x.shape[-1] * x.itemsize for x in self._own) // widest) * widest

    def _bytes(self, rows: int, width: int, *, landing: bool = False) -> Tensor:
        shape, device = (rows, *self._own[-1].shape[1:-2], width), self._own[-1].device
        size = torch.Size(shape).numel()
        return (self._comm if landing else self._comm.buffers).acquire(size, device).view(shape)

    def _columns(self, message: Tensor, chunk: HeadChunk) -> list[Tensor]:
        """Views `[s, (b,) h, size]` of a message of bytes."""
        found, first, heads = list[Tensor](), 0, chunk.heads.stop - chunk.heads.start
        for x in self._own:
            if not heads:  # no view of no bytes
                found.append(x.new_empty(*message.shape[:-1], 0, x.shape[-1]))
                continue
            last = first + heads * x.shape[-1] * x.itemsize
            found.append(message[..., first:last].view(x.dtype).unflatten(-1, (heads, x.shape[-1])))
            first = last
        return found

    def _traced(self, name: str, what: str, stage: Stage, chunk: HeadChunk) -> record_function:
        chunks = (chunk.number, self._step.head_chunks)
        stages = (stage.number, len(self._step.stages_in(forward=self._forward)))
        return self._comm.traced(name, what, forward=self._forward, chunk=chunks, stage=stages)


def row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """`[t, (b,) h, 1]` the product of each output and its gradient, in at least fp32."""
    dtype = summed_in(out.dtype)
    sums = dout.new_empty(*dout.shape[:-1], 1, dtype=dtype)
    for target, gradient, output in _parts(sums, dout, out):
        torch.sum(output.to(dtype, copy=True).mul_(gradient), -1, keepdim=True, out=target)
    return sums


def stand_in(dout: Tensor, sums: Tensor, *, wide: bool) -> Tensor:
    """`[s, (b,) h, v]` a tensor whose products with `dout` add up to these row sums.

    Args:
        dout: `[s, (b,) h, v]`.
        sums: `[s, (b,) h, 1]` in at least fp32.
        wide: in the type of the sums: one element alone, which is exact to a rounding. Else in that of `dout`: dout
            itself, scaled, so that roundings of its elements, each as large as those of an output are, even out.
    """
    made = torch.empty_like(dout, dtype=sums.dtype if wide else dout.dtype)
    fill = _one_element if wide else _scaled
    for target, gradient, of_rows in _parts(made, dout, sums):
        fill(target, gradient, of_rows)
    return made


def _one_element(target: Tensor, dout: Tensor, sums: Tensor) -> None:
    place = dout.abs().argmax(-1, keepdim=True)
    largest = dout.gather(-1, place).to(sums.dtype)
    part = torch.where(largest != 0, sums / torch.where(largest != 0, largest, 1), 0)
    target.zero_().scatter_(-1, place, part)


def _scaled(target: Tensor, dout: Tensor, sums: Tensor) -> None:
    unit = dout.to(sums.dtype, copy=True)
    largest = unit.abs().amax(-1, keepdim=True)
    unit.div_(torch.where(largest > 0, largest, 1))  # so that no square over- or underflows
    norm = unit.square().sum(-1, keepdim=True)
    scale = torch.where(largest > 0, sums / torch.where(largest > 0, largest * norm, 1), 0)
    target.copy_(unit.mul_(scale))


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of equally many rows, part by part."""
    rows = max(1, -(-len(tensors[0]) // _PARTS))
    return zip(*(x.split(rows) for x in tensors), strict=True)
