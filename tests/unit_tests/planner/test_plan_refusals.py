"""Tests of the refusals of `plan_attention` and `plan_linear`, the capability table, and the forms of arguments."""

import re

import numpy as np
import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.mask import Mask
from megatron_cp.nn import Attention
from megatron_cp.plan.transport import Transport
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.batch import AttentionSpec, LinearSpec
from megatron_cp.planner.capabilities import require, working
from megatron_cp.planner.linear import plan_linear
from tests.refusals import refusal_of, rejects
from tests.unit_tests.planner.plan_cases import ATTENTION, LAYOUT, LINEAR, PACKING, PLANNERS, refused


@pytest.mark.parametrize(
    ("argument", "value"), [(name, value) for name in ("scheme", "kind", "mode") for value in refused(name)]
)
def test_rejects_what_is_not_built(argument, value):
    planner, arguments = (plan_attention, ATTENTION) if argument == "scheme" else (plan_linear, LINEAR)
    with refusal_of(argument, repr(value)):
        planner(**arguments | {argument: value})


def test_a_refusal_from_the_table_says_what_to_do():
    rejects(r"allowed: GPTModel or .*not built yet; self-attention only", require, "megatron", "cross_attention")


@pytest.mark.parametrize("scheme", working("scheme"))
def test_what_the_table_says_works_for_attention_is_planned(scheme):
    plan = plan_attention(**{**ATTENTION, "layout": Layout.zigzag(PACKING, 4)}, scheme=scheme)
    assert (plan.kind, plan.scheme) == ("attention", "a2a" if scheme == "auto" else scheme)


SIZES = {
    "gdn": {"heads": 6, "key_heads": 2, "head_dim": 8},
    "kda": {"heads": 6, "key_heads": 2, "head_dim": 8},
    "mamba": {"heads": 6, "groups": 2, "head_dim": 8, "state": 16},
    "conv1d": {"channels": 40},
}


@pytest.mark.parametrize("kind", working("kind"))
@pytest.mark.parametrize("mode", working("mode"))
def test_what_the_table_says_works_for_linear_layers_is_planned(kind, mode):
    plan = plan_linear(PACKING, LAYOUT, kind, **SIZES[kind], mode=mode, hidden_size=32)
    assert plan.kind == kind
    assert mode in ("auto", plan.scheme if plan.hidden_layout is None else "redistribute")


def test_auto_takes_the_cheapest_way():
    packing = Packing([60_000, 500, 5_036])
    contiguous, zigzag = (make(packing, 8) for make in (Layout.contiguous, Layout.zigzag))
    sizes = {"heads": 32, "key_heads": 16, "head_dim": 128}
    prices = plan_linear(packing, contiguous, **sizes).prices
    assert [price.scheme for price in prices] == ["chunkwise", "headwise"]
    assert prices[0].forward + prices[0].backward < prices[1].forward + prices[1].backward
    many = Packing([512] * 128)
    assert plan_linear(many, Layout.zigzag(many, 8), **sizes).scheme == "headwise"  # every document on every rank
    redistributed = plan_linear(packing, zigzag, **sizes, hidden_size=2048, layers=6)
    assert (redistributed.hidden_layout, redistributed.layout) == (zigzag, contiguous)
    assert "around a run of 6 linear layers" in redistributed.explain()
    alone = plan_linear(packing, Layout.contiguous(packing, 1), **sizes, hidden_size=2048)
    assert (alone.scheme, alone.hidden_layout) == ("headwise", None)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("state", {"state": None}), ("head_dim", {"head_dim": None}), ("key_heads", {"key_heads": 2}),
        ("value_head_dim", {"value_head_dim": 8}), ("groups", {"groups": 4}), ("conv_width", {"conv_width": 65}),
        ("conv_width", {"conv_width": 0}), ("hidden_size", {"mode": "redistribute"}),
        ("hidden_size", {"hidden_size": 0}), ("layers", {"layers": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_rejects_shapes_that_mamba_does_not_have(argument, change):
    rejects(f"^{argument}: got ", plan_linear, PACKING, LAYOUT, "mamba", **{**SIZES["mamba"], **change})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AttentionSpec(heads=6, kv_heads=4, head_dim=8), "^kv_heads: got 4; allowed: a divisor of heads, 6"),
        (lambda: LinearSpec("gdn", 6, 4, 8, 8), "^key_heads: got 4; allowed: a divisor of heads, 6"),
        (lambda: AttentionSpec(heads=6), "^head_dim: got None; allowed: an integer from 1"),
        (lambda: AttentionSpec(2, 2, 10**9), "^head_dim: got 1000000000; allowed: an integer from 1 to 65536"),
        (lambda: LinearSpec("conv1d", 2**25, 1, 1, 1), "^heads: got 33554432; allowed: an integer from 1 to 16777216"),
        (lambda: plan_attention(PACKING, LAYOUT, heads=2**16, head_dim=2**9), "^head_dim: got 512; .* from 1 to 256"),
        (lambda: plan_attention(PACKING, LAYOUT, heads=10**12, head_dim=8), "^heads: got .* from 1 to 65536"),
        (lambda: plan_attention(PACKING, LAYOUT, heads=2, head_dim=8, item_size=17), "^item_size: got .* from 1 to 16"),
        (lambda: plan_linear(PACKING, LAYOUT, "gdn", heads=2, head_dim=10**9), "^head_dim: got .* from 1 to 65536"),
        (lambda: plan_linear(PACKING, LAYOUT, "conv1d", channels=2**25), "^channels: got .* from 1 to 16777216"),
    ],
)
def test_rejects_sizes_when_they_are_given(make, says):
    rejects(says, make)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("tokens", [2**27, 2**30])
def test_the_largest_sizes_are_planned(tokens):
    packing = Packing([tokens])
    layout = Layout.contiguous(packing, 2)
    assert plan_attention(packing, layout, heads=2**16, head_dim=2**8, item_size=16).prices[0].forward > 0
    sizes = {"heads": 2**16, "head_dim": 2**8, "hidden_size": 2**24, "item_size": 16}
    assert plan_linear(packing, layout, "gdn", **sizes).prices[0].forward > 0


def test_key_heads_and_value_sizes_are_those_of_queries_where_none_are_given():
    assert AttentionSpec(heads=6, head_dim=8) == AttentionSpec(6, 6, 8, 8)
    assert AttentionSpec(heads=2, head_dim=8, latent=(2, 4)).kv_heads == 2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan_attention(PACKING, LAYOUT, num_heads=4, head_dim=8), "plan_attention.*'num_heads'. .*mean heads"),
        (lambda: AttentionSpec(num_attention_heads=4), "AttentionSpec.__init__.* Did you mean heads"),
        (lambda: AttentionSpec(4, num_key_value_heads=4), "Did you mean kv_heads"),
        (lambda: plan_linear(PACKING, LAYOUT, "gdn", heads=4, key_head=2, head_dim=8), "Did you mean key_heads"),
        (lambda: LinearSpec("gdn", n_heads=4), "Did you mean heads"),
        (lambda: Attention(8, num_heads=4), "Attention.__init__.*'num_heads'. Did you mean heads"),
        (lambda: plan_attention(PACKING, LAYOUT, frob=4), "unexpected keyword argument 'frob'$"),
    ],
)
def test_rejects_an_unknown_keyword_with_the_argument_that_it_resembles(call, says):
    with pytest.raises(TypeError, match=says):
        call()


def test_rejects_keys_and_layouts_of_another_packing():
    with refusal_of("kv_packing", repr(Packing([3, 5]))):
        plan_attention(**ATTENTION, kv_packing=Packing([3, 5]))
    rejects("kv_packing: got None", plan_attention, **ATTENTION, kv_layout=LAYOUT)


FOUR = Layout.zigzag(PACKING, 4)
REFUSED = [
    *(("kv_layout", "over 3 ranks", {"kv_packing": PACKING, "kv_layout": layout})
      for layout in (Layout.contiguous(PACKING, 4), Layout.contiguous(Packing([3, 5]), 3), None)),
    *(("scheme", f"3 has no other divisor; use a2a, {inner} or", {"scheme": f"a2a+{inner}"})
      for inner in ("p2p", "all_gather", "exact")),
    *(("ulysses_degree", f"allowed: {allowed}", {"layout": FOUR, "scheme": scheme, "ulysses_degree": degree})
      for scheme, degree, allowed in (("a2a+p2p", 3, "2"), ("a2a+p2p", 4, "2"), ("p2p", 2, "1"))),
    *(("head_chunks", f"got {chunks}; allowed: ", {"scheme": scheme, "head_chunks": chunks})
      for scheme, chunks in (("p2p", 2), ("exact", 0))),
    *(("mask", re.escape(f"got {mask!r}; allowed: "), {"mask": mask})
      for mask in (Mask.causal(Packing([3, 5])), "casual", 3)),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "says", "options"), REFUSED)
def test_rejects_options_of_attention(argument, says, options):
    rejects(rf"^{argument}: (got .*)?{says}", plan_attention, **ATTENTION | options)


def test_the_default_mask_of_cross_attention_does_not_depend_on_the_lengths():
    for lengths in (PACKING.lengths, PACKING.lengths + 1):
        keys = Packing(lengths.tolist())
        plan = plan_attention(**ATTENTION, kv_packing=keys, kv_layout=Layout.zigzag(keys, 3))
        assert plan.mask.name == "full"
    assert plan_attention(**ATTENTION).mask.name == "causal"


@pytest.mark.parametrize("scheme", ["a2a", "a2a+p2p", "exact"])
def test_fingerprints_see_the_layout_of_the_keys(scheme):
    layout, keys = Layout.zigzag(PACKING, 4), Packing([3, 9, 0, 20, 5])
    plan, other = (
        plan_attention(**{**ATTENTION, "layout": layout}, kv_packing=keys, kv_layout=partition(keys, 4), scheme=scheme)
        for partition in (Layout.contiguous, Layout.zigzag)
    )
    assert plan != other
    assert plan.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(("kv_heads", "cp_size", "degree"), [(8, 12, 4), (2, 12, 2), (1, 9, 3), (6, 12, 6)])
def test_a_product_shares_the_key_value_heads_evenly_where_it_can(kv_heads, cp_size, degree):
    layout = Layout.zigzag(PACKING, cp_size)
    plan = plan_attention(PACKING, layout, heads=24, kv_heads=kv_heads, head_dim=8, scheme="a2a+p2p")
    assert plan.ulysses_degree == degree


@PLANNERS
def test_a_refusal_of_head_chunks_says_why_and_what_to_do(planner, arguments):
    group = "key/value head" if planner is plan_attention else "key head"
    arguments = {**arguments, "scheme": "a2a"} if planner is plan_attention else arguments
    with refusal_of("head_chunks", 2) as caught:
        planner(**{**arguments, "layout": Layout.zigzag(PACKING, 2)}, head_chunks=2)
    assert str(caught.value).endswith(
        f"allowed: 1, for 2 {group}s over 2 ranks. A chunk is at least one {group} of a rank: "
        f"use more {group}s or fewer ranks."
    )
    with refusal_of("head_chunks", 3) as caught:
        planner(**{**arguments, "layout": Layout.zigzag(PACKING, 1)}, head_chunks=3)
    assert str(caught.value).endswith(f"allowed: 1 to 2, for 2 {group}s. A chunk is at least one {group}.")


def test_rejects_head_chunks_and_codecs_of_modes_that_exchange_no_heads():
    for wish in ({"head_chunks": 2}, {"codec": "fp8"}):
        for mode in ("chunkwise", "redistribute"):
            with pytest.raises(ArgumentError, match=rf"for {mode}\. Only heads .*: use headwise\.$") as caught:
                plan_linear(**{**LINEAR, "mode": mode}, hidden_size=32, **wish)
            assert caught.value.argument in wish
    with pytest.raises(ArgumentError, match=r"none for conv1d\. It has single channels"):
        plan_linear(PACKING, LAYOUT, "conv1d", channels=40, codec="fp8")
    with pytest.raises(ArgumentError, match=r"none for exact\. Keys among which queries choose travel in their own"):
        plan_attention(**ATTENTION, scheme="exact", codec="fp8", topk=2)
    with pytest.raises(ArgumentError, match="1, for 2 groups of B and C over 2 ranks"):
        plan_linear(PACKING, Layout.zigzag(PACKING, 2), "mamba", **SIZES["mamba"], head_chunks=2)


@PLANNERS
def test_transports_may_be_names_and_counts_numpy_integers(planner, arguments):
    for name in ("collective", "pairwise"):
        assert planner(**arguments, transport=name) == planner(**arguments, transport=Transport(name))
    with pytest.raises(ArgumentError, match=r'Transport.even_hosts\("hierarchical", cp_size, hosts\)') as caught:
        planner(**arguments, transport="hierarchical")
    assert caught.value.argument == "transport"
    for wrong in ("carrier", None, 1):
        with refusal_of("transport", repr(wrong)):
            planner(**arguments, transport=wrong)
    assert planner(**{**arguments, "heads": np.int64(6)}) == planner(**arguments)
    other = Layout.zigzag(Packing([3, 5]), 3)
    with refusal_of("layout", repr(other)):
        planner(**{**arguments, "layout": other})


def test_plans_by_other_transports_differ_in_one_line():
    lines = [plan_attention(**ATTENTION, transport=name).describe() for name in ("collective", "pairwise")]
    assert [pair for pair in zip(*lines, strict=True) if len(set(pair)) == 2] == [
        ("transport: collective", "transport: pairwise")
    ]


@PLANNERS
@pytest.mark.parametrize("count", [0, -6, 6.0], ids=repr)
@pytest.mark.parametrize("name", ["heads", "head_dim", "value_head_dim"])
def test_rejects_a_count_below_1_or_fractional(planner, arguments, name, count):
    with refusal_of(name, repr(count)):
        planner(**{**arguments, name: count})


@PLANNERS
@pytest.mark.parametrize("count", [0, -2, 2.0, 4, 5, 12], ids=repr)
def test_rejects_key_heads_that_are_no_divisor_of_the_heads(planner, arguments, count):
    name = "kv_heads" if planner is plan_attention else "key_heads"
    with refusal_of(name, repr(count)):
        planner(**{**arguments, name: count})
