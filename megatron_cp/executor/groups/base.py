"""`RankGroup`: the ranks of one context-parallel group, and the few ways in which they talk.

What moves data is started, and waited for later: `start_all_to_all(...).wait()`. What two ranks send each other arrives
in the order of starting, whatever is waited for first.
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
from torch.utils._python_dispatch import _disable_current_modes

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.buffers import Buffers


class Message(NamedTuple):
    """A contiguous tensor to send to, or to receive from, one rank of the group."""

    tensor: Tensor
    peer: int


class Pending(ABC):
    """A transfer under way. Neither what is sent nor what is received may be touched before `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when everything has arrived (on CUDA: when it will have, for work that is queued from now on).

        Raises:
            PeerError: another rank does not answer, has ended, or does something else.
        """


class Done(Pending):
    """A transfer of nothing."""

    def wait(self) -> None:
        pass


class Agreed:
    """What the ranks of a group have compared already: it is not compared again.

    Every rank adds the same at the same time, so that all forget the same, oldest first. Calls and plans are forgotten
    apart: a job has few kinds of calls for all of its time, and new plans for every batch.

    Attributes:
        compares_calls: calls are compared.
        num_calls: how many this rank has made.
    """

    _MOST = 4096  # of each

    def __init__(self) -> None:
        self.compares_calls = True
        self.num_calls = 0
        self._calls: dict[Any, str] = {}
        self._plans: dict[bytes, str] = {}
        self._lines: dict[str, tuple[str, ...]] = {}

    def call(self, key: object) -> str | None:
        """The mark of a kind of call, or None if it is not known."""
        return self._calls.get(key)

    def plan(self, key: bytes) -> str | None:
        """The mark of a plan or a layout, or None if it is not known."""
        return self._plans.get(key)

    def add_call(self, key: object, digest: bytes, lines: Sequence[str]) -> str:
        """Remembers a kind of call that is equal on all ranks. Returns its mark, 8 letters that stand for it."""
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
        """What was compared of the call and the plan whose marks an activity bears, as in `attention [0a1b2c3d...]`."""
        found = re.search(r"\[((?:[0-9a-f]{8})+)\]", activity)
        marks = re.findall(".{8}", found[1]) if found else []
        return tuple(line for mark in marks for line in self._lines.get(mark, ()))


def differences(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Of the lines of several ranks, for each those that not all have: all of them, where the first is not the same."""
    if len({tuple(of_rank[:1]) for of_rank in lines}) > 1:
        return [list(of_rank) for of_rank in lines]
    shared = set(lines[0]).intersection(*lines[1:])
    return [[line for line in of_rank if line not in shared] for of_rank in lines]


class RankGroup(ABC):
    """The ranks of one group. Every method is collective: all ranks of the group call it in the same order.

    From one thread at a time: who waits for what is one thing of a rank.

    Attributes:
        rank: this rank's place in the group.
        size: the number of ranks.
        activity: what this rank does with the group now, in words that are the same on every rank. Errors of waits
            show it, and where the backend allows it, messages arrive in the activity that they were sent in, or not.
        details: what is compared now, line by line, for errors alone; may differ from rank to rank.
    """

    rank: int
    size: int
    activity: str = ""
    details: tuple[str, ...] = ()

    @cached_property
    def buffers(self) -> Buffers:
        """What this rank sends from, and receives what is read once in."""
        return Buffers()

    @cached_property
    def agreed(self) -> Agreed:
        """What the ranks have compared."""
        return Agreed()

    @abstractmethod
    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        """Sends piece r of `sent` to rank r and fills piece r of `received` from it.

        Both tensors are contiguous and flat; splits count elements and may be zero. Where a rank sends itself nothing
        and receives something from itself, that is left alone: see `keep_own`.
        """

    @abstractmethod
    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """Fills flat `received` with every rank's flat `sent`, in rank order; all ranks send equally much."""

    @abstractmethod
    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts all messages together. Messages of one pair stay in order.

        A rank that has none while others have some sends itself an empty one, and receives that: backends that number
        what ranks start, such as NCCL, want each operation on every rank, and its tensor says on which device.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has come this far."""

    def all_to_all(self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]) -> None:
        """`start_all_to_all`, waited for."""
        self.start_all_to_all(received, sent, received_splits, sent_splits).wait()

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        """`start_all_gather`, waited for."""
        self.start_all_gather(received, sent).wait()

    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """`start_messages`, waited for."""
        self.start_messages(sends, receives).wait()

    def part(self, ranks: range) -> RankGroup:
        """This group, or the part of it that `ranks` are, this rank among them."""
        return self if len(ranks) == self.size else Part(self, ranks)

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Every rank's `value`, in rank order; all ranks send equally many. For set-up: it synchronises."""
        # On the host whatever torch's default device is: layers are built under others, such as meta.
        everyone = torch.empty(self.size * len(value), dtype=torch.uint8, device="cpu")
        self.host_all_gather(everyone, torch.frombuffer(bytearray(value), dtype=torch.uint8))
        return [piece.numpy().tobytes() for piece in everyone.split(len(value))]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. For set-up: it pickles and it synchronises."""
        data = pickle.dumps(value)
        sizes = [int.from_bytes(size, "little") for size in self.all_gather_bytes(len(data).to_bytes(8, "little"))]
        padded = self.all_gather_bytes(data.ljust(max(sizes), b"\0"))
        return [pickle.loads(piece[:size]) for piece, size in zip(padded, sizes, strict=True)]

    def host_all_gather(self, received: Tensor, sent: Tensor) -> None:
        """`all_gather` of host tensors, also where the group itself only moves device tensors."""
        self.all_gather(received, sent)


class Part(RankGroup):
    """Some ranks of a group, talking through it: what they start, all other parts of the group start too.

    Args:
        parent: the group.
        ranks: of the parent, this rank among them; rank n of the part is `ranks[n]`.
    """

    def __init__(self, parent: RankGroup, ranks: range) -> None:
        self._parent, self._ranks = parent, ranks
        self.buffers = parent.buffers
        self.rank, self.size = ranks.index(parent.rank), len(ranks)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
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
    """Copies what a rank sends itself, unless that is left out: then who sends writes it to `received`."""
    if sent.numel():
        with _disable_current_modes():  # the wire is no copy of an activation: counters must not see it
            received.copy_(sent)


def check_peers(messages: Sequence[Message], rank: int) -> None:
    """Refuses messages to oneself, but for the empty ones of a rank that is idle."""
    if any(message.peer == rank and message.tensor.numel() for message in messages):
        raise ArgumentError("peer", rank, "another rank of the group")


def check_splits(tensor: Tensor, splits: list[int], name: str, size: int) -> None:
    """Refuses splits that are not the tensor's."""
    if len(splits) != size or sum(splits) != tensor.numel():
        raise ArgumentError(name, splits, f"{size} counts that add up to the tensor's {tensor.numel()} elements")
