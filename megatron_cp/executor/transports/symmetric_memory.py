"""`SymmetricMemory`: ranks of one host copy what they receive out of the sender's device. On CUDA.

    start   queues copies and signals on a stream beside the caller's; `groups/symmetric_memory.py` has their order
    wait    lets the caller's stream wait for that one

Copies between devices are plain ones, which copy engines do: no kernel of a collective takes processors meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup
from megatron_cp.executor.groups.base import Done, check_peers
from megatron_cp.executor.groups.symmetric_memory import REMEDY, window_of
from megatron_cp.executor.transports.base import GroupTransport
from megatron_cp.plan.transport import Transport


class SymmetricMemory(GroupTransport):
    """Lets each receiver copy its piece out of the sender's window. Making the first of a group is collective."""

    def __init__(self, group: RankGroup, transport: Transport) -> None:
        super().__init__(group, transport)
        self.window = None if group.size == 1 and not group.path else window_of(group)

    def start_all_to_all(self, received: Tensor, sent: Tensor, split_counts: SplitCounts) -> Pending:
        rank = self.group.rank
        incoming = received.split(split_counts.received_by(rank))
        outgoing = sent.split(split_counts.sent_by(rank, sent.numel()))
        sends, receives = ([Message(piece, peer) for peer, piece in enumerate(x)] for x in (outgoing, incoming))
        return self._start(sends, receives)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        size = self.group.size
        receives = [Message(piece, peer) for peer, piece in enumerate(received.split([sent.numel()] * size))]
        return self._start([Message(sent, peer) for peer in range(size)], receives, to_all=True)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        check_peers((*sends, *receives), self.group.rank)
        return self._start(sends, receives)

    def _start(self, sends: Sequence[Message], receives: Sequence[Message], *, to_all: bool = False) -> Pending:
        window, rank, size = self.window, self.group.rank, self.group.size
        self._check(tensor for tensor, _ in (*sends, *receives))
        outgoing, incoming = (_by_peer(messages, size) for messages in (sends, receives))
        own = list(zip(incoming[rank], outgoing[rank], strict=False))

        def work() -> None:
            for received, sent in own:
                if sent.numel():  # else the caller writes it
                    received.copy_(sent)
            if window is None:
                return
            after = [(rank + step) % size for step in range(1, size)]
            if to_all:
                shares = [(outgoing[after[0]], [self._whole(peer) for peer in after])] if after else []
            else:
                shares = [(outgoing[peer], [self._whole(peer)]) for peer in after]
            arriving = [(incoming[peer], self._whole(peer)) for peer in reversed(after)]
            window.exchange(shares, arriving, self.group.patience, to_all=to_all)

        if window is None:
            work()
            return Done()
        return window.queue(work, [tensor for tensor, _ in (*sends, *receives)])

    def _check(self, tensors: Iterable[Tensor]) -> None:
        if self.window is None:
            return
        for tensor in tensors:
            if tensor.device != self.window.device:
                allowed = f"tensors of the rank's device {self.window.device}, not of {tensor.device}"
                raise ArgumentError("transport", "symmetric_memory", allowed, REMEDY)

    def _whole(self, rank: int) -> int:
        """Returns a rank's number in the whole group, to which the window belongs."""
        for ranks in reversed(self.group.path):
            rank = ranks[rank]
        return rank


def _by_peer(messages: Sequence[Message], size: int) -> list[list[Tensor]]:
    """Returns the bytes of the messages to or from each rank, in order."""
    found: list[list[Tensor]] = [[] for _ in range(size)]
    for tensor, peer in messages:
        found[peer].append(tensor.detach().view(-1).view(torch.uint8))
    return found
