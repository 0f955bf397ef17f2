"""`GroupTransport`: the interface and the contract of transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup
from megatron_cp.plan.transport import Transport


class GroupTransport(ABC):
    """Moves messages between one rank and the other ranks of its group, and provides the memory that receives them.

    All transports deliver the same bytes to the same places. They differ in the messages that an operation consists of,
    in when these are sent, and in the memory that receives them.

    A caller acquires memory, starts an operation that fills it, waits, reads, and releases:

        received = transport.acquire(size, device)
        pending = transport.start_all_to_all(received, sent, split_counts)
        ...                        # computes meanwhile
        pending.wait()
        ...                        # reads `received`
        transport.release(received)

    The contract for callers:

    - Every rank makes the same calls of `acquire` and `start_*` in the same order, and waits in the same order. Sizes
      differ from rank to rank and may be zero. The order of releases may differ, too.
    - `received` is memory from `acquire`, all of it or a contiguous part. `sent` may be any memory. Both are contiguous
      and flat, and the caller accesses neither between start and wait.
    - A rank calls from one thread at a time.

    The contract for transports:

    - `start_*` does not wait for other ranks, so that callers compute while messages are sent. `wait` returns when all
      of `received` is written and `sent` may be used again. On CUDA both hold for work that is queued after it.
    - Acquired memory is used for nothing else until it is released, or, if `kept`, for as long as a tensor refers to
      it.
    - Every rank starts equally many operations of the group, in the same order. A rank that is idle in one sends an
      `empty_message`, since backends number operations, and debugging tools compare the numbers of the ranks.
    - Errors show `group.activity`, which the caller has set before `start_*`. A transport that starts operations of the
      group in `wait` sets it again first, since other operations may have been started meanwhile.

    A transport whose ranks write into each other's memory overrides `acquire`, `release` and all three `start_*`. It
    may write into another rank's memory once that rank has started the same operation: the rank has acquired the memory
    by then, and does not read it before its wait. As sizes differ, the n-th buffer of each rank has another offset in
    its heap, which a rank sends to the others with the signal of its start. `wait` returns when all writers have
    signalled that they are done, and when this rank's own writes have completed. Memory that is `kept` may outlive the
    step: it is taken from the heap until no tensor refers to it, or is ordinary memory into which `wait` copies. A new
    transport is made for every call and every part of a group, so a heap belongs to the group, as `RankGroup.buffers`
    do. `tests/unit_tests/executor/test_one_sided_transport.py` has such a transport over threads.

    Args:
        group: the ranks.
        transport: the plan's record: the name, and the hosts of the ranks if the name requires them.
    """

    def __init__(self, group: RankGroup, transport: Transport) -> None:
        self.group, self.transport = group, transport

    def acquire(self, size: int, device: torch.device, *, kept: bool = False) -> Tensor:
        """Returns `[size]` uninitialised bytes to receive a message in.

        Args:
            size: number of bytes.
            device: device of the message.
            kept: False if the caller reads the message and then calls `release`. True if the memory must stay valid
                for as long as a tensor refers to it, for example because autograd saves it for backward.
        """
        if kept:
            return torch.empty(size, dtype=torch.uint8, device=device)
        return self.group.buffers.acquire(size, device)

    def release(self, *tensors: Tensor) -> None:
        """Takes back memory that `acquire` returned, or views of it, and send buffers of the group.

        It ignores other tensors, also those that were acquired as `kept`.
        """
        self.group.buffers.release(*tensors)

    @abstractmethod
    def start_all_to_all(self, received: Tensor, sent: Tensor, split_counts: SplitCounts) -> Pending:
        """Sends piece r of `sent` to rank r, and receives piece r of `received` from it.

        The rank's piece for itself is copied. If it is left out of `sent`, the caller writes it to `received`, which it
        may do while messages are sent.

        Args:
            received, sent: tensors of the same type.
            split_counts: the counts of all ranks, which a transport needs to pass on messages of others.
        """

    @abstractmethod
    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """Fills `received` with every rank's `sent`, in rank order; all ranks send equally much."""

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts all messages together, such as a step of a ring; those of one pair of ranks stay in order.

        Every rank sends and receives at least one message, which may be empty.
        """
        return self.group.start_messages(sends, receives)

    def empty_message(self, like: Tensor) -> Message:
        """Returns the message without elements to itself by which an idle rank takes part in an operation.

        Args:
            like: a flat tensor of the type and on the device of the other ranks' tensors.
        """
        return Message(like[:0], self.group.rank)
