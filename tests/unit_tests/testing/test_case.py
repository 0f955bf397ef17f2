"""`LayerCase` plans without torch what `Case` plans with it."""

from dataclasses import replace

import pytest
import torch

from megatron_cp.plan.kinds import KINDS
from megatron_cp.testing.case import DTYPES, LayerCase
from megatron_cp.testing.parity import TOLERANCES, Case

BATCH = {"cp": 4, "lengths": (7, 1, 130, 64)}


def test_types_are_torchs_and_decide_what_is_coded():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == {
        str(dtype).removeprefix("torch."): dtype.itemsize for dtype in TOLERANCES
    }
    case = LayerCase("attention", **BATCH, scheme="a2a", codec="fp8")
    assert case.codes
    assert str(replace(case, codec="none")) != str(case)


@pytest.mark.parametrize("layer", ["attention", *KINDS])
def test_plans_and_words_are_those_of_a_case_that_runs(layer):
    for name, named in DTYPES.items():
        planned, run = LayerCase(layer, **BATCH, dtype=named), Case(layer, **BATCH, dtype=getattr(torch, name))
        assert planned.plan() == run.plan()
        assert str(planned) == str(run)
