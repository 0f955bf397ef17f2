"""Attention under tables of blocks: every scheme against dense softmax, in float64."""

import pytest

import megatron_cp as cp
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout.block_masks import BLOCK_TABLES
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.testing.parity import Case
from tests.scheme_cases import check

RAGGED = (7, 1, 130, 3, 64)
LAYOUTS = {1: "contiguous", 3: "zigzag", 4: "contiguous", 5: "balanced"}


def sizes_of(scheme):
    return (4,) if SCHEMES[scheme].is_product else (3, 5) if scheme != "a2a" else (1, 3, 5)


@pytest.mark.parametrize(("scheme", "cp_size"), [(scheme, size) for scheme in SCHEMES for size in sizes_of(scheme)])
@pytest.mark.parametrize("mask", [*BLOCK_TABLES, "strided:8"])
@pytest.mark.few
def test_a_table_is_dense_attention_in_every_scheme(mask, scheme, cp_size):
    check(Case("attention", cp_size, RAGGED, LAYOUTS[cp_size], 6, 2, 8, 8, mask=mask, scheme=scheme, seed=cp_size))


@pytest.mark.parametrize("mask", [*BLOCK_TABLES, "global_local:6"])
def test_a_slot_plans_a_table(mask):
    packing = Packing(RAGGED)
    layout = Layout.zigzag(packing, 3)
    slot = cp.AttentionSpec(6, 2, 8, 8, mask=mask, scheme="exact")
    assert slot.plan(layout).mask == Mask.named(packing, mask)
    assert mask in slot.plan(layout).explain()
    own = [5, 1, 100, 0, 64]
    assert slot.plan(layout, own).mask == Mask.named(packing, mask).unpadded(own)


def test_rejects_a_slot_with_a_number_of_blocks_that_does_not_fit():
    with pytest.raises(cp.ArgumentError, match="mask: got 'strided:6'; allowed: strided:BLOCKS with a multiple of 4"):
        cp.AttentionSpec(6, 2, 8, 8, mask="strided:6")
