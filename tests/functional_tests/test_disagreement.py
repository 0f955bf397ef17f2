"""Ranks over gloo that do different things, stop or end: every other rank says so, soon, and none aborts or hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.groups import RankGroup, set_timeout
from megatron_cp.executor.launch import RankError, run_ranks

SIZE = 3
LIMIT = 90.0  # of a whole job on a busy machine; what stops within is said, not killed


def layer(group: RankGroup, scheme: str = "a2a", **options) -> torch.Tensor:
    """One call of attention, the same on every rank unless the options differ."""
    packing = cp.Packing([7, 1, 130])
    layout = cp.Layout.zigzag(packing, SIZE)
    plan = cp.plan_attention(packing, layout, heads=3, head_dim=4, scheme=scheme)
    dtype = options.pop("dtype", torch.float32)
    q = torch.ones(int(layout.row_counts[group.rank]), 3, 4, dtype=dtype, requires_grad=True)
    return cp.attention(q, q, q, plan, group, **options)


def odd_one(group: RankGroup, fault: str) -> str:
    """Runs a step, then another in which rank 1 does something else. Returns what this rank is told."""
    layer(group).sum().backward()
    odd = group.rank == 1
    try:
        if fault == "another type, in one rank's call alone":
            layer(group, dtype=torch.float64 if odd else torch.float32)
        elif fault == "another cap, in one rank's call alone":
            layer(group, softcap=30.0 if odd else 0.0)
        elif fault == "another scheme":
            layer(group, "p2p" if odd else "exact")
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


# The fault, and what every rank's message shows of it.
FAULTS = {
    "another type, in one rank's call alone": "float64",
    "another cap, in one rank's call alone": "softcap: 30.0",
    "another scheme": "scheme: p2p",
    "no backward": "backward",
    "a layer less": "backward",
    "no gradients": "gradients: off",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rejects_ranks_that_do_different_things_showing_what(fault: str):
    for said in run_ranks(odd_one, SIZE, fault, kind="processes", timeout=LIMIT):
        assert "Error: " in said
        assert FAULTS[fault] in said


def late(group: RankGroup) -> float:
    """Rank 1 comes after the others have begun to look for a reason."""
    layer(group)
    if group.rank == 1:
        time.sleep(7)
    return float(layer(group).sum())


def test_a_late_rank_is_waited_for():
    assert len(run_ranks(late, SIZE, kind="processes", timeout=LIMIT)) == SIZE


def stop_rank_1(group: RankGroup) -> None:
    layer(group)
    set_timeout(3.0)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    layer(group)


def test_a_stopped_rank_is_named_and_ended():
    step = r"in attention \[\w+\], a2a, exchange of q, k, v to heads, forward, .*"
    with pytest.raises(RankError, match=rf"rank \d of 3, {step}: rank 1 did not answer in \d+ s"):
        run_ranks(stop_rank_1, SIZE, kind="processes", timeout=None)
