"""Messages between host tensors over gloo, each with a tag that only its counterpart on the other rank has.

gloo ends the process of a rank that is sent more bytes than it expects, and fills a tensor in part where it is sent
fewer. Ranks that do different things with a group could so abort, or compute with each other's wrong data. A tag made
of the number of the message between the two ranks, its bytes and what it is for excludes both: what does not belong
together never meets, both ranks wait, and `stalls` tells them why.
"""

from __future__ import annotations

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
from megatron_cp.executor.groups.stalls import Board, LastWords, Report, Stall, Started, Watch

_REMEMBERED = 16  # latest messages of each pair and direction, for what is said of a stall
_IN_VAIN = 2**31 - 1  # a tag that no message has


def says_lost(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed is about other ranks, and not about what was asked for."""
    said = str(error)
    of_gloo = "gloo/transport/" in said or "Application timeout caused pair closure" in said
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (of_gloo and "enforce fail" not in said)


@dataclass
class _Way:
    """The messages of this rank with one peer in one direction.

    Attributes:
        count: how many were started.
        latest: the last of them.
    """

    count: int = 0
    latest: deque[Started] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def start(self, nbytes: int, activity: str) -> Started:
        tag = zlib.crc32(f"{self.count}:{nbytes}:{activity}".encode()) % _IN_VAIN
        self.latest.append(Started(self.count, tag, nbytes, activity))
        self.count += 1
        return self.latest[-1]


class TaggedMessages:
    """What one rank sends and receives over a gloo group.

    Args:
        group: the process group.
        agreed: what its ranks have compared.

    Attributes:
        timeout: seconds to wait for one message; the group's own limit if None.
        stall: what this rank waits for now.
        verdict: why it would wait for ever, once that is known.
        told: the number of the wait that the other ranks were told of last.
    """

    def __init__(self, group: dist.ProcessGroup, agreed: Agreed) -> None:
        self._group, self._agreed = ref(group), agreed
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout: float | None = None
        self.stall: Stall | None = None
        self.verdict: str | None = None
        self.told = 0
        self._failed: tuple[str, int] | None = None  # no error: it would keep all that it has passed through
        places = dist.get_process_group_ranks(group)
        is_whole_job = places == list(range(self.size))
        self._places = "" if is_whole_job else f" (Ranks 0, 1, ... of this group are ranks {places} of the job.)"
        self.board = Board.of(group, self.rank, self.size)
        self._ways = {way: [_Way() for _ in range(self.size)] for way in ("send", "recv")}
        self._number = 0
        self._watch = Watch(self)

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], activity: str, details: tuple[str, ...]
    ) -> Pending:
        """Starts messages; empty ones do not travel."""
        group = self._group()
        if group is None or self._failed is not None:
            text, lost = self._failed or ("the process group of these ranks was destroyed", -1)
            raise PeerError(text, rank=self.rank, peer=lost)
        works = []
        for way, operation, messages in (("recv", dist.irecv, receives), ("send", dist.isend, sends)):
            for message in messages:
                if not message.tensor.numel():
                    continue
                started = self._ways[way][message.peer].start(message.tensor.nbytes, activity)
                options = {f"group_{'src' if way == 'recv' else 'dst'}": message.peer, "tag": started.tag}
                try:
                    work = operation(message.tensor, group=group, **options)
                except RuntimeError as error:
                    if not says_lost(error):
                        raise
                    raise self._failure(
                        Stall(0, way, message.peer, started, details, time.monotonic()), error
                    ) from error
                works.append((way, message.peer, started, work))
        tensors = tuple(message.tensor for message in (*sends, *receives))
        return _TaggedPending(self, works, tensors, details)

    def wait(self, way: str, peer: int, started: Started, details: tuple[str, ...], work: Any) -> None:
        """Waits for one message."""
        self._number += 1
        since = time.monotonic()
        self.stall = Stall(self._number, way, peer, started, details, since)
        self._watch.begin()
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
        """For each way and peer how many messages were started, and the latest."""
        return {way: [(one.count, list(one.latest)) for one in ways] for way, ways in self._ways.items()}

    def report(self, stall: Stall) -> Report:
        """What the others may know of a wait."""
        return Report(stall, self.started(), stall.details or self._agreed.lines(stall.message.activity))

    def break_off(self, peer: int) -> None:
        """Makes every wait for this group fail: gloo ends all of them where one times out."""
        nothing, group = torch.empty(1, dtype=torch.uint8, device="cpu"), self._group()
        if group is None:  # torch would take None for all ranks of the job
            return
        try:
            work = dist.irecv(nothing, group=group, group_src=peer, tag=_IN_VAIN)
            assert work is not None
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass

    def _failure(self, stall: Stall, error: RuntimeError) -> PeerError:
        seconds = time.monotonic() - stall.since
        said = str(error)
        verdict = self.verdict  # once: the watch may come to one meanwhile
        if verdict is not None:
            why = verdict
        elif "Timed out waiting" in said or "timeout" in said:
            why = f"rank {stall.peer} did not answer in {seconds:.0f} s"
        else:
            why = f"rank {stall.peer} ended, or broke the connection off, after {seconds:.0f} s"
        doing = stall.describe(() if verdict else stall.details)
        self.break_off(stall.peer)  # who waits for this rank need not wait until it has ended
        others = self.board.exchange_last_words(LastWords(f"rank {self.rank} was {doing}", verdict))
        text = f"rank {self.rank} of {self.size}, {doing}: {why}."
        if verdict is None:
            known = [words.verdict for words in others if words.verdict is not None]
            lines = [f"  {words.waiting}" for words in others]
            text += f" It says: {known[0]}" if known else "".join(f"\n{line}" for line in lines)
        self._failed = (text + self._places, stall.peer)
        return PeerError(self._failed[0], rank=self.rank, peer=stall.peer)


class _TaggedPending(Pending):
    """Messages under way, with the tensors that must live until they have arrived."""

    def __init__(
        self, messages: TaggedMessages, works: list[tuple[str, int, Started, Any]], tensors: tuple[Tensor, ...],
        details: tuple[str, ...],
    ) -> None:  # fmt: skip
        self._messages, self._works, self._tensors, self._details = messages, works, tensors, details

    def wait(self) -> None:
        for way, peer, started, work in self._works:
            self._messages.wait(way, peer, started, self._details, work)
        self._works, self._tensors = [], ()
