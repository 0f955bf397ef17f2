"""Ranks over gloo that do different things, stop or end: every other rank says so, soon, and none aborts or hangs."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.groups import RankGroup, set_timeout
from megatron_cp.executor.launch import RankError, run_ranks

SIZE = 3


def layer(group: RankGroup, scheme: str = "a2a", mask: str = "causal", **options) -> torch.Tensor:
    """Calls attention once, in the same way on every rank unless the options differ."""
    packing = cp.Packing([7, 1, 130])
    layout = cp.Layout.zigzag(packing, SIZE)
    plan = cp.plan_attention(packing, layout, heads=3, head_dim=4, scheme=scheme, mask=cp.Mask.named(packing, mask))
    dtype = options.pop("dtype", torch.float32)
    q = torch.ones(int(layout.row_counts[group.rank]), 3, 4, dtype=dtype, requires_grad=True)
    return cp.attention(q, q, q, plan, group, **options)


def odd_one(group: RankGroup, fault: str) -> str:
    """Runs a step, then another in which rank 1 does something else. Returns what this rank is told."""
    layer(group).sum().backward()
    layer(group, mask="window:3,0").sum().backward()
    odd = group.rank == 1
    try:
        if fault == "another type, in one rank's call alone":
            layer(group, dtype=torch.float64 if odd else torch.float32)
        elif fault == "another cap, in one rank's call alone":
            layer(group, softcap=30.0 if odd else 0.0)
        elif fault == "another scheme":
            layer(group, "p2p" if odd else "exact")
        elif fault == "plans that were both compared":
            layer(group, mask="window:3,0" if odd else "causal")
        elif fault == "layouts that were both compared":
            packing = cp.Packing([6, 6, 12])
            zigzag, contiguous = cp.Layout.zigzag(packing, SIZE), cp.Layout.contiguous(packing, SIZE)
            rows = torch.ones(8, 4)
            for _ in range(2):
                there = cp.relayout(rows, zigzag, contiguous, group)
                back = cp.relayout(there, contiguous, zigzag, group)
            cp.relayout(back, *((contiguous, zigzag) if odd else (zigzag, contiguous)), group)
        elif fault == "backward passes in another order":
            first, second = layer(group), layer(group)
            for out in (second, first) if odd else (first, second):
                out.sum().backward()
        elif fault == "no backward":
            out = layer(group)
            if not odd:
                out.sum().backward()
            group.barrier()
        elif fault == "a layer less":
            out = layer(group)
            if not odd:
                out = out + layer(group)
            out.sum().backward()
            group.barrier()
        elif fault == "no gradients":
            with torch.set_grad_enabled(not odd):
                layer(group)
    except (cp.PeerError, cp.PlanMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


CALL = r"attention \[\w+\], call \d+, a2a"
# The fault, and what every rank's message shows of it.
FAULTS = {
    "another type, in one rank's call alone": "float64",
    "another cap, in one rank's call alone": "softcap: 30.0",
    "another scheme": "scheme: p2p",
    "no backward": rf"rank \d is in {CALL}, exchange of out to heads, backward, waiting .* rank 1",
    "a layer less": rf"rank 1 is in {CALL}, exchange of out to heads, backward, waiting",
    "plans that were both compared": r"rank 1 is in attention \[\w+\], call \d+, .*\(.*mask: window:3,0.*\), waiting",
    "layouts that were both compared": r"rank 1 is in relayout \[\w+\], call \d+, forward, waiting",
    "backward passes in another order": rf"rank 1 is in {CALL}, exchange of out to heads, backward",
    "no gradients": "gradients: off",
}


def forgets(group: RankGroup) -> bool:
    """Returns True if the call failed, and its tensors are freed when its error is."""
    x = torch.ones(1000)
    seen = weakref.ref(x)
    set_timeout(1.0)
    if group.rank == 1:
        time.sleep(4)
    failed = group.rank == 1  # who is late need not learn of it
    try:
        fail_with(x, group)
    except cp.PeerError:
        failed = True
    del x
    gc.collect()
    return failed and seen() is None


def fail_with(x: torch.Tensor, group: RankGroup) -> None:
    layer(group).sum().add(x.sum())


def late(group: RankGroup) -> float:
    """Rank 1 comes after the others have begun to look for a reason."""
    layer(group)
    if group.rank == 1:
        time.sleep(7)
    return float(layer(group).sum())


def stop_rank_1(group: RankGroup) -> None:
    layer(group)
    set_timeout(3.0)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    layer(group)


JOBS = {fault: (odd_one, fault) for fault in FAULTS} | {job.__name__: (job,) for job in (forgets, late, stop_rank_1)}
# The limit is of a whole job on a busy machine; what stops within is said, not killed. Nothing but its own limit ends
# the wait for a stopped rank.
LIMITS = dict.fromkeys(JOBS, 90.0) | {"stop_rank_1": None}


@pytest.fixture(scope="module")
def answers(forked_ranks: None) -> Iterator[dict[str, Future[list[object]]]]:
    """Returns the results of every job's ranks. Jobs wait most of the time, so some run side by side."""
    with ThreadPoolExecutor(4) as pool:
        yield {
            name: pool.submit(run_ranks, job[0], SIZE, *job[1:], kind="processes", timeout=LIMITS[name])
            for name, job in JOBS.items()
        }


@pytest.mark.parametrize("fault", FAULTS)
def test_rejects_ranks_that_do_different_things_showing_what(fault: str, answers):
    for said in answers[fault].result():
        assert "Error: " in said
        assert re.search(FAULTS[fault], said), said


def test_a_late_rank_is_waited_for_and_what_a_failed_call_held_is_freed(answers):
    assert len(answers["late"].result()) == SIZE
    assert answers["forgets"].result() == [True] * SIZE


def test_a_stopped_rank_is_named_and_ended(answers):
    step = r"in attention \[\w+\], call \d+, a2a, exchange of q, k, v to heads, forward, .*"
    with pytest.raises(RankError, match=rf"rank \d of 3, {step}: rank 1 did not answer in \d s"):
        answers["stop_rank_1"].result()
