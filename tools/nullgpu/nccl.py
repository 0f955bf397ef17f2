"""NCCL on the emulated device, among threads that are ranks: torch.distributed's collectives of CUDA tensors.

It is as hard on its callers as NCCL may be. What arrives is overwritten when a collective starts, and what is sent is
read when the last rank waits for it: who reads, writes or gives away either in between gets other numbers, and an
`OrderError` besides (`ordering`). The n-th collectives of all ranks must be the same one, with splits that agree.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_cp.executor.groups import RankGroup, TorchGroup
from megatron_cp.executor.launch import run_ranks
from tools.nullgpu import ordering
from tools.nullgpu.emulation import on_host

T = TypeVar("T")

BACKEND = "cuda:nccl"


def run_ranks_over_nccl(function: Callable[..., T], size: int, *args: Any, timeout: float = 120.0) -> list[T]:
    """`run_ranks` with threads whose group is a `TorchGroup` over NCCL. Checks the order of transfers.

    Args:
        function: the ranks' function.
        size: the number of ranks.
        args: its further arguments.
        timeout: seconds until the call fails.

    Raises:
        RankError: a rank raised; a collective was started otherwise on another rank, or not everywhere.
    """
    communicator = Communicator(size, 0.7 * timeout)  # before the ranks' own time is over, whose end says less
    with ordering.watching(), _answering():
        results = run_ranks(partial(_on_rank, communicator, function), size, *args, timeout=timeout)
    counts = [len(of_rank) for of_rank in communicator.started]
    if len(set(counts)) > 1:
        raise RuntimeError(f"ranks started {counts} collectives, which debugging tools of NCCL take for an error")
    return results


def _on_rank(communicator: Communicator, function: Callable[..., Any], group: RankGroup, *args: Any) -> Any:
    try:
        return function(TorchGroup(ProcessGroup(communicator, group.rank)), *args)
    except BaseException:
        communicator.abort()
        raise


@dataclass(eq=False)
class Collective:
    """A collective that one rank has started. Splits are in bytes."""

    kind: str
    received: Tensor
    sent: Tensor
    received_splits: list[int]
    sent_splits: list[int]
    transfer: int
    is_waited: bool = field(default=False)
    is_done: bool = field(default=False)


class Communicator:
    """The collectives of some ranks.

    Attributes:
        started: by each rank, in order.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.started: list[list[Collective]] = [[] for _ in range(size)]
        self._changed = threading.Condition()
        self._is_aborted = False
        self._barrier = threading.Barrier(size)

    def start(
        self, rank: int, kind: str, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Work:
        """Starts a rank's next collective."""
        for tensor in (received, sent):
            if not tensor.is_cuda or not tensor.is_contiguous():
                raise RuntimeError(f"NCCL moves contiguous CUDA tensors, not {tensor.device} {tensor.stride()}")
        if received.dtype != sent.dtype:
            raise RuntimeError(f"NCCL: {sent.dtype} is sent and {received.dtype} received")
        number = len(self.started[rank])
        assert ordering.active is not None
        transfer = ordering.active.start(f"{kind} {number} of rank {rank}", sent, received)
        with _disable_current_modes():
            if received.numel():
                on_host(received.view(torch.uint8)).fill_(0xFF)  # it may arrive from now on
        mine = Collective(kind, received, sent, received_splits, sent_splits, transfer)
        with self._changed:
            self.started[rank].append(mine)
            for other, of_rank in enumerate(self.started):
                if len(of_rank) > number:
                    _agree(number, rank, mine, other, of_rank[number])
        return Work(self, rank, number)

    def wait(self, rank: int, number: int) -> None:
        """Waits until all ranks wait for the collective, then moves all of its data."""
        mine = self.started[rank][number]
        with self._changed:
            mine.is_waited = True
            everyone = [of_rank[number] for of_rank in self.started if len(of_rank) > number]
            if len(everyone) == self.size and all(each.is_waited for each in everyone):
                _move(everyone)
                self._changed.notify_all()
            arrived = self._changed.wait_for(lambda: mine.is_done or self._is_aborted, self.timeout)
        if self._is_aborted:
            raise RuntimeError("NCCL: the communicator was aborted")
        if not arrived:
            late = [other for other, of_rank in enumerate(self.started)
                    if len(of_rank) <= number or not of_rank[number].is_waited]  # fmt: skip
            raise RuntimeError(f"NCCL: {mine.kind} {number}: ranks {late} did not wait for it in {self.timeout:g} s")
        assert ordering.active is not None
        ordering.active.wait(mine.transfer)

    def barrier(self) -> None:
        """Waits until all ranks have arrived."""
        self._barrier.wait(self.timeout)

    def abort(self) -> None:
        """Ends every wait."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()
        self._barrier.abort()


def _agree(number: int, rank: int, mine: Collective, other: int, theirs: Collective) -> None:
    """Checks that two ranks start the same collective, and that one receives as much as the other sends."""
    if mine.kind != theirs.kind:
        raise RuntimeError(f"NCCL: collective {number} is {mine.kind} on rank {rank} and {theirs.kind} on rank {other}")
    pairs = ((rank, mine, other, theirs), (other, theirs, rank, mine))
    for source, sender, target, receiver in pairs:
        sent, received = sender.sent_splits[target], receiver.received_splits[source]
        if sent != received:
            text = f"rank {source} sends {sent} bytes to rank {target}, which receives {received}"
            raise RuntimeError(f"NCCL: in collective {number}, {mine.kind}, {text}")


def _move(everyone: list[Collective]) -> None:
    with _disable_current_modes():
        outgoing = [_pieces(each.sent, each.sent_splits) for each in everyone]
        for target, each in enumerate(everyone):
            for source, piece in enumerate(_pieces(each.received, each.received_splits)):
                sent = outgoing[source]
                piece.copy_(sent[target] if each.kind == "all_to_all" else sent[0])
    for each in everyone:
        each.is_done = True
        each.received = each.sent = each.received[:0]  # torch holds them until then


def _pieces(tensor: Tensor, splits: list[int]) -> list[Tensor]:
    """Returns the pieces on the host, as bytes; what an all-gather sends is one piece."""
    found = on_host(tensor.view(-1).view(torch.uint8)) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return [found] if sum(splits) != found.numel() else list(found.split(splits))


class Work:
    """torch.distributed's handle of a collective."""

    def __init__(self, communicator: Communicator, rank: int, number: int) -> None:
        self._communicator, self._rank, self._number = communicator, rank, number

    def wait(self) -> None:
        """Makes the current stream wait for the collective."""
        self._communicator.wait(self._rank, self._number)


class ProcessGroup(dist.ProcessGroup):
    """A rank's group."""

    def __init__(self, communicator: Communicator, rank: int) -> None:
        super().__init__(rank, communicator.size)
        self.communicator, self.own_rank = communicator, rank


def all_to_all_single(
    received: Tensor, sent: Tensor, received_splits: list[int] | None = None, sent_splits: list[int] | None = None,
    *, group: Any, async_op: bool = False,
) -> Work | None:  # fmt: skip
    """torch.distributed's, of a `ProcessGroup`."""
    size = group.communicator.size
    splits = []
    for tensor, given in ((received, received_splits), (sent, sent_splits)):
        given = [len(tensor) // size] * size if given is None else given
        if len(given) != size or sum(given) != len(tensor):
            raise RuntimeError(f"splits {given} are not those of {len(tensor)} elements over {size} ranks")
        splits.append([count * tensor.element_size() for count in given])
    work = group.communicator.start(group.own_rank, "all_to_all", received, sent, *splits)
    return work if async_op else work.wait()


def all_gather_into_tensor(received: Tensor, sent: Tensor, *, group: Any, async_op: bool = False) -> Work | None:
    """torch.distributed's, of a `ProcessGroup`."""
    splits = [sent.nbytes] * group.communicator.size
    if sum(splits) != received.nbytes:
        raise RuntimeError(f"{received.nbytes} bytes do not hold {splits}")
    work = group.communicator.start(group.own_rank, "all_gather", received, sent, splits, splits)
    return work if async_op else work.wait()


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """torch.distributed's functions take a `ProcessGroup` within it."""
    answers = {
        "all_to_all_single": all_to_all_single,
        "all_gather_into_tensor": all_gather_into_tensor,
        "barrier": lambda *, group: group.communicator.barrier(),
        "get_rank": lambda group: group.own_rank,
        "get_world_size": lambda group: group.communicator.size,
        "get_backend": lambda _: "nccl",
        "get_backend_config": lambda _: BACKEND,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(dist, name, answer))
        yield
