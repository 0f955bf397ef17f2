"""`Clocks`: what each stream comes after, and an `OrderError` where two accesses of memory may happen in any order.

A stream's clock says, for each stream, how much of it has happened before. Events and signals between ranks carry
clocks. Two accesses of the same bytes, of which one writes, must be in an order that these give: the order in which the
host queued them is none. So a race is found in any run, whoever was quicker in it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


class OrderError(RuntimeError):
    """Raised if memory was used before the stream had waited for what uses it elsewhere."""


@dataclass(frozen=True)
class Access:
    """An access of memory: its operator, stream, and time in that stream's clock."""

    name: str
    stream: int
    time: int
    writes: bool


class Clocks:
    """The streams of all ranks of a process; each rank must have streams of its own.

    Attributes:
        callers: the stream of each rank in which its layers run. What two of them share are tables that threads of one
            process find in its memory, and ranks that are processes do not: its order is not checked.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.callers: set[int] = set()
        self._clocks: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._events: dict[int, dict[int, int]] = {}
        self._accesses: list[Access | None] = []
        self._free: list[int] = []  # places in it
        self._ranges = np.zeros((2, 0), dtype=np.int64)

    def release(self, stream: int) -> dict[int, int]:
        """Returns what has happened before this moment of a stream."""
        with self.lock:
            clock = self._clocks[stream]
            seen = clock | {stream: clock.get(stream, 0) + 1}
            clock[stream] = seen[stream]
            return seen

    def acquire(self, stream: int, seen: dict[int, int]) -> None:
        """Lets a stream go on after what `release` returned."""
        with self.lock:
            clock = self._clocks[stream]
            for other, time in seen.items():
                clock[other] = max(clock.get(other, 0), time)

    def record(self, event: int, stream: int) -> None:
        self._events[event] = self.release(stream)

    def wait_event(self, event: int, stream: int) -> None:
        self.acquire(stream, self._events.get(event, {}))

    def access(self, name: str, ranges: Iterable[tuple[int, int]], *, writes: bool, stream: int) -> None:
        """Checks accesses of half-open ranges of addresses in a stream, and remembers them."""
        with self.lock:
            clock = self._clocks[stream]
            for start, end in ranges:
                if start < end:
                    self._access(Access(name, stream, clock.get(stream, 0) + 1, writes), start, end, clock)

    def check_transfers(self, name: str, given: tuple[int, int], stream: int) -> None:
        """Checks that a stream has waited for all transfers with some memory."""
        with self.lock:
            clock = self._clocks[stream]
            for _, other in self._others(*given):
                if other.stream < 0 and clock.get(other.stream, 0) < other.time:
                    raise _error(Access(name, stream, 0, True), other)

    def _others(self, start: int, end: int) -> Iterator[tuple[int, Access]]:
        """Yields the accesses of some memory, with their places."""
        starts, ends = self._ranges
        for at in np.flatnonzero((starts < end) & (ends > start)).tolist():
            other = self._accesses[at]
            assert other is not None
            yield at, other

    def _access(self, access: Access, start: int, end: int, clock: dict[int, int]) -> None:
        starts, ends = self._ranges
        for at, other in self._others(start, end):
            if other.stream != access.stream and clock.get(other.stream, 0) < other.time:
                if (access.writes or other.writes) and not self.callers >= {access.stream, other.stream}:
                    raise _error(access, other)
            elif start <= starts[at] and ends[at] <= end and (access.writes or not other.writes):
                self._free.append(at)  # whatever races with it races with the new one
                self._ranges[:, at] = 0
        if not self._free:
            known, more = len(self._accesses), 256
            self._free += range(known, known + more)
            self._accesses += [None] * more
            self._ranges = np.concatenate([self._ranges, np.zeros((2, more), np.int64)], 1)
        at = self._free.pop()
        self._accesses[at], self._ranges[:, at] = access, (start, end)


def _error(access: Access, other: Access) -> OrderError:
    does, did = ("writes" if each.writes else "reads" for each in (access, other))
    if other.stream < 0:
        return OrderError(f"{access.name} {does} memory of {other.name}, which its stream has not waited for")
    return OrderError(f"{access.name} {does} what {other.name} {did} in another stream, in no order")


def runs(addresses: np.ndarray) -> list[tuple[int, int]]:
    """Returns the half-open ranges of a kernel's addresses; gaps of up to 16 bytes are elements."""
    if not addresses.size:
        return []
    found = np.unique(addresses)
    breaks = np.flatnonzero(np.diff(found) > 16) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(found, breaks)]
