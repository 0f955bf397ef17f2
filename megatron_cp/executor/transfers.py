"""How the keys and values of one `head_rank` get to the queries that see them, and their gradients back.

Three ways, one interface: iterate over what arrives, stage by stage, the next transfer being under way while a stage
is computed; in backward, give each stage's gradients back, and reduce those of the own keys at the end.

What is packed is in the group's buffers, and what arrives in memory of the transport.

Shapes: `t` own key rows, `s` the rows at hand in a stage, `b` batch (absent for packed THD), `g` key/value heads of the
rank (of a head chunk, for stages), `d` and `v` their sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.device import on_device
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import Message, Pending
from megatron_cp.plan.attention import Attend, Gathering, HeadChunk

_GATHERED = "keys and values of other ranks"  # the step, as errors name it

Keys = tuple[Tensor, Tensor]  # `[s, (b,) g, d]` keys and `[s, (b,) g, v]` values of a chunk's heads


class Transfers(ABC):
    """The keys of one attention on one rank, on their way.

    Args:
        step: the schedule.
        kv_rank, head_rank: of this rank.
        comm: the ranks of one `head_rank`, and the transport between them.
        k, v: `[t, (b,) g, d]` and `[t, (b,) g, v]` the own keys and values, without pad rows.
    """

    def __init__(self, step: Attend, kv_rank: int, head_rank: int, comm: Communicator, k: Tensor, v: Tensor) -> None:
        self.step, self.kv_rank, self.comm, self.k, self.v = step, kv_rank, comm, k, v
        self.buffers = comm.buffers
        self.chunks = step.chunks(head_rank)
        self.acc_dtype = torch.promote_types(k.dtype, torch.float32)

    @abstractmethod
    def arrivals(self) -> Iterator[tuple[int, HeadChunk, Keys]]:
        """Each stage, with its number, its heads and the keys at hand: good until the next is asked for."""

    @abstractmethod
    def gradient_type(self) -> torch.dtype:
        """The type in which `return_gradient` wants gradients."""

    @abstractmethod
    def return_gradient(self, stage: int, chunk: HeadChunk, gradient: Tensor) -> None:
        """A stage's share of the gradients of the keys at hand, in what `pack_like` took: it is given back in there."""

    @abstractmethod
    def reduce_gradients(self, dk: Tensor, dv: Tensor) -> None:
        """Writes the gradients of the own keys and values, once every stage has been given back."""


def transfers(step: Attend, kv_rank: int, head_rank: int, comm: Communicator, k: Tensor, v: Tensor) -> Transfers:
    """The way of a schedule."""
    kind = AtHome if step.num_kv_ranks == 1 else Rotation if step.kv_schedule == "p2p" else Gather
    return kind(step, kv_rank, head_rank, comm, k, v)


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


class AtHome(Transfers):
    """One KV rank: its keys are all keys, and nothing travels."""

    def arrivals(self) -> Iterator[tuple[int, HeadChunk, Keys]]:
        for chunk in self.chunks:
            yield 0, chunk, (self.k[..., chunk.groups, :], self.v[..., chunk.groups, :])

    def gradient_type(self) -> torch.dtype:
        raise AssertionError("written in place")

    def return_gradient(self, stage: int, chunk: HeadChunk, gradient: Tensor) -> None:
        raise AssertionError("written in place")

    def reduce_gradients(self, dk: Tensor, dv: Tensor) -> None:
        raise AssertionError("written in place")


class Rotation(Transfers):
    """Blocks of keys pass from rank to rank. In backward their gradients follow one stage behind, and end at home.

    Gradients are summed on the way, in at least fp32, in the order of the KV ranks that the block visits.
    """

    _gradient: Tensor  # of the block that is on its way here
    _sent: Tensor  # that of the block before, on its way on
    _on_the_way: Pending

    def arrivals(self) -> Iterator[tuple[int, HeadChunk, Keys]]:
        (chunk,), last = self.chunks, self.step.num_kv_ranks - 1
        block = pack(self.k, self.v, self.buffers)
        for stage in range(last):
            following, ahead = self._pass_on(block, stage, "keys and values")
            yield stage, chunk, unpack(block, self.k, self.v)
            ahead.wait()
            self.comm.release(block)
            block = following
        yield last, chunk, unpack(block, self.k, self.v)
        self.comm.release(block)

    def gradient_type(self) -> torch.dtype:
        return self.acc_dtype

    def return_gradient(self, stage: int, chunk: HeadChunk, gradient: Tensor) -> None:
        if stage:
            gradient.add_(self._arrived())
            self.comm.release(self._gradient)  # before there is room for the next
        self._sent = gradient
        self._gradient, self._on_the_way = self._pass_on(gradient, stage, "gradients of keys and values")

    def reduce_gradients(self, dk: Tensor, dv: Tensor) -> None:
        for target, source in zip((dk, dv), unpack(self._arrived(), self.k, self.v), strict=True):
            target.copy_(source)
        self.comm.release(self._gradient)

    def _arrived(self) -> Tensor:
        self._on_the_way.wait()
        self.comm.release(self._sent)
        return self._gradient

    def _pass_on(self, block: Tensor, stage: int, what: str) -> tuple[Tensor, Pending]:
        """Sends a stage's block on, and starts to receive the block that the KV rank before has in that stage."""
        size, source = self.step.num_kv_ranks, self.step.source(self.kv_rank, stage + 1)
        rows = int(self.step.keys.token_counts[source])
        following = self.comm.acquire_like(block, rows, *block.shape[1:])
        pending = self.comm.start_messages(
            [Message(block.view(-1), (self.kv_rank + 1) % size)],
            [Message(following.view(-1), (self.kv_rank - 1) % size)],
            f"{what} of stage {stage + 1} of {size}",
        )
        return following, pending


class Gather(Transfers):
    """The keys that are seen come in one collective a head chunk, and their gradients go back in another.

    The owner sums what comes back in the order of the KV ranks, in at least fp32.
    """

    def arrivals(self) -> Iterator[tuple[int, HeadChunk, Keys]]:
        self._returning: list[tuple[HeadChunk, Tensor, Tensor, Pending]] = []
        ahead = [self._start(self.chunks[0])]
        for number, chunk in enumerate(self.chunks):
            received, sent, pending = ahead.pop()
            pending.wait()
            self.comm.release(sent)
            if number + 1 < len(self.chunks):
                ahead.append(self._start(self.chunks[number + 1]))
            received = self._arranged(received)
            yield 0, chunk, unpack(received, self.k, self.v, chunk.num_groups)
            self.comm.release(received)

    def gradient_type(self) -> torch.dtype:
        return self.k.dtype

    def return_gradient(self, stage: int, chunk: HeadChunk, gradient: Tensor) -> None:
        self._finish_returns()
        gathering = self._gathering
        if gathering.returned is not None:
            gradient = self._reordered(gradient, self._index("returned"))
        received = self._take(self.comm, gathering.send_rows.size, chunk)
        split_counts = self.step.split_counts.reversed().times(received.shape[1:].numel())
        pending = self.comm.start_all_to_all(
            received.view(-1), gradient.view(-1), split_counts, "gradients of gathered keys and values"
        )
        self._returning.append((chunk, received, gradient, pending))

    def reduce_gradients(self, dk: Tensor, dv: Tensor) -> None:
        self._finish_returns()
        for target, total in zip((dk, dv), self._sums, strict=True):
            target.copy_(total)

    @cached_property
    def _sums(self) -> list[Tensor]:
        """Of the gradients of the own keys and values."""
        return [torch.zeros_like(x, dtype=self.acc_dtype) for x in (self.k, self.v)]

    @property
    def _gathering(self) -> Gathering:
        return self.step.gathering(self.kv_rank)

    def _index(self, name: str) -> Tensor:
        return _index(self.step, self.kv_rank, name, self.k.device)

    def _take(self, memory: Buffers | Communicator, rows: int, chunk: HeadChunk) -> Tensor:
        """Memory for rows of a chunk's heads: of the buffers to send from, of the communicator to receive in."""
        width = chunk.num_groups * (self.k.shape[-1] + self.v.shape[-1])
        return memory.acquire_like(self.k, rows, *self.k.shape[1:-2], width)

    def _start(self, chunk: HeadChunk) -> tuple[Tensor, Tensor, Pending]:
        """What is received, what is sent, and the wait for both."""
        local = self.k[..., chunk.groups, :], self.v[..., chunk.groups, :]
        if self.step.kv_schedule == "all_gather":
            longest = int(self.step.keys.token_counts.max())  # backends gather equal shares only
            share = self._take(self.buffers, longest, chunk)
            for target, source in zip(unpack(share[: len(self.k)], *local), local, strict=True):
                target.copy_(source)
            received = self._take(self.comm, self.step.num_kv_ranks * longest, chunk)
            pending = self.comm.start_all_gather(received.view(-1), share.view(-1), _GATHERED)
            return received, share, pending
        gathering = self._gathering
        sent = self._take(self.buffers, gathering.send_rows.size, chunk)
        for target, source in zip(unpack(sent, *local), local, strict=True):
            torch.index_select(source, 0, self._index("send_rows"), out=target)
        received = self._take(self.comm, gathering.tokens.size, chunk)
        split_counts = self.step.split_counts.times(sent.shape[1:].numel())
        return received, sent, self.comm.start_all_to_all(received.view(-1), sent.view(-1), split_counts, _GATHERED)

    def _arranged(self, received: Tensor) -> Tensor:
        """What arrived, in stream order."""
        if self.step.kv_schedule == "all_gather":
            if len(received) == self._gathering.tokens.size and self._gathering.arrange is None:
                return received
            return self._reordered(received, _shares(self.step, self.k.device))
        return received if self._gathering.arrange is None else self._reordered(received, self._index("arrange"))

    def _reordered(self, rows: Tensor, index: Tensor) -> Tensor:
        """The rows of a buffer in another one, which takes its place."""
        ordered = self.buffers.acquire_like(rows, len(index), *rows.shape[1:])
        torch.index_select(rows, 0, index, out=ordered)
        self.comm.release(rows)
        return ordered

    def _finish_returns(self) -> None:
        for chunk, received, sent, pending in self._returning:
            pending.wait()
            self.comm.release(sent)
            sums = [total[..., chunk.groups, :] for total in self._sums]
            rows = self._index("send_rows").split(self._gathering.send_counts.tolist())
            pieces = received.split(self._gathering.send_counts.tolist())
            for of_kv_rank, piece in zip(rows, pieces, strict=True):
                for total, part in zip(sums, unpack(piece, self.k, self.v, chunk.num_groups), strict=True):
                    total.index_add_(0, of_kv_rank, part.to(self.acc_dtype))
            self.comm.release(received)
        self._returning = []


def prepare_gathering(step: Attend, kv_rank: int, device: torch.device) -> None:
    """Makes the index tables of `Gather`, so that no layer has to."""
    if step.num_kv_ranks == 1 or step.kv_schedule == "p2p":
        return
    for name in ("send_rows", "arrange", "returned"):
        if getattr(step.gathering(kv_rank), name) is not None:
            _index(step, kv_rank, name, device)
    if step.kv_schedule == "all_gather":
        _shares(step, device)


def _index(step: Attend, kv_rank: int, name: str, device: torch.device) -> Tensor:
    return step.memo((name, kv_rank, device), lambda: on_device(getattr(step.gathering(kv_rank), name), device))


def _shares(step: Attend, device: torch.device) -> Tensor:
    """Where each token of the stream stands among the shares of an all-gather, all as long as the longest."""

    def make() -> Tensor:
        counts, places = step.keys.token_counts, step.keys.inverse_order
        lasts = np.cumsum(counts)
        owners = np.searchsorted(lasts, places, side="right")
        return on_device(owners * int(counts.max()) + places - (lasts - counts)[owners], device)

    return step.memo(("shares", device), make)
