"""Tests of the number of calls that plan a batch and make a rank's tables; unlike times, it does not depend on load.

Whatever is done for each pair of ranks, or row by row, shows here: at cp 64 there are 4096 pairs.
"""

import numpy as np
import pytest

from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.flows import Fetch
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.linear import plan_linear
from tests.counts import calls_of

DRAWS = np.random.default_rng(0).lognormal(8, 1.2, 64)
LENGTHS = np.diff(np.round(np.cumsum(DRAWS) / DRAWS.sum() * 2**18).astype(int), prepend=0)
RANK = 5


def attention(layout, scheme, **options):
    return plan_attention(layout.packing, layout, heads=32, kv_heads=8, head_dim=128, scheme=scheme, **options)


def linear(layout, mode):
    return plan_linear(layout.packing, layout, "gdn", heads=32, key_heads=16, head_dim=128, mode=mode)


def make_tables(plan, rank):
    """Makes the tables that a rank needs to run an attention."""
    kv_rank = rank // plan.ulysses_degree
    for exchange, _ in plan.exchanges(forward=True):
        layout = exchange.subgroup(kv_rank).layout
        _ = layout.order, layout.inverse_order
    for stage in plan.attend.stages if plan.attend else ():
        if len(plan.attend.tiles(kv_rank, stage).bands):
            plan.attend.call_tiles(kv_rank, stage)
        if isinstance(stage.keys, Fetch):
            _ = stage.keys.tables(kv_rank), stage.keys.split_counts
            _ = stage.keys.shares() if stage.keys.equal_shares else None


WAYS = {
    "a2a": lambda layout: attention(layout, "a2a"),
    "p2p": lambda layout: attention(layout, "p2p"),
    "all_gather": lambda layout: attention(layout, "all_gather"),
    "exact": lambda layout: attention(layout, "exact"),
    "a2a+exact": lambda layout: attention(layout, "a2a+exact", ulysses_degree=8),
    "headwise": lambda layout: linear(layout, "headwise"),
    "chunkwise": lambda layout: linear(layout, "chunkwise"),
}


# At cp 64: a quarter more than there are, or more where prices are part of the plan.
MOST_CALLS = {
    "a2a": 4_000, "p2p": 11_000, "all_gather": 2_500, "exact": 3_200, "a2a+exact": 3_400, "headwise": 10_200,
    "chunkwise": 6_800,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["zigzag", "balanced"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few
def test_calls_grow_no_faster_than_ranks(way, name):
    counts = {}
    for cp_size in (16, 64, 256):  # the first one of a process also imports what only some plans need
        layout = getattr(Layout, name)(Packing(LENGTHS), cp_size)
        counts[cp_size] = calls_of(lambda layout=layout: make_tables(WAYS[way](layout), RANK))
    assert counts[64] <= MOST_CALLS[way]
    assert counts[256] <= 4 * counts[64]


MOST_CALLS_OF_AUTO = 91_000  # a twentieth more than there are, of 21 plans, of which 8 are played


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["zigzag", "balanced", "contiguous"])
def test_auto_plays_few_ways(name):
    attention(Layout.contiguous(Packing([64]), 64), "auto")  # what is imported, and presets
    layout, plans = getattr(Layout, name)(Packing(LENGTHS), 64), []
    assert calls_of(lambda: plans.append(attention(layout, "auto"))) <= MOST_CALLS_OF_AUTO
    assert sum(price.is_played for price in plans[0].prices) <= 8 < len(plans[0].prices)
    assert calls_of(lambda: attention(layout, "auto")) <= 2_000  # remembered
