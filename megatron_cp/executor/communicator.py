"""`Communicator`: the ranks of a plan and the wire between them.

The wire is the group itself, or a transport that is laid over it. On each an operation is started, and waited for
later; both are collective, and ranks wait in the order of starting. The caller acquires the memory for received
messages here, and releases it here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from megatron_cp.exchange.device import CallTables
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup, Wire
from megatron_cp.executor.trace import current_layer, range_name
from megatron_cp.executor.transports import LAID_OVER_GROUP
from megatron_cp.plan.transport import COLLECTIVE, Transport


class Communicator:
    """Sends and receives the messages of one plan on one rank.

    Args:
        group: the ranks.
        transport: the algorithm that carries messages.
        operation: name of the operation, for errors.
        scheme: the plan's scheme, for errors and for the names of ranges.
        tables: the plan's tables, if another pack's may be loaded over them before backward; checked at each start.

    Attributes:
        buffers: memory for packing and sending; for received messages use `acquire`.
        wire: what carries the messages.
        layer: number of the layer that made this, or None; for the names of ranges.
        chunk: number, from 0, and count of the head chunks, for the names of ranges.
    """

    chunk = (0, 1)

    def __init__(
        self, group: RankGroup, transport: Transport = COLLECTIVE, operation: str = "", scheme: str = "",
        tables: CallTables | None = None,
    ) -> None:  # fmt: skip
        self.group, self.transport, self.operation, self.scheme = group, transport, operation, scheme
        self.tables = tables
        self.layer = current_layer()
        self.rank, self.size, self.buffers = group.rank, group.size, group.buffers
        laid = LAID_OVER_GROUP.get(transport.name)
        self.wire: Wire = group if laid is None else laid(group, transport)

    def part(self, ranks: range) -> Communicator:
        """Returns a communicator of a subset of the ranks that includes this rank."""
        if len(ranks) == self.size:
            return self
        group, transport = self.group.part(ranks), self.transport.part(ranks)
        part = Communicator(group, transport, self.operation, self.scheme, self.tables)
        part.layer, part.chunk = self.layer, self.chunk  # in backward, too, where `current_layer` is None
        return part

    def chunk_comm(self, number: int, count: int) -> Communicator:
        """Returns this communicator with ranges that name chunk `number` of `count` chunks of heads."""
        if count == 1:
            return self
        named = copy.copy(self)
        named.chunk = (number, count)
        return named

    def traced(
        self,
        step: str,
        what: str = "",
        *,
        forward: bool,
        chunk: tuple[int, int] = (0, 1),
        stage: tuple[int, int] = (0, 1),
    ) -> record_function:
        """Returns the range of a step, for use while a profiler is on. The arguments are those of `range_name`."""
        chunk = chunk if chunk[1] > 1 else self.chunk
        name = range_name(self.scheme, step, what, chunk=chunk, stage=stage, forward=forward, layer=self.layer)
        return record_function(name)

    def acquire(self, size: int, device: torch.device, *, kept: bool = False) -> Tensor:
        """Returns `[size]` uninitialised bytes for a received message, valid until `release`.

        Args:
            kept: the memory is valid as long as tensors refer to it, as autograd's do until backward; `release` then
                has no effect on it.
        """
        return self.wire.acquire(size, device, kept=kept)

    def acquire_like(self, like: Tensor, *shape: int) -> Tensor:
        """Returns a tensor for a received message, in place of `like.new_empty(*shape)`, valid until `release`."""
        return self.wire.acquire(math.prod(shape) * like.itemsize, like.device).view(like.dtype).view(shape)

    def release(self, *tensors: Tensor) -> None:
        """Takes back tensors acquired here or in `buffers`, or views of them; ignores other tensors."""
        self.wire.release(*tensors)

    def start_all_to_all(self, received: Tensor, sent: Tensor, split_counts: SplitCounts, step: str = "") -> Pending:
        """Starts sending piece r of flat `sent` to rank r, and receiving piece r of flat `received` from it."""
        self._enter(step)
        received_splits, sent_splits = split_counts.received_by(self.rank), split_counts.sent_by(self.rank)
        return self.wire.start_all_to_all(received, sent, received_splits, sent_splits, split_counts)

    def start_all_gather(self, received: Tensor, sent: Tensor, step: str = "") -> Pending:
        """Starts filling flat `received` with every rank's flat `sent`, all of equal size, in rank order."""
        self._enter(step)
        return self.wire.start_all_gather(received, sent)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message], step: str = "") -> Pending:
        """Starts messages between ranks together, as a ring does. Messages between two ranks stay in order."""
        self._enter(step)
        return self.wire.start_messages(sends, receives)

    def _enter(self, step: str) -> None:
        """Sets the group's activity, for errors, and checks that the plan's tables still hold its own pack."""
        if self.tables is not None:
            self.tables.check()
        self.group.activity = ", ".join(filter(None, (self.operation, self.scheme, step)))


def direction(*, forward: bool) -> str:
    """Returns "forward" or "backward"."""
    return "forward" if forward else "backward"


def over(group: RankGroup | Communicator) -> Communicator:
    """Returns a communicator as it is, or one over a group with the transport of its backend."""
    return group if isinstance(group, Communicator) else Communicator(group)
