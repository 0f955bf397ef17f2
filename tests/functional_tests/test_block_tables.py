"""Block tables of too many blocks for tiles: refused, or left out of what auto prices. Others: `test_tiled.py`."""

import re

import numpy as np
import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.predict.hardware import Link, Topology
from megatron_cp.planner.tiled import MOST_RUNS


def chequered(runs):
    """So many visible blocks, no two side by side, of two tokens each: of one, a diagonal would be a single band."""
    blocks = int(np.ceil(np.sqrt(2 * runs))) + 1
    table = np.indices((blocks, blocks)).sum(axis=0) % 2 == 0
    table[np.unravel_index(np.flatnonzero(table)[runs:], table.shape)] = False
    return Mask.from_blocks(Packing([2 * blocks]), table, 2)


@pytest.mark.parametrize("scheme", ["tiled", "a2a+tiled"])
def test_rejects_a_table_of_too_many_blocks(scheme):
    mask = chequered(2 * MOST_RUNS)
    assert len(mask.bands) > MOST_RUNS
    shape = {"heads": 2, "kv_heads": 2, "head_dim": 8, "mask": mask, "scheme": scheme}
    with pytest.raises(ArgumentError) as refused:
        plan_attention(mask.packing, Layout.contiguous(mask.packing, 4), **shape)
    said = str(refused.value)
    assert f"; allowed: at most {MOST_RUNS} runs of blocks" in said
    assert "Use larger blocks, or exact" in said
    assert MOST_RUNS < int(re.match(r"mask: got '(\d+) runs'", said)[1]) <= len(mask.bands)


def test_auto_says_that_a_table_has_too_many_blocks_for_tiles():
    """Links are so slow that tiles would be worth a search."""
    mask, slow = chequered(2 * MOST_RUNS), Link(1e-6, 0.0, 1e7)
    plan = plan_attention(
        mask.packing, Layout.contiguous(mask.packing, 4), heads=2, head_dim=8, mask=mask, search_seconds=0.01,
        topology=Topology((0,) * 4, slow, slow),
    )  # fmt: skip
    assert not any("tiled" in price.scheme for price in plan.prices)
    for name in ("tiled", "a2a+tiled (u = 2)"):
        (note,) = (note for note in plan.notes if note.startswith(f"left out: {name}, for mask: got "))
        assert f"; allowed: at most {MOST_RUNS} runs of blocks" in note
        assert f"note: {note}" in plan.explain()


def test_what_one_rank_holds_is_no_part_of_that_limit():
    packing = Packing([1] * (MOST_RUNS + 1) + [900])
    shape = {"heads": 1, "head_dim": 8, "mask": Mask.causal(packing), "scheme": "tiled"}
    assert len(shape["mask"].bands) > MOST_RUNS
    plan = plan_attention(packing, Layout.contiguous(packing, 4), **shape)
    assert plan.attend.tiled is not None
