"""`Workload`: what all ranks do in one direction of a plan, with times and bytes, for `simulate`. No torch in here.

It has local work, transfers that start, and transfers that are awaited. All ranks do the same operations in the same
order; times and bytes differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_cp.layout.array_types import FloatArray, IntArray
from megatron_cp.planner.predict.hardware import Hardware

Seconds = FloatArray  # `[ranks]`


@dataclass(frozen=True, eq=False)
class Edges:
    """The messages of one transfer.

    Attributes:
        senders, receivers: `[n]` two different ranks for each message.
        nbytes: `[n]` the bytes of each message, above 0.
    """

    senders: IntArray
    receivers: IntArray
    nbytes: IntArray

    @classmethod
    def from_messages(cls, senders: IntArray, receivers: IntArray, nbytes: IntArray) -> Edges:
        """Makes edges of messages, except empty ones and those from a rank to itself."""
        travels = (senders != receivers) & (nbytes > 0)
        if travels.all():  # the same arrays, by which `simulate` recognises the route of the transfer before
            return cls(senders, receivers, nbytes)
        return cls(senders[travels], receivers[travels], nbytes[travels])

    @classmethod
    def from_counts(cls, nbytes: IntArray) -> Edges:
        """Makes edges of `[ranks, ranks]` the bytes that go from each rank to each."""
        senders, receivers = np.divmod(np.arange(nbytes.size), len(nbytes))
        return cls.from_messages(senders, receivers, nbytes.ravel())

    def sent(self, ranks: int) -> IntArray:
        """Returns `[ranks]` the bytes that each rank sends."""
        return np.bincount(self.senders, self.nbytes, minlength=ranks).astype(np.int64)

    def reversed(self) -> Edges:
        """Returns the same messages in the opposite direction."""
        return Edges(self.receivers, self.senders, self.nbytes)


@dataclass(frozen=True, eq=False)
class TimedWork:
    """Local work.

    Attributes:
        name: the name of the step.
        kind: "kernel" for the layer's own work, "copy" for packing, merging and summing, "product" for weights.
        seconds: `[ranks]` the time on each rank.
    """

    name: str
    kind: str
    seconds: Seconds


@dataclass(frozen=True, eq=False)
class Transfer:
    """The start of a transfer: messages leave when their sender reaches this operation.

    Attributes:
        name: the name of the data.
        key: the number of the transfer, for `Arrival`.
        edges: the messages.
        starts: transfers that the backend starts one after another for this one, each with a latency.
        handling: `[ranks]` seconds of a rank's core to send and receive the bytes, while it computes or waits.
        overlap: the part of the transfer's time that work can hide.
        is_second: True if it passes on what has just arrived, and is waited for at once.
    """

    name: str
    key: int
    edges: Edges
    starts: int
    handling: Seconds
    overlap: float = 1.0
    is_second: bool = False


@dataclass(frozen=True, eq=False)
class Arrival:
    """The wait for a transfer: until all messages to the rank have arrived and its own have left."""

    key: int


Operation = TimedWork | Transfer | Arrival


class Workload:
    """A list of operations that grows while a plan is walked over.

    Args:
        ranks: the number of ranks.
        collective: seconds of a host to start a transfer and to wait for it.
        transfer: bytes a second that a rank's core sends or receives; 0 where a device does so by itself.
        issue: seconds of a device's host to issue an operation.

    Attributes:
        host: seconds of a device's host to issue all operations, while the device computes.
    """

    def __init__(self, ranks: int, *, collective: float = 0.0, transfer: float = 0.0, issue: float = 0.0) -> None:
        self.ranks, self.collective, self.transfer, self.issue = ranks, collective, transfer, issue
        self.host = 0.0
        self.operations: list[Operation] = []
        self._keys = 0

    @classmethod
    def on(cls, hardware: Hardware, ranks: int) -> Workload:
        """Returns an empty workload of ranks that have this hardware."""
        return cls(ranks, collective=hardware.collective, transfer=hardware.transfer, issue=hardware.host[0])

    def work(self, name: str, kind: str, seconds: Seconds | float, *, host: float | None = None) -> None:
        """Adds local work, unless all its times are 0; its host takes `issue` for it, or the given seconds."""
        times = seconds if isinstance(seconds, np.ndarray) else np.full(self.ranks, seconds, dtype=np.float64)
        if times.any():
            self.host += self.issue if host is None else host
            self.operations.append(TimedWork(name, kind, times))

    def start(
        self, name: str, edges: Edges, starts: int = 1, *, overlap: float = 1.0, host: float | None = None,
        is_second: bool = False,
    ) -> int:  # fmt: skip
        """Adds the start of a transfer; returns the key to wait for it."""
        self._keys += 1
        if edges.senders.size:
            self.host += self.issue if host is None else host
        handling: Seconds = np.zeros(self.ranks)
        if self.collective or self.transfer:  # where a device moves bytes by itself, its ranks do nothing for them
            moved: Seconds = np.bincount(edges.senders, edges.nbytes, minlength=self.ranks)
            moved = moved + np.bincount(edges.receivers, edges.nbytes, minlength=self.ranks)
            if self.collective:
                blocked: Seconds = (moved > 0) * np.float64(self.collective)
                self.work("start a transfer", "copy", blocked, host=0.0)
            handling = moved / self.transfer if self.transfer else handling
        self.operations.append(Transfer(name, self._keys, edges, starts, handling, overlap, is_second))
        return self._keys

    def wait(self, key: int) -> None:
        """Adds the wait for a transfer."""
        self.operations.append(Arrival(key))

    @property
    def transfers(self) -> Iterator[Transfer]:
        """The transfers, in the order in which every rank starts them."""
        return (operation for operation in self.operations if isinstance(operation, Transfer))
