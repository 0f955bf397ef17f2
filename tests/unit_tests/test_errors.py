"""Errors keep what they say when they are made anew."""

import pickle
import re

import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.planner.capabilities import require
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
        ("scheme", "Ulysses", "a2a"), ("scheme", "a2a + p2p", "a2a+p2p"), ("layout", "zig-zag", "zigzag"),
        ("mode", "head_wise", "headwise"), ("kind", "gated_delta_net", "gdn"), ("codec", "e4m3", "fp8"),
        ("transport", "hierarchic", "hierarchical"),
    ],
)  # fmt: skip
def test_rejects_what_others_call_it_and_asks_whether_that_was_meant(argument, value, meant):
    rejects(re.escape(f"Did you mean {meant}?"), require, argument, value)


@pytest.mark.parametrize("value", ["", "nothing", "x", None, 5])
def test_rejects_what_is_like_nothing_without_asking(value):
    with pytest.raises(ArgumentError) as caught:
        require("scheme", value)
    assert "mean" not in str(caught.value)
