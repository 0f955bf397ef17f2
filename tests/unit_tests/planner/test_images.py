"""A vision tower's rows, operations, time and bytes, against numbers that were computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.route import rows_between
from megatron_cp.planner import AttentionSpec, priced
from megatron_cp.planner import images as planned
from megatron_cp.planner.images import Tower, layouts_of_rows, plan_tower
from tests.fixed_machine import FIXED

# Two layers of width 24 with an MLP of 32, patches of 96 features, rows of 4 patches, and deepstack's features once.
TOWER = Tower(
    "qwen3_vl", layers=2, width=24, heads=2, weights=96 * 24 + 2 * (4 * 24**2 + 2 * 24 * 32),
    projector=2 * (96**2 + 96 * 48), features=96, patches=4, rows=1, merge=2,
)  # fmt: skip
IMAGES = [(1, 4, 4), (1, 8, 4)]


def test_whole_images_are_priced_as_each_rank_runs_them():
    found = plan_tower(TOWER, TOWER.frames(IMAGES, 24), 2, FIXED)
    # The dearer image, of 32 patches and 8 rows, goes first. Its attention has 32 x 32 pairs, 4 x 24 operations each.
    operations = [
        2 * (32 * 9_984 + 8 * 27_648) + 2 * 96 * 32**2,
        2 * (16 * 9_984 + 4 * 27_648) + 2 * 96 * 16**2,
    ]
    assert found.operations.tolist() == operations == [1_277_952, 589_824]
    assert (found.rows.tolist(), found.num_split) == ([8, 4], 0)
    attention = AttentionSpec(2, head_dim=12, mask="full", hardware=FIXED, scheme="exact", head_chunks=1)
    alone = priced(attention.plan(Layout.contiguous(Packing([32]), 1)), FIXED)
    hardware = FIXED.hardware
    seconds = (operations[0] - 2 * 96 * 32**2) / (hardware.matrix / (1 + hardware.matrix_rows / 32))
    assert found.milliseconds == pytest.approx(
        (1e3 * seconds + 2 * alone.forward, 2e3 * seconds + 2 * alone.backward), rel=1e-12
    )
    # Rows stand at tokens 4 to 7 and 12 to 19 of 24: each image was made by the rank whose text does not have it.
    places = np.r_[4:8, 12:20]
    text = Layout.contiguous(Packing([20, 4]), 2)
    counts = rows_between(*layouts_of_rows(Packing([4, 8]), found.pieces, found.order, places, text))
    assert counts.tolist() == [[0, 8], [4, 0]]


def test_an_image_beyond_a_share_is_split_and_its_attention_planned(monkeypatch):
    frames = TOWER.frames([(1, 16, 16), (2, 4, 4)], 72)
    whole = plan_tower(TOWER, frames, 3, FIXED)
    assert (sorted(whole.rows.tolist()), whole.num_split) == ([4, 4, 64], 0)
    monkeypatch.setattr(planned, "LEAST_PIECE", 20)  # of 64 rows: three pieces at most
    split = plan_tower(TOWER, frames, 3, FIXED)
    assert (sorted(split.rows.tolist()), split.num_split) == ([22, 25, 25], 1)
    assert split.operations.sum() == whole.operations.sum() == plan_tower(TOWER, frames, 1, FIXED).operations[0]
    ((plan, layers),) = split.attention
    assert layers == 2
    assert max(plan.bytes_sent(2, forward=True)) > 0 == max(whole.attention[0][0].bytes_sent(2, forward=True))
    # Of layers that see windows of 2 x 2 rows fewer pairs are computed: 16 patches see each other.
    windowed = plan_tower(replace(TOWER, kind="qwen2_5_vl", window=2, windowed=1), frames, 3, FIXED)
    pairs = 256**2 + 2 * 16**2 - (16 + 2) * 16**2
    assert windowed.operations.sum() == split.operations.sum() - 96 * pairs
