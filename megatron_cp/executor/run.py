"""The loop over a plan's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, assert_never, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.errors import ArgumentError, PlanMismatchError
from megatron_cp.exchange.geometry import prepare_tables
from megatron_cp.executor.chain import Halo, Scan
from megatron_cp.executor.exchange import ToTokensJourney, start_to_heads
from megatron_cp.executor.groups import RankGroup, as_rank_group
from megatron_cp.executor.halo import prepare_halo
from megatron_cp.executor.plan import Compute, Plan, ToHeads, ToTokens
from megatron_cp.executor.relayout import prepare_relayout
from megatron_cp.executor.schedule import Attend
from megatron_cp.executor.transfers import prepare_gathering
from megatron_cp.executor.wire import Wire

LocalWork = Callable[..., list[Tensor]]
Inputs = list[Tensor] | Callable[[int], list[Tensor]]


def run(plan: Plan, wire: Wire, inputs: Inputs, work: Callable[[int], Mapping[str, LocalWork]]) -> list[Tensor]:
    """Runs a plan on this rank. Every step is differentiable, and its backward is its adjoint over the same plan.

    Heads that go in chunks are computed chunk by chunk: the next one arrives, and the one before leaves, meanwhile.

    Args:
        plan: the same on every rank.
        wire: the plan's ranks, and the road between them.
        inputs: what the first step takes; or a function that makes it for one chunk, of that chunk's heads alone, while
            the chunks before are under way already.
        work: for each chunk of heads the functions that do it: for each `Compute` step by its name, for `Attend` under
            "attend", for `Halo` under "conv" and for `Scan` under "rule".
    """
    last = plan.steps[-1]
    back = ToTokensJourney(last.exchange, wire) if isinstance(last, ToTokens) else None
    for chunk, arriving in enumerate(_departed(plan, wire, inputs)):
        tensors = [tensor for arrive in arriving for tensor in arrive()]
        # Kernels compute in the types that they are given: autocast would change them behind their backs.
        with torch.autocast(tensors[0].device.type, enabled=False):
            tensors = _computed(plan, tensors, work(chunk))
        if back is not None:
            back.leave(chunk, *tensors)
    return tensors if back is None else back.arrive()


def _departed(plan: Plan, wire: Wire, inputs: Inputs) -> list[list[Callable[[], list[Tensor]]]]:
    """Starts the exchanges to the head side. For each chunk of heads the functions that wait for it."""
    inbound = [step for step in plan.steps if isinstance(step, ToHeads)]
    if not inbound:
        return [[lambda: inputs(0) if callable(inputs) else inputs]]
    if not callable(inputs):
        parts = (start_to_heads(step.exchange, wire, *inputs[slice(*step.inputs)]) for step in inbound)
        return [list(of_chunk) for of_chunk in zip(*parts, strict=True)]
    arriving = []
    for chunk in range(plan.head_chunks):
        made = inputs(chunk)
        starts = (start_to_heads(s.exchange.of_chunk(chunk), wire, *made[slice(*s.inputs)]) for s in inbound)
        arriving.append([arrive for started in starts for arrive in started])
    return arriving


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
    node = rank // plan.ulysses_degree
    for exchange, _ in plan.exchanges(forward=True):
        prepare_tables(exchange.of_node(node).layout, device)
    for step in plan.chain:
        if isinstance(step, Halo):
            if step.reach:
                prepare_halo(step, rank, device)
                _ = step.traffic
        else:
            _ = step.traffic(forward=True), step.traffic(forward=False)
    if plan.outer is not None:
        prepare_relayout(plan.outer, plan.layout, rank, device)
        prepare_relayout(plan.layout, plan.outer, rank, device)
    if plan.attend is None:
        return
    for stage in range(plan.attend.num_stages):
        tiles = plan.attend.tiles(node, stage)
        if len(tiles.bands):
            _ = tiles.cropped if stage else tiles.cropped_keys
    prepare_gathering(plan.attend, node, device)
    if plan.attend.num_nodes > 1 and plan.attend.schedule != "p2p":
        _ = plan.attend.traffic


@runtime_checkable
class Agreeable(Protocol):
    """What ranks can compare: a plan, or the plans of a whole batch."""

    @property
    def cp_size(self) -> int: ...
    def fingerprint(self) -> bytes: ...
    def describe(self) -> list[str]: ...


def check_agreement(plan: Agreeable, group: RankGroup | dist.ProcessGroup | None) -> None:
    """Fails on every rank unless all ranks made the same plan. One 16-byte exchange on the host; call it once a plan.

    Raises:
        ArgumentError: the group has another number of ranks than the plan.
        PlanMismatchError: with the lines in which the first differing rank's plan departs from rank 0's.
    """
    if not isinstance(plan, Agreeable) or isinstance(plan, type):
        raise ArgumentError("plan", plan, "a plan, or the plans of a batch")
    ranks = as_rank_group(group, plan.cp_size)
    prints = ranks.all_gather_bytes(plan.fingerprint())
    if len(set(prints)) == 1:
        return
    descriptions = ranks.all_gather_object(plan.describe())
    other = next(rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0])
    here, there = descriptions[0], descriptions[other]
    here, there = here + [""] * (len(there) - len(here)), there + [""] * (len(here) - len(there))
    lines = [
        f"  rank 0: {a or 'nothing'}\n  rank {other}: {b or 'nothing'}"
        for a, b in zip(here, there, strict=True)
        if a != b
    ]
    raise PlanMismatchError(
        f"the ranks made different plans (rank {other} differs from rank 0); every rank must plan from the same "
        "document lengths and options:\n" + "\n".join(lines)
    )
