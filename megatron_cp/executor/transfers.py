"""How the keys and values of one `head_rank` get to the queries that see them, and their gradients back.

`KeyTransfers` walks over the stages of an attention: the next flow is under way while a stage is computed. A flow is
payloads by the class of its kind, in both directions: rows come, and in backward their gradients go on.

    Fetch     rows come in one collective a head chunk; gradients go back in another, and their owner sums them; those
              of tiles at home, which need no message, are the first of that sum
    PassOn    blocks pass from rank to rank; gradients follow one stage behind, are summed on the way and end at home

What is packed is in the group's buffers, and what arrives in memory of the transport.

Shapes: `t` own key rows, `s` the rows at hand in a stage, `b` batch (absent for packed THD), `g` key/value heads of the
rank (of a head chunk, for stages), `d` and `v` their sizes.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.executor.arguments import part_of, summed_in
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.fetched import fetch_index, prepare_fetch, reordered
from megatron_cp.executor.groups import Message, Pending
from megatron_cp.executor.trace import NO_RANGE, profiling
from megatron_cp.executor.visitors import Visitors
from megatron_cp.plan.attention import Attend, Stage
from megatron_cp.plan.flows import Fetch, KeyFlow, PassOn
from megatron_cp.plan.head_chunks import HeadChunk

Keys = tuple[Tensor, Tensor]  # `[s, (b,) g, d]` keys and `[s, (b,) g, v]` values of a chunk's heads

_GATHERED = "keys and values of other ranks"  # the step, as errors name it


def pack(k: Tensor, v: Tensor, buffers: Buffers) -> Tensor:
    """Keys and values in one buffer `[s, (b,) g * d + g * v]`, whose views `unpack` gives."""
    packed = pack_like(k, v, k.dtype, buffers)
    for target, source in zip(unpack(packed, k, v), (k, v), strict=True):
        target.copy_(source)
    return packed


def pack_like(k: Tensor, v: Tensor, dtype: torch.dtype, buffers: Buffers) -> Tensor:
    """An unwritten buffer that holds what `pack` would, in another type."""
    width = k.shape[-2] * k.shape[-1] + v.shape[-2] * v.shape[-1]
    return buffers.acquire_like(k, *k.shape[:-2], width, dtype=dtype)


def unpack(packed: Tensor, k: Tensor, v: Tensor, heads: int | None = None) -> Keys:
    """Views `[s, (b,) g, d]` and `[s, (b,) g, v]` of what `pack` made, for heads of the sizes that k's and v's have."""
    heads = k.shape[-2] if heads is None else heads
    keys, values = packed.split([heads * k.shape[-1], heads * v.shape[-1]], -1)
    return keys.unflatten(-1, (heads, k.shape[-1])), values.unflatten(-1, (heads, v.shape[-1]))


class KeyTransfers:
    """The keys of one attention on one rank, on their way.

    Args:
        step: the stages.
        kv_rank, head_rank: of this rank.
        comm: the ranks of one `head_rank`, and the transport between them.
        k, v: `[t, (b,) g, d]` and `[t, (b,) g, v]` the own keys and values, without pad rows.
        visitors: queries that leave their ranks, whose messages follow those of the keys.
        forward: the direction in which they are computed with.
    """

    def __init__(
        self, step: Attend, kv_rank: int, head_rank: int, comm: Communicator, k: Tensor, v: Tensor,
        visitors: Visitors | None = None, *, forward: bool,
    ) -> None:  # fmt: skip
        self._step, self._head_rank, self._comm, self._k, self._v = step, head_rank, comm, k, v
        self._visitors, self._forward = visitors, forward
        flow = step.key_flow if forward else step.backward_key_flow
        self._carrier = None if flow is None else _CARRIERS[flow](step, kv_rank, comm, k, v)

    def arrivals(self) -> Iterator[tuple[Stage, HeadChunk, Keys]]:
        """Each stage of each head chunk, and the keys at hand: good until the next is asked for.

        Stage by stage: what is at hand is computed for all heads while the first rows are on their way.
        """
        chunks = self._step.chunks(self._head_rank)
        stages = self._step.stages if self._forward else self._step.backward_stages
        if self._carrier is None:
            for chunk in chunks:
                yield stages[0], chunk, (part_of(self._k, -2, chunk.groups), part_of(self._v, -2, chunk.groups))
            return
        at_home, travelling = list[tuple[Stage, HeadChunk]](), list[tuple[Stage, HeadChunk]]()
        for stage in stages:
            stays = stage.keys is None and not self._carrier.starts_at_home
            (at_home if stays else travelling).extend([(stage, chunk) for chunk in chunks])
        coming: _Arrival | None = self._start(*travelling[0], None)
        for stage, chunk in at_home:
            yield stage, chunk, (part_of(self._k, -2, chunk.groups), part_of(self._v, -2, chunk.groups))
        following: tuple[Stage, HeadChunk] | None
        for (stage, chunk), following in itertools.pairwise([*travelling, None]):  # type: ignore[misc]
            assert coming is not None
            with self.traced("wait", "k,v", stage, chunk) if profiling() else NO_RANGE:
                block = coming.wait(self._comm)
            coming = None if following is None else self._start(*following, block)
            with self.traced("unpack", "k,v", stage, chunk) if self._carrier.reorders and profiling() else NO_RANGE:
                block = self._carrier.in_order(stage, block)
            yield stage, chunk, unpack(block, self._k, self._v, chunk.num_groups)
            if coming is None or coming.sent is not block:
                self._comm.release(block)

    def _start(self, stage: Stage, chunk: HeadChunk, block: Tensor | None) -> _Arrival:
        assert self._carrier is not None
        with self.traced("send", "k,v", stage, chunk) if profiling() else NO_RANGE:
            started = self._carrier.start(stage, chunk, block)
        if stage.remote_queries is not None:
            assert self._visitors is not None
            self._visitors.start(stage, chunk)
        return started

    def traced(self, name: str, what: str, stage: Stage, chunk: HeadChunk) -> record_function:
        """The range of something that is done for a stage of a head chunk."""
        return _traced(self._step, self._comm, name, what, stage, chunk, forward=self._forward)

    def gradients_like(self, keys: Keys) -> Tensor:
        """An unwritten buffer for the gradients of the keys at hand, of the type in which they travel."""
        assert self._carrier is not None
        return pack_like(*keys, self._carrier.gradient_type, self._comm.buffers)

    def return_gradient(self, stage: Stage, chunk: HeadChunk, gradient: Tensor) -> None:
        """A stage's part of the gradients of the keys at hand, in what `gradients_like` gave: it is given back."""
        assert self._carrier is not None
        self._carrier.return_gradient(stage, chunk, gradient)

    def own_sums(self, chunk: HeadChunk) -> Keys | None:
        """Where a stage of own keys writes their gradients, if others are added to them; else None."""
        sums = None if self._carrier is None else self._carrier.sums
        return None if sums is None else (part_of(sums[0], -2, chunk.groups), part_of(sums[1], -2, chunk.groups))

    def reduce_gradients(self, dk: Tensor, dv: Tensor) -> None:
        """Writes the gradients of the own keys and values, once every stage's have been returned."""
        assert self._carrier is not None
        self._carrier.reduce_gradients(dk, dv)


def _traced(
    step: Attend, comm: Communicator, name: str, what: str, stage: Stage, chunk: HeadChunk, *, forward: bool
) -> record_function:
    chunks, stages = (chunk.number, step.head_chunks), (stage.number, len(step.stages_in(forward=forward)))
    return comm.traced(name, what, forward=forward, chunk=chunks, stage=stages)


@dataclass(frozen=True, eq=False)
class _Arrival:
    """A block of keys on its way here, or here already.

    Attributes:
        block: it.
        sent: what this rank sends for it; of a ring the block before, which is in use meanwhile.
    """

    block: Tensor
    sent: Tensor | None = None
    pending: Pending | None = None

    def wait(self, comm: Communicator) -> Tensor:
        if self.pending is not None:
            self.pending.wait()
        if self.sent is not None:
            comm.release(self.sent)
        return self.block


class _Carrier(ABC):
    """Carries the flows of one kind.

    Attributes:
        reorders: rows may arrive in another order than the stage wants them.
        starts_at_home: own rows, as they stand, are what it starts with.
        sums: of the gradients of the own keys and values, where it adds them up here; else None.
    """

    reorders = False
    starts_at_home = False
    sums: Keys | None = None

    def __init__(self, step: Attend, kv_rank: int, comm: Communicator, k: Tensor, v: Tensor) -> None:
        self.step, self.kv_rank, self.comm, self.k, self.v = step, kv_rank, comm, k, v
        self.buffers = comm.buffers
        self.acc_dtype = summed_in(k.dtype)

    @property
    @abstractmethod
    def gradient_type(self) -> torch.dtype:
        """The type in which gradients travel."""

    @abstractmethod
    def start(self, stage: Stage, chunk: HeadChunk, block: Tensor | None) -> _Arrival:
        """Starts the flow of a stage; `block` is what the stage before has at hand."""

    def in_order(self, stage: Stage, block: Tensor) -> Tensor:
        """A block that has arrived, its rows as the stage wants them."""
        return block

    def traced_gradient(self, name: str, stage: Stage, chunk: HeadChunk) -> record_function:
        """The range of something that is done with gradients."""
        return _traced(self.step, self.comm, name, "dk,dv", stage, chunk, forward=False)

    @abstractmethod
    def return_gradient(self, stage: Stage, chunk: HeadChunk, gradient: Tensor) -> None:
        """See `KeyTransfers`."""

    @abstractmethod
    def reduce_gradients(self, dk: Tensor, dv: Tensor) -> None:
        """See `KeyTransfers`."""


class _PassesOn(_Carrier):
    """Gradients are summed on the way, in at least fp32, in the order of the KV ranks that the block visits."""

    starts_at_home = True
    _gradient: _Arrival | None = None  # of the block that is on its way here

    @property
    def gradient_type(self) -> torch.dtype:
        return self.acc_dtype

    def start(self, stage: Stage, chunk: HeadChunk, block: Tensor | None) -> _Arrival:
        if stage.keys is None:
            return _Arrival(pack(self.k, self.v, self.buffers))
        assert isinstance(stage.keys, PassOn)
        assert block is not None
        return self._pass_on(stage.keys, block, "keys and values")

    def return_gradient(self, stage: Stage, chunk: HeadChunk, gradient: Tensor) -> None:
        if self._gradient is not None:
            with self.traced_gradient("wait", stage, chunk) if profiling() else NO_RANGE:
                arrived = self._gradient.wait(self.comm)
            gradient.add_(arrived)
            self.comm.release(arrived)  # before there is room for the next
        assert isinstance(stage.gradients, PassOn)
        with self.traced_gradient("send", stage, chunk) if profiling() else NO_RANGE:
            self._gradient = self._pass_on(stage.gradients, gradient, "gradients of keys and values")

    def reduce_gradients(self, dk: Tensor, dv: Tensor) -> None:
        assert self._gradient is not None
        with self.comm.traced("wait", "dk,dv", forward=False) if profiling() else NO_RANGE:
            arrived = self._gradient.wait(self.comm)
        for target, source in zip((dk, dv), unpack(arrived, self.k, self.v), strict=True):
            target.copy_(source)
        self.comm.release(arrived)

    def _pass_on(self, flow: PassOn, block: Tensor, what: str) -> _Arrival:
        size, received = flow.size, self.comm.acquire_like(block, flow.rows_received(self.kv_rank), *block.shape[1:])
        pending = self.comm.start_messages(
            [Message(block.view(-1), (self.kv_rank + 1) % size)],
            [Message(received.view(-1), (self.kv_rank - 1) % size)],
            f"{what} of stage {flow.hops} of {size}",
        )
        return _Arrival(received, block, pending)


class _Fetches(_Carrier):
    """The owner sums what comes back in the order of the KV ranks, in at least fp32."""

    reorders = True

    def __init__(self, step: Attend, kv_rank: int, comm: Communicator, k: Tensor, v: Tensor) -> None:
        super().__init__(step, kv_rank, comm, k, v)
        self._returning: list[tuple[Stage, HeadChunk, _Arrival]] = []

    @property
    def gradient_type(self) -> torch.dtype:
        return self.k.dtype

    def start(self, stage: Stage, chunk: HeadChunk, block: Tensor | None) -> _Arrival:
        own, flow = (self.k[..., chunk.groups, :], self.v[..., chunk.groups, :]), self._flow(stage)
        rows = flow.message_rows(self.kv_rank)
        assert rows.sent is not None
        sent = self.buffers.acquire_like(self.k, *self._shape(rows.sent, chunk))
        received = self.comm.acquire_like(self.k, *self._shape(rows.received, chunk))
        if flow.equal_shares:  # backends gather equal shares only
            for target, source in zip(unpack(sent[: len(self.k)], *own), own, strict=True):
                target.copy_(source)
            pending = self.comm.start_all_gather(received.view(-1), sent.view(-1), _GATHERED)
            return _Arrival(received, sent, pending)
        for target, source in zip(unpack(sent, *own), own, strict=True):
            torch.index_select(source, 0, self._index(flow, "send_rows"), out=target)
        split_counts = flow.split_counts.times(sent.shape[1:].numel())
        pending = self.comm.start_all_to_all(received.view(-1), sent.view(-1), split_counts, _GATHERED)
        return _Arrival(received, sent, pending)

    def in_order(self, stage: Stage, block: Tensor) -> Tensor:
        flow = self._flow(stage)
        if flow.message_rows(self.kv_rank).ordered is None:
            return block
        return reordered(block, self._index(flow, "shares" if flow.equal_shares else "order"), self.comm)

    def return_gradient(self, stage: Stage, chunk: HeadChunk, gradient: Tensor) -> None:
        self._finish_returns()
        with self.traced_gradient("send", stage, chunk) if profiling() else NO_RANGE:
            self._start_return(stage, chunk, gradient)

    def _start_return(self, stage: Stage, chunk: HeadChunk, gradient: Tensor) -> None:
        flow = self._flow(stage)
        tables = flow.tables(self.kv_rank)
        if tables.inverse is not None:
            gradient = reordered(gradient, self._index(flow, "inverse"), self.comm)
        received = self.comm.acquire_like(self.k, *self._shape(tables.send_rows.size, chunk))
        split_counts = flow.split_counts.reversed().times(received.shape[1:].numel())
        pending = self.comm.start_all_to_all(
            received.view(-1), gradient.view(-1), split_counts, "gradients of gathered keys and values"
        )
        self._returning.append((stage, chunk, _Arrival(received, gradient, pending)))

    def reduce_gradients(self, dk: Tensor, dv: Tensor) -> None:
        self._finish_returns()
        for target, total in zip((dk, dv), self.sums, strict=True):
            target.copy_(total)

    @cached_property
    def sums(self) -> Keys:  # type: ignore[override]
        dk, dv = (torch.zeros_like(x, dtype=self.acc_dtype) for x in (self.k, self.v))
        return dk, dv

    def _flow(self, stage: Stage) -> Fetch:
        assert isinstance(stage.keys, Fetch)
        return stage.keys

    def _index(self, flow: Fetch, name: str) -> Tensor:
        return fetch_index(flow, self.kv_rank, name, self.k.device)

    def _shape(self, rows: int, chunk: HeadChunk) -> tuple[int, ...]:
        return rows, *self.k.shape[1:-2], chunk.num_groups * (self.k.shape[-1] + self.v.shape[-1])

    def _finish_returns(self) -> None:
        for stage, chunk, returned in self._returning:
            with self.traced_gradient("wait", stage, chunk) if profiling() else NO_RANGE:
                received = returned.wait(self.comm)
            with self.traced_gradient("sum", stage, chunk) if profiling() else NO_RANGE:
                self._add(self._flow(stage), chunk, received)
            self.comm.release(received)
        self._returning = []

    def _add(self, flow: Fetch, chunk: HeadChunk, received: Tensor) -> None:
        sums = [total[..., chunk.groups, :] for total in self.sums]
        counts = flow.tables(self.kv_rank).send_counts.tolist()
        for rows, piece in zip(self._index(flow, "send_rows").split(counts), received.split(counts), strict=True):
            for total, part in zip(sums, unpack(piece, self.k, self.v, chunk.num_groups), strict=True):
                total.index_add_(0, rows, part.to(self.acc_dtype))


_CARRIERS: dict[type[KeyFlow], type[_Carrier]] = {PassOn: _PassesOn, Fetch: _Fetches}


def prepare_transfers(step: Attend, kv_rank: int, device: torch.device) -> None:
    """Makes the tables that transfers use, so that no layer has to."""
    for stage in step.all_stages:
        for flow in (stage.keys, stage.remote_queries):
            if isinstance(flow, Fetch):
                prepare_fetch(flow, kv_rank, device)
