"""`relayout`: moves tokens from one layout to another."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.device import on_device
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.agreement import agree_on_call
from megatron_cp.executor.arguments import check_rows, check_stream
from megatron_cp.executor.communicator import Communicator, direction
from megatron_cp.executor.groups import Group, as_rank_group
from megatron_cp.executor.no_compile import no_compile, no_compile_backward
from megatron_cp.executor.trace import NO_RANGE, profiling
from megatron_cp.layout import Layout, Route
from megatron_cp.layout.memo import Memo, remembered
from megatron_cp.layout.route import rows_between
from megatron_cp.plan.transport import COLLECTIVE, Transport, checked_transport


@no_compile
def relayout(
    local: Tensor, source: Layout, target: Layout, group: Group | None = None, *,
    transport: Transport | str = COLLECTIVE,
) -> Tensor:  # fmt: skip
    """Moves rows from one layout to another: one all-to-all between two gathers; differentiable.

    Args:
        local: `[source.row_counts[rank], ...]` this rank's rows.
        source, target: layouts of one packing over the ranks of `group`.
        transport: the algorithm that carries messages; see `plan_attention`. That of a plan is `plan.transport`.

    Returns:
        `[target.row_counts[rank], ...]`, pad rows zero.

    Raises:
        ArgumentError: layouts, group, rows or transport that do not belong together.
    """
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            raise ArgumentError(
                name, layout, "a layout", "A plan's hidden_layout is None where nothing is redistributed."
            )
    ranks = as_rank_group(group, source.cp_size)
    check_rows("local", local, source, ranks.rank)
    check_stream("local", local.device, source)
    transport = checked_transport(transport, source.cp_size)
    options = {"transport": transport.describe()}
    mark = agree_on_call(ranks, [source, target], "relayout", {"local": local}, options)
    tables = prepare_relayout(source, target, ranks.rank, local.device)
    return _Relayout.apply(local, tables, Communicator(ranks, transport, mark))


def prepare_relayout(source: Layout, target: Layout, rank: int, device: torch.device) -> _RelayoutTables:
    """Makes the index tables of one rank, once."""
    # By the target's value, not the target: layouts that hold each other's tables would wait for the garbage collector.
    key = ("relayout", target.value, rank, device)
    found: _RelayoutTables = source.memo(key, lambda: _RelayoutTables(source, target, rank, device))
    return found


class _RelayoutTables(Memo):
    """The tables of a route on a device, for both directions."""

    def __init__(self, source: Layout, target: Layout, rank: int, device: torch.device) -> None:
        route = Route.between(source, target, rank)
        self.rows = (int(target.row_counts[rank]), int(source.row_counts[rank]))
        self._rows_between = SplitCounts(source.memo(("rows", target.value), lambda: rows_between(source, target)))
        gathers = (route.send_rows, route.arrivals, route.recv_rows, route.reversed().arrivals)
        self.send, self.arrive, self.send_back, self.arrive_back = (on_device(rows, device) for rows in gathers)

    @remembered
    def split_counts(self, features: int, *, forward: bool) -> SplitCounts:
        """Returns the elements that all ranks send each other, for rows of `features` elements."""
        return (self._rows_between if forward else self._rows_between.reversed()).times(features)


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, tables: _RelayoutTables, comm: Communicator) -> Tensor:
        ctx.tables = (tables, comm)
        with comm.traced("relayout", forward=True) if profiling() else NO_RANGE:
            return _moved(local, tables, comm, forward=True)

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tables, comm = ctx.tables
        with comm.traced("relayout", forward=False) if profiling() else NO_RANGE:
            return _moved(gradients[0], tables, comm, forward=False), None, None


def _moved(local: Tensor, tables: _RelayoutTables, comm: Communicator, *, forward: bool) -> Tensor:
    send, arrive = (tables.send, tables.arrive) if forward else (tables.send_back, tables.arrive_back)
    split_counts = tables.split_counts(math.prod(local.shape[1:]), forward=forward)
    received = comm.acquire_like(local, arrive.numel(), *local.shape[1:])
    sent = comm.buffers.acquire_like(local, send.numel(), *local.shape[1:])
    torch.index_select(local, 0, send, out=sent)
    pending = comm.start_all_to_all(received.view(-1), sent.view(-1), split_counts, direction(forward=forward))
    with comm.traced("relayout wait", forward=forward) if profiling() else NO_RANGE:
        pending.wait()
    moved = local.new_zeros(tables.rows[0 if forward else 1], *local.shape[1:])
    torch.index_select(received, 0, arrive, out=moved[: arrive.numel()])
    comm.release(sent, received)
    return moved
