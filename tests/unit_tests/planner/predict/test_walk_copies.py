"""A prediction has the copies that put rows in order exactly where a rank makes them."""

import re

import pytest

import megatron_cp as cp
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.hardware import Rates
from megatron_cp.planner.predict.walk import workload_of
from megatron_cp.planner.predict.workload import TimedWork

PACKING = cp.Packing([12, 20])
ORDERS = ".* heads|order "
SHAPE = {"heads": 4, "kv_heads": 4, "head_dim": 8}


def copies(plan, *, forward, only=""):
    operations = workload_of(plan, Rates(machine("h100").hardware, 2, forward)).operations
    names = [each.name for each in operations if isinstance(each, TimedWork) and each.kind == "copy"]
    return [name for name in names if re.match(only, name)]


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize(
    ("scheme", "codec", "contiguous", "zigzag"),
    [
        ("a2a", "none", [], ["unpack heads", "pack heads"]),
        ("a2a", "fp8", ["unpack heads", "pack heads"], ["unpack heads", "pack heads"]),
        ("all_gather", "none", [], ["order keys", "order gradients of keys"]),
        ("exact", "none", [], ["order keys", "order gradients of keys"]),
    ],
)
def test_rows_are_copied_where_they_are_not_in_stream_order(scheme, codec, contiguous, zigzag, forward):
    for name, expected in (("contiguous", contiguous), ("zigzag", zigzag)):
        plan = cp.plan_attention(
            PACKING, getattr(cp.Layout, name)(PACKING, 4), **SHAPE, scheme=scheme, head_chunks=1, codec=codec
        )
        both = [each for each in expected if not (forward and "gradients" in each)]
        assert copies(plan, forward=forward, only=ORDERS) == both


def test_a_ring_merges_outputs_and_adds_gradients_once_a_hop():
    plan = cp.plan_attention(PACKING, cp.Layout.zigzag(PACKING, 4), **SHAPE, scheme="p2p")
    assert copies(plan, forward=True) == ["pack keys", *["merge"] * 3]
    assert copies(plan, forward=False) == ["pack keys", *["merge", "sum gradients"] * 3, "own gradients"]


def test_rows_are_put_in_order_where_they_are_not():
    # Its result is no message, unlike attention's.
    for name, expected in (("contiguous", ["pack heads"]), ("zigzag", ["unpack heads", "pack heads"])):
        layout = getattr(cp.Layout, name)(PACKING, 4)
        plan = cp.plan_linear(PACKING, layout, kind="gdn", heads=4, head_dim=8, mode="headwise")
        assert copies(plan, forward=True, only=ORDERS) == expected
    packing = cp.Packing([8])
    for fragments, steps in (([(5, 8), (0, 5)], ["ToHeads", "Attend", "ToTokens"]), ([(0, 8)], ["Attend"])):
        layout = cp.Layout.from_fragments(packing, [fragments])
        plan = cp.plan_attention(packing, layout, **SHAPE, scheme="a2a")
        assert [type(step).__name__ for step in plan.steps] == steps
