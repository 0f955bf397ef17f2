"""Errors keep what they say when they are made anew."""

import pickle

import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.planner.capabilities import require


def test_an_error_survives_pickling_and_what_megatron_does_to_it():
    error = ArgumentError("heads", 3, "a multiple of 2", "Take 4.")
    assert str(error) == "heads: got 3; allowed: a multiple of 2. Take 4."
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.argument) == (str(error), "heads")
    longer = type(error)(f"{error} when instantiating Layer")
    assert (str(longer), longer.argument) == (f"{error} when instantiating Layer", "heads")


def test_a_refusal_names_the_argument_as_the_user_spells_it():
    with pytest.raises(ArgumentError, match=r"^--cp-comm-type: got 'tiled'; allowed: .*\. tiled is not built yet"):
        require("scheme", "tiled", name="--cp-comm-type")
