"""Tests of the tensors that an attention keeps alive: those that the graph saves, and tables until the batch ends."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Packing
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.layouts import layout_by_name

PACKING = Packing([12, 1, 9])
EXCHANGED = [scheme.name for scheme in SCHEMES.values() if scheme.exchanges_heads]


def planned(scheme):
    return cp.plan_attention(PACKING, layout_by_name("zigzag", PACKING, 4), heads=4, head_dim=8, scheme=scheme)


def inputs_alive(group, plan, recomputed):
    """Returns True for each of q, k and v, to which only the call refers, that outlives its forward pass."""
    leaf = torch.ones(int(plan.layout.row_counts[group.rank]), 4, 8, requires_grad=True)

    def layer(leaf):
        tensors = [leaf * number for number in (1, 2, 3)]
        alive.extend(weakref.ref(tensor) for tensor in tensors)
        return cp.attention(*tensors, plan, group)

    alive = []
    out = checkpoint(layer, leaf, use_reentrant=False) if recomputed else layer(leaf)
    found = [reference() is not None for reference in alive]
    out.sum().backward()
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_recomputed_layer_keeps_no_input(scheme):
    assert run_ranks(inputs_alive, 4, planned(scheme), True) == [[False] * 3] * 4


@pytest.mark.parametrize("scheme", EXCHANGED)
def test_inputs_that_were_exchanged_are_kept_on_the_head_side_alone(scheme):
    assert run_ranks(inputs_alive, 4, planned(scheme), False) == [[False] * 3] * 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_batchs_tables_end_with_its_plan(scheme):
    """Without the garbage collector, which training jobs switch off."""
    plans, steps = [], []

    def step(group):
        plan = planned(scheme)
        plan.explain()
        tensors = [torch.ones(int(plan.layout.row_counts[group.rank]), 4, 8, requires_grad=True) for _ in "qkv"]
        cp.attention(*tensors, plan, group).sum().backward()
        plans.append(weakref.ref(plan))
        steps.append(weakref.ref(plan.attend))

    gc.collect()
    gc.disable()
    try:
        run_ranks(step, 4)
        assert [reference() for reference in (*plans, *steps)] == [None] * 8
    finally:
        gc.enable()
