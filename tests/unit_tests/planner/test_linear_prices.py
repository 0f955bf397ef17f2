"""Tests of the prices of linear layers' modes, and of the mode that a layer or a run of layers takes."""

import dataclasses

import pytest

from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.transport import Transport
from megatron_cp.planner.batch import LinearSpec
from megatron_cp.planner.linear import contiguous_like, plan_linear
from megatron_cp.planner.predict import Link, machine
from megatron_cp.planner.predict.hardware import Setting
from megatron_cp.planner.predict.kernel_times import rule_products, scan_products
from megatron_cp.planner.predict.price import priced, state_bounds

PACKING = Packing([60_000, 500, 5_036])
SIZES = {"heads": 32, "key_heads": 16, "head_dim": 128}
H100, FREE = machine("h100"), Link(latency=0.0, message=0.0, bandwidth=1e30)
KINDS = ("gdn", "kda", "mamba")


def rule(rate):
    """Rows of all kinds."""
    return tuple((kind, 128, rate, rate, 0.0) for kind in KINDS)


_INSTANT = {
    "copy": 1e30, "convolution": (1e30, 1e30), "call": 0.0, "launch": 0.0, "rule": rule(1e30), "rule_floor": 0.0,
    "chain": (),
}  # fmt: skip


def only(within=FREE, between=FREE, **rates):
    """A machine on which nothing takes time but what is said."""
    hardware = dataclasses.replace(H100.hardware, **{**_INSTANT, **rates})
    return dataclasses.replace(H100, hardware=hardware, within=within, between=between)


SLOW_WIRE = only(Link(0.0, 0.0, 1.0), Link(0.0, 0.0, 0.5))
SLOW_START = only(Link(1.0, 0.0, 1e30), Link(1.0, 0.0, 1e30))
SLOW_PRODUCTS = only(rule=rule(1.0))


def plan(mode, layout=None, **more):
    layout = layout or Layout.zigzag(PACKING, 8)
    return plan_linear(layout.packing, layout, **SIZES, mode=mode, hidden_size=2048, **more)


def test_the_wire_costs_its_bytes():
    # A head exchange out and one in run one after the other, on the rank that sends or receives most in each.
    made = plan("headwise", Layout.contiguous(Packing([4096]), 8))  # as much to and from every rank
    price = priced(made, SLOW_WIRE)
    assert price.forward == pytest.approx(1e3 * max(made.bytes_sent(2, forward=True)))
    assert price.backward == pytest.approx(1e3 * max(made.bytes_sent(2, forward=False)))
    assert price.bytes_sent == max(made.bytes_sent(2, forward=True))
    assert price.exposed == pytest.approx(price.total)
    made = plan("chunkwise")
    price = priced(made, SLOW_WIRE)
    assert price.forward >= 1e3 * max(made.bytes_sent(2, forward=True))
    assert price.backward >= 1e3 * max(made.bytes_sent(2, forward=False))
    whole, coded = (priced(plan("headwise", **wish), SLOW_WIRE) for wish in ({}, {"codec": "fp8"}))
    assert coded.bytes_sent < whole.bytes_sent
    assert coded.forward < whole.forward


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("name", ["pairwise", "hierarchical", "shared_memory"])
def test_candidates_are_priced_by_the_transport_that_was_asked_for(mode, name):
    on = machine("cpu") if name == "shared_memory" else H100
    topology = on.topology(16, [0] * 16 if name == "shared_memory" else [0] * 8 + [1] * 8)
    by, layout = Transport.even_hosts(name, 16, topology.num_hosts), Layout.zigzag(PACKING, 16)
    made, collective = (
        plan(mode, layout, transport=each, hardware=on, topology=topology) for each in (by, "collective")
    )
    (price,) = made.prices
    found = priced(made, on, topology)
    assert (price.forward, price.backward) == (found.forward, found.backward)
    assert price.total != collective.prices[0].total
    assert not any(getattr(step, "gathers", False) for step in made.steps)  # only the backend's own gather crosses once


@pytest.mark.parametrize(("kind", "maps"), [("gdn", {"key_heads": 4}), ("mamba", {})])
def test_a_segment_between_others_costs_the_walk_of_its_map(kind, maps):
    """Only the middle rank's segment has both a past and a future: it walks its state, and its transition forward."""
    layout = Layout.contiguous(Packing([300]), 3)
    sizes = {"heads": 4, "head_dim": 16, **({"state": 8} if kind == "mamba" else {"value_head_dim": 8}), **maps}
    chunkwise, heads, tokens = plan_linear(layout.packing, layout, kind, **sizes, mode="chunkwise"), 4, 100
    keys, values = (8, 16) if kind == "mamba" else (16, 8)
    ends = Layout.contiguous(Packing([100] * 3), 3)  # the same work, and no segment waits for another
    alone = plan_linear(ends.packing, ends, kind, **sizes, mode="chunkwise")
    # A state [K, V] is multiplied by each token's key and value, of the delta rule by its key once more; the delta
    # rule's transition is a matrix [K, K], which is multiplied by the same two in the forward pass.
    walk = {"gdn": 2 * keys * values, "mamba": keys * values}[kind]
    transition = {"gdn": 2 * keys * keys, "mamba": 0}[kind]
    for forward in (True, False):
        scans = [next(iter(made.recurrent_steps[1:])) for made in (chunkwise, alone)]
        more, none = (
            scan_products(made, scan, forward=forward) for made, scan in zip((chunkwise, alone), scans, strict=True)
        )
        assert more.tolist() == [0, tokens * heads * (walk + (transition if forward else 0)), 0]
        assert not none.any()
    products = {"gdn": 64 * (keys + values) + 3 * keys * values + 64 * (keys + (keys + values) // 2)}
    products["mamba"] = 64 * (keys + values) + 2 * keys * values
    assert rule_products(chunkwise) == products[kind]


def test_head_chunks_hide_transfers_behind_work():
    """On a machine whose work takes as long as its wire, a chunk is under way while the one before is computed."""
    wire = Link(0.0, 0.0, 1e9)
    whole = priced(plan("headwise"), only(wire, wire))
    busy = only(wire, wire, rule=rule(1e12))
    one, four = (priced(plan("headwise", head_chunks=chunks), busy) for chunks in (None, 2))
    assert four.total < one.total
    assert one.exposed == pytest.approx(whole.total)
    assert four.exposed < one.exposed


def test_auto_says_what_the_way_that_it_takes_leaves_unused():
    made = plan("auto", Layout.contiguous(PACKING, 8), codec="int8")
    note = "codec int8 is unused: chunkwise was chosen, which exchanges no heads; headwise uses them"
    assert (made.scheme, made.notes) == ("chunkwise", (note,))
    assert f"note: {note}" in made.explain()
    assert plan("auto", Layout.contiguous(PACKING, 8), head_chunks=1).notes == ()
    many = Layout.zigzag(Packing([512] * 128), 8)
    taken = plan_linear(many.packing, many, **SIZES, codec="int8", head_chunks=2)  # every document is on every rank
    assert (taken.scheme, taken.notes) == ("headwise", ())
    alone = plan_linear(PACKING, Layout.contiguous(PACKING, 1), **SIZES, hidden_size=2048)
    assert (alone.scheme, alone.hidden_layout) == ("headwise", None)


def test_more_ranks_than_a_node_has_are_on_the_network():
    layout = Layout.contiguous(PACKING, 16)
    made = plan("headwise", layout)
    inside = only(Link(0.0, 0.0, 1.0), FREE)
    near, far = priced(made, inside).forward, priced(made, only(FREE, Link(0.0, 0.0, 1.0))).forward
    assert far / near == pytest.approx(8 / 7, rel=1e-3)  # of 15 other ranks 7 are on the same host


def test_a_redistribution_is_shared_by_the_layers_of_its_run():
    one, four = (plan("redistribute", layers=layers) for layers in (1, 4))
    inside = priced(plan("chunkwise", one.layout), SLOW_WIRE).forward
    redistributed = [priced(made, SLOW_WIRE).forward - inside for made in (one, four)]
    assert redistributed[0] >= 1e3 * max(one.redistribution.bytes_sent(one.layout, 2))
    assert redistributed[1] == pytest.approx(redistributed[0] / 4, rel=1e-6)
    starts = [priced(made, SLOW_START).forward for made in (one, four)]
    assert starts == pytest.approx([4e3, 2.5e3])  # a halo, a scan, and two transfers of the redistribution
    assert four.bytes_sent(2, forward=True) == plan("chunkwise", four.layout).bytes_sent(2, forward=True)


def test_idle_ranks_make_the_others_slower():
    few = {"heads": 4, "head_dim": 128}
    packing = Packing([100] * 64)
    layout = Layout.contiguous(packing, 8)
    with pytest.warns(UserWarning, match="4 of 8 ranks get no value head"):
        headwise = plan_linear(packing, layout, **few, mode="headwise")
    chunkwise = plan_linear(packing, layout, **few, mode="chunkwise")
    busy = [priced(made, SLOW_PRODUCTS).forward for made in (headwise, chunkwise)]
    assert busy[0] / busy[1] == pytest.approx(2)


def test_a_bound_is_no_more_than_the_price():
    # A question on one rank and its answers on two in turn: its state travels once, though the owner often changes.
    answers = Packing.tree([600, *[500] * 32], [-1, *[0] * 32])
    held = [[(0, 600)], *[[] for _ in range(7)]]
    for number in range(32):
        held[number % 2].append((600 + 500 * number, 1100 + 500 * number))
    layouts = [Layout.from_fragments(answers, held)]
    for packing in (Packing([60_000, 500]), Packing([512] * 32), Packing([7, 1, 130]), answers):
        layouts += [getattr(Layout, name)(packing, 8) for name in ("contiguous", "zigzag", "balanced")]
    for layout in layouts:
        made = plan("chunkwise", layout)
        few, sent = state_bounds(made, Setting(H100, H100.topology(8), 2))
        price = priced(made, H100)
        assert few.is_bound
        assert few.forward <= sent.forward <= price.forward
        assert few.backward <= sent.backward <= price.backward
        assert few.bytes_sent <= sent.bytes_sent == price.bytes_sent
    many = Layout.zigzag(Packing([512] * 128), 8)
    prices = {price.scheme: price for price in plan("auto", many).prices}
    assert prices["chunkwise"].is_bound  # ruled out by its bound alone
    assert "predicted at least" in plan("auto", many).explain()


def test_contiguous_rows_keep_the_rest_of_a_layout():
    layout = Layout.contiguous(PACKING, 8)
    made = plan("redistribute", layout)
    assert (made.scheme, made.redistribution, made.layout) == ("chunkwise", None, layout)
    layout = Layout.zigzag(Packing([3]), 4, align=4).padded(align=4, min_rows=1)
    assert contiguous_like(layout) == Layout.contiguous(Packing([3]), 4).padded(align=4, min_rows=1)
    assert contiguous_like(layout) is contiguous_like(layout)


GDN = LinearSpec("gdn", 32, 16, 128, 128)
MAMBA = LinearSpec("mamba", 8, 1, 16, 16)  # so small that a redistribution of hidden states never pays for it alone


def in_run(slot, *run):
    return dataclasses.replace(slot, hidden_size=2048, run=run)


def test_a_run_is_redistributed_together_or_not_at_all():
    layout = Layout.zigzag(Packing([4096] * 16), 8)
    assert in_run(GDN, GDN).plan(layout).redistribution is not None
    alone = Layout.zigzag(PACKING, 8)
    assert in_run(MAMBA, MAMBA).plan(alone).redistribution is None
    mostly_gdn, mostly_mamba = (GDN, GDN, GDN, MAMBA), (GDN, *(MAMBA,) * 40)
    for run, redistributed in ((mostly_gdn, True), (mostly_mamba, None)):
        plans = [in_run(slot, *run).plan(layout) for slot in (GDN, MAMBA)]
        assert len({made.redistribution is None for made in plans}) == 1
        if redistributed is not None:
            assert plans[0].redistribution is not None
        assert all(
            made.prices[0].scheme == (made.scheme if made.redistribution is None else "redistribute") for made in plans
        )


def test_counts_and_other_kinds_decide(monkeypatch):
    """With prices set by hand: a redistribution saves gdn 3, and costs mamba 2."""
    prices = {"gdn": {"headwise": 5.0, "redistribute": 2.0}, "mamba": {"headwise": 1.0, "redistribute": 3.0}}

    def set_by_hand(slot, layout):
        made = [
            dataclasses.replace(priced(slot._plan(layout, "headwise"), H100), scheme=way, forward=t)
            for way, t in prices[slot.kind].items()
        ]
        made = [dataclasses.replace(price, backward=0.0) for price in made]
        return tuple(sorted(made, key=lambda price: price.forward))

    monkeypatch.setattr(LinearSpec, "_prices", set_by_hand)
    layout = Layout.zigzag(PACKING, 8)
    for run, redistributed in (((GDN, MAMBA), True), ((GDN, MAMBA, MAMBA), False), ((GDN, GDN, MAMBA, MAMBA), True)):
        for slot in (GDN, MAMBA):
            assert (in_run(slot, *run).plan(layout).redistribution is not None) == redistributed, (run, slot.kind)


def test_descriptions_differ_where_plans_do_and_not_where_prices_do():
    different = [
        plan("headwise"), plan("headwise", conv_width=3), plan("chunkwise"), plan("chunkwise", conv_width=3),
        plan("chunkwise", Layout.contiguous(PACKING, 8)), plan("redistribute"),
    ]  # fmt: skip
    assert len({made.fingerprint() for made in different}) == len(different)
    assert len(set(different)) == len(different)
    assert plan("chunkwise") == plan("chunkwise", hardware=SLOW_WIRE)
