"""`RankGroup`: the ranks of one context-parallel group, and the few ways in which they talk.

Two implementations: `TorchGroup` over any torch.distributed backend, and `ThreadGroup`, whose ranks are threads of one
process and which most tests use because it starts in microseconds. `Part` is some ranks of either.

What moves data is started, and waited for later: `start_all_to_all(...).wait()`. What two ranks send each other arrives
in the order of starting, whatever is waited for first.
"""

from __future__ import annotations

import pickle
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
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
        """Returns when everything has arrived (on CUDA: when it will have, for work that is queued from now on)."""


class RankGroup(ABC):
    """The ranks of one group. Every method is collective: all ranks of the group call it in the same order.

    Attributes:
        rank: this rank's place in the group.
        size: the number of ranks.
    """

    rank: int
    size: int

    @cached_property
    def buffers(self) -> Buffers:
        """What this rank sends from, and receives what is read once in."""
        return Buffers()

    @abstractmethod
    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        """Sends piece r of `sent` to rank r and fills piece r of `received` from it.

        Both tensors are contiguous and flat; splits count elements and may be zero.
        """

    @abstractmethod
    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """Fills flat `received` with every rank's flat `sent`, in rank order; all ranks send equally much."""

    @abstractmethod
    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts all messages together. Messages of one pair stay in order."""

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


# Of each process group, for as long as it lives: an operation that is given one wraps it anew.
_buffers: WeakKeyDictionary[dist.ProcessGroup, Buffers] = WeakKeyDictionary()


class TorchGroup(RankGroup):
    """A torch.distributed process group, on any backend.

    Args:
        group: the process group.
        host_group: a group of the same ranks that can move host tensors (gloo), for what happens outside a step.
            None where `group` can do it itself.
    """

    def __init__(self, group: dist.ProcessGroup, host_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(group, dist.ProcessGroup):
            remedy = "Of a device mesh take mesh.get_group()."
            raise ArgumentError("group", group, "a torch.distributed group, a RankGroup, or None for one rank", remedy)
        self.group = group
        self.host_group = host_group
        self.buffers = _buffers.setdefault(group, Buffers())
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        _check_splits(received, received_splits, "received_splits", self.size)
        _check_splits(sent, sent_splits, "sent_splits", self.size)
        work = dist.all_to_all_single(received, sent, received_splits, sent_splits, group=self.group, async_op=True)
        return _Works([work], (received, sent))

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        work = dist.all_gather_into_tensor(received, sent, group=self.group, async_op=True)
        return _Works([work], (received, sent))

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        _check_peers((*sends, *receives), self.rank)
        if any(message.tensor.is_cuda for message in (*sends, *receives)):
            if "cuda:gloo" in dist.get_backend_config(self.group):
                return self._start_messages_by_host(sends, receives)
            return self._start_messages_together(sends, receives)
        return self._start_messages_apart(sends, receives)

    def _start_messages_apart(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        operations = [
            dist.P2POp(operation, message.tensor, group=self.group, group_peer=message.peer)
            for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
            for message in messages
            if message.tensor.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Works(works, tuple(message.tensor for message in (*sends, *receives)))

    def _start_messages_together(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """By one collective of bytes, for NCCL.

        It sends nothing for splits of zero, and wants every rank in its first operation, also one that has nothing to
        say.
        """
        sent, received = (sorted(messages, key=lambda message: message.peer) for messages in (sends, receives))
        device = (*sends, *receives)[0].tensor.device
        taken: list[Tensor] = []

        def together(messages: list[Message]) -> Tensor:
            if len(messages) == 1:  # as in a ring: it leaves, or arrives, where it belongs
                return _bytes_of(messages[0].tensor)
            taken.append(self.buffers.take(sum(message.tensor.nbytes for message in messages), device))
            return taken[-1]

        arrived, outgoing = together(received), together(sent)
        if len(sent) > 1:
            torch.cat([_bytes_of(message.tensor) for message in sent], out=outgoing)
        splits = ([sum(m.tensor.nbytes for m in messages if m.peer == peer) for peer in range(self.size)]
                  for messages in (received, sent))  # fmt: skip
        pending = self.start_all_to_all(arrived, outgoing, *splits)
        return _Unpacked(pending, arrived, received if len(received) > 1 else [], taken, self.buffers)

    def _start_messages_by_host(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Through memory of the host that the device reaches by itself: gloo sends nothing else from rank to rank."""
        staged = [
            [Message(self._staged(message.tensor), message.peer) for message in messages]
            for messages in (sends, receives)
        ]
        for message, copy in zip(sends, staged[0], strict=True):
            copy.tensor.copy_(_bytes_of(message.tensor), non_blocking=True)
        if any(message.tensor.is_cuda for message in sends):
            torch.cuda.current_stream(sends[0].tensor.device).synchronize()  # gloo reads at once
        pending = self._start_messages_apart(*staged)
        return _FromHost(pending, receives, staged, self.buffers)

    def _staged(self, tensor: Tensor) -> Tensor:
        return self.buffers.take(tensor.nbytes, tensor.device, pinned=tensor.is_cuda)

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


class _Works(Pending):
    """torch.distributed's handles, with the tensors that must live until they are done."""

    def __init__(self, works: list[Any], tensors: tuple[Tensor, ...]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], ()


class _Unpacked(Pending):
    """Bytes that belong into the tensors of messages once they have arrived, and the buffers that they take."""

    def __init__(
        self, pending: Pending, arrived: Tensor, messages: list[Message], taken: list[Tensor], buffers: Buffers
    ) -> None:
        self._pending, self._arrived, self._messages = pending, arrived, messages
        self._taken, self._buffers = taken, buffers

    def wait(self) -> None:
        self._pending.wait()
        if self._messages:
            pieces = self._arrived.split([message.tensor.nbytes for message in self._messages])
            for message, piece in zip(self._messages, pieces, strict=True):
                _bytes_of(message.tensor).copy_(piece)
        self._buffers.give(*self._taken)


class _FromHost(Pending):
    """Messages that arrive on the host, and go on to the device."""

    def __init__(
        self, pending: Pending, receives: Sequence[Message], staged: list[list[Message]], buffers: Buffers
    ) -> None:
        self._pending, self._receives, self._staged, self._buffers = pending, receives, staged, buffers

    def wait(self) -> None:
        self._pending.wait()
        for message, arrived in zip(self._receives, self._staged[1], strict=True):
            _bytes_of(message.tensor).copy_(arrived.tensor)  # waited for: the buffer is someone else's next
        self._buffers.give(*(message.tensor for messages in self._staged for message in messages))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


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
        self._awaited: list[deque[_Awaited]] = [deque() for _ in range(size)]  # by sender, in order
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

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        _check_splits(received, received_splits, "received_splits", self.size)
        _check_splits(sent, sent_splits, "sent_splits", self.size)
        for peer, piece in enumerate(sent.split(sent_splits)):
            self._put(piece, peer)
        return self._arrivals(enumerate(received.split(received_splits)))

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        shares = [sent.numel()] * self.size
        return self.start_all_to_all(received, sent.repeat(self.size), shares, shares)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        _check_peers((*sends, *receives), self.rank)
        for message in sends:
            self._put(message.tensor, message.peer)
        return self._arrivals((message.peer, message.tensor) for message in receives)

    def barrier(self) -> None:
        token = torch.zeros(self.size, dtype=torch.uint8)
        self.all_to_all(torch.empty_like(token), token, [1] * self.size, [1] * self.size)

    def _put(self, piece: Tensor, peer: int) -> None:
        with _disable_current_modes():  # the wire is no copy of an activation: counters must not see it
            self._mailboxes[self.rank][peer].put(piece.detach().clone())

    def _arrivals(self, pieces: Iterable[tuple[int, Tensor]]) -> Pending:
        expected = []
        for peer, piece in pieces:
            expected.append((peer, _Awaited(piece)))
            self._awaited[peer].append(expected[-1][1])
        return _Arrivals(self, expected)

    def bring(self, piece: _Awaited, peer: int) -> None:
        """Waits for a piece, and for those from the same rank that were started before it."""
        while not piece.is_here:
            first = self._awaited[peer].popleft()
            self._take(first.tensor, peer)
            first.is_here = True

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


@dataclass
class _Awaited:
    """A piece that will come through a mailbox."""

    tensor: Tensor
    is_here: bool = False


class _Arrivals(Pending):
    """What the other threads of a group will have put into their mailboxes."""

    def __init__(self, group: ThreadGroup, expected: list[tuple[int, _Awaited]]) -> None:
        self._group, self._expected = group, expected

    def wait(self) -> None:
        for peer, piece in self._expected:
            self._group.bring(piece, peer)
        self._expected = []


class Part(RankGroup):
    """Some ranks of a group, talking through it: what they start, all other parts of the group start too.

    Args:
        whole: the group.
        ranks: of the whole group, this rank among them; rank n of the part is `ranks[n]`.
    """

    def __init__(self, whole: RankGroup, ranks: range) -> None:
        self._whole, self._ranks = whole, ranks
        self.buffers = whole.buffers
        self.rank, self.size = ranks.index(whole.rank), len(ranks)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        _check_splits(received, received_splits, "received_splits", self.size)
        _check_splits(sent, sent_splits, "sent_splits", self.size)
        return self._whole.start_all_to_all(received, sent, self._spread(received_splits), self._spread(sent_splits))

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        others = [rank for rank in range(self.size) if rank != self.rank]
        pieces = received.view(self.size, -1)
        pieces[self.rank].copy_(sent)
        return self.start_messages(
            [Message(sent, peer) for peer in others], [Message(pieces[peer], peer) for peer in others]
        )

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self._whole.start_messages(
            *(
                [Message(message.tensor, self._ranks[message.peer]) for message in messages]
                for messages in (sends, receives)
            )
        )

    def barrier(self) -> None:
        self._whole.barrier()

    def _spread(self, splits: list[int]) -> list[int]:
        spread = [0] * self._whole.size
        for rank, split in zip(self._ranks, splits, strict=True):
            spread[rank] = split
        return spread


def as_rank_group(group: RankGroup | dist.ProcessGroup | None, cp_size: int) -> RankGroup:
    """A group to run a plan over `cp_size` ranks on: a `RankGroup` as it is, a process group wrapped.

    None is this rank alone, where `cp_size` is 1.

    Raises:
        ArgumentError: it is no group, has another number of ranks, or is None for several.
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
