"""Watches a rank: the time of its kernels, its transfers and the rest."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_cp.cli import Progress
from megatron_cp.executor import Message, Pending, RankGroup
from megatron_cp.torch_private import occupy_device

T = TypeVar("T")

DIRECTIONS = ("forward", "backward")
BOTH = (*DIRECTIONS, "both")
_HEAD_START = 5_000_000  # cycles of a GPU, some milliseconds
Measure = Callable[[str, Callable[[], Any]], Any]  # takes a direction and what to do


@dataclass(frozen=True)
class Timing:
    """The times and bytes of one direction on one rank.

    Attributes:
        kernel, wire, total: seconds of its thread or stream: in kernels, starting and awaiting transfers, and in all.
        wall_wire, wall: seconds by the clock, of transfers and in all.
        sent: bytes to other ranks.
        host: seconds by the clock until the call returned; on CUDA that is before the device is done.
    """

    kernel: float
    wire: float
    total: float
    wall_wire: float
    wall: float
    sent: int
    host: float = 0.0

    @property
    def busy(self) -> float:
        return self.total - self.wire


class Watch:
    """Records the time that a rank spends in each kind of work, and the bytes that it sends."""

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.sent = device, 0
        self.spans: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.spans.append((name, start, self._now()))

    def timed(self, call: Callable[[], T]) -> tuple[T, Timing]:
        """Returns a call's result and its timing."""
        self.spans.clear()
        self.sent = 0
        if self.device != "cpu":
            # The host queues the call meanwhile. An idle device would wait for it, and the host's time be the device's.
            occupy_device(_HEAD_START)
        began = time.perf_counter()
        with self.span("total"):
            result = call()
        return result, self._taken(time.perf_counter() - began)

    def _taken(self, host: float) -> Timing:
        sums = {name: np.zeros(2) for name in ("kernel", "wire", "total")}
        for name, start, end in self.spans:
            sums[name] += self._between(start, end)
        (kernel, _), (wire, wall_wire), (total, wall) = (sums[name].tolist() for name in ("kernel", "wire", "total"))
        return Timing(kernel, wire, total, wall_wire, wall, self.sent, host)

    def _now(self) -> Any:
        if self.device == "cpu":
            return np.array([time.thread_time(), time.perf_counter()])
        event = torch.cuda.Event(enable_timing=True)  # the host waits for none of them before the direction is over
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> Any:
        if self.device == "cpu":
            return end - start
        end.synchronize()
        return np.full(2, start.elapsed_time(end) / 1e3)


class WatchedGroup(RankGroup):
    """A group that records when it starts and awaits transfers, and the bytes that it sends."""

    def __init__(self, group: RankGroup, watch: Watch) -> None:
        self._group, self._watch = group, watch
        self.rank, self.size, self.agreed = group.rank, group.size, group.agreed

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        self._watch.sent += (sum(sent_splits) - sent_splits[self.rank]) * sent.element_size()
        return self._started(self._group.start_all_to_all, received, sent, received_splits, sent_splits)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        self._watch.sent += sent.nbytes * (self.size - 1)
        return self._started(self._group.start_all_gather, received, sent)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self._watch.sent += sum(message.tensor.nbytes for message in sends)
        return self._started(self._group.start_messages, sends, receives)

    def barrier(self) -> None:
        self._group.barrier()

    def _started(self, start: Callable[..., Pending], *args: Any) -> Pending:
        with self._watch.span("wire"):
            return _WatchedPending(start(*args), self._watch)


class _WatchedPending(Pending):
    def __init__(self, pending: Pending, watch: Watch) -> None:
        self._pending, self._watch = pending, watch

    def wait(self) -> None:
        with self._watch.span("wire"):
            self._pending.wait()


def with_progress(turns: Iterable[T], what: str, rank: int = 0) -> Iterator[T]:
    """Yields the turns; the first rank's standard error shows how many are done, and how long the rest may take."""
    waiting = list(turns)
    progress = Progress(what, len(waiting), quiet=rank > 0)
    try:
        for turn in waiting:
            yield turn
            progress.step()
    finally:
        progress.clear()


def interleaved_order(names: Sequence[str], repeats: int) -> Iterator[str]:
    """Yields every name once a round, in one order on all ranks: none always comes first or after the same one."""
    for repeat in range(repeats):
        yield from random.Random(repeat).sample(names, len(names))


def interleaved(
    steps: Mapping[str, Callable[[Measure], Any]], repeats: int, watch: Watch, group: RankGroup
) -> dict[tuple[str, str], list[Timing]]:
    """Times every step in both directions, one after the other within every repeat; all ranks begin together.

    A step calls `measure(direction, call)` for both directions. Timings are by name and direction.
    """
    spent: dict[tuple[str, str], list[Timing]] = {(name, way): [] for name in steps for way in DIRECTIONS}
    for name in with_progress(interleaved_order(list(steps), repeats), "timings", group.rank):

        def timed(way: str, call: Callable[[], Any], name: str = name) -> Any:
            group.barrier()
            result, taken = watch.timed(call)
            spent[name, way].append(taken)
            return result

        steps[name](timed)
    return spent
