"""`PackCost`: what a pack takes, from the lengths of its documents."""

import dataclasses
import math

import numpy as np
import pytest

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


def test_numbers_are_floats_and_the_value_can_be_a_key():
    assert PackCost(1, 2, 3) == PackCost(1.0, np.float64(2), np.int64(3))
    assert len({PackCost(1, 2, 3), PackCost(1.0, 2.0, 3.0)}) == 1
    assert isinstance(PackCost(1, 2, 3).token, float)


ONE = PackCost(1, 1, 1)
NO_COSTS = [-1, math.nan, math.inf, None, "1", True, [1.0]]
NO_LENGTHS = [[-1], [1.5], ["a"], [[1]], None, "12", {1, 2}, [True], np.array(3)]


@pytest.mark.parametrize(
    ("argument", "values", "call"),
    [
        *((name, NO_COSTS, lambda value, name=name: dataclasses.replace(ONE, **{name: value}))
          for name in ("pack", "token", "pair")),
        *((name, NO_COSTS, lambda value, name=name: PackCost.of_flops(
            **{"active_parameters": 1, "softmax_features": 1, name: value}))
          for name in ("active_parameters", "softmax_features", "token")),
        ("lengths", NO_LENGTHS, ONE.of),
        ("hardware", ["h100", machine("h100")], lambda value: ONE.at_rates_of(value, 128)),
        ("head_dim", [0, 1.5], lambda value: ONE.at_rates_of(machine("h100").hardware, value)),
    ],
)  # fmt: skip
def test_rejects_what_has_no_cost(argument, values, call):
    for value in values:
        rejects(f"^{argument}: got ", call, value)
