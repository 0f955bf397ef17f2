"""`ThreadGroup`: a group whose ranks are threads of one process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError, PeerError
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups.base import (
    Agreed,
    Message,
    Pending,
    RankGroup,
    check_peers,
    check_splits,
    keep_own,
    unshared_lines,
)
from megatron_cp.torch_private import no_modes


class ThreadGroup(RankGroup):
    """A group whose ranks are threads of one process. `ThreadGroup.create(size)` makes all members, one a thread.

    Sent tensors are copied, as by a network. A rank raises `PeerError` and does not hang if it waits longer than
    `timeout` seconds, if its group was aborted because another rank failed, or if it is sent another message than it
    expects.
    """

    def __init__(
        self, rank: int, size: int, mailboxes: list[list[SimpleQueue[Any]]], aborted: threading.Event, timeout: float
    ) -> None:
        self.rank, self.size = rank, size
        self._mailboxes = mailboxes  # [sender][receiver]
        self._awaited: list[deque[_Awaited]] = [deque() for _ in range(size)]  # by sender, in order
        self._aborted = aborted
        self._limit = timeout

    @classmethod
    def create(cls, size: int, timeout: float = 60.0) -> list[ThreadGroup]:
        if size < 1:
            raise ArgumentError("size", size, "an integer of at least 1")
        mailboxes: list[list[SimpleQueue[Any]]] = [[SimpleQueue() for _ in range(size)] for _ in range(size)]
        aborted = threading.Event()
        return [cls(rank, size, mailboxes, aborted, timeout) for rank in range(size)]

    @property
    def patience(self) -> float:
        return self._limit

    def has_failed(self) -> bool:
        return self._aborted.is_set()

    def abort(self) -> None:
        """Fails all current and later waits of all ranks."""
        self._aborted.set()
        for row in self._mailboxes:
            for mailbox in row:
                mailbox.put(None)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        check_splits(received, received_splits, "received_splits", self.size)
        check_splits(sent, sent_splits, "sent_splits", self.size)
        outgoing, incoming = sent.split(sent_splits), received.split(received_splits)
        keep_own(incoming[self.rank], outgoing[self.rank])
        others = [peer for peer in range(self.size) if peer != self.rank]
        for peer in others:
            self._put(outgoing[peer], peer)
        return self._arrivals((peer, incoming[peer]) for peer in others)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        shares = [sent.numel()] * self.size
        return self.start_all_to_all(received, sent.repeat(self.size), shares, shares)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        check_peers((*sends, *receives), self.rank)
        for message in sends:
            if message.peer != self.rank:
                self._put(message.tensor, message.peer)
        return self._arrivals((message.peer, message.tensor) for message in receives if message.peer != self.rank)

    def barrier(self) -> None:
        token = torch.zeros(self.size, dtype=torch.uint8, device="cpu")
        self.all_to_all(torch.empty_like(token), token, [1] * self.size, [1] * self.size)

    def _put(self, piece: Tensor, peer: int) -> None:
        with no_modes():  # counters of copied activations must not count the transfer itself
            sent = _Sent(piece.detach().clone(), self.activity, self.details, self.agreed)
        self._mailboxes[self.rank][peer].put(sent)

    def _arrivals(self, pieces: Iterable[tuple[int, Tensor]]) -> Pending:
        expected = []
        for peer, piece in pieces:
            expected.append((peer, _Awaited(piece, self.activity, self.details, self.agreed)))
            self._awaited[peer].append(expected[-1][1])
        return _Arrivals(self, expected)

    def receive(self, piece: _Awaited, peer: int) -> None:
        """Receives a piece, after those from the same rank that were started before it."""
        while not piece.has_arrived:
            first = self._awaited[peer].popleft()
            self._take(first, peer)
            first.has_arrived = True

    def _take(self, awaited: _Awaited, peer: int) -> None:
        here = f"rank {self.rank} of {self.size}, in {_describe(awaited.activity)}"
        try:
            arrived = None if self._aborted.is_set() else self._mailboxes[peer][self.rank].get(timeout=self._limit)
        except Empty:
            raise PeerError(f"{here}: waited {self._limit} s for rank {peer}", rank=self.rank, peer=peer) from None
        if arrived is None:
            raise PeerError(f"{here}: stopped, since another rank of its group failed", rank=self.rank, peer=peer)
        found, piece = arrived.tensor, awaited.tensor
        if found.shape != piece.shape or found.dtype != piece.dtype or arrived.activity != awaited.activity:
            own, theirs = unshared_lines([awaited.lines(), arrived.lines()])
            raise PeerError(
                f"{here}: expects {_describe_tensor(piece)} from rank {peer}, which sent {_describe_tensor(found)} in "
                f"{_describe(arrived.activity)}"
                + "".join(
                    f"\n  rank {rank}'s call: {'; '.join(lines)}"
                    for rank, lines in ((self.rank, own), (peer, theirs))
                    if lines
                ),
                rank=self.rank, peer=peer,
            )  # fmt: skip
        with no_modes():
            piece.detach().copy_(found)


@dataclass
class _Sent:
    """A piece in a mailbox, and the activity in which it was sent."""

    tensor: Tensor
    activity: str
    details: tuple[str, ...]
    agreed: Agreed

    def lines(self) -> tuple[str, ...]:
        """Returns the lines that describe the activity."""
        return self.details or self.agreed.lines(self.activity)


@dataclass
class _Awaited(_Sent):
    """A piece that is expected in a mailbox, and the activity that waits for it."""

    has_arrived: bool = False


def _describe(activity: str) -> str:
    return activity or "a transfer of the caller"


def _describe_tensor(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


class _Arrivals(Pending):
    """Pieces that the other ranks put into their mailboxes for this rank."""

    def __init__(self, group: ThreadGroup, expected: list[tuple[int, _Awaited]]) -> None:
        self._group, self._expected = group, expected

    def wait(self) -> None:
        for peer, piece in self._expected:
            self._group.receive(piece, peer)
        self._expected = []
