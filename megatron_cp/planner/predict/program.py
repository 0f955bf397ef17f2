"""`Program`: what every rank of a plan does, in order, as local work, transfers that start, and waits for them.

All ranks do the same operations in the same order; how long they take and how much they move differs. No torch in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_cp.layout.packing import IntArray

Seconds = NDArray[np.float64]  # `[ranks]`


@dataclass(frozen=True, eq=False)
class Edges:
    """The messages of one transfer.

    Attributes:
        senders, receivers: `[n]` ranks, never the same one twice in a row: what a rank keeps is no message.
        nbytes: `[n]` of each, above 0.
    """

    senders: IntArray
    receivers: IntArray
    nbytes: IntArray

    @classmethod
    def of(cls, senders: IntArray, receivers: IntArray, nbytes: IntArray) -> Edges:
        """Those of given messages that travel: to others, and not empty."""
        travels = (senders != receivers) & (nbytes > 0)
        if travels.all():  # the same arrays, by which `simulate` sees that they go where those before went
            return cls(senders, receivers, nbytes)
        return cls(senders[travels], receivers[travels], nbytes[travels])

    def sent(self, ranks: int) -> IntArray:
        """`[ranks]` bytes that each sends."""
        return np.bincount(self.senders, self.nbytes, minlength=ranks).astype(np.int64)

    def reversed(self) -> Edges:
        """The way back."""
        return Edges(self.receivers, self.senders, self.nbytes)


@dataclass(frozen=True, eq=False)
class Work:
    """Local work.

    Attributes:
        name: of the step.
        kind: "kernel" for the layer's own, "copy" for packing, merging and summing, "product" for weights.
        seconds: `[ranks]`.
    """

    name: str
    kind: str
    seconds: Seconds


@dataclass(frozen=True, eq=False)
class Start:
    """A transfer starts: its messages leave when their sender comes here.

    Attributes:
        name: of what travels.
        key: by which `Wait` names it.
        edges: its messages.
        starts: transfers that the backend starts one after another for it, each with a latency.
        handling: `[ranks]` seconds that a rank's core takes to send and receive the bytes, while it computes or waits.
    """

    name: str
    key: int
    edges: Edges
    starts: int
    handling: Seconds


@dataclass(frozen=True, eq=False)
class Wait:
    """A rank goes on once all messages to it have arrived and its own have left."""

    key: int


Operation = Work | Start | Wait


class Program:
    """The operations, in order, while they are put together.

    Args:
        ranks: how many.
        collective: seconds of a host to start a transfer and to wait for it.
        transfer: bytes a second that a rank's core sends or receives; 0 where a device does.
    """

    def __init__(self, ranks: int, *, collective: float = 0.0, transfer: float = 0.0) -> None:
        self.ranks, self.collective, self.transfer = ranks, collective, transfer
        self.operations: list[Operation] = []
        self._keys = 0

    def work(self, name: str, kind: str, seconds: Seconds | float) -> None:
        """Adds local work, unless it is none."""
        of_ranks = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (self.ranks,))
        if of_ranks.any():
            self.operations.append(Work(name, kind, of_ranks))

    def start(self, name: str, edges: Edges, starts: int = 1) -> int:
        """Adds a transfer; the key to wait for it."""
        self._keys += 1
        moved: Seconds = np.zeros(self.ranks)
        for ends in (edges.senders, edges.receivers):
            moved += np.bincount(ends, edges.nbytes, minlength=self.ranks)
        if self.collective:
            host: Seconds = (moved > 0) * np.float64(self.collective)
            self.work("start a transfer", "copy", host)
        handling = moved / self.transfer if self.transfer else np.zeros(self.ranks)
        self.operations.append(Start(name, self._keys, edges, starts, handling))
        return self._keys

    def wait(self, key: int) -> None:
        """Adds the wait for a transfer."""
        self.operations.append(Wait(key))

    @property
    def transfers(self) -> Iterator[Start]:
        """The transfers, in the order in which every rank starts them."""
        return (operation for operation in self.operations if isinstance(operation, Start))

    def busy(self) -> Seconds:
        """`[ranks]` seconds of local work."""
        total = np.zeros(self.ranks)
        for operation in self.operations:
            if isinstance(operation, Work):
                total += operation.seconds
        return total
