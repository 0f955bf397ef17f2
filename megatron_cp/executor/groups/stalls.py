"""Why a rank waits in vain: ranks that wait long tell one another for what, and find out whether it can still come.

Ranks that do different things with their group wait for each other for ever. A wait of a few seconds may as well be for
a rank that is late, or for a large message. So a rank that has waited for `PATIENCE` seconds writes onto a board (the
key-value store by which the group met) which message it waits for and which it has started. Another rank that reads
this knows for certain whether its own message is on its way:

    the peer has started it                     it travels: wait
    the peer has started another one instead    it will never come
    the peer has not started it, and waits      follow what the peer waits for; in a circle it will never come
    the peer is not on the board                it computes, or is stopped: wait, until the time limit

Nothing is written while messages arrive in time.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch.distributed as dist

from megatron_cp.executor.groups.base import differences

PATIENCE = 3.0  # seconds of waiting before others are told
_PAUSE = 1.0  # seconds between two looks
_LAST_WORDS = 2.0  # seconds for the board, which may be gone, to take and give what ranks ended with
_FOR_READERS = 1.0  # of them, for the others to read
_OTHER_WAY = {"send": "recv", "recv": "send"}


class Started(NamedTuple):
    """A message that was started: its number between the two ranks, counted from 0, and what it is."""

    number: int
    tag: int
    nbytes: int
    activity: str


@dataclass(frozen=True)
class Stall:
    """What a rank waits for.

    Attributes:
        wait: number of the wait on this rank.
        way: "send" or "recv".
        peer: the rank waited for.
        message: of those with this peer.
        details: what is compared, if this is in a comparison.
        since: of this rank's monotonic clock.
    """

    wait: int
    way: str
    peer: int
    message: Started
    details: tuple[str, ...]
    since: float

    def describe(self, lines: Sequence[str] = ()) -> str:
        """What the rank does and waits for, with lines that say more about the former."""
        what = f"{self.message.nbytes:,} bytes {'to' if self.way == 'send' else 'from'} rank {self.peer}"
        doing = self.message.activity or "a transfer of the caller"
        return f"in {doing}{f' ({"; ".join(lines)})' if lines else ''}, waiting for {what}"


@dataclass(frozen=True)
class Report:
    """What a rank that waits tells the others: for what, what it has started with each, and of which call."""

    stall: Stall
    started: Mapping[str, list[tuple[int, list[Started]]]]
    lines: tuple[str, ...] = ()


def verdict(rank: int, report: Report, look: Callable[[int], Report | None]) -> str | None:
    """Why the wait of `rank` never ends, or None where it may still end.

    Args:
        rank: the rank that asks.
        own: what it waits for at this moment.
        look: another rank's report, if it has waited long. It may be old. It is true all the same if that rank still
            waits, and it does if what it waits for was never sent: so a circle counts if it leads back to `rank`.
    """
    reports = {rank: report}
    path = [rank]
    while True:
        here = reports[path[-1]].stall
        there = reports.get(here.peer) or look(here.peer)
        if there is None:
            return None
        reports[here.peer] = there
        count, latest = there.started[_OTHER_WAY[here.way]][path[-1]]
        if here.message.number < count:
            found = next((one for one in latest if one.number == here.message.number), None)
            if found is None or found.tag == here.message.tag:
                return None
            return _explained([*path, here.peer], reports)
        if here.peer == rank:
            return _explained(path, reports)
        if here.peer in path:
            return None
        path.append(here.peer)


def _explained(path: list[int], reports: Mapping[int, Report]) -> str:
    ranks = sorted(set(path))
    told: dict[int, Sequence[str]] = {}
    for first in {reports[rank].lines[:1] for rank in ranks}:
        alike = [rank for rank in ranks if reports[rank].lines[:1] == first]
        if len(alike) > 1:
            told |= dict(zip(alike, differences([reports[rank].lines for rank in alike]), strict=True))
        else:  # nothing to set it against: only what is new says something, which is what is compared
            told[alike[0]] = reports[alike[0]].stall.details
    lines_of_ranks = [f"  rank {rank} is {reports[rank].stall.describe(told[rank])}" for rank in ranks]
    return (
        "ranks do different things with the same group, so it never arrives; every rank must make the same calls in "
        "the same order, forward and backward:\n" + "\n".join(lines_of_ranks)
    )


class LastWords(NamedTuple):
    """What a rank ended with: for whom it waited, and why in vain if it knows."""

    waiting: str
    verdict: str | None


class Board:
    """The key-value store of a process group, as a place for reports. All of it may fail without harm.

    A job may make its groups anew with the same store, and torch then gives them the same names. So each rank counts
    how often it has come to this board, and reads only what the others wrote the same time. Where a rank left a group
    unused in between, the counts differ, and waits are ended by their time limit alone.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._others = store, rank, [other for other in range(size) if other != rank]
        self._visit = 0
        self._safely(self._count_visit)

    def _count_visit(self) -> None:
        self._visit = self._store.add(f"megatron_cp/visits/{self._rank}", 1)

    @classmethod
    def of(cls, group: dist.ProcessGroup, rank: int, size: int) -> Board:
        return cls(dist.distributed_c10d._get_process_group_store(group), rank, size)

    def publish(self, report: Report) -> None:
        self._set("stall", report)

    def report(self, rank: int) -> Report | None:
        """Of another rank that has waited; it may have gone on since."""
        return self._get("stall", [rank]).get(rank)

    def leave(self, words: LastWords) -> None:
        """Leaves what this rank ends with."""
        self._set("end", words)

    def exchange_last_words(self, words: LastWords) -> list[LastWords]:
        """Leaves what this rank ends with, and returns what others ended with. Takes 2 seconds at most.

        The board may end with this rank. So, where the reason is known, this rank stays until all have read it, or for
        a second: some may never come to look.
        """
        found: list[LastWords] = []

        def exchange() -> None:
            self.leave(words)
            found.extend(self._get("end", self._others).values())
            self._set("read", True)
            if any(said.verdict is not None for said in (words, *found)):
                end = time.monotonic() + _FOR_READERS
                while len(self._get("read", self._others)) < len(self._others) and time.monotonic() < end:
                    time.sleep(0.02)

        # The store may be on a rank that is stopped.
        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join(_LAST_WORDS)
        return list(found)

    def _key(self, kind: str, rank: int) -> str:
        return f"megatron_cp/{kind}/{self._visit}/{rank}"

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


class Messages(Protocol):
    """What a rank sends and receives, as far as its watch knows it; see `TaggedMessages`."""

    rank: int
    board: Board
    stall: Stall | None
    verdict: str | None
    told: int

    def report(self, stall: Stall) -> Report:
        """What the others may know of a wait."""

    def break_off(self, peer: int) -> None:
        """Makes every wait for this group fail."""


class Watch:
    """A thread that looks once a second whether this rank has waited long, and then whether in vain."""

    def __init__(self, messages: Messages) -> None:
        self._messages = ref(messages)
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=_watch, args=(self._messages,), name="stalls", daemon=True)
            self._thread.start()


def _watch(reference: ref[Messages]) -> None:
    while True:
        time.sleep(_PAUSE)
        messages = reference()
        if messages is None or messages.verdict is not None:
            return
        _look(messages)
        del messages


def _look(messages: Messages) -> None:
    stall = messages.stall
    if stall is None or time.monotonic() - stall.since < PATIENCE:
        return
    report = messages.report(stall)
    if messages.told != stall.wait:  # while one waits nothing changes
        messages.board.publish(report)
        messages.told = stall.wait
    found = verdict(messages.rank, report, messages.board.report)
    if found is not None and messages.stall is stall:
        messages.verdict = found
        messages.board.leave(LastWords(f"rank {messages.rank} was {stall.describe()}", found))
        messages.break_off(stall.peer)
