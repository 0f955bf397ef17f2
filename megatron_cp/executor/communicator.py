"""`Communicator`: the ranks of a plan and the transport between them.

With every transport an operation is started, and waited for later; both are collective, and ranks wait in the order
of starting. Who starts one acquires the memory in which it lands here, and releases it here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.arguments import check_slots
from megatron_cp.executor.groups import Message, Pending, RankGroup
from megatron_cp.executor.trace import current_layer, range_name
from megatron_cp.executor.transports import transport_over
from megatron_cp.layout.memo import Memo
from megatron_cp.plan.transport import COLLECTIVE, Transport


class Communicator:
    """How what a plan sends travels, seen from one rank.

    Args:
        group: the ranks.
        transport: how messages travel.
        operation: what the plan is of, for errors.
        scheme: how it is spread, for errors and for the names of ranges.
        plan: where its tables may be replaced by another pack's meanwhile.

    Attributes:
        layer: the number of the layer that made this, or None: for the names of ranges, as is
        chunk: the number of the chunk of heads that it is used for, from 0, and how many there are.
    """

    chunk = (0, 1)

    def __init__(
        self, group: RankGroup, transport: Transport = COLLECTIVE, operation: str = "", scheme: str = "",
        plan: Memo | None = None,
    ) -> None:  # fmt: skip
        self.group, self.transport, self.operation, self.scheme = group, transport, operation, scheme
        self._plan = plan
        self.layer = current_layer()
        self.rank, self.size = group.rank, group.size
        self._over_group = transport_over(group, transport)

    @property
    def buffers(self) -> Buffers:
        """Memory to pack in, and to send from; what is received lands in what `acquire` returns."""
        return self.group.buffers

    def part(self, ranks: range) -> Communicator:
        """The communicator of some of the ranks, this one among them."""
        if len(ranks) == self.size:
            return self
        part = Communicator(self.group.part(ranks), self.transport.part(ranks), self.operation, self.scheme, self._plan)
        part.layer, part.chunk = self.layer, self.chunk  # also in backward, where no layer is current
        return part

    def in_chunk(self, number: int, count: int) -> Communicator:
        """This communicator, whose ranges name one of several chunks of heads."""
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
        """The range of a step; asked for while a profiler is on. Arguments are those of `range_name`."""
        chunk = chunk if chunk[1] > 1 else self.chunk
        name = range_name(self.scheme, step, what, chunk=chunk, stage=stage, forward=forward, layer=self.layer)
        return record_function(name)

    def acquire(self, size: int, device: torch.device, *, kept: bool = False) -> Tensor:
        """`[size]` unwritten bytes in which a message lands: until `release`, or, if `kept`, as long as they are held.

        Args:
            kept: the memory stays the caller's for as long as it refers to it, as autograd does for backward; `release`
                leaves it alone.
        """
        return self._over_group.acquire(size, device, kept=kept)

    def acquire_like(self, like: Tensor, *shape: int) -> Tensor:
        """What `like.new_empty(*shape)` is, for a message to land in, until `release`."""
        return self.acquire(math.prod(shape) * like.itemsize, like.device).view(like.dtype).view(shape)

    def release(self, *tensors: Tensor) -> None:
        """Takes back what was acquired here or in `buffers`, or views of it. Other tensors are left alone."""
        self._over_group.release(*tensors)

    def start_all_to_all(self, received: Tensor, sent: Tensor, split_counts: SplitCounts, step: str = "") -> Pending:
        """Piece r of flat `sent` goes to rank r, and piece r of flat `received` comes from it."""
        self._enter(step)
        return self._over_group.start_all_to_all(received, sent, split_counts)

    def start_all_gather(self, received: Tensor, sent: Tensor, step: str = "") -> Pending:
        """Fills flat `received` with every rank's flat `sent`, in rank order; all ranks send equally much."""
        self._enter(step)
        return self._over_group.start_all_gather(received, sent)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message], step: str = "") -> Pending:
        """Starts messages from rank to rank together, as a ring does. Messages of one pair stay in order."""
        self._enter(step)
        return self._over_group.start_messages(sends, receives)

    def _enter(self, step: str) -> None:
        """Tells the group what it is used for from now on. Before a backward another pack may have come."""
        if self._plan is not None:
            check_slots(self._plan)
        self.group.activity = ", ".join(filter(None, (self.operation, self.scheme, step)))


def direction(*, forward: bool) -> str:
    """The word for it."""
    return "forward" if forward else "backward"


def over(group: RankGroup | Communicator) -> Communicator:
    """A group with its backend's own transport, or a communicator as it is."""
    return group if isinstance(group, Communicator) else Communicator(group)
