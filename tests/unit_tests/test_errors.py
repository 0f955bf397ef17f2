"""Errors keep what they say when they are made anew."""

import pickle
import re

import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.batch import AttentionSpec, LinearSpec
from megatron_cp.planner.capabilities import require, spelled
from tests.refusals import rejects


def test_an_error_survives_pickling_and_names_the_argument_as_the_user_spells_it():
    error = ArgumentError("heads", 3, "a multiple of 2", "Take 4.")
    assert str(error) == "heads: got 3; allowed: a multiple of 2. Take 4."
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.argument) == (str(error), "heads")
    longer = type(error)(f"{error} when instantiating Layer")
    assert (str(longer), longer.argument) == (f"{error} when instantiating Layer", "heads")
    with pytest.raises(
        ArgumentError, match=r"^--cross: got 'cross_attention'; allowed: .*\. cross_attention is not built yet"
    ):
        require("megatron", "cross_attention", name="--cross")


@pytest.mark.parametrize(
    ("argument", "value", "meant"),
    [
        ("scheme", "allgather", "all_gather"), ("scheme", "All-Gather", "all_gather"), ("scheme", "ring", "p2p"),
        ("scheme", "Ulysses", "a2a"), ("scheme", "a2a + p2p", "a2a+p2p"), ("scheme", "ulysses+ring", "a2a+p2p"),
        ("layout", "zig-zag", "zigzag"), ("mode", "head_wise", "headwise"), ("kind", "gated_delta_net", "gdn"),
        ("codec", "e4m3", "fp8"), ("layer", "Mamba-2", "mamba"),
    ],
)  # fmt: skip
def test_takes_the_names_of_other_projects(argument, value, meant):
    assert require(argument, value) == spelled(argument, value) == meant


@pytest.mark.parametrize(
    ("argument", "value", "meant"),
    [
        ("scheme", "rings", "p2p"), ("scheme", "all_gathr", "all_gather"), ("codec", "e5m2", "fp8_e5m2"),
        ("mode", "relay", "redistribute"), ("transport", "hierarchic", "hierarchical"),
        ("transport", "NCCL", "collective"),
    ],
)  # fmt: skip
def test_rejects_what_is_like_a_name_and_asks_whether_that_was_meant(argument, value, meant):
    rejects(re.escape(f"Did you mean {meant}?"), require, argument, value)


def test_plans_by_a_name_of_another_project_are_the_same():
    packing = Packing([50, 7])
    layout = Layout.zigzag(packing, 2)
    plans = [
        plan_attention(packing, layout, heads=4, head_dim=8, scheme=name, codec=codec, mask=mask)
        for name, codec, mask in (("a2a", "fp8", Mask.window(packing, 15)), ("Ulysses", "E4M3", "window:16"))
    ]
    assert plans[0] == plans[1]
    specs = [
        AttentionSpec(4, 4, 8, scheme=name, mask=mask) for name, mask in (("p2p", "window:15,0"), ("ring", "window:16"))
    ]
    assert specs[0] == specs[1]
    assert LinearSpec("Mamba-2", 4, 2, 8, 8, mode="Head-wise") == LinearSpec("mamba", 4, 2, 8, 8, mode="headwise")


@pytest.mark.parametrize("value", ["", "nothing", "x", None, 5])
def test_rejects_what_is_like_nothing_without_asking(value):
    with pytest.raises(ArgumentError) as caught:
        require("scheme", value)
    assert "mean" not in str(caught.value)
