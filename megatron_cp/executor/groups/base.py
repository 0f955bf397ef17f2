"""`Wire`, what carries messages between ranks, and `RankGroup`, the ranks of one context-parallel group.

Operations that move data are started, and waited for later: `start_all_to_all(...).wait()`. The messages between two
ranks arrive in the order in which they were started, in any order of waits.
"""

from __future__ import annotations

import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.torch_private import no_modes


class Message(NamedTuple):
    """A contiguous tensor to send to, or to receive from, one rank of the group."""

    tensor: Tensor
    peer: int


class Pending(ABC):
    """A transfer that was started. Its tensors may be neither read nor written before `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until all messages have arrived (on CUDA it orders later work on the stream after them).

        Raises:
            PeerError: another rank does not answer, has ended, or calls another operation.
        """


class Done(Pending):
    """A transfer without messages."""

    def wait(self) -> None:
        pass


class Agreed:
    """The calls and plans that the ranks of a group have compared, which are not compared again.

    All ranks add the same entries at the same time, so that all drop the same ones, the oldest first. Calls and plans
    are dropped separately, since a job has few kinds of calls but new plans for every batch.

    Attributes:
        compares_calls: True if calls are compared.
        num_calls: number of calls that this rank has made.
    """

    _MOST = 4096  # calls, and plans

    def __init__(self) -> None:
        self.compares_calls = True
        self.num_calls = 0
        self._calls: dict[Any, str] = {}
        self._plans: dict[bytes, str] = {}
        self._lines: dict[str, tuple[str, ...]] = {}

    def call(self, key: object) -> str | None:
        """Returns the mark of a kind of call, or None if it is not known."""
        return self._calls.get(key)

    def plan(self, key: bytes) -> str | None:
        """Returns the mark of a plan or a layout, or None if it is not known."""
        return self._plans.get(key)

    def add_call(self, key: object, digest: bytes, lines: Sequence[str]) -> str:
        """Remembers a kind of call that is equal on all ranks. Returns its mark, an identifier of 8 letters."""
        return self._add(self._calls, key, digest, lines)

    def add_plan(self, key: bytes, lines: Sequence[str]) -> str:
        """Remembers a plan or a layout that is equal on all ranks. Returns its mark."""
        return self._add(self._plans, key, key, lines)

    def _add(self, known: dict[Any, str], key: object, digest: bytes, lines: Sequence[str]) -> str:
        known[key] = mark = digest.hex()[:8]
        self._lines[mark] = tuple(lines)
        if len(known) > self._MOST:
            self._lines.pop(known.pop(next(iter(known))), None)
        return mark

    def lines(self, activity: str) -> tuple[str, ...]:
        """Returns the compared lines of the call and plan whose marks an activity has, `attention [0a1b2c3d...]`."""
        found = re.search(r"\[((?:[0-9a-f]{8})+)\]", activity)
        marks = re.findall(".{8}", found[1]) if found else []
        return tuple(line for mark in marks for line in self._lines.get(mark, ()))


def unshared_lines(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns, for each rank, the lines that not all ranks have, or all of its lines if the first lines differ."""
    if len({tuple(of_rank[:1]) for of_rank in lines}) > 1:
        return [list(of_rank) for of_rank in lines]
    shared = set(lines[0]).intersection(*lines[1:])
    return [[line for line in of_rank if line not in shared] for of_rank in lines]


class Wire(ABC):
    """Carrier of messages between one rank and the others: a group itself, or a transport that is laid over a group.

    All wires deliver the same bytes to the same places. They differ in the messages that an operation consists of, in
    when these are sent, and in the memory that receives them.

    A caller acquires memory, starts an operation that fills it, waits, reads, and releases:

        received = wire.acquire(size, device)
        pending = wire.start_all_gather(received, sent)
        ...                        # computes meanwhile
        pending.wait()
        ...                        # reads `received`
        wire.release(received)

    The contract for callers:

    - Every rank makes the same calls of `acquire` and `start_*` in the same order, and waits in the same order. Sizes
      differ from rank to rank and may be zero. The order of releases may differ, too.
    - `received` is memory from `acquire`, all of it or a contiguous part; a group itself fills any memory. `sent` may
      be any memory. Both are contiguous and flat, and the caller accesses neither between start and wait.
    - A rank calls from one thread at a time.

    The contract for wires:

    - `start_*` does not wait for other ranks, so that callers compute while messages are sent. `wait` returns when all
      of `received` is written and `sent` may be used again. On CUDA both hold for work that is queued after it.
    - Acquired memory is used for nothing else until it is released, or, if `kept`, for as long as a tensor refers to
      it.
    - Errors show the group's `activity`, which the caller has set before `start_*`. A transport that starts operations
      of the group in `wait` sets it again first, since other operations may have been started meanwhile.
    - Over a group, every rank starts equally many operations of it, in the same order. A rank that is idle in one sends
      an `empty_message`, since backends number operations, and debugging tools compare the numbers of the ranks.

    A transport whose ranks write into each other's memory overrides `acquire` and `release` too. It may write into
    another rank's memory once that rank has started the same operation: the rank has acquired the memory by then, and
    does not read it before its wait. As sizes differ, the n-th buffer of each rank has another offset in its heap,
    which a rank sends to the others with the signal of its start. `wait` returns when all writers have signalled that
    they are done, and when this rank's own writes have completed. Memory that is `kept` may outlive the step: it is
    taken from the heap until no tensor refers to it, or is ordinary memory into which `wait` copies. A transport is
    made for every call and every part of a group, so a heap belongs to the group, as `buffers` do.
    `tests/unit_tests/executor/test_one_sided_transport.py` has such a transport over threads.
    """

    @cached_property
    def buffers(self) -> Buffers:
        """The pool of this rank's send buffers and of receive buffers that are read once."""
        return Buffers()

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
        return self.buffers.acquire(size, device)

    def release(self, *tensors: Tensor) -> None:
        """Takes back memory from `acquire` or `buffers`, or views of it.

        It ignores other tensors, also those that were acquired as `kept`.
        """
        self.buffers.release(*tensors)

    @abstractmethod
    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        """Sends piece r of `sent` to rank r and fills piece r of `received` from it.

        The rank's piece for itself is copied.

        Args:
            received, sent: contiguous, flat tensors of the same type.
            received_splits, sent_splits: the elements of each piece, which may be zero.
            split_counts: the elements that any rank sends to any other. A transport in which ranks pass on messages of
                others needs them; the `Communicator` always gives them.
        """

    @abstractmethod
    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """Fills flat `received` with every rank's flat `sent`, in rank order; all ranks send equally much."""

    @abstractmethod
    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts all messages together, such as a step of a ring. Messages of one pair of ranks stay in order.

        A rank without messages, while others have some, sends itself an `empty_message` and receives it, because
        backends that number operations, such as NCCL, need each operation on every rank.
        """


class RankGroup(Wire):
    """The ranks of one group. Every method is collective: all ranks of the group call it in the same order.

    A rank must call its methods from one thread at a time.

    Attributes:
        rank: this rank's place in the group.
        size: the number of ranks.
        activity: description of the current operation, the same on every rank. Errors of waits show it, and where the
            backend allows it, a message is received only in the activity in which it was sent.
        details: the lines that are being compared, for errors only; they may differ from rank to rank.
        path: the ranges of ranks by which `part` led here from a whole group.
        process_group: torch.distributed's group of the whole group's ranks; None if there is none.
    """

    rank: int
    size: int
    activity: str = ""
    details: tuple[str, ...] = ()
    path: tuple[range, ...] = ()
    process_group: Any = None

    @cached_property
    def agreed(self) -> Agreed:
        """The calls and plans that the ranks have compared."""
        return Agreed()

    @property
    def patience(self) -> float:
        """The seconds that a rank waits for another."""
        return 600.0

    def has_failed(self) -> bool:
        """Returns True once this rank knows that another one has failed."""
        return False

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every rank has called it."""

    def all_to_all(self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]) -> None:
        """Starts `start_all_to_all` and waits for it."""
        self.start_all_to_all(received, sent, received_splits, sent_splits).wait()

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        """Starts `start_all_gather` and waits for it."""
        self.start_all_gather(received, sent).wait()

    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Starts `start_messages` and waits for it."""
        self.start_messages(sends, receives).wait()

    def part(self, ranks: range) -> RankGroup:
        """Returns the group of `ranks`, which include this rank."""
        return self if len(ranks) == self.size else Subgroup(self, ranks)

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Returns every rank's `value`, of equal lengths, in rank order. It synchronises, and is meant for set-up."""
        # The device is given because layers are built under other default devices, such as meta.
        everyone = torch.empty(self.size * len(value), dtype=torch.uint8, device="cpu")
        self.host_all_gather(everyone, torch.frombuffer(bytearray(value), dtype=torch.uint8))
        return [piece.numpy().tobytes() for piece in everyone.split(len(value))]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in rank order. It pickles and synchronises, and is meant for set-up."""
        data = pickle.dumps(value)
        sizes = [int.from_bytes(size, "little") for size in self.all_gather_bytes(len(data).to_bytes(8, "little"))]
        padded = self.all_gather_bytes(data.ljust(max(sizes), b"\0"))
        return [pickle.loads(piece[:size]) for piece, size in zip(padded, sizes, strict=True)]

    def host_all_gather(self, received: Tensor, sent: Tensor) -> None:
        """Runs `all_gather` on host tensors, also where the group itself moves device tensors only."""
        self.all_gather(received, sent)


class Subgroup(RankGroup):
    """A part of a group's ranks. Operations go through the group, and all its other parts start them too.

    Args:
        parent: the group.
        ranks: ranks of the parent, with this one; rank n of the subgroup is `ranks[n]`.
    """

    def __init__(self, parent: RankGroup, ranks: range) -> None:
        self._parent, self._ranks = parent, ranks
        self.path = (*parent.path, ranks)
        self.buffers, self.process_group = parent.buffers, parent.process_group
        self.rank, self.size = ranks.index(parent.rank), len(ranks)

    @property
    def patience(self) -> float:
        return self._parent.patience

    def has_failed(self) -> bool:
        return self._parent.has_failed()

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        check_splits(received, received_splits, "received_splits", self.size)
        check_splits(sent, sent_splits, "sent_splits", self.size)
        self._parent.activity = self.activity
        return self._parent.start_all_to_all(received, sent, self._spread(received_splits), self._spread(sent_splits))

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        others = [rank for rank in range(self.size) if rank != self.rank]
        pieces = received.view(self.size, -1)
        pieces[self.rank].copy_(sent)
        return self.start_messages(
            [Message(sent, peer) for peer in others], [Message(pieces[peer], peer) for peer in others]
        )

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self._parent.activity = self.activity
        return self._parent.start_messages(
            *(
                [Message(message.tensor, self._ranks[message.peer]) for message in messages]
                for messages in (sends, receives)
            )
        )

    def barrier(self) -> None:
        self._parent.barrier()

    def _spread(self, splits: list[int]) -> list[int]:
        spread = [0] * self._parent.size
        for rank, split in zip(self._ranks, splits, strict=True):
            spread[rank] = split
        return spread


def keep_own(received: Tensor, sent: Tensor) -> None:
    """Copies a rank's piece for itself, which is empty where rows or states go to other ranks only."""
    if sent.numel():
        with no_modes():  # counters of copied activations must not count the transfer itself
            received.copy_(sent)


def empty_message(like: Tensor, rank: int) -> Message:
    """Returns the message without elements to itself by which an idle rank takes part in an operation.

    Args:
        like: a flat tensor of the type and on the device of the other ranks' tensors.
        rank: this rank.
    """
    return Message(like[:0], rank)


def check_peers(messages: Sequence[Message], rank: int) -> None:
    """Refuses messages to this rank itself, except the empty ones of an idle rank."""
    if any(message.peer == rank and message.tensor.numel() for message in messages):
        raise ArgumentError("peer", rank, "another rank of the group")


def check_splits(tensor: Tensor, splits: list[int], name: str, size: int) -> None:
    """Refuses splits that do not add up to the tensor's elements."""
    if len(splits) != size or sum(splits) != tensor.numel():
        raise ArgumentError(name, splits, f"{size} counts that add up to the tensor's {tensor.numel()} elements")
