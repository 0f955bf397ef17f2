"""`RankGroup`: the ranks of one context-parallel group, and the few ways in which they talk.

Two implementations: `TorchGroup` over any torch.distributed backend, and `ThreadGroup`, whose ranks are threads of one
process and which most tests use because it starts in microseconds.
"""

from __future__ import annotations

import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_cp.errors import ArgumentError


class Message(NamedTuple):
    """A contiguous tensor to send to, or to receive from, one rank of the group."""

    tensor: Tensor
    peer: int


class RankGroup(ABC):
    """The ranks of one group. Every method is collective: all ranks of the group call it in the same order.

    Attributes:
        rank: this rank's place in the group.
        size: the number of ranks.
    """

    rank: int
    size: int

    @abstractmethod
    def all_to_all(self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]) -> None:
        """Sends piece r of `sent` to rank r and fills piece r of `received` from it.

        Both tensors are contiguous and flat; splits count elements and may be zero.
        """

    @abstractmethod
    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        """Fills flat `received` with every rank's flat `sent`, in rank order; all ranks send equally much."""

    @abstractmethod
    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Starts all messages together and returns when they have arrived. Messages of one pair stay in order."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has come this far."""

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Every rank's `value`, in rank order; all ranks send equally many. For set-up: it synchronises."""
        everyone = torch.empty(self.size * len(value), dtype=torch.uint8)
        self.host_all_gather(everyone, torch.frombuffer(bytearray(value), dtype=torch.uint8))
        return [piece.numpy().tobytes() for piece in everyone.split(len(value))]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. For set-up: it pickles and it synchronises."""
        own = pickle.dumps(value)
        sizes = [int.from_bytes(size, "little") for size in self.all_gather_bytes(len(own).to_bytes(8, "little"))]
        padded = self.all_gather_bytes(own.ljust(max(sizes), b"\0"))
        return [pickle.loads(piece[:size]) for piece, size in zip(padded, sizes, strict=True)]

    def host_all_gather(self, received: Tensor, sent: Tensor) -> None:
        """`all_gather` of host tensors, also where the group itself only moves device tensors."""
        self.all_gather(received, sent)


class TorchGroup(RankGroup):
    """A torch.distributed process group, on any backend.

    Args:
        group: the process group.
        host_group: a group of the same ranks that can move host tensors (gloo), for what happens outside a step.
            None where `group` can do it itself.
    """

    def __init__(self, group: dist.ProcessGroup, host_group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.host_group = host_group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    def all_to_all(self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]) -> None:
        _check_splits(received, received_splits, "received_splits", self.size)
        _check_splits(sent, sent_splits, "sent_splits", self.size)
        dist.all_to_all_single(received, sent, received_splits, sent_splits, group=self.group)

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        dist.all_gather_into_tensor(received, sent, group=self.group)

    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        _check_peers((*sends, *receives), self.rank)
        operations = [
            dist.P2POp(operation, message.tensor, group=self.group, group_peer=message.peer)
            for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
            for message in messages
            if message.tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def host_all_gather(self, received: Tensor, sent: Tensor) -> None:
        if self.host_group is not None:
            dist.all_gather_into_tensor(received, sent, group=self.host_group)
        elif dist.get_backend(self.group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            on_device = received.to(device)
            dist.all_gather_into_tensor(on_device, sent.to(device), group=self.group)
            received.copy_(on_device)
        else:
            dist.all_gather_into_tensor(received, sent, group=self.group)


class ThreadGroup(RankGroup):
    """Ranks as threads of one process. `ThreadGroup.create(size)` makes the whole group, one member a thread.

    Sent tensors are copied, as a wire would. A rank that waits longer than `timeout` seconds, or whose group was
    aborted because another rank failed, raises `BrokenPipeError` instead of hanging.
    """

    def __init__(
        self, rank: int, size: int, mailboxes: list[list[SimpleQueue[Any]]], aborted: threading.Event, timeout: float
    ) -> None:
        self.rank, self.size = rank, size
        self._mailboxes = mailboxes  # [sender][receiver]
        self._aborted = aborted
        self._timeout = timeout

    @classmethod
    def create(cls, size: int, timeout: float = 60.0) -> list[ThreadGroup]:
        if size < 1:
            raise ArgumentError("size", size, "an integer of at least 1")
        mailboxes: list[list[SimpleQueue[Any]]] = [[SimpleQueue() for _ in range(size)] for _ in range(size)]
        aborted = threading.Event()
        return [cls(rank, size, mailboxes, aborted, timeout) for rank in range(size)]

    def abort(self) -> None:
        """Makes every rank that waits, now or later, fail."""
        self._aborted.set()
        for row in self._mailboxes:
            for mailbox in row:
                mailbox.put(None)

    def all_to_all(self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]) -> None:
        _check_splits(received, received_splits, "received_splits", self.size)
        _check_splits(sent, sent_splits, "sent_splits", self.size)
        for peer, piece in enumerate(sent.split(sent_splits)):
            self._put(piece, peer)
        for peer, piece in enumerate(received.split(received_splits)):
            self._take(piece, peer)

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        self.all_to_all(received, sent.repeat(self.size), [sent.numel()] * self.size, [sent.numel()] * self.size)

    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        _check_peers((*sends, *receives), self.rank)
        for message in sends:
            self._put(message.tensor, message.peer)
        for message in receives:
            self._take(message.tensor, message.peer)

    def barrier(self) -> None:
        token = torch.zeros(self.size, dtype=torch.uint8)
        self.all_to_all(torch.empty_like(token), token, [1] * self.size, [1] * self.size)

    def _put(self, piece: Tensor, peer: int) -> None:
        with _disable_current_modes():  # the wire is no copy of an activation: counters must not see it
            self._mailboxes[self.rank][peer].put(piece.detach().clone())

    def _take(self, piece: Tensor, peer: int) -> None:
        try:
            arrived = None if self._aborted.is_set() else self._mailboxes[peer][self.rank].get(timeout=self._timeout)
        except Empty:
            raise BrokenPipeError(f"rank {self.rank} waited {self._timeout} s for rank {peer}") from None
        if arrived is None:
            raise BrokenPipeError(f"rank {self.rank} stopped: another rank of its group failed")
        if arrived.shape != piece.shape or arrived.dtype != piece.dtype:
            raise RuntimeError(
                f"rank {peer} sent {tuple(arrived.shape)} {arrived.dtype}, "
                f"rank {self.rank} expects {tuple(piece.shape)} {piece.dtype}"
            )
        with _disable_current_modes():
            piece.detach().copy_(arrived)


def as_rank_group(group: RankGroup | dist.ProcessGroup | None, cp_size: int) -> RankGroup:
    """A group to run a plan over `cp_size` ranks on: a `RankGroup` as it is, a process group wrapped.

    None is this rank alone, where `cp_size` is 1.

    Raises:
        ArgumentError: the group has another number of ranks, or is None for several.
    """
    if group is None:
        if cp_size > 1:
            raise ArgumentError("group", None, f"a group of the plan's {cp_size} ranks")
        return ThreadGroup.create(1)[0]
    ranks = group if isinstance(group, RankGroup) else TorchGroup(group)
    if ranks.size != cp_size:
        raise ArgumentError("group", f"{ranks.size} ranks", f"the {cp_size} ranks that the plan is for")
    return ranks


def _check_peers(messages: Sequence[Message], rank: int) -> None:
    if any(message.peer == rank for message in messages):
        raise ArgumentError("peer", rank, "another rank of the group")


def _check_splits(tensor: Tensor, splits: list[int], name: str, size: int) -> None:
    if len(splits) != size or sum(splits) != tensor.numel():
        raise ArgumentError(name, splits, f"{size} counts that add up to the tensor's {tensor.numel()} elements")
