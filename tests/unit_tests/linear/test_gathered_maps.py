"""Tests of chunkwise layers whose maps of segments come in one all-gather: the same bits, and when it is taken."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_cp.executor import agreement
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.recurrence import Scan
from megatron_cp.planner.linear import plan_linear
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.price import priced
from megatron_cp.testing import parity
from tests.counting_group import CountingGroup


@dataclasses.dataclass(frozen=True)
class Gathered(parity.Case):
    def plan(self):
        return gathered(super().plan(), gathers=True)


def gathered(plan, *, gathers):
    steps = (dataclasses.replace(step, gathers=gathers) if isinstance(step, Scan) else step for step in plan.steps)
    return dataclasses.replace(plan, steps=tuple(steps))


CASES = [
    ("gdn", 2, "contiguous", {}), ("gdn", 3, "zigzag", {}), ("kda", 5, "random", {}), ("mamba", 4, "contiguous", {}),
    ("kda", 8, "contiguous", {"lengths": (131,)}), ("mamba", 6, "zigzag", {}), ("gdn", 5, "balanced", {"align": 4}),
    ("gdn", 4, "contiguous", {"lengths": (1, 1)}),
    ("gdn", 3, "contiguous", {"lengths": (20, 7, 9), "parents": (-1, 0, 0)}),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "cp", "layout", "changes"), CASES, ids=str)
def test_maps_that_are_gathered_give_the_same_bits(layer, cp, layout, changes):
    options = {"layer": layer, "cp": cp, "lengths": (41, 1, 0, 23, 6), "layout": layout, "scheme": "chunkwise"}
    ways = [made(**options | changes) for made in (parity.Case, Gathered)]
    problem = parity.draw(ways[0])
    one_by_one, together = (
        parity.whole(way, run_ranks(parity.run_layer, cp, way, problem)) for way in ways
    )  # fmt: skip
    assert one_by_one.keys() == together.keys()
    assert all(torch.equal(one_by_one[name], together[name]) for name in together)
    assert max(parity.compare(ways[1]).errors.values()) <= 1e-12


def sent(group, case, problem):
    agreement.compare_calls(group, False)
    counted = CountingGroup(group)
    parity.run_layer(counted, case, problem)
    return counted.bytes_sent, counted.calls["all_gather"]


def test_every_rank_sends_one_share_of_equal_size():
    case = Gathered("gdn", 4, (50,), layout="contiguous", scheme="chunkwise", conv_width=1)
    plan = case.plan()
    state, transition = 6 * 16 * 16 * 8, 6 * 16 * 16 * 8
    assert plan.bytes_sent(8, forward=True) == [3 * (state + transition)] * 4
    assert run_ranks(sent, 4, case, parity.draw(case)) == [(2 * 3 * (state + transition), 2)] * 4


LONG = Packing([2**20])
SIZES = {"kind": "gdn", "heads": 32, "key_heads": 16, "head_dim": 128, "mode": "chunkwise"}


@pytest.mark.parametrize(
    ("cp", "lengths", "taken"), [(64, [2**20], True), (8, [2**20], False), (64, [2**14] * 64, False)]
)
def test_a_long_chain_over_several_hosts_is_gathered(cp, lengths, taken):
    packing = Packing(lengths)
    layout = Layout.contiguous(packing, cp)
    plan = plan_linear(packing, layout, **SIZES)
    assert plan.recurrent_steps[-1].gathers == taken
    if taken:
        on = machine("h100")
        other = priced(gathered(plan, gathers=False), on)
        assert plan.prices[0].total < 0.7 * other.total
        assert plan.prices[0].exposed < 0.25 * other.exposed
        assert "maps gathered" in plan.prices[0].detail
        assert "one all-gather" in plan.explain()
    assert plan.fingerprint() != gathered(plan, gathers=not taken).fingerprint()


@pytest.mark.parametrize("hidden", [True, False])
def test_transfers_of_both_directions_count(hidden, monkeypatch):
    """The rule hides all transfers of one direction; those of the other one still make a gather faster."""
    monkeypatch.setattr(
        "megatron_cp.planner.predict.walk.rule_seconds",
        lambda plan, rates, **_: np.full(plan.cp_size, 1.0 * (rates.forward == hidden)),
    )
    assert plan_linear(LONG, Layout.contiguous(LONG, 64), **SIZES).recurrent_steps[-1].gathers
