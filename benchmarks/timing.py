"""Watches a rank: the time of its transfers and the rest; prints medians and tables."""

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
from megatron_cp.exchange.split_counts import SplitCounts
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
        wire, total: seconds of its thread or stream: starting and awaiting transfers, and in all.
        wall_wire, wall: seconds by the clock, of transfers and in all.
        sent: bytes to other ranks.
    """

    wire: float
    total: float
    wall_wire: float
    wall: float
    sent: int

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
        with self.span("total"):
            result = call()
        sums = {name: np.zeros(2) for name in ("wire", "total")}
        for name, start, end in self.spans:
            sums[name] += self._between(start, end)
        (wire, wall_wire), (total, wall) = (sums[name].tolist() for name in ("wire", "total"))
        return result, Timing(wire, total, wall_wire, wall, self.sent)

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
    """A group that records when it starts and awaits transfers, and the bytes that it sends.

    With `hosts`, those of the ranks, it counts what goes to other hosts only.
    """

    def __init__(self, group: RankGroup, watch: Watch, hosts: Sequence[int] | None = None) -> None:
        self._group, self._watch = group, watch
        self.rank, self.size, self.agreed = group.rank, group.size, group.agreed
        hosts = range(group.size) if hosts is None else hosts
        self._is_away = np.array([host != hosts[group.rank] for host in hosts])

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        self._watch.sent += sent.element_size() * int(np.array(sent_splits)[self._is_away].sum())
        return self._started(self._group.start_all_to_all, received, sent, received_splits, sent_splits)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        self._watch.sent += sent.nbytes * int(self._is_away.sum())
        return self._started(self._group.start_all_gather, received, sent)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self._watch.sent += sum(message.tensor.nbytes for message in sends if self._is_away[message.peer])
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


def interleaved_order(names: Sequence[str], repeats: int) -> Iterator[str]:
    """Yields every name once a round, in one order on all ranks: none always comes first or after the same one."""
    for repeat in range(repeats):
        yield from random.Random(repeat).sample(names, len(names))


def interleaved(
    steps: Mapping[str, Callable[[Measure], Any]], repeats: int, watch: Watch, group: RankGroup
) -> dict[tuple[str, str], list[Timing]]:
    """Times every step in both directions, one after the other within every repeat; all ranks begin together.

    A step calls `measure(direction, call)` for each of its directions. Timings are by name and direction. The first
    rank's standard error shows how many steps are done, and how long the rest may take.
    """
    spent: dict[tuple[str, str], list[Timing]] = {}
    progress = Progress("timings", repeats * len(steps), quiet=group.rank > 0)
    try:
        for name in interleaved_order(list(steps), repeats):

            def timed(way: str, call: Callable[[], Any], name: str = name) -> Any:
                group.barrier()
                result, taken = watch.timed(call)
                spent.setdefault((name, way), []).append(taken)
                return result

            steps[name](timed)
            progress.step()
    finally:
        progress.clear()
    return spent


def once(call: Callable[[], Any], measure: Measure) -> None:
    """Times a call that has no backward."""
    measure("", call)


def slowest(ranks: Iterable[Mapping[Any, Sequence[Timing]]], key: Any, value: Callable[[Timing], float]) -> Any:
    """Returns, for each repeat, the most of a value that any rank has of what is timed under a key."""
    return np.max([[value(timing) for timing in rank[key]] for rank in ranks], axis=0)


def spread(values: Any) -> dict[str, float]:
    """Returns the median and the quartiles on either side."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def formatted(value: Mapping[str, float], *, percent: bool = False) -> str:
    """Returns a spread as text."""
    low, median, high = (value[name] * (100 if percent else 1) for name in ("low", "median", "high"))
    digits, unit = (1, " %") if percent else (2, "")
    return f"{median:.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"


def table(left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table, whose last columns, `right`, are aligned to the right."""
    rule = f"|{'---|' * len(left)}{'--:|' * len(right)}"
    head, *lines = (f"| {' | '.join(row)} |" for row in ((*left, *right), *rows))
    return [head, rule, *lines]
