"""Detects waits that can never end: ranks that wait long publish their waits and check whether they can still end.

Ranks that call different operations of their group wait for each other for ever. A wait of a few seconds may also be
for a rank that is late, or for a large message. So a rank that has waited for the seconds of `tagged.PATIENCE` writes
to a board (the key-value store by which the group was set up) which message it waits for and which messages it has
started. Another rank that reads this knows for certain whether its own message is on its way:

    the peer has started it                     it is on its way: wait
    the peer has started another one instead    it will never arrive
    the peer has not started it, and waits      check the message that the peer waits for; a cycle never ends
    the peer is not on the board                it computes, or is stopped: wait until the time limit

Nothing is written while messages arrive in time.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_cp.executor.groups.base import unshared_lines

_EXCHANGE_TIME = 2.0  # seconds for the exchange of exit reports by the board, which may be gone
_READING_TIME = 1.0  # seconds of these for the other ranks to read
_OPPOSITE = {"send": "recv", "recv": "send"}


class Started(NamedTuple):
    """A message that was started, with its number between the two ranks, from 0."""

    number: int
    tag: int
    nbytes: int
    activity: str


@dataclass(frozen=True)
class Stall:
    """A wait of a rank.

    Attributes:
        wait: number of the wait on this rank.
        peer: the rank that is waited for.
        details: the lines that are being compared, if the wait is in a comparison.
        since: time at which it began, by this rank's monotonic clock.
    """

    wait: int
    direction: str
    peer: int
    message: Started
    details: tuple[str, ...]
    since: float

    def describe(self, lines: Sequence[str] = ()) -> str:
        """Returns a text about the activity, with `lines` as its details, and about the message that is waited for."""
        what = f"{self.message.nbytes:,} bytes {'to' if self.direction == 'send' else 'from'} rank {self.peer}"
        doing = self.message.activity or "a transfer of the caller"
        details = f" ({'; '.join(lines)})" if lines else ""
        return f"in {doing}{details}, waiting for {what}"


@dataclass(frozen=True)
class StallReport:
    """The report of a rank that waits: its wait, the messages that it has started, and the lines of its call."""

    stall: Stall
    started: Mapping[str, list[tuple[int, list[Started]]]]
    lines: tuple[str, ...] = ()


def verdict(rank: int, report: StallReport, look: Callable[[int], StallReport | None]) -> str | None:
    """Returns why the wait of `rank` can never end, or None if it may still end.

    Args:
        look: returns another rank's report if it has waited long. The report may be old, but holds if that rank still
            waits, which it does if the message that it waits for was never sent. So only a cycle that leads back to
            `rank` counts.
    """
    reports = {rank: report}
    path = [rank]
    while True:
        here = reports[path[-1]].stall
        there = reports.get(here.peer) or look(here.peer)
        if there is None:
            return None
        reports[here.peer] = there
        count, latest = there.started[_OPPOSITE[here.direction]][path[-1]]
        if here.message.number < count:
            found = next((one for one in latest if one.number == here.message.number), None)
            if found is None or found.tag == here.message.tag:
                return None
            return _explain([*path, here.peer], reports)
        if here.peer == rank:
            return _explain(path, reports)
        if here.peer in path:
            return None
        path.append(here.peer)


def _explain(path: list[int], reports: Mapping[int, StallReport]) -> str:
    ranks = sorted(set(path))
    shown: dict[int, Sequence[str]] = {}
    for first in {reports[rank].lines[:1] for rank in ranks}:
        alike = [rank for rank in ranks if reports[rank].lines[:1] == first]
        if len(alike) > 1:
            shown |= dict(zip(alike, unshared_lines([reports[rank].lines for rank in alike]), strict=True))
        else:  # there is no other rank to compare its lines with, so that only the details are of use
            shown[alike[0]] = reports[alike[0]].stall.details
    lines_of_ranks = [f"  rank {rank} is {reports[rank].stall.describe(shown[rank])}" for rank in ranks]
    return (
        "ranks do different things with the same group, so it never arrives; every rank must make the same calls in "
        "the same order, forward and backward:\n" + "\n".join(lines_of_ranks)
    )


class ExitReport(NamedTuple):
    """The last report of a rank that fails: its wait, and the reason why it can never end, if known."""

    waiting: str
    verdict: str | None


class Board:
    """Reports in the key-value store of a process group. Failures of the store are ignored.

    A job may make its groups again with the same store, and torch then gives them the same names. So each rank counts
    the boards that it has made, and reads only reports with the same count. If a rank did not use a group in between,
    the counts differ, and waits are ended by their time limit only.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._others = store, rank, [other for other in range(size) if other != rank]
        self._generation = 0
        self._safely(self._count_generation)

    def _count_generation(self) -> None:
        self._generation = self._store.add(f"megatron_cp/generation/{self._rank}", 1)

    def publish(self, report: StallReport) -> None:
        self._set("stall", report)

    def report(self, rank: int) -> StallReport | None:
        """Returns the report of another rank that has waited, which may have continued since."""
        return self._get("stall", [rank]).get(rank)

    def publish_exit(self, report: ExitReport) -> None:
        self._set("end", report)

    def exchange_exit_reports(self, report: ExitReport) -> list[ExitReport]:
        """Publishes this rank's exit report and returns those of others, within 2 seconds.

        The store may end with this rank's process. So if the reason is known, this rank waits until all others have
        read it, but for at most a second, since some may never read it.
        """
        found: list[ExitReport] = []

        def exchange() -> None:
            self.publish_exit(report)
            found.extend(self._get("end", self._others).values())
            self._set("read", True)
            if any(each.verdict is not None for each in (report, *found)):
                end = time.monotonic() + _READING_TIME
                while len(self._get("read", self._others)) < len(self._others) and time.monotonic() < end:
                    time.sleep(0.02)

        # The store may be on a rank that is stopped and does not answer.
        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join(_EXCHANGE_TIME)
        return list(found)

    def _key(self, kind: str, rank: int) -> str:
        return f"megatron_cp/{kind}/{self._generation}/{rank}"

    def _set(self, kind: str, value: Any) -> None:
        self._safely(lambda: self._store.set(self._key(kind, self._rank), pickle.dumps(value)))

    def _get(self, kind: str, ranks: Sequence[int]) -> dict[int, Any]:
        found: dict[int, Any] = {}

        def read() -> None:
            for rank in ranks:
                key = self._key(kind, rank)
                if self._store.check([key]):
                    found[rank] = pickle.loads(self._store.get(key))

        self._safely(read)
        return found

    def _safely(self, action: Callable[[], None]) -> None:
        if self._store is None:
            return
        try:
            action()
        except Exception:
            self._store = None
