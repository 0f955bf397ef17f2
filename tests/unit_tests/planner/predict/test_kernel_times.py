"""Tests of the predicted times of kernels, against counts by hand."""

import dataclasses

import numpy as np
import pytest

from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.bands import UNBOUNDED
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.linear import plan_linear
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.hardware import Rates
from megatron_cp.planner.predict.kernel_times import (
    _shapes,
    attention_seconds,
    chunked_tokens,
    convolution_seconds,
    rule_seconds,
    stage_shapes,
)

FULL, CAUSAL = (-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0)


def shapes(*bands, tile):
    return [part.tolist() for part in _shapes(np.array(bands).T, tile)]


@pytest.mark.parametrize(
    ("band", "pairs", "cut", "tiles", "padding"),
    [
        ((0, 1000, 0, 1000, *FULL), 1_000_000, 0, 10, 0),  # no edge runs through it
        ((0, 1000, 0, 1000, *CAUSAL), 500_500, 550_000 - 500_500, 10, 0),
        ((0, 60, 0, 60, *CAUSAL), 1830, 3600 - 1830, 1, 6400),  # shorter than a tile: a whole one
        ((1000, 1100, 0, 1100, *CAUSAL), 105_050, 110_000 - 105_050, 1, 0),  # all keys of the past, and a square
        ((0, 1000, 0, 1000, -9, 0), 9955, 190_000 - 9955, 10, 0),  # a narrow window: two tiles for each but the first
        ((5, 206, 7, 107, *FULL), 20_100, 0, 3, 9900),  # the last query alone has a tile of its own
    ],
)
def test_a_band_computes_whole_tiles(band, pairs, cut, tiles, padding):
    assert shapes(band, tile=100) == [[pairs], [cut], [band[1] - band[0]], [1], [tiles], [padding]]


def test_tiles_are_those_that_meet_a_visible_pair():
    """Random bands, against a table of all their pairs; a tile of queries has no gap between its tiles of keys."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        (q0, k0), (queries, keys), tile = rng.integers(0, 30, 2), rng.integers(1, 40, 2), int(rng.integers(1, 12))
        lo, hi = sorted(rng.integers(-40, 40, 2).tolist())
        lo, hi = lo if rng.random() < 0.7 else -UNBOUNDED, hi if rng.random() < 0.7 else UNBOUNDED
        apart = np.arange(k0, k0 + keys) - np.arange(q0, q0 + queries)[:, None]
        seen = (apart >= lo) & (apart <= hi)
        pairs, cut, rows, bands, tiles, padding = shapes((q0, q0 + queries, k0, k0 + keys, lo, hi), tile=tile)
        seen = seen[np.ix_(seen.any(axis=1), seen.any(axis=0))]
        columns = [np.flatnonzero(seen[at : at + tile].any(axis=0)) // tile for at in range(0, len(seen), tile)]
        computed = sum(int(each[-1] - each[0] + 1) for each in columns) * tile**2
        assert (pairs[0], rows[0], bands[0], tiles[0]) == (seen.sum(), len(seen), seen.size > 0, len(columns))
        assert pairs[0] + cut[0] + padding[0] == computed
        assert pairs[0] + cut[0] == min(computed, seen.size)


def test_stages_of_a_ring_are_those_of_their_keys():
    """The first has a rank's own keys, where an edge of the mask runs; the others have whole squares, or nothing."""
    layout = Layout.contiguous(Packing([400]), 4)
    step = plan_attention(layout.packing, layout, heads=4, head_dim=16, scheme="p2p").attend
    found = stage_shapes(step, 10)
    assert found.cut[0].tolist() == [55 * 100 - 5050] * 4
    assert not found.cut[1:].any()
    assert found.pairs.sum() == 400 * 401 // 2
    assert found.pairs[1].tolist() == [0, 10_000, 10_000, 10_000]  # of the rank before
    assert found.tiles.sum(axis=0).tolist() == [10, 20, 30, 40]
    assert not found.padding.any()


def test_a_device_computes_the_padding_of_tiles_and_a_core_does_not():
    layout = Layout.contiguous(Packing([10] * 3), 1)
    step = plan_attention(layout.packing, layout, heads=2, head_dim=16).attend
    flat = dataclasses.replace(
        machine("cpu").hardware, attention=((16, 64.0, 1.0),), tile=32, call=0.0, band=(0.0, 0.0), row=()
    )
    for cores, pairs in ((2, 100), (0, 32**2)):
        hardware = dataclasses.replace(flat, cores=cores)
        seconds = attention_seconds(step, Rates(hardware, 2, forward=True), np.array([0]), np.array([2]))
        assert seconds.tolist() == [[3 * 2 * pairs]]


def test_attention_adds_up():
    """Work, one call, two bands, and the queries of all heads, at two times the price backward."""
    hardware = dataclasses.replace(
        machine("cpu").hardware,
        attention=((16, 1e30, 1e30),),
        call=1.0,
        band=(10.0, 20.0),
        row=((16, 100.0, 200.0), (64, 1.0, 1.0)),
    )
    layout = Layout.contiguous(Packing([5, 3]), 1)
    step = plan_attention(layout.packing, layout, heads=4, head_dim=16).attend
    for forward, expected in ((True, 1 + 2 * 10 + 8 * 4 * 100), (False, 1 + 2 * 20 + 8 * 4 * 200)):
        seconds = attention_seconds(step, Rates(hardware, 2, forward), np.array([0]), np.array([4]))
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
        took = [rule_seconds(plan, Rates(hardware, 4, forward))[0] for hardware in (one, other)]
        assert took[0] - 5.0 == pytest.approx(times * took[1])


def test_a_convolution_takes_its_channels():
    packing, hardware = Packing([10]), dataclasses.replace(machine("cpu").hardware, convolution=(2.0, 1.0), launch=0.5)
    plan = plan_linear(packing, Layout.contiguous(packing, 1), "gdn", heads=4, key_heads=2, head_dim=8, mode="headwise")
    elements = 10 * (2 * 2 + 4) * 8  # neither beta nor alpha is convolved
    for forward, rate in ((True, 2), (False, 1)):
        seconds = convolution_seconds(plan, Rates(hardware, 2, forward), np.array([10]))
        assert seconds == pytest.approx([elements / rate + 0.5])


@pytest.mark.parametrize(
    ("mode", "sizes", "products", "copied"),
    [
        ("heads", (4, 192, 128), (1, 2), (320, 320)),  # own keys and values are made
        ("expand", (4, 192, 128), (1, 3), (192, 192 + 256)),  # in backward once more, and their gradients added
        ("absorb", (1, 576, 512), (1, 2), (2 * 576, 4 * 576)),  # of queries and results, beside keys of one head
    ],
)
def test_products_of_an_up_projection_count_beside_those_of_attention(mode, sizes, products, copied):
    packing, hardware = Packing([1000]), machine("h100").hardware
    layout = Layout.contiguous(packing, 1)
    kv_heads, size, value = sizes
    of_latents = {"heads": 4, "head_dim": 192, "value_head_dim": 128, "latent": (64, 512), "latent_mode": mode}
    seconds = [
        [
            attention_seconds(plan.attend, Rates(hardware, 2, way), np.array([0]), np.array([4])).sum()
            for way in (True, False)
        ]
        for plan in (
            plan_attention(packing, layout, scheme="p2p", **of_latents),
            plan_attention(
                packing, layout, scheme="p2p", heads=4, kv_heads=kv_heads, head_dim=size, value_head_dim=value
            ),
        )
    ]
    rate = hardware.matrix / (1 + hardware.matrix_rows / 1000)
    for more, plain, times, features in zip(*seconds, products, copied, strict=True):
        by_hand = 1000 * 4 * (2 * 512 * 256 * times / rate + 2 * features / hardware.copy)
        assert more - plain == pytest.approx(by_hand)
