"""Tests of the predicted times of kernels, against counts by hand."""

import dataclasses

import numpy as np
import pytest

from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout.bands import UNBOUNDED
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.linear import plan_linear
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.kernels import (
    _shapes,
    attention_seconds,
    chunked_tokens,
    convolution_seconds,
    rule_seconds,
    stage_shapes,
)

FULL, CAUSAL = (-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0)


def shapes(*bands, tile):
    return [part.tolist() for part in _shapes(np.array(bands), tile)]


@pytest.mark.parametrize(
    ("band", "pairs", "wasted"),
    [
        ((0, 1000, 0, 1000, *FULL), 1_000_000, 0),  # no edge runs through it
        ((0, 1000, 0, 1000, *CAUSAL), 500_500, 999 * 100 // 2),
        ((0, 60, 0, 60, *CAUSAL), 1830, 59 * 59 // 2),  # shorter than a tile: the whole square
        ((1000, 1100, 0, 1100, *CAUSAL), 100_000 + 5050, 99 * 99 // 2),  # all keys of the past, and a square
        ((0, 1000, 0, 1000, -9, 0), 9955, 9955),  # a narrow window, of which no more is wasted than visible
    ],
)
def test_an_edge_wastes_half_of_the_tiles_that_it_cuts(band, pairs, wasted):
    assert shapes(band, tile=100) == [[pairs], [wasted], [band[1] - band[0]], [1]]


def test_masks_waste_only_where_an_edge_runs():
    layout = Layout.contiguous(Packing([400]), 4)
    step = plan_attention(layout.packing, layout, heads=4, head_dim=16, scheme="p2p").attend
    found = stage_shapes(step, 10)
    assert found.cut[0].tolist() == [99 * 10 // 2] * 4
    assert not found.cut[1:].any()
    assert found.pairs.sum() == 400 * 401 // 2
    layout = Layout.contiguous(Packing([100]), 1)
    made = plan_attention(layout.packing, layout, heads=1, head_dim=16, mask=Mask.full(layout.packing))
    assert not stage_shapes(made.attend, 64).cut.any()


def test_attention_adds_up():
    """Work, one call, two bands, and the queries of all heads, at two times the price backward."""
    hardware = dataclasses.replace(
        machine("cpu").hardware, attention=((16, 1e30, 1e30),), call=1.0, band=(10.0, 20.0), row=(100.0, 200.0)
    )
    layout = Layout.contiguous(Packing([5, 3]), 1)
    step = plan_attention(layout.packing, layout, heads=4, head_dim=16).attend
    for forward, expected in ((True, 1 + 2 * 10 + 8 * 4 * 100), (False, 1 + 2 * 20 + 8 * 4 * 200)):
        seconds = attention_seconds(step, hardware, 2, np.array([0]), np.array([4]), forward=forward)
        assert seconds == pytest.approx(np.array([[expected]]))


def test_chunks_are_filled_up():
    packing = Packing([65, 1, 128, 200])
    headwise, chunkwise = (
        plan_linear(packing, Layout.contiguous(packing, 2), "gdn", heads=2, head_dim=8, mode=mode)
        for mode in ("headwise", "chunkwise")
    )
    assert chunked_tokens(headwise).tolist() == [128 + 64 + 128 + 256] * 2
    # 197 tokens each: 65, 1, 128 and 3 of the last document on the first rank.
    assert chunked_tokens(chunkwise).tolist() == [128 + 64 + 128 + 64, 256]
    tree = Packing.tree([65, 1, 130], [-1, 0, 0])
    headwise = plan_linear(tree, Layout.contiguous(tree, 2), "gdn", heads=2, head_dim=8, mode="headwise")
    assert chunked_tokens(headwise).tolist() == [128 + 64 + 192] * 2


@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba"])
def test_a_layer_takes_the_rates_of_its_kind(kind):
    packing, more = Packing([640]), {"state": 8} if kind == "mamba" else {}
    plan = plan_linear(packing, Layout.contiguous(packing, 1), kind, heads=2, head_dim=8, mode="headwise", **more)
    slow = tuple((each, 64, 1.0, 1.0, 5.0 if each == kind else 0.0) for each in ("gdn", "kda", "mamba"))
    quick = tuple((each, 64, *((2.0, 4.0) if each == kind else (1.0, 1.0)), 0.0) for each in ("gdn", "kda", "mamba"))
    one, other = (
        dataclasses.replace(machine("cpu").hardware, rule=rule, rule_floor=0.0, wider=(1.0, 1.0))
        for rule in (slow, quick)
    )
    for forward, times in ((True, 2), (False, 4)):
        took = [rule_seconds(plan, hardware, 4, forward=forward)[0] for hardware in (one, other)]
        assert took[0] - 5.0 == pytest.approx(times * took[1])


def test_a_convolution_takes_its_channels():
    packing, hardware = Packing([10]), dataclasses.replace(machine("cpu").hardware, convolution=(2.0, 1.0), launch=0.5)
    plan = plan_linear(packing, Layout.contiguous(packing, 1), "gdn", heads=4, key_heads=2, head_dim=8, mode="headwise")
    elements = 10 * (2 * 2 + 4) * 8  # neither beta nor alpha is convolved
    for forward, rate in ((True, 2), (False, 1)):
        seconds = convolution_seconds(plan, hardware, 2, np.array([10]), forward=forward)
        assert seconds == pytest.approx([elements / rate + 0.5])
