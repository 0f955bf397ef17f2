"""The loop over a plan's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import assert_never

import torch
from torch import Tensor

from megatron_cp.exchange.geometry import prepare_tables
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.halo import prepare_halo
from megatron_cp.executor.head_exchange import ToTokensInParts, start_to_heads
from megatron_cp.executor.relayout import prepare_relayout
from megatron_cp.executor.transfers import prepare_transfers
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import Compute, ToHeads, ToTokens

LocalWork = Callable[..., list[Tensor]]
Inputs = list[Tensor] | Callable[[int], list[Tensor]]


def run(plan: Plan, comm: Communicator, inputs: Inputs, work: Callable[[int], Mapping[str, LocalWork]]) -> list[Tensor]:
    """Runs a plan on this rank. Every step is differentiable, and its backward is its adjoint over the same plan.

    Heads that go in chunks are computed chunk by chunk: the next one arrives, and the one before is sent, meanwhile.

    Args:
        plan: the same on every rank.
        comm: the plan's ranks, and the transport between them.
        inputs: what the first step takes; or a function that makes it for one chunk, of that chunk's heads alone, while
            the chunks before are under way already.
        work: for each chunk of heads the functions that do it: for each `Compute` step by its name, for `Attend` under
            "attend", for `Halo` under "conv" and for `Scan` under "rule".
    """
    last = plan.steps[-1]
    back = ToTokensInParts(last.exchange, comm) if isinstance(last, ToTokens) else None
    for chunk, in_flight in enumerate(_started(plan, comm, inputs)):
        tensors = [tensor for finish in in_flight for tensor in finish()]
        # Kernels compute in the types that they are given: autocast would change them behind their backs.
        with torch.autocast(tensors[0].device.type, enabled=False):
            tensors = _computed(plan, tensors, work(chunk))
        if back is not None:
            back.start(chunk, *tensors)
    return tensors if back is None else back.finish()


def _started(plan: Plan, comm: Communicator, inputs: Inputs) -> list[list[Callable[[], list[Tensor]]]]:
    """Starts the exchanges to the head side. For each chunk of heads the functions that wait for it."""
    inbound = [step for step in plan.steps if isinstance(step, ToHeads)]
    if not inbound:
        return [[lambda: inputs(0) if callable(inputs) else inputs]]
    if not callable(inputs):
        parts = (start_to_heads(step.exchange, comm, *inputs[slice(*step.inputs)]) for step in inbound)
        return [list(of_chunk) for of_chunk in zip(*parts, strict=True)]
    in_flight = []
    for chunk in range(plan.head_chunks):
        made = inputs(chunk)
        starts = (start_to_heads(s.exchange.of_chunk(chunk), comm, *made[slice(*s.inputs)]) for s in inbound)
        in_flight.append([finish for started in starts for finish in started])
    return in_flight


def _computed(plan: Plan, tensors: list[Tensor], work: Mapping[str, LocalWork]) -> list[Tensor]:
    """The local steps of one chunk."""
    for step in plan.steps:
        match step:
            case Attend():
                tensors = work["attend"](*tensors)
            case Compute(name):
                tensors = work[name](*tensors)
            case Halo():
                tensors = work["conv"](*tensors)
            case Scan():
                tensors = work["rule"](*tensors)
            case ToHeads() | ToTokens():
                pass
            case _:
                assert_never(step)
    return tensors


def prepare(plan: Plan, rank: int, device: torch.device) -> None:
    """Makes all that a rank derives from a plan, but for what its kernels do, so that no layer has to.

    Call it where the batch is sharded: the copies to a device are then long done when the first layer needs them.
    """
    kv_rank = rank // plan.ulysses_degree
    for exchange, _ in plan.exchanges(forward=True):
        prepare_tables(exchange.within(kv_rank).layout, device)
    for step in plan.recurrent_steps:
        if isinstance(step, Halo):
            if step.reach:
                prepare_halo(step, rank, device)
                _ = step.split_counts
        else:
            _ = step.split_counts(forward=True), step.split_counts(forward=False)
    if plan.hidden_layout is not None:
        prepare_relayout(plan.hidden_layout, plan.layout, rank, device)
        prepare_relayout(plan.layout, plan.hidden_layout, rank, device)
    if plan.attend is None:
        return
    for stage in plan.attend.stages:
        if len(plan.attend.tiles(kv_rank, stage).bands):
            _ = plan.attend.call_tiles(kv_rank, stage)
    prepare_transfers(plan.attend, kv_rank, device)
