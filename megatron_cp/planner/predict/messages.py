"""Predicts the buffers of messages: `Pool` counts as `Buffers` allocates, and a walk follows a program's buffers.

No torch in here.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_cp.exchange.split_counts import SPARE, rounded
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.flows import Fetch, Return, RowFlow
from megatron_cp.plan.payloads import Payload
from megatron_cp.plan.program import Allocate, Order, Pack, Release, Start


class Pool:
    """The pool of `Buffers`, in numbers.

    Attributes:
        capacities: the capacity of each buffer, in the order in which they were made.
    """

    def __init__(self) -> None:
        self.capacities: list[int] = []
        self._free: list[int] = []

    def acquire(self, size: int) -> int:
        """Returns the number of the buffer that a message of so many bytes takes."""
        capacity = rounded(size)
        fitting = [number for number in self._free if capacity <= self.capacities[number] <= SPARE * capacity]
        if fitting:
            self._free.remove(min(fitting))
            return min(fitting)
        self.capacities.append(capacity)
        return len(self.capacities) - 1

    def release(self, taken: Iterable[int]) -> None:
        """Marks buffers as free."""
        self._free += taken


def walk_buffers(step: Attend, kv_rank: int, head_rank: int, item_size: int, pool: Pool, *, forward: bool) -> None:
    """Acquires and releases in a pool the buffers of one direction of an attention on one rank."""
    chunks, taken = step.chunks(head_rank), dict[int, int]()

    def acquire(rows: int, payload: Payload, chunk: int) -> int:
        return pool.acquire(rows * step.row_bytes(payload, head_rank, item_size, chunks[chunk]))

    def usable_rows(flow: RowFlow | None) -> int:
        if flow is None:
            return int(step.keys.token_counts[kv_rank])
        rows = flow.message_rows(kv_rank)
        return rows.received if rows.ordered is None else rows.ordered

    for do in step.program(forward=forward):
        match do:
            case Pack(payload=payload, flow=Return() as flow):
                taken[do.buffer] = acquire(sum(flow.split_counts.sent_by(kv_rank)), payload, do.part.chunk)
            case Pack(payload=payload, flow=flow):
                rows = usable_rows(None) if flow is None else flow.message_rows(kv_rank).sent
                assert rows is not None
                taken[do.buffer] = acquire(rows, payload, do.part.chunk)
            case Start(payload=payload, flow=flow):
                taken[do.buffer] = acquire(flow.message_rows(kv_rank).received, payload, do.part.chunk)
            case Allocate(payload=payload, flow=flow):
                taken[do.buffer] = acquire(usable_rows(flow), payload, do.part.chunk)
            case Order(payload=payload, flow=flow) if flow.order_table(kv_rank) is not None:
                rows = usable_rows(flow) if isinstance(flow, Fetch) else flow.message_rows(kv_rank).sent
                assert rows is not None
                ordered = acquire(rows, payload, do.part.chunk)
                pool.release([taken[do.buffer]])
                taken[do.buffer] = ordered
            case Release():
                pool.release([taken.pop(do.buffer)])
