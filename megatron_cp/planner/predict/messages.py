"""The buffers that messages take: `Pool` does in numbers what `Buffers` does, and the walks here what executors do.

No torch in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_cp.exchange.split_counts import SPARE, rounded
from megatron_cp.plan.attention import Attend, Stage
from megatron_cp.plan.flows import MessageRows, PassOn, RowFlow
from megatron_cp.plan.head_chunks import HeadChunk

_Part = tuple[Stage, HeadChunk]
_Taken = list[int]  # numbers of buffers


class Pool:
    """What `Buffers` does, in numbers.

    Attributes:
        capacities: of the buffers, in the order in which they were made.
    """

    def __init__(self) -> None:
        self.capacities: list[int] = []
        self._free: list[int] = []

    def acquire(self, size: int) -> int:
        """The number of the buffer that a message of so many bytes takes."""
        capacity = rounded(size)
        fitting = [number for number in self._free if capacity <= self.capacities[number] <= SPARE * capacity]
        if fitting:
            self._free.remove(min(fitting))
            return min(fitting)
        self.capacities.append(capacity)
        return len(self.capacities) - 1

    def release(self, taken: Iterable[int]) -> None:
        """Takes buffers back."""
        self._free += taken


def walk_along_keys(step: Attend, kv_rank: int, head_rank: int, item_size: int, pool: Pool, *, forward: bool) -> None:
    """Takes from a pool, and gives back, what keys, visiting queries and what goes back take in one direction."""
    _AlongKeys(step, kv_rank, head_rank, item_size, pool, forward=forward).walk()


class _AlongKeys:
    """One direction of an attention on one rank, in the order of `KeyTransfers` and `Visitors`."""

    def __init__(
        self, step: Attend, kv_rank: int, head_rank: int, item_size: int, pool: Pool, *, forward: bool
    ) -> None:
        self.step, self.kv_rank, self.head_rank, self.item = step, kv_rank, head_rank, item_size
        self.pool, self.forward = pool, forward
        self.returning: _Taken = []  # gradients of keys: what is sent of them and received for them
        self.going_home: _Taken = []  # likewise what was made of visitors

    def walk(self) -> None:
        """Takes and gives back buffers, stage by stage and in each chunk by chunk."""
        chunks = self.step.chunks(self.head_rank)
        order = [
            (stage, chunk)
            for stage in self.step.stages_in(forward=self.forward)
            for chunk in chunks
            if stage.keys is not None or isinstance(stage.gradients, PassOn)
        ]
        coming = self._start(order[0]) if order else None
        for number, part in enumerate(order):
            assert coming is not None
            here, following = coming, order[number + 1 : number + 2]
            self.pool.release(here.sent)
            coming = self._start(*following) if following else None
            self._put_in_order(here.keys, self._rows(part[0].keys), "keys", part[1])
            self._compute(part, here)
            if coming is not None and isinstance(following[0][0].keys, PassOn):
                coming.sent += here.keys
            else:
                self.pool.release(here.keys)
        self.pool.release(self.going_home)
        self.pool.release(self.returning)

    def _start(self, part: _Part) -> _Coming:
        """What brings the keys of a stage, and its visitors. Own rows are packed, to be passed on."""
        stage, chunk = part
        rows = self._rows(stage.keys)
        found = _Coming(self._take(rows.sent, "keys", chunk), self._take(rows.received, "keys", chunk), [], [])
        if stage.remote_queries is not None:
            rows = stage.remote_queries.message_rows(self.kv_rank)
            found.visitors_sent += self._take(rows.sent, self._visiting, chunk)
            found.visitors += self._take(rows.received, self._visiting, chunk)
        return found

    def _compute(self, part: _Part, here: _Coming) -> None:
        stage, chunk = part
        made: _Taken = []
        if not self.forward and stage.gradients is not None:
            keys = self._rows(stage.keys)
            made = self._take(_at_hand(keys), self._gradients(stage), chunk)
        if stage.remote_queries is not None:
            self.pool.release(here.visitors_sent)
            rows, home = (
                stage.remote_queries.message_rows(self.kv_rank),
                "results" if self.forward else "gradients of remote queries",
            )
            self._put_in_order(here.visitors, rows, self._visiting, chunk)
            message = self._take(_at_hand(rows), home, chunk)
            self.pool.release(here.visitors)
            self.pool.release(self.going_home)
            assert stage.results is not None
            self.going_home = self._go_back(message, stage.results, home, chunk)
        if made and stage.gradients is not None:
            self._return(made, stage.gradients, self._gradients(stage), chunk)

    def _return(self, made: _Taken, flow: RowFlow, name: str, chunk: HeadChunk) -> None:
        self.pool.release(self.returning)
        self.returning = self._go_back(made, flow, name, chunk)

    def _go_back(self, made: _Taken, flow: RowFlow, name: str, chunk: HeadChunk) -> _Taken:
        """What is sent, put in order if it must be, and what comes for it."""
        rows = flow.message_rows(self.kv_rank)
        ordered = self._take(rows.sent, name, chunk)
        if ordered:
            self.pool.release(made)
        return (ordered or made) + self._take(rows.received, name, chunk)

    def _put_in_order(self, taken: _Taken, rows: MessageRows, name: str, chunk: HeadChunk) -> None:
        if rows.ordered is not None:
            ordered = self._take(rows.ordered, name, chunk)
            self.pool.release(taken)
            taken[:] = ordered

    def _rows(self, flow: RowFlow | None) -> MessageRows:
        if flow is None:
            return MessageRows(None, int(self.step.keys.token_counts[self.kv_rank]), None)
        return flow.message_rows(self.kv_rank)

    def _take(self, rows: int | None, name: str, chunk: HeadChunk) -> _Taken:
        if rows is None:
            return []
        return [self.pool.acquire(rows * self.step.row_bytes(name, self.head_rank, self.item, chunk))]

    @property
    def _visiting(self) -> str:
        return "remote queries" if self.forward else "remote queries and gradients"

    @staticmethod
    def _gradients(stage: Stage) -> str:
        return "sums of gradients of keys" if isinstance(stage.gradients, PassOn) else "gradients of keys"


@dataclass
class _Coming:
    """Buffers of the keys of a stage, and of its visitors: what this rank sends, and what it then has at hand."""

    sent: _Taken
    keys: _Taken
    visitors_sent: _Taken
    visitors: _Taken


def _at_hand(rows: MessageRows) -> int:
    return rows.received if rows.ordered is None else rows.ordered
