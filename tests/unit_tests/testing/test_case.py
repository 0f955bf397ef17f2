"""`LayerCase` plans without torch what `Case` plans with it, and the cases that a sweep makes of one."""

from dataclasses import replace

import pytest
import torch

from megatron_cp.layout import Mask
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.testing.case import DTYPES, LayerCase
from megatron_cp.testing.parity import TOLERANCES, Case
from megatron_cp.testing.sweep import ALONG_PATHS, MASKS, sweep
from tests.refusals import rejects

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


def test_cases_of_all_schemes_search_where_tiles_are_assigned():
    pytest.importorskip("ortools")
    cases = sweep(
        Case("attention", 4, (7, 1, 40, 0, 13), "random", scheme="a2a", search_seconds=0.01), ["layout", "mask"]
    )
    assert {case.scheme for case in cases if case.search_seconds} == {"tiled", "a2a+tiled"}
    assert {case.scheme for case in cases} == set(SCHEMES)


def test_cases_of_documents_that_branch_have_masks_along_paths():
    tree = Case("attention", 2, (7, 1, 4), "random", parents=(-1, 0, 0))
    masks = {case.mask for case in sweep(tree, ["layout", "scheme"])}
    assert masks == set(ALONG_PATHS) < set(MASKS)
    for name in set(MASKS) - masks:
        rejects("where documents branch", Mask.named, tree.packing, name)
