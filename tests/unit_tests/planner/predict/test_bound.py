"""Tests that a candidate's bound is never more than its predicted time, so that `auto` misses none."""

import contextlib
import dataclasses
import warnings

import numpy as np
import pytest

import megatron_cp as cp
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner import tiled
from megatron_cp.planner.predict import machine, presets
from megatron_cp.planner.predict.bound import _remote_tiles, bounds_of_directions, longest_path
from megatron_cp.planner.predict.price import priced
from megatron_cp.planner.tiled import bound_of_tiles
from tests.random_tiles import TILED, assign_all_to, assign_at_random


def ways(layout, mask, heads, groups, *, schemes=tuple(SCHEMES), **options):
    for name, scheme in ((name, SCHEMES[name]) for name in schemes):
        for degree in [u for u in range(2, layout.cp_size) if layout.cp_size % u == 0] if scheme.is_product else [None]:
            with warnings.catch_warnings(), contextlib.suppress(cp.ArgumentError):  # codecs and chunks of a ring
                warnings.simplefilter("ignore", UserWarning)
                yield cp.plan_attention(
                    layout.packing, layout, heads=heads, kv_heads=groups, head_dim=64, mask=mask, scheme=name,
                    ulysses_degree=degree, **options,
                )  # fmt: skip


def free(on):
    """The machine with kernels that take no time, so that transfers stand alone."""
    rates = dict.fromkeys(("call", "launch", "rule_floor", "units"), 0.0)
    fast = dataclasses.replace(on.hardware, attention=((64, 1e30, 1e30),), row=(), copy=1e30, **rates)
    within, between = (
        dataclasses.replace(link, latency=0.0, message=0.0, ramp=0.0) for link in (on.within, on.between)
    )
    return dataclasses.replace(on, hardware=fast, within=within, between=between)


def copying(on):
    """The machine with copies as slow as its links, and kernels that take no time."""
    one = free(on)
    within, between = (dataclasses.replace(link, bandwidth=1e9) for link in (one.within, one.between))
    return dataclasses.replace(
        one, hardware=dataclasses.replace(one.hardware, copy=1e9), within=within, between=between
    )


def transport_of(random, hosts):
    name = str(random.choice(["collective", "pairwise", "hierarchical"]))
    return cp.Transport(name, hosts) if name == "hierarchical" else name


SEEDS = [pytest.param(seed, marks=pytest.mark.thorough if seed >= 8 else ()) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bound_is_no_more_than_the_price(seed, monkeypatch):
    """Every candidate is tested, with tiles assigned at random; tiles that a search finds are in the last tests."""
    assign_at_random(monkeypatch, seed)
    random = np.random.default_rng(seed)
    size = int(random.choice([1, 2, 3, 4, 5, 6, 8, 16]))
    lengths = random.lognormal(4, 2, int(random.integers(1, 12))).astype(int)
    packing = cp.Packing([*lengths.tolist(), *([1] if random.random() < 0.5 else [])])
    layout = getattr(cp.Layout, str(random.choice(["zigzag", "balanced", "contiguous"])))(packing, size)
    mask = cp.Mask.named(packing, str(random.choice(["causal", "full", "window:63,0"])))
    groups = int(random.choice([1, 2, 3, 8]))
    options = {"codec": str(random.choice(["none", "fp8", "int8"])), "head_chunks": random.choice([None, 2])}
    item = int(random.choice([2, 4, 8]))
    on = machine(str(random.choice(presets())))
    hosts = int(random.integers(1, size + 1))
    options |= {"topology": on.topology(size, hosts), "transport": transport_of(random, on.topology(size, hosts).hosts)}
    for one in (on, free(on), copying(on)):
        topology = one.topology(size, hosts)
        for plan in ways(layout, mask, groups * int(random.choice([1, 4])), groups, **options):
            bounds = bounds_of_directions(plan, one, topology, item)
            price = priced(plan, one, topology, item_size=item)
            assert bounds[0] <= price.forward * (1 + 1e-9), (plan.scheme, plan.ulysses_degree)
            assert bounds[1] <= price.backward * (1 + 1e-9), (plan.scheme, plan.ulysses_degree)


MORE = [pytest.param(seed, marks=pytest.mark.thorough) for seed in range(4, 12)]


@pytest.mark.parametrize("seed", [*range(4), *MORE])
def test_tiles_in_any_order_take_no_less_than_their_bound(seed, monkeypatch):
    """Tiles are assigned at random: work, ports and paths alternately decide, forward and backward."""
    assign_at_random(monkeypatch, seed)
    random = np.random.default_rng(seed)
    size = int(random.choice([2, 3, 4, 6]))
    packing = cp.Packing((random.lognormal(4, 2, int(random.integers(1, 4))).astype(int) + 1).tolist())
    layout = getattr(cp.Layout, str(random.choice(["zigzag", "contiguous"])))(packing, size)
    mask = cp.Mask.named(packing, str(random.choice(["causal", "full", "star"])))
    on, item = machine("h100"), int(random.choice([2, 4]))
    hosts = int(random.integers(1, size + 1))
    transport = transport_of(random, on.topology(size, hosts).hosts)
    for one in (on, free(on), copying(on)):
        topology = one.topology(size, hosts)
        plans = list(ways(layout, mask, 4, 2, schemes=TILED, transport=transport))
        assert plans
        for plan in plans:
            price = priced(plan, one, topology, item_size=item)
            bounds = bounds_of_directions(plan, one, topology, item)
            assert bounds[0] <= price.forward * (1 + 1e-9)
            assert bounds[1] <= price.backward * (1 + 1e-9)


def test_the_bound_of_one_tile_is_its_way_there_and_back(monkeypatch):
    """Rank 1, on another host, computes all: queries and keys of rank 0 are sent to it, and results back."""
    assign_all_to(monkeypatch, 1)
    on, packing = machine("h100"), cp.Packing([2048])
    topology = on.topology(2, 2)
    layout = cp.Layout.contiguous(packing, 2)
    mask = cp.Mask.full(packing)
    plan = cp.plan_attention(packing, layout, heads=1, head_dim=128, mask=mask, scheme="tiled", topology=topology)
    keys, results, link = 1024 * 2 * 128 * 2, 1024 * (128 + 1) * 4, topology.between
    work = 1024 * 1024 * 4 * 128 / on.hardware.attention_rate(128, forward=True)
    path = longest_path(plan, plan.attend, on, topology, 2, forward=True)
    assert path == pytest.approx(2 * link.latency + (keys + results) / link.bandwidth + work)
    forward, _ = bounds_of_directions(plan, on, topology, 2)
    assert forward == pytest.approx(1e3 * max(path, 4 * work))


@pytest.mark.parametrize("seed", [*range(4), *MORE[:4]])
def test_what_any_tiles_take_at_least_is_known_before_they_are_assigned(seed, monkeypatch):
    monkeypatch.setattr(tiled, "USUAL_STEPS", 100)  # any assignment will do
    random = np.random.default_rng(seed)
    size, hosts = [(2, 1), (3, 1), (4, 2), (6, 3)][seed % 4]
    packing = cp.Packing((random.lognormal(5, 1, int(random.integers(1, 4))).astype(int) + 1).tolist())
    layout = getattr(cp.Layout, str(random.choice(["zigzag", "contiguous"])))(packing, size)
    mask = cp.Mask.named(packing, str(random.choice(["causal", "full", "star", "strided"])))
    on, schemes = machine("h100"), (*TILED, "exact", "a2a+exact")
    transport = transport_of(random, on.topology(size, hosts).hosts)
    for one in (on, free(on), copying(on)):
        topology = one.topology(size, hosts)
        if one.within.bandwidth != on.within.bandwidth or one is on:  # the search reads no more of a machine
            plans = list(ways(layout, mask, 4, 2, schemes=schemes, topology=topology, transport=transport))
        for plan in plans:
            if plan.attend.tiled is None:
                continue
            alike = next(x for x in plans if x.ulysses_degree == plan.ulysses_degree and "exact" in x.scheme)
            bound = bound_of_tiles(alike, one, topology, 2, float("inf"))
            price = priced(plan, one, topology)
            few = bound_of_tiles(alike, one, topology, 2, 0.0)
            of_tiles = bounds_of_directions(plan, one, topology, 2)
            for way, taken in enumerate((price.forward, price.backward)):
                assert few[way] <= bound[way] <= taken * (1 + 1e-9)
                assert of_tiles[way] <= taken * (1 + 1e-9)


def test_auto_finds_the_fastest_of_all_ways():
    """But for what is gained by another preferred way; see `choose`. Tiles are not among them without a search."""
    untiled = [name for name in SCHEMES if name not in TILED]
    for seed, size, name in ((0, 8, "balanced"), (1, 16, "contiguous"), (2, 32, "zigzag")):
        lengths = np.maximum(np.random.default_rng(seed).lognormal(6, 1.5, 12).astype(int), 1)
        packing = cp.Packing(lengths.tolist())
        layout, mask, on = getattr(cp.Layout, name)(packing, size), cp.Mask.causal(packing), machine("a100")
        best = min(priced(plan, on).total for plan in ways(layout, mask, 16, 4, schemes=untiled))
        chosen = cp.plan_attention(packing, layout, heads=16, kv_heads=4, head_dim=64, hardware=on)
        assert chosen.prices[0].total <= best * 1.04 + 0.1
        assert chosen.prices[0].total == pytest.approx(priced(chosen, on).total)


def test_remote_tiles_are_known_with_who_owns_their_rows_and_keys(monkeypatch):
    assign_at_random(monkeypatch, 3)
    layout = cp.Layout.zigzag(cp.Packing([70, 9, 41]), 4)
    plan = cp.plan_attention(layout.packing, layout, heads=4, kv_heads=2, head_dim=64, scheme="tiled")
    step = next(step for step in plan.steps if isinstance(step, Attend))
    tiles, owners, readers, moves_queries = _remote_tiles(step.assigned_tiles(forward=True), step, 4)
    assert moves_queries.any()
    assert not moves_queries.all()
    assert ((owners[:, 0] != readers) == moves_queries).all()
    rows, keys = tiles[moves_queries, :2], tiles[:, 2:4]  # a rank's own queries are numbered by local row
    for edges, whose in ((rows, owners[moves_queries, 0]), (keys, owners[:, 1])):
        assert (layout.located(edges[:, 0])[0] == whose).all()
        assert (layout.located(edges[:, 1] - 1)[0] == whose).all()
