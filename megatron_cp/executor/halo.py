"""The halo exchange: the inputs before each segment that a causal convolution reaches, while others are computed.

Shapes: `t` rows of this rank, pad rows included, `c` channels, `n` waiting segments, `r` the reach, width - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.chain import Halo
from megatron_cp.executor.groups import Pending, RankGroup
from megatron_cp.executor.wire import Wire, over


def start_halo(step: Halo, group: RankGroup | Wire, x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Sends what others need; differentiable, and what comes back in backward is under way just as long.

    Args:
        step: the tables.
        group: the ranks of the layout, and the road between them.
        x: `[t, c]`

    Returns:
        x, to be used from now on in place of the argument by one operation, and a function that waits and returns the
        history `[n, r, c]` of the segments that continue a document, zero before the document. Call it once.
    """
    journey = _Journey(step, over(group), x)
    x, rows = _Start.apply(x, journey)
    return x, lambda: _Wait.apply(rows, journey)


def prepare_halo(step: Halo, rank: int, device: torch.device) -> None:
    """Makes the index tables, so that no layer has to."""
    for name in ("send_rows", "own_rows", "places"):
        _index(step, rank, name, device)


class _Journey:
    """One exchange under way: forward, and later backward."""

    def __init__(self, step: Halo, group: Wire, x: Tensor) -> None:
        self.step, self.group = step, group
        self.tables = step.tables(group.rank)
        self.pending: Pending | None = None
        self.channels = x.shape[1]

    def index(self, name: str, device: torch.device) -> Tensor:
        return _index(self.step, self.group.rank, name, device)

    def start(self, received: Tensor, sent: Tensor, *, forward: bool) -> None:
        if not self.step.crosses:
            return
        rows = self.step.traffic if forward else self.step.traffic.reversed()
        self.pending = self.group.start_all_to_all(received.view(-1), sent.view(-1), rows.times(self.channels))

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        self.pending = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: _Journey) -> Any:
        ctx.journey, tables = journey, journey.tables
        arriving = int(tables.recv_counts.sum())
        rows = x.new_empty(arriving + tables.own_rows.size, x.shape[1])
        journey.start(rows[:arriving], x.index_select(0, journey.index("send_rows", x.device)), forward=True)
        torch.index_select(x, 0, journey.index("own_rows", x.device), out=rows[arriving:])
        return x.view_as(x), rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        journey = ctx.journey
        dx, drows = gradients
        journey.wait()
        # In place: the convolution, x's one user, has just made it.
        dx = dx if dx.is_contiguous() else dx.contiguous()
        dx.index_add_(0, journey.index("own_rows", dx.device), drows[int(journey.tables.recv_counts.sum()) :])
        dx.index_add_(0, journey.index("send_rows", dx.device), journey.returned)
        del journey.returned
        return dx, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        journey.wait()
        history = rows.new_zeros(journey.tables.num_waiting * journey.step.reach, rows.shape[1])
        history.index_copy_(0, journey.index("places", rows.device), rows)
        return history.unflatten(0, (journey.tables.num_waiting, journey.step.reach))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        journey = ctx.journey
        drows = gradients[0].flatten(0, 1).index_select(0, journey.index("places", gradients[0].device))
        arrived = int(journey.tables.recv_counts.sum())
        journey.returned = drows.new_empty(int(journey.tables.send_counts.sum()), drows.shape[1])
        journey.start(journey.returned, drows[:arrived], forward=False)
        return drows, None


def _index(step: Halo, rank: int, name: str, device: torch.device) -> Tensor:
    return step.layout.table(
        ("halo", step.reach, rank, name, device),
        lambda: on_device(getattr(step.tables(rank), name), device, torch.int64),
    )
