"""The halo exchange: sends the inputs before each segment that a causal convolution reaches, while others are computed.

Shapes: `t` rows of this rank, pad rows included, `c` channels, `n` waiting segments, `r` the reach, width - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.communicator import Communicator, direction, over
from megatron_cp.executor.groups import Pending, RankGroup
from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.executor.trace import NO_RANGE, profiling
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.recurrence import Halo


def start_halo(step: Halo, comm: RankGroup | Communicator, x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Starts sending the rows that other ranks need; differentiable, with as much overlap in backward.

    Returns:
        x, for one operation, which must use it in place of the argument; and a function that waits and returns the
        history `[n, r, c]` of the segments that continue a document, zero before the document. Call it once.
    """
    in_flight = InFlightHalo(step, over(comm), x)
    x, order_token = _StartHalo.apply(x, in_flight)
    return x, lambda: _WaitHalo.apply(order_token, in_flight)


def prepare_halo(step: Halo, rank: int, device: torch.device) -> None:
    """Makes the index tables, so that no layer has to."""
    for name in ("send_rows", "local_rows", "places"):
        _index(step, rank, name, device)
    for name in ("send_rows", "local_rows"):
        _rounds(step, rank, name, device)


class InFlightHalo:
    """The messages of one halo exchange that are under way on one rank, in forward and later in backward."""

    _pending: Pending | None = None
    _rows: Tensor  # rows that own segments need (in backward, their gradients): first those of other ranks
    _others: Tensor  # rows that other ranks need (in backward, their gradients)

    def __init__(self, step: Halo, comm: Communicator, x: Tensor) -> None:
        self.step, self.comm = step, comm
        self.tables = step.tables(comm.rank)
        self.crossing, self.channels = int(self.tables.recv_counts.sum()), x.shape[1]

    def index(self, name: str, device: torch.device) -> Tensor:
        return _index(self.step, self.comm.rank, name, device)

    def add(self, target: Tensor, name: str, rows: Tensor) -> None:
        """Adds `target[index[i]] += rows[i]`, in a fixed order also on CUDA, where that of `index_add_` varies."""
        for index, places in _rounds(self.step, self.comm.rank, name, target.device):
            target.index_add_(0, index, rows if places is None else rows.index_select(0, places))

    def acquire(self, like: Tensor, *, forward: bool) -> tuple[Tensor, Tensor]:
        """Takes memory for the rows needed here, and for those needed elsewhere: one is received and one is sent."""
        here, there = (self.comm, self.comm.buffers) if forward else (self.comm.buffers, self.comm)
        self._rows = here.acquire_like(like, self.tables.places.size, self.channels)
        self._others = there.acquire_like(like, self.tables.send_rows.size, self.channels)
        return self._rows, self._others

    def start(self, *, forward: bool) -> None:
        if not self.step.crosses:
            return
        split_counts = (self.step.split_counts if forward else self.step.split_counts.reversed()).times(self.channels)
        here, there = self._rows[: self.crossing].view(-1), self._others.view(-1)
        received, sent = (here, there) if forward else (there, here)
        step_name = f"rows before segments, {direction(forward=forward)}"
        self._pending = self.comm.start_all_to_all(received, sent, split_counts, step_name)

    def wait(self, *, forward: bool) -> tuple[Tensor, Tensor]:
        if self._pending is not None:
            with self.comm.traced("halo wait", forward=forward) if profiling() else NO_RANGE:
                self._pending.wait()
        self._pending = None
        return self._rows, self._others

    def release(self) -> None:
        self.comm.release(self._rows, self._others)
        del self._rows, self._others


# Between the two ends autograd sees an order token: an empty tensor that keeps the order of steps.


class _StartHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, in_flight: InFlightHalo) -> Any:
        ctx.in_flight = in_flight
        with in_flight.comm.traced("halo send", forward=True) if profiling() else NO_RANGE:
            rows, sent = in_flight.acquire(x, forward=True)
            torch.index_select(x, 0, in_flight.index("send_rows", x.device), out=sent)
            in_flight.start(forward=True)
            torch.index_select(x, 0, in_flight.index("local_rows", x.device), out=rows[in_flight.crossing :])
        return x.view_as(x), x.new_empty(0)

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        in_flight, dx = ctx.in_flight, gradients[0]
        drows, returned = in_flight.wait(forward=False)
        # In place: the convolution, x's one user, has just made it.
        dx = dx if dx.is_contiguous() else dx.contiguous()
        in_flight.add(dx, "local_rows", drows[in_flight.crossing :])
        in_flight.add(dx, "send_rows", returned)
        in_flight.release()
        return dx, None


class _WaitHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, order_token: Tensor, in_flight: InFlightHalo) -> Tensor:
        ctx.in_flight = in_flight
        rows, _ = in_flight.wait(forward=True)
        history = order_token.new_zeros(in_flight.tables.num_waiting * in_flight.step.reach, in_flight.channels)
        history.index_copy_(0, in_flight.index("places", order_token.device), rows)
        in_flight.release()
        return history.unflatten(0, (in_flight.tables.num_waiting, in_flight.step.reach))

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        in_flight, dhistory = ctx.in_flight, gradients[0].flatten(0, 1)
        with in_flight.comm.traced("halo send", forward=False) if profiling() else NO_RANGE:
            drows, _ = in_flight.acquire(dhistory, forward=False)
            torch.index_select(dhistory, 0, in_flight.index("places", dhistory.device), out=drows)
            in_flight.start(forward=False)
        return dhistory.new_empty(0), None


def _index(step: Halo, rank: int, name: str, device: torch.device) -> Tensor:
    return step.layout.memo(
        ("halo", step.reach, rank, step.continued, name, device),
        lambda: on_device(getattr(step.tables(rank), name), device, torch.int64),
    )


def _rounds(step: Halo, rank: int, name: str, device: torch.device) -> list[tuple[Tensor, Tensor | None]]:
    """Returns the rows of a table, and their places in it (None for all), in rounds that `index_add_` adds at once.

    On CUDA no row occurs twice in a round. On the CPU `index_add_` adds in a fixed order, so there is one round.
    """

    def make() -> list[tuple[Tensor, Tensor | None]]:
        rows = getattr(step.tables(rank), name)
        rounds = rounds_without_repeats(rows) if device.type == "cuda" else []
        if len(rounds) <= 1:
            return [(_index(step, rank, name, device), None)]
        return [(on_device(rows[of], device, torch.int64), on_device(of, device, torch.int64)) for of in rounds]

    return step.layout.memo(("halo rounds", step.reach, rank, step.continued, name, device), make)


def rounds_without_repeats(rows: IntArray) -> list[IntArray]:
    """Splits the places of a table into rounds, in its order, so that no row occurs twice in a round.

    A row occurs twice if several segments reach it: after documents that are shorter than the taps.
    """
    order = np.argsort(rows, kind="stable")
    starts = np.flatnonzero(np.diff(rows[order], prepend=-1))
    occurrence = np.empty(len(rows), dtype=np.int64)
    occurrence[order] = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
    return [np.flatnonzero(occurrence == number) for number in range(occurrence.max(initial=-1) + 1)]
