"""The loop over a plan's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import Compute, Step, ToHeads, ToTokens

LocalWork = Callable[..., list[Tensor]]
Inputs = list[Tensor] | Callable[[int], list[Tensor]]
Finish = Callable[[], list[Tensor]]


def run(plan: Plan, comm: Communicator, inputs: Inputs, work: Callable[[int], Mapping[str, LocalWork]]) -> list[Tensor]:
    """Runs a plan on this rank. Every step is differentiable, and its backward is its adjoint over the same plan.

    The steps up to the last exchange to the head side work on own tokens. An exchange starts as soon as the steps
    before it are done, and later steps run while it is under way; local work between exchanges takes and returns all
    tensors. The steps after that exchange take the tensors that have arrived. Head chunks are computed one after
    another, while the next chunk arrives and the previous one is sent.

    Args:
        plan: the plan, equal on every rank.
        comm: the plan's ranks, and the transport between them.
        inputs: the tensors of the first step; or a function that makes them for one chunk, with that chunk's heads
            only, while earlier chunks are under way.
        work: maps a chunk of heads to its functions: for each `Compute` step by its name, for `Attend` under "attend",
            for `Halo` under "conv" and for `Scan` under "rule". Unless `inputs` is a function, work between exchanges
            to the head side is done once for all chunks, by the functions of chunk 0.
    """
    count = max((number + 1 for number, step in enumerate(plan.steps) if isinstance(step, ToHeads)), default=0)
    on_tokens, on_heads = plan.steps[:count], plan.steps[count:]
    back = ToTokensInParts(plan.steps[-1].exchange, comm) if isinstance(plan.steps[-1], ToTokens) else None
    for chunk, in_flight in enumerate(_started(plan, on_tokens, comm, inputs, work)):
        tensors = [tensor for finish in in_flight for tensor in finish()]
        with without_autocast(tensors[0].device):
            functions, chunk_comm = work(chunk), comm.chunk_comm(chunk, plan.head_chunks) if profiling() else comm
            for step in on_heads:
                if not isinstance(step, ToTokens):
                    tensors = _compute(step, tensors, functions, chunk_comm)
        if back is not None:
            back.start(chunk, *tensors)
    return tensors if back is None else back.finish()


def _started(
    plan: Plan, steps: Sequence[Step], comm: Communicator, inputs: Inputs,
    work: Callable[[int], Mapping[str, LocalWork]],
) -> list[list[Finish]]:  # fmt: skip
    """Runs the token-side steps and starts every exchange.

    Returns, for each head chunk, functions that wait for its tensors and return them.
    """
    if not steps:
        return [[lambda: inputs(0) if callable(inputs) else inputs]]
    if not callable(inputs):
        arriving = _start_on_tokens(steps, comm, inputs, work(0), None)
        return [list(finishes) for finishes in zip(*arriving, strict=True)]
    in_flight = []
    for chunk in range(plan.head_chunks):
        chunk_comm = comm.chunk_comm(chunk, plan.head_chunks) if profiling() else comm
        arriving = _start_on_tokens(steps, chunk_comm, inputs(chunk), work(chunk), chunk)
        in_flight.append([finish for parts in arriving for finish in parts])
    return in_flight


def _start_on_tokens(
    steps: Sequence[Step], comm: Communicator, tensors: list[Tensor], work: Mapping[str, LocalWork], chunk: int | None
) -> list[list[Finish]]:
    """Runs the steps on the tensors of all chunks, or of `chunk`, and starts their exchanges.

    Returns, for each exchange, a function for each of its parts that waits for it and returns its tensors.
    """
    alone = chunk is None and sum([isinstance(step, ToHeads) for step in steps]) == 1
    arriving: list[list[Finish]] = []
    for step in steps:
        if isinstance(step, ToHeads):
            exchange = step.exchange if chunk is None else step.exchange.chunk_exchange(chunk)
            inbound = ToHeadsInParts(exchange, comm)
            inbound.start(*tensors[slice(*step.inputs)], alone=alone)
            arriving.append([partial(inbound.finish, part) for part in range(inbound.num_parts)])
        else:
            with without_autocast(tensors[0].device):
                tensors = _compute(step, tensors, work, comm)
    return arriving


def _compute(step: Step, tensors: list[Tensor], work: Mapping[str, LocalWork], comm: Communicator) -> list[Tensor]:
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
        case ToHeads() | ToTokens():
            raise AssertionError(f"{step} is an exchange")
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
