"""The loop over a layer's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from typing_extensions import assert_never

from megatron_cp.exchange.device import indexed
from megatron_cp.exchange.geometry import prepare_tables
from megatron_cp.executor.autocast import without_autocast
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.halo import prepare_halo
from megatron_cp.executor.head_exchange import ToHeadsInParts, ToTokensInParts
from megatron_cp.executor.relayout import prepare_relayout
from megatron_cp.executor.trace import profiling, traced_work
from megatron_cp.executor.transfers import prepare_transfers
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.layer_program import Local, Move, Project
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import Compute, LocalStep, ToHeads, ToTokens

LocalWork = Callable[..., list[Tensor]]
LayerInputs = list[Tensor] | Callable[[int], list[Tensor]]  # of all heads, or a function that makes those of a chunk


def run(
    plan: Plan, comm: Communicator, inputs: LayerInputs, work: Callable[[int], Mapping[str, LocalWork]]
) -> list[Tensor]:
    """Runs a plan's forward program on this rank.

    Every instruction is differentiable, and autograd runs their adjoints in the order of the backward program.

    Args:
        plan: the plan, equal on every rank.
        comm: the plan's ranks, and the transport between them.
        inputs: the tensors of the first step; or a function that makes them for one chunk, with that chunk's heads
            only, while earlier chunks are under way.
        work: maps a chunk of heads to its functions: for each `Compute` step by its name, for `Attend` under "attend",
            for `Halo` under "conv" and for `Scan` under "rule". Unless `inputs` is a function, work between exchanges
            to the head side is done once for all chunks, by the functions of chunk 0.
    """
    tensors, chunk_comm = [] if callable(inputs) else inputs, comm
    arriving = dict[tuple[int, int], Callable[[], list[Tensor]]]()  # by step and part, what waits for the part
    back = ToTokensInParts(plan.steps[-1].exchange, comm) if isinstance(plan.steps[-1], ToTokens) else None
    for do in plan.program(forward=True, projected=callable(inputs)):
        match do:
            case Project(chunk):
                assert callable(inputs)
                chunk_comm = comm.chunk_comm(chunk, plan.head_chunks) if profiling() else comm
                tensors = inputs(chunk)
            case Local(steps, chunk):
                with without_autocast(tensors[0].device):
                    functions = work(chunk or 0)
                    if chunk is not None and profiling():
                        chunk_comm = comm.chunk_comm(chunk, plan.head_chunks)
                    for step in steps:
                        tensors = _compute(step, tensors, functions, chunk_comm)
            case Move(ToHeads(exchange, (first, last)) as step, starts=True, parts=parts):
                exchange = exchange.chunk_exchange(parts[0]) if callable(inputs) else exchange
                inbound = ToHeadsInParts(exchange, chunk_comm)
                inbound.start(*tensors[first:last], alone=last - first >= len(tensors) and not callable(inputs))
                arriving |= {(id(step), part): partial(inbound.finish, number) for number, part in enumerate(parts)}
            case Move(ToHeads(_, (first, _)) as step, parts=(part,)):
                tensors = tensors[:first]  # those of the exchanges before
                tensors += arriving.pop((id(step), part))()
            case Move(starts=True, parts=(part,)) if back is not None:
                back.start(part, *tensors)
            case Move() if back is not None:
                tensors = back.finish()
    return tensors


def _compute(step: LocalStep, tensors: list[Tensor], work: Mapping[str, LocalWork], comm: Communicator) -> list[Tensor]:
    """Runs one local step."""
    match step:
        case Attend():
            return work["attend"](*tensors)  # each stage makes a range of its own
        case Compute(name):
            pass
        case Halo():
            name = "conv"
        case Scan():
            name = "rule"
        case _:
            assert_never(step)
    if not profiling():
        return work[name](*tensors)
    return traced_work(work[name], tensors, lambda forward: comm.traced(name, forward=forward))


def prepare(plan: Plan, rank: int, device: torch.device) -> None:
    """Makes all tables that a rank derives from a plan, except those of kernels, so that no layer has to.

    Call it when the batch is sharded, so that the copies to a device end before the first layer needs them.
    """
    device, kv_rank = indexed(device), rank // plan.ulysses_degree
    for exchange, _ in plan.exchanges(forward=True):
        prepare_tables(exchange.subgroup(kv_rank).layout, device)
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
    for stage in plan.attend.all_stages:
        if len(plan.attend.tiles(kv_rank, stage).bands):
            _ = plan.attend.call_tiles(kv_rank, stage)
        if stage.remote_queries is not None:
            _ = plan.attend.remote_tiles(kv_rank, stage).cropped_keys
    prepare_transfers(plan.attend, kv_rank, rank % plan.ulysses_degree, device)
