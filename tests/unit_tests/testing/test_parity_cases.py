"""Tests of a parity case for each scheme, each layer and mode, and each transport, in seconds."""

import pytest
import torch

from megatron_cp.layout import Mask
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.schemes import MODES, SCHEMES
from megatron_cp.plan.transport import TRANSPORTS
from megatron_cp.testing.parity import Case, compare
from megatron_cp.testing.sweep import ALONG_PATHS, MASKS, sweep
from tests.refusals import rejects
from tests.scheme_cases import check

LENGTHS = (7, 1, 40, 0, 13)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_dense_attention(scheme):
    check(Case("attention", 4, LENGTHS, "random", scheme=scheme, learned_sink=True, align=3))


def test_cases_of_all_schemes_search_where_tiles_are_assigned():
    pytest.importorskip("ortools")
    cases = sweep(Case("attention", 4, LENGTHS, "random", scheme="a2a", search_seconds=0.01), ["layout", "mask"])
    assert {case.scheme for case in cases if case.search_seconds} == {"tiled", "a2a+tiled"}
    assert {case.scheme for case in cases} == set(SCHEMES)


def test_cases_of_documents_that_branch_have_masks_along_paths():
    tree = Case("attention", 2, (7, 1, 4), "random", parents=(-1, 0, 0))
    masks = {case.mask for case in sweep(tree, ["layout", "scheme"])}
    assert masks == set(ALONG_PATHS) < set(MASKS)
    for name in set(MASKS) - masks:
        rejects("where documents branch", Mask.named, tree.packing, name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", KINDS)
def test_every_layer_and_mode_equals_one_rank(layer, mode):
    assert compare(Case(layer, 3, LENGTHS, "zigzag", scheme=mode, hidden_size=64, align=2)).passed


@pytest.mark.parametrize("layer", ["attention", "gdn"])
@pytest.mark.parametrize("transport", sorted(set(TRANSPORTS) - {"symmetric_memory"}))  # which is for devices
def test_every_transport_gives_one_ranks_bits(transport, layer):
    scheme = "a2a" if layer == "attention" else "headwise"
    parity = compare(Case(layer, 3, LENGTHS, "zigzag", scheme=scheme, transport=transport, dtype=torch.bfloat16))
    assert parity.passed
    assert parity.bitwise_forward
