"""Tests of the refusals of `plan_attention` and `plan_linear`, the capability table, and the forms of arguments."""

import re

import numpy as np
import pytest

from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.mask import Mask
from megatron_cp.nn import Attention
from megatron_cp.plan.transport import Transport
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.batch import AttentionSpec, LinearSpec
from megatron_cp.planner.capabilities import require, working
from megatron_cp.planner.linear import plan_linear
from tests.refusals import refusal_of, rejects
from tests.unit_tests.planner.plan_cases import ATTENTION, LAYOUT, LINEAR, PACKING, PLANNERS


@pytest.mark.parametrize("scheme", working("scheme"))
def test_what_the_table_says_works_for_attention_is_planned(scheme):
    plan = plan_attention(**{**ATTENTION, "layout": Layout.zigzag(PACKING, 4)}, scheme=scheme)
    assert (plan.kind, plan.scheme) == ("attention", "a2a" if scheme == "auto" else scheme)


SIZES = {
    "gdn": {"heads": 6, "key_heads": 2, "head_dim": 8},
    "kda": {"heads": 6, "key_heads": 2, "head_dim": 8},
    "gdn2": {"heads": 6, "key_heads": 2, "head_dim": 8},
    "gdp": {"heads": 6, "key_heads": 2, "head_dim": 8, "num_householder": 2},
    "mamba": {"heads": 6, "groups": 2, "head_dim": 8, "state": 16},
    "conv1d": {"channels": 40},
}


def mamba(**changes):
    return plan_linear(PACKING, LAYOUT, "mamba", **SIZES["mamba"], **changes)


@pytest.mark.parametrize("kind", working("kind"))
@pytest.mark.parametrize("mode", working("mode"))
def test_what_the_table_says_works_for_linear_layers_is_planned(kind, mode):
    plan = plan_linear(PACKING, LAYOUT, kind, **SIZES[kind], mode=mode, hidden_size=32)
    assert plan.kind == kind
    assert mode in ("auto", plan.scheme if plan.hidden_layout is None else "redistribute")


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
        (lambda: plan_attention(**ATTENTION | {"kv_heads": 4}), "^kv_heads: got 4; allowed: a divisor of heads, 6"),
        (lambda: plan_linear(**LINEAR | {"key_heads": 12}), "^key_heads: got 12; allowed: a divisor of heads, 6"),
        (lambda: mamba(key_heads=2), "^key_heads: got 2; allowed: "),
        (lambda: mamba(value_head_dim=8), "^value_head_dim: got 8; allowed: "),
        (lambda: mamba(conv_width=65), "^conv_width: got 65; allowed: "),
        (lambda: mamba(mode="redistribute"), "^hidden_size: got None; allowed: "),
        (lambda: mamba(layers=3), "^layers: got 3; allowed: "),
        (lambda: require("megatron", "cross_attention"), "allowed: GPTModel or .*not built yet; self-attention only"),
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
        (lambda: LinearSpec("gdn", heads=4, search_cache="x"), "unexpected keyword argument 'search_cache'"),
    ],
)
def test_rejects_an_unknown_keyword_with_the_argument_that_it_resembles(call, says):
    with pytest.raises(TypeError, match=says):
        call()


def test_a_keyword_that_left_is_answered_with_what_took_its_place():
    rejects("search_cache: got 'x'; allowed: only search_seconds", plan_attention, PACKING, LAYOUT, search_cache="x")


FOUR = Layout.zigzag(PACKING, 4)
OTHER = Packing([3, 5])
REFUSED = [
    ("kv_packing", re.escape(f"got {OTHER!r}; allowed: "), {"kv_packing": OTHER}),
    ("kv_packing", "got None", {"kv_layout": LAYOUT}),
    *(("kv_layout", "over 3 ranks", {"kv_packing": PACKING, "kv_layout": layout})
      for layout in (Layout.contiguous(PACKING, 4), Layout.contiguous(OTHER, 3), None)),
    *(("scheme", f"3 has no other divisor; use a2a, {inner} or", {"scheme": f"a2a+{inner}"})
      for inner in ("p2p", "all_gather", "exact")),
    *(("ulysses_degree", f"allowed: {allowed}", {"layout": FOUR, "scheme": scheme, "ulysses_degree": degree})
      for scheme, degree, allowed in (("a2a+p2p", 3, "2"), ("a2a+p2p", 4, "2"), ("p2p", 2, "1"))),
    *(("head_chunks", f"got {chunks}; allowed: ", {"scheme": scheme, "head_chunks": chunks})
      for scheme, chunks in (("p2p", 2), ("exact", 0))),
    *(("mask", re.escape(f"got {mask!r}; allowed: "), {"mask": mask}) for mask in (Mask.causal(OTHER), "casual", 3)),
    ("codec", "none for exact. Keys among which queries choose are never coded",
     {"scheme": "exact", "codec": "fp8", "topk": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "says", "options"), REFUSED)
def test_rejects_options_of_attention(argument, says, options):
    rejects(rf"^{argument}: (got .*)?{says}", plan_attention, **ATTENTION | options)


@pytest.mark.parametrize(
    ("argument", "says", "options"),
    [
        *((argument, rf"for {mode}\. .* heads .*: use headwise\.$", {"mode": mode, argument: value})
          for argument, value in (("head_chunks", 2), ("codec", "fp8")) for mode in ("chunkwise", "redistribute")),
        ("codec", r"none for conv1d\. Its heads are single channels", {"kind": "conv1d", "codec": "fp8"}),
        ("head_chunks", "1, for 2 groups of B and C over 2 ranks",
         {"kind": "mamba", "layout": Layout.zigzag(PACKING, 2), "head_chunks": 2}),
    ],
)  # fmt: skip
def test_rejects_options_of_linear_layers(argument, says, options):
    given = {"packing": PACKING, "layout": LAYOUT, "hidden_size": 32, **SIZES[options.get("kind", "gdn")]}
    rejects(f"^{argument}: got .*{says}", plan_linear, **given | options)


def test_the_default_mask_of_cross_attention_does_not_depend_on_the_lengths():
    for lengths in (PACKING.lengths, PACKING.lengths + 1):
        keys = Packing(lengths.tolist())
        plan = plan_attention(**ATTENTION, kv_packing=keys, kv_layout=Layout.zigzag(keys, 3))
        assert plan.mask.name == "full"
    assert plan_attention(**ATTENTION).mask.name == "causal"


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


@PLANNERS
def test_transports_may_be_names_and_counts_numpy_integers(planner, arguments):
    for name in ("collective", "pairwise"):
        assert planner(**arguments, transport=name) == planner(**arguments, transport=Transport(name))
    assert planner(**{**arguments, "heads": np.int64(6)}) == planner(**arguments)


def test_plans_by_other_transports_differ_in_one_line():
    lines = [plan_attention(**ATTENTION, transport=name).describe() for name in ("collective", "pairwise")]
    assert [pair for pair in zip(*lines, strict=True) if len(set(pair)) == 2] == [
        ("transport: collective", "transport: pairwise")
    ]
