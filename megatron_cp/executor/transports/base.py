"""`GroupTransport`: what a transport must do and promise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup
from megatron_cp.plan.transport import Transport


class GroupTransport(ABC):
    """How messages travel between the ranks of one group, seen from one rank, and the memory in which they land.

    All transports bring the same bytes to the same places. They differ in the messages that they make of an operation,
    in when these travel, and in whose memory they land.

    A caller acquires memory, starts an operation that fills it, waits, reads, and releases:

        received = transport.acquire(size, device)
        pending = transport.start_all_to_all(received, sent, split_counts)
        ...                        # computes meanwhile
        pending.wait()
        ...                        # reads `received`
        transport.release(received)

    Callers promise:

    - Every rank makes the same calls of `acquire` and `start_*` in the same order, and waits in the same order. Sizes
      differ from rank to rank and may be zero. The order of releases may differ, too.
    - What is received lands in memory of `acquire`: in all of it, or in a contiguous part of it. What is sent lies in
      any memory. Both are contiguous and flat, and from start to wait the caller touches neither.
    - One thread of a rank calls at a time.

    A transport promises:

    - `start_*` does not wait for other ranks; callers rely on it to compute while messages travel. `wait` of what was
      started returns when all of `received` is written, and `sent` is the caller's again. On CUDA both are true for
      work that is queued from then on.
    - Memory that was acquired is nobody else's until it is released, or, if `kept`, for as long as a tensor refers to
      it.
    - Every rank starts equally many operations of the group, in the same order. A rank that is idle in one sends
      `nothing`: backends number what they start, and debugging tools compare the numbers of the ranks.
    - Errors show `group.activity`, which the caller has set before `start_*`. A transport that starts operations of the
      group in `wait` sets it again before, since other operations may have been started meanwhile.

    A transport over symmetric memory, whose ranks write into each other's, overrides `acquire`, `release` and all three
    `start_*`. It may write into another rank's memory from the time on when that rank has started the same operation:
    the rank has acquired the memory by then, and it reads none of it before its wait. As sizes differ, the n-th
    memory of each rank lies elsewhere in its heap: a rank tells the others where with a signal of its start. `wait`
    returns when all who write here have signalled that they have, and when the own writes have left. Memory that is
    `kept` may outlive the step: it is taken from the heap until no tensor refers to it, or it is ordinary memory into
    which `wait` copies. Transports are made anew for every call and for every part of a group, so a heap belongs to the
    group, as `RankGroup.buffers` do. `tests/unit_tests/executor/test_one_sided_transport.py` has one over threads.

    Args:
        group: the ranks.
        transport: its name, and the hosts of the ranks where the name asks for them.
    """

    def __init__(self, group: RankGroup, transport: Transport) -> None:
        self.group, self.transport = group, transport

    def acquire(self, size: int, device: torch.device, *, kept: bool = False) -> Tensor:
        """`[size]` unwritten bytes in which a message lands.

        Args:
            size: in bytes.
            device: of the message.
            kept: False: the caller reads the message and gives the memory to `release`. True: the memory is the
                caller's for as long as it refers to it, such as what autograd keeps for backward.
        """
        if kept:
            return torch.empty(size, dtype=torch.uint8, device=device)
        return self.group.buffers.acquire(size, device)

    def release(self, *tensors: Tensor) -> None:
        """Takes back what `acquire` returned, or views of it, and buffers of the group that were sent from.

        Other tensors are left alone, those that were acquired as `kept` among them.
        """
        self.group.buffers.release(*tensors)

    @abstractmethod
    def start_all_to_all(self, received: Tensor, sent: Tensor, split_counts: SplitCounts) -> Pending:
        """Piece r of `sent` goes to rank r, and piece r of `received` comes from it; the own piece is copied.

        Or it is left out of `sent`, and is the caller's, who writes it to `received`, also while messages travel.

        Args:
            received, sent: of one type.
            split_counts: of all ranks: who passes messages on knows how much others send each other.
        """

    @abstractmethod
    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """Fills `received` with every rank's `sent`, in rank order; all ranks send equally much."""

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts all messages together; those of one pair of ranks stay in order. The steps of a ring.

        Every rank sends some, if empty ones, and receives some.
        """
        return self.group.start_messages(sends, receives)

    def nothing(self, like: Tensor) -> Message:
        """The message by which a rank that is idle takes part in an operation: to itself, without elements.

        Args:
            like: a flat tensor where those of the other ranks are.
        """
        return Message(like[:0], self.group.rank)
