"""Sums of the halo's gradients: in one order, although a row may belong to several segments."""

import numpy as np
import pytest
import torch

from megatron_cp.executor.halo import rounds_without_repeats
from megatron_cp.layout import Packing
from megatron_cp.plan.recurrence import Halo
from megatron_cp.planner.layouts import layout_by_name


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "random"])
@pytest.mark.parametrize("width", [2, 4, 7])
def test_no_row_is_added_to_twice_at_a_time(layout, width):
    packing = Packing((30, 1, 2, 40))
    laid_out = layout_by_name(layout, packing, 4)
    step, most = Halo(laid_out, width, 3), 0
    for rank in range(4):
        for name in ("send_rows", "local_rows"):
            rows = getattr(step.tables(rank), name).astype(np.int64)
            rounds = rounds_without_repeats(rows)
            most = max(most, len(rounds))
            values = torch.from_numpy(np.random.default_rng(0).normal(size=(len(rows), 3)))
            expected, found = (torch.zeros(int(laid_out.row_counts[rank]), 3, dtype=torch.float64) for _ in range(2))
            for row, value in zip(rows, values, strict=True):
                expected[row] += value
            for places in rounds:
                assert len(np.unique(rows[places])) == len(places)
                found.index_add_(0, torch.from_numpy(rows[places]), values[places])
            assert torch.equal(found, expected)
    assert most > 1 or layout != "random" or width == 2  # segments of single tokens reach the same rows
