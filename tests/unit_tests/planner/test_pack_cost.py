"""`PackCost`: what a pack takes, from the lengths of its documents."""

import dataclasses
import math
import re

import numpy as np
import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.pack_cost import PackCost
from tests.refusals import rejects


def test_a_pack_costs_its_start_its_tokens_and_its_pairs():
    cost = PackCost(0.5, 2.0, 0.25)
    assert cost.of([3, 1, 0]) == 0.5 + 2.0 * 4 + 0.25 * (9 + 1)
    assert cost.of([]) == 0.5
    assert cost.of_documents([3, 1, 0]).tolist() == [6 + 2.25, 2.25, 0]
    assert cost.of(np.array([3, 1], np.uint8)) == cost.of([3, 1])
    assert PackCost(0, 0, 1).of([2**40]) == 2.0**80


def test_flops_are_those_of_gemms_and_of_causal_attention():
    """The document is one of a Llama-like layer, counted product by product."""
    tokens, hidden, heads, head_dim = 100, 32, 4, 16
    weights = 4 * hidden * heads * head_dim
    gemms = 3 * 2 * tokens * weights  # forward, and one for each gradient
    attention = 3 * 2 * (2 * tokens * tokens * heads * head_dim) / 2  # two products, half of the pairs
    cost = PackCost.of_flops(active_parameters=weights, softmax_features=heads * head_dim, token=7.0)
    assert cost.of([tokens]) == gemms + attention + 7.0 * tokens
    assert cost.pack == 0


def test_flops_take_as_long_as_the_kernels_that_do_them():
    """Pairs in attention's kernel, which computes scores once more in backward; all else in matrix products."""
    hardware = dataclasses.replace(
        machine("h100").hardware, matrix=100.0, attention=((64, 10.0, 5.0), (128, 20.0, 10.0))
    )
    cost = PackCost(3.0, 200.0, 6.0)
    assert cost.at_rates_of(hardware, 128) == PackCost(3.0, 2.0, 2 / 20 + 5 / 10)
    assert cost.at_rates_of(hardware, 64) == PackCost(3.0, 2.0, 2 / 10 + 5 / 5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("h100", 128), "hardware: got 'h100'; allowed: a Hardware"), ((machine("h100"), 128), "hardware: got"),
        ((machine("h100").hardware, 0), "head_dim: got 0"), ((machine("h100").hardware, 1.5), "head_dim: got 1.5"),
    ],
)  # fmt: skip
def test_rejects_what_has_no_rates(arguments, says):
    rejects(re.escape(says), PackCost(1, 1, 1).at_rates_of, *arguments)


def test_numbers_are_floats_and_the_value_can_be_a_key():
    assert PackCost(1, 2, 3) == PackCost(1.0, np.float64(2), np.int64(3))
    assert len({PackCost(1, 2, 3), PackCost(1.0, 2.0, 3.0)}) == 1
    assert isinstance(PackCost(1, 2, 3).token, float)


@pytest.mark.parametrize("name", ["pack", "token", "pair"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, None, "1", True, [1.0]])
def test_rejects_what_is_no_cost(name, value):
    with pytest.raises(ArgumentError, match=re.escape(f"{name}: got {value!r}; allowed: a finite number of at least")):
        PackCost(**{"pack": 1, "token": 1, "pair": 1, name: value})


@pytest.mark.parametrize("name", ["active_parameters", "softmax_features", "token"])
@pytest.mark.parametrize("value", [-1, math.nan, None, "1"])
def test_rejects_sizes_that_no_model_has(name, value):
    rejects(f"{name}: got", PackCost.of_flops, **{"active_parameters": 1, "softmax_features": 1, name: value})


@pytest.mark.parametrize("lengths", [[-1], [1.5], ["a"], [[1]], None, "12", {1, 2}, [True], np.array(3)])
def test_rejects_lengths_that_no_document_has(lengths):
    rejects("lengths: got", PackCost(1, 1, 1).of, lengths)
