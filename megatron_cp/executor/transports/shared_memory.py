"""`SharedMemory`: ranks of one host copy what they receive out of the sender's memory. On the CPU.

    start   writes a note to each receiver, with the place of its piece
    wait    copies each piece when its note is there, and waits until the own pieces have been read

The group's buffers are in memory that the other ranks map; what is sent from elsewhere is copied to a buffer first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup, keep_own
from megatron_cp.executor.groups.shared_memory import Waits, heap_of
from megatron_cp.executor.transports.base import GroupTransport
from megatron_cp.plan.transport import Transport
from megatron_cp.torch_private import no_modes


class SharedMemory(GroupTransport):
    """Lets each receiver copy its piece out of the sender's memory. Making the first of a group is collective."""

    def __init__(self, group: RankGroup, transport: Transport) -> None:
        super().__init__(group, transport)
        self.heap = heap_of(group)

    def start_all_to_all(self, received: Tensor, sent: Tensor, split_counts: SplitCounts) -> Pending:
        rank, staged = self.group.rank, list[Tensor]()
        incoming = received.split(split_counts.received_by(rank))
        outgoing = self._readable(sent, staged).split(split_counts.sent_by(rank, sent.numel()))
        return self._exchange(incoming, outgoing, staged)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        size, staged = self.group.size, list[Tensor]()
        return self._exchange(received.split([sent.numel()] * size), [self._readable(sent, staged)] * size, staged)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        staged = list[Tensor]()
        sent = [Message(self._readable(tensor, staged), peer) for tensor, peer in sends]
        return _Copies(self, sent, receives, staged)

    def _exchange(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor], staged: list[Tensor]) -> Pending:
        keep_own(incoming[self.group.rank], outgoing[self.group.rank])
        others = [(self.group.rank + step) % self.group.size for step in range(1, self.group.size)]
        sent, received = ([Message(pieces[peer], peer) for peer in others] for pieces in (outgoing, incoming))
        return _Copies(self, sent, received, staged)

    def _readable(self, sent: Tensor, staged: list[Tensor]) -> Tensor:
        """Returns the tensor, or a copy of it in shared memory, which is added to `staged`."""
        if not sent.is_cpu:
            remedy = 'Use "collective" or "pairwise" for tensors of a device.'
            raise ArgumentError("transport", "shared_memory", f"tensors of the host, not of {sent.device}", remedy)
        if not sent.numel() or self.heap.pool.place(sent) is not None:
            return sent
        copy = self.group.buffers.acquire_like(sent, sent.numel())
        staged.append(copy)
        with no_modes():
            copy.copy_(sent.detach())
        return copy


class _Copies(Pending):
    """Pieces that this rank copies from others, and pieces that others copy from it."""

    def __init__(
        self, transport: SharedMemory, sends: Sequence[Message], receives: Sequence[Message], staged: list[Tensor]
    ) -> None:
        group, heap = transport.group, transport.heap
        self._heap, self._buffers = heap, group.buffers
        self._waits = Waits(group.activity, group.patience, group.has_failed)
        self._staged = staged
        self._tensors = [message.tensor for message in (*sends, *receives)]  # they live until they have been read
        self._sent, self._awaited = list[tuple[int, int]](), list[tuple[Tensor, int, int]]()
        for tensor, peer in receives:
            if tensor.numel():
                self._awaited.append((tensor.detach().view(torch.uint8), peer, heap.expect(peer)))
        for tensor, peer in sends:
            if tensor.numel():
                place = heap.pool.place(tensor)
                assert place is not None
                number = heap.send(place, tensor.nbytes, peer, self._waits)
                self._sent.append((peer, number))

    def wait(self) -> None:
        heap, waits = self._heap, self._waits
        while self._awaited:
            heap.wait_until(self._some_arrived, self._awaited[0][1], waits)
            here = [each for each in self._awaited if heap.arrived(*each[1:])]
            self._awaited = [each for each in self._awaited if not any(each is one for one in here)]
            with no_modes():  # counters of copied activations must not count the transfer itself
                for each in here:
                    heap.read(*each, waits.activity)
        for peer, number in self._sent:
            heap.wait_until(partial(heap.was_read, peer, number), peer, waits)
        self._buffers.release(*self._staged)
        self._sent, self._staged = [], []
        self._tensors.clear()

    def _some_arrived(self) -> bool:
        return any(self._heap.arrived(peer, number) for _, peer, number in self._awaited)
