"""The loop over a plan's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import torch
from torch import Tensor

from megatron_cp.exchange.device import indexed
from megatron_cp.exchange.geometry import prepare_tables
from megatron_cp.executor.autocast import without_autocast
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.halo import prepare_halo
from megatron_cp.executor.head_exchange import ToTokensInParts, start_to_heads
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

    The steps are a program. Those up to the last exchange to the head side are on own tokens: an exchange starts as
    soon as the steps before it are done, and others go on meanwhile; local work between them takes and returns all
    tensors at hand. The steps after it take what has arrived. Heads that go in chunks are computed chunk by chunk: the
    next one arrives, and the one before is sent, meanwhile.

    Args:
        plan: the same on every rank.
        comm: the plan's ranks, and the transport between them.
        inputs: what the first step takes; or a function that makes it for one chunk, of that chunk's heads alone, while
            the chunks before are under way already.
        work: for each chunk of heads the functions that do it: for each `Compute` step by its name, for `Attend` under
            "attend", for `Halo` under "conv" and for `Scan` under "rule". Work between exchanges to the head side is
            done for all chunks together, as of chunk 0, unless `inputs` makes each by itself.
    """
    count = max((number + 1 for number, step in enumerate(plan.steps) if isinstance(step, ToHeads)), default=0)
    on_tokens, on_heads = plan.steps[:count], plan.steps[count:]
    back = ToTokensInParts(plan.steps[-1].exchange, comm) if isinstance(plan.steps[-1], ToTokens) else None
    for chunk, in_flight in enumerate(_started(plan, on_tokens, comm, inputs, work)):
        tensors = [tensor for finish in in_flight for tensor in finish()]
        with without_autocast(tensors[0].device):
            of_chunk, in_chunk = work(chunk), comm.in_chunk(chunk, plan.head_chunks) if profiling() else comm
            for step in on_heads:
                if not isinstance(step, ToTokens):
                    tensors = _computed(step, tensors, of_chunk, in_chunk)
        if back is not None:
            back.start(chunk, *tensors)
    return tensors if back is None else back.finish()


def _started(
    plan: Plan, steps: Sequence[Step], comm: Communicator, inputs: Inputs,
    work: Callable[[int], Mapping[str, LocalWork]],
) -> list[list[Finish]]:  # fmt: skip
    """Runs the steps on own tokens. For each chunk of heads the functions that wait for what arrives."""
    if not steps:
        return [[lambda: inputs(0) if callable(inputs) else inputs]]
    if not callable(inputs):
        arriving = _on_tokens(steps, comm, inputs, work(0), None)
        return [list(of_chunk) for of_chunk in zip(*arriving, strict=True)]
    in_flight = []
    for chunk in range(plan.head_chunks):
        in_chunk = comm.in_chunk(chunk, plan.head_chunks) if profiling() else comm
        arriving = _on_tokens(steps, in_chunk, inputs(chunk), work(chunk), chunk)
        in_flight.append([finish for parts in arriving for finish in parts])
    return in_flight


def _on_tokens(
    steps: Sequence[Step], comm: Communicator, tensors: list[Tensor], work: Mapping[str, LocalWork], chunk: int | None
) -> list[list[Finish]]:
    """Of each exchange among the steps, for each of its parts (for one, where a chunk is named) the wait for it."""
    alone = chunk is None and sum([isinstance(step, ToHeads) for step in steps]) == 1
    arriving: list[list[Finish]] = []
    for step in steps:
        if isinstance(step, ToHeads):
            exchange = step.exchange if chunk is None else step.exchange.chunk_exchange(chunk)
            arriving.append(start_to_heads(exchange, comm, *tensors[slice(*step.inputs)], alone=alone))
        else:
            with without_autocast(tensors[0].device):
                tensors = _computed(step, tensors, work, comm)
    return arriving


def _computed(step: Step, tensors: list[Tensor], work: Mapping[str, LocalWork], comm: Communicator) -> list[Tensor]:
    """One local step."""
    match step:
        case Attend():
            return work["attend"](*tensors)  # each of its stages has a range
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
    """Makes all that a rank derives from a plan, but for what its kernels do, so that no layer has to.

    Call it where the batch is sharded: the copies to a device are then long done when the first layer needs them.
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
