"""`assigned_tiles`: which problems are solved for an attention, and what is said of the answers."""

import re
import sys
from dataclasses import replace
from functools import partial

import pytest

from megatron_cp.apps.estimate.model_presets import PRESETS
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner import tiled
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.batch import AttentionSpec
from megatron_cp.planner.predict.hardware import Link, Topology
from megatron_cp.planner.tiles import TileWeights, solve, tiles_of
from megatron_cp.planner.tiles.bounds import lower_bound
from megatron_cp.planner.tiles.problem import volumes
from tests.refusals import rejects

PACKING = Packing([64])
NEAR, FAR = Link(1e-6, 0.0, 60.0), Link(1e-6, 0.0, 10.0)
PLAN = partial(
    plan_attention, PACKING, heads=3, kv_heads=3, head_dim=8, value_head_dim=4, scheme="tiled",
    mask=Mask.named(PACKING, "global_local"),
)  # fmt: skip


@pytest.fixture
def solved(monkeypatch):
    """Records each problem that is solved, with the arguments and the answer."""
    found, solve = [], tiled.solve

    def noting(problem, **given):
        found.append((problem, given, solve(problem, **given | {"search_seconds": 0})))
        return found[-1][-1]

    monkeypatch.setattr(tiled, "solve", noting)
    return found


def test_bytes_are_weighed_by_direction_and_by_the_head_rank_with_most_heads(solved):
    PLAN(Layout.contiguous(PACKING, 4), item_size=4, search_seconds=3)
    shape = {"heads": 3, "kv_heads": 3, "head_dim": 8, "value_head_dim": 4, "item_size": 4}
    assert [problem.weights for problem, *_ in solved] == [TileWeights.forward(**shape), TileWeights.backward(**shape)]
    assert [given["search_seconds"] for _, given, _ in solved] == [3.0] * 2
    assert all(problem.hosts is None for problem, *_ in solved)
    # Three heads on two head ranks: one of them has two.
    solved.clear()
    PLAN(Layout.contiguous(PACKING, 4), scheme="a2a+tiled", ulysses_degree=2, head_chunks=1)
    assert solved[0][0].weights == TileWeights.forward(heads=2, kv_heads=2, head_dim=8, value_head_dim=4)


@pytest.mark.parametrize("mask", ["global_local", "causal", "star"])
def test_the_bound_is_of_true_head_ranks(mask):
    """Ten heads of two groups on three head ranks: no one has most heads and most groups at once."""
    packing = Packing([600])
    plan = plan_attention(
        packing, Layout.contiguous(packing, 6), heads=10, kv_heads=2, head_dim=64, mask=Mask.named(packing, mask),
        scheme="a2a+tiled", ulysses_degree=3, head_chunks=1,
    )  # fmt: skip
    for forward, known in zip((True, False), plan.attend.tiled.solutions, strict=True):
        busiest = max(plan.attend.bytes_sent(2, forward=forward))  # of two KV ranks, what one sends the other receives
        assert 0 < known.bound <= busiest
        assert known.busiest_bytes >= busiest  # whole chunks


def test_bytes_between_hosts_are_dearer_and_said_as_they_are(solved):
    topology = Topology((0, 0, 1, 1), NEAR, FAR)
    plan = PLAN(Layout.contiguous(PACKING, 4), topology=topology)
    for (problem, _, solution), known in zip(solved, plan.attend.tiled.solutions, strict=True):
        assert (problem.hosts.tolist(), problem.host_cost) == ([0, 0, 1, 1], 6)
        assert known.busiest_bytes == max(max(each) for each in volumes(problem, solution.ranks))
        assert 0 < known.bound < solution.bound  # which is weighted
        assert known.bound == lower_bound(problem.single_host()) <= known.busiest_bytes
        assert known.is_optimal == (known.busiest_bytes == known.bound)


def test_a_plan_is_said_to_be_the_best_where_that_is_proven(solved):
    """All, some or none of the assignments are proven, and the text follows the numbers."""
    for name in ("full", "causal", "global_local", "streaming"):
        plan = PLAN(Layout.contiguous(PACKING, 4), mask=Mask.named(PACKING, name))
        for (_, _, solution), known in zip(solved[-2:], plan.attend.tiled.solutions, strict=True):
            assert known.is_optimal == solution.optimal
            assert known.busiest_bytes == max(solution.sent.max(), solution.received.max())
    assert len({solution.optimal for _, _, solution in solved}) == 2


def test_rejects_a_search_without_the_solver(monkeypatch):
    """By auto too, which would silently leave out a scheme that cannot be planned; and before a batch comes."""
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    layout, slot = Layout.contiguous(PACKING, 4), partial(AttentionSpec, 2, 2, 8, 8)
    problem = tiles_of(Mask.causal(PACKING), layout, weights=TileWeights(1, 1, 2, 0))
    calls = [partial(solve, problem), *(partial(call, scheme=name) for call in (slot, partial(PLAN, layout))
                                        for name in ("auto", "tiled"))]  # fmt: skip
    for call in calls:
        rejects(r"^search_seconds: got .*pip install ortools==", call, search_seconds=5)
    assert solve(problem, steps=10).bound > 0
    assert PLAN(layout).attend.tiled is not None
    slot(scheme="tiled")


@pytest.mark.parametrize("scheme", [each.name for each in SCHEMES.values() if not each.assigns_tiles])
def test_rejects_a_search_that_no_layer_reads(scheme):
    """By name, wherever it is given: to a plan, to a slot, to the slots of a model, and beside linear layers alone."""
    says = rf"^search_seconds: got 1.0; allowed: 0 with {re.escape(scheme)}\. .*: use tiled or a2a\+tiled or auto"
    rejects(says, PLAN, Layout.contiguous(PACKING, 4), scheme=scheme, search_seconds=1.0)
    rejects(says, AttentionSpec, 4, 4, 8, 8, scheme=scheme, search_seconds=1.0)
    rejects(says, PRESETS["llama3-8b"].slots, scheme=scheme, search_seconds=1.0)
    model = PRESETS["nemotron-h"]
    linear = replace(model, blocks=tuple(block for block in model.blocks if not hasattr(block.mixer, "kv_heads")))
    rejects(r"^search_seconds: .*; allowed: 0 without attention", linear.slots, search_seconds=1.0)


def test_a_search_is_read_by_some_layers_of_a_model():
    pytest.importorskip("ortools")
    slots = PRESETS["nemotron-h"].slots(scheme="tiled", search_seconds=2.0)
    assert {slot.search_seconds for slot in slots if isinstance(slot, AttentionSpec)} == {2.0}
    assert any(not isinstance(slot, AttentionSpec) for slot in slots)


def test_one_rank_has_all_tiles():
    given = Mask.causal(PACKING), Layout.contiguous(PACKING, 1)
    problem = tiles_of(*given, weights=TileWeights(1, 1, 2, 0))
    assert problem.load_cap >= problem.total == 64 * 65 // 2
    says = r"^imbalance: got 1.06; allowed: a number from 1 to 1.05 for 1 ranks"
    rejects(says, tiles_of, *given, weights=TileWeights(1, 1, 2, 0), imbalance=1.06)
