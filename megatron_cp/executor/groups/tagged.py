"""Messages of host tensors over gloo, each with a tag that only its counterpart on the other rank has.

gloo ends the process of a rank that is sent more bytes than it expects, and fills only a part of a tensor if it is sent
fewer. Ranks that call different operations could so abort, or compute with wrong data. A tag is made of the number of
the message between the two ranks, its bytes and its activity, which excludes both: messages that do not belong together
are never matched, both ranks wait, and `stalls` tells them why.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.errors import PeerError
from megatron_cp.executor.groups.base import Agreed, Message, Pending
from megatron_cp.executor.groups.gloo_exit import wait_for_gloo_at_exit
from megatron_cp.executor.groups.stalls import Board, ExitReport, Stall, StallReport, Started, verdict
from megatron_cp.torch_private import store_of

_REMEMBERED = 16  # latest messages of each pair and direction, for the description of a stall
_UNUSED_TAG = 2**31 - 1  # no message has this tag
PATIENCE = 3.0  # seconds of waiting before a wait is published
_PAUSE = 1.0  # seconds between two checks


def is_peer_failure(error: RuntimeError) -> bool:
    """True if an error of torch.distributed is about other ranks, and not about the arguments of the call."""
    said = str(error)
    is_gloo = "gloo/transport/" in said or "Application timeout caused pair closure" in said
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (is_gloo and "enforce fail" not in said)


@dataclass
class _MessageQueue:
    """The messages started by this rank with one peer in one direction: how many, and the latest of them."""

    count: int = 0
    latest: deque[Started] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def start(self, nbytes: int, activity: str) -> Started:
        tag = zlib.crc32(f"{self.count}:{nbytes}:{activity}".encode()) % _UNUSED_TAG
        self.latest.append(Started(self.count, tag, nbytes, activity))
        self.count += 1
        return self.latest[-1]


class TaggedMessages:
    """The messages of one rank over a gloo group.

    Attributes:
        timeout: seconds to wait for one message; the group's own limit if None.
        verdict: the reason why a wait can never end, once it is known.
        published: number of the latest wait that was published to the other ranks.
    """

    def __init__(self, group: dist.ProcessGroup, agreed: Agreed) -> None:
        self._group, self._agreed = ref(group), agreed
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout: float | None = None
        self.stall: Stall | None = None
        self.verdict: str | None = None
        self.published = 0
        self._failed: tuple[str, int] | None = None  # text and peer; an exception would keep all frames alive
        places = dist.get_process_group_ranks(group)
        is_whole_job = places == list(range(self.size))
        self._places = "" if is_whole_job else f" (Ranks 0, 1, ... of this group are ranks {places} of the job.)"
        self.board = Board(store_of(group), self.rank, self.size)
        self._queues = {direction: [_MessageQueue() for _ in range(self.size)] for direction in ("send", "recv")}
        self._number = 0
        self._watch: threading.Thread | None = None
        wait_for_gloo_at_exit()

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], activity: str, details: tuple[str, ...]
    ) -> Pending:
        """Starts messages; empty ones are not sent."""
        group = self._group()
        if group is None or self._failed is not None:
            text, lost = self._failed or ("the process group of these ranks was destroyed", -1)
            raise PeerError(text, rank=self.rank, peer=lost)
        works = []
        for direction, operation, messages in (("recv", dist.irecv, receives), ("send", dist.isend, sends)):
            for message in messages:
                if not message.tensor.numel():
                    continue
                started = self._queues[direction][message.peer].start(message.tensor.nbytes, activity)
                options = {f"group_{'src' if direction == 'recv' else 'dst'}": message.peer, "tag": started.tag}
                try:
                    work = operation(message.tensor, group=group, **options)
                except RuntimeError as error:
                    if not is_peer_failure(error):
                        raise
                    raise self._failure(
                        Stall(0, direction, message.peer, started, details, time.monotonic()), error
                    ) from error
                works.append((direction, message.peer, started, work))
        tensors = tuple(message.tensor for message in (*sends, *receives))
        return _TaggedPending(self, works, tensors, details)

    def wait(self, direction: str, peer: int, started: Started, details: tuple[str, ...], work: Any) -> None:
        """Waits for one message."""
        self._number += 1
        since = time.monotonic()
        self.stall = Stall(self._number, direction, peer, started, details, since)
        if self._watch is None:
            self._watch = threading.Thread(target=_watch, args=(ref(self),), name="stalls", daemon=True)
            self._watch.start()
        try:
            if self.timeout is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._failure(self.stall, error) from error
        finally:
            self.stall = None

    def started(self) -> dict[str, list[tuple[int, list[Started]]]]:
        """Returns, for each direction and peer, the number of messages that were started and the latest ones."""
        return {
            direction: [(queue.count, list(queue.latest)) for queue in queues]
            for direction, queues in self._queues.items()
        }

    def report(self, stall: Stall) -> StallReport:
        """Returns the report of a wait for the other ranks."""
        return StallReport(stall, self.started(), stall.details or self._agreed.lines(stall.message.activity))

    def abort_waits(self, peer: int) -> None:
        """Fails all waits of this group: gloo ends all of them when one times out."""
        nothing, group = torch.empty(1, dtype=torch.uint8, device="cpu"), self._group()
        if group is None:  # torch would take None for all ranks of the job
            return
        try:
            work = dist.irecv(nothing, group=group, group_src=peer, tag=_UNUSED_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass

    def _failure(self, stall: Stall, error: RuntimeError) -> PeerError:
        seconds = time.monotonic() - stall.since
        said = str(error)
        reason = self.verdict  # read once, since the watch may set it meanwhile
        if reason is not None:
            why = reason
        elif "Timed out waiting" in said or "timeout" in said:
            why = f"rank {stall.peer} did not answer in {seconds:.0f} s"
        else:
            why = f"rank {stall.peer} ended, or broke the connection off, after {seconds:.0f} s"
        doing = stall.describe(() if reason else stall.details)
        self.abort_waits(stall.peer)  # so that ranks that wait for this one need not wait until its process has ended
        others = self.board.exchange_exit_reports(ExitReport(f"rank {self.rank} was {doing}", reason))
        text = f"rank {self.rank} of {self.size}, {stall.describe()}: {why}."
        if reason is None:
            known = [other.verdict for other in others if other.verdict is not None]
            lines = [f"  {other.waiting}" for other in others]
            text += f" It says: {known[0]}" if known else "".join(f"\n{line}" for line in lines)
        if reason is None and stall.details:  # the cause first: a plan has many lines
            text += f"\n  This rank's call: {'; '.join(stall.details)}"
        self._failed = (text + self._places, stall.peer)
        return PeerError(self._failed[0], rank=self.rank, peer=stall.peer)


class _TaggedPending(Pending):
    """Started messages, with the tensors that must live until they have arrived."""

    def __init__(
        self, messages: TaggedMessages, works: list[tuple[str, int, Started, Any]], tensors: tuple[Tensor, ...],
        details: tuple[str, ...],
    ) -> None:  # fmt: skip
        self._messages, self._works, self._tensors, self._details = messages, works, tensors, details

    def wait(self) -> None:
        for direction, peer, started, work in self._works:
            self._messages.wait(direction, peer, started, self._details, work)
        self._works, self._tensors = [], ()


def _watch(reference: ref[TaggedMessages]) -> None:
    """Checks every second whether this rank has waited long, and if so whether the wait can end."""
    while True:
        time.sleep(_PAUSE)
        messages = reference()
        if messages is None or messages.verdict is not None:
            return
        _look(messages)
        del messages


def _look(messages: TaggedMessages) -> None:
    stall = messages.stall
    if stall is None or time.monotonic() - stall.since < PATIENCE:
        return
    report = messages.report(stall)
    if messages.published != stall.wait:  # a report does not change during a wait
        messages.board.publish(report)
        messages.published = stall.wait
    found = verdict(messages.rank, report, messages.board.report)
    if found is not None and messages.stall is stall:
        messages.verdict = found
        messages.board.publish_exit(ExitReport(f"rank {messages.rank} was {stall.describe()}", found))
        messages.abort_waits(stall.peer)
