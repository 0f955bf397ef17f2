"""Sums of the halo's gradients: in one order, although a row may belong to several segments."""

import numpy as np
import pytest
import torch

from megatron_cp.executor.halo import _rounds, prepare_halo
from megatron_cp.layout import Packing
from megatron_cp.plan.recurrence import Halo
from megatron_cp.planner.layouts import layout_by_name

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "random"])
@pytest.mark.parametrize("width", [2, 4, 7])
def test_no_row_is_added_to_twice_at_a_time(layout, width):
    packing = Packing((30, 1, 2, 40))
    laid_out = layout_by_name(layout, packing, 4)
    step, most = Halo(laid_out, width, 3), 0
    for rank in range(4):
        prepare_halo(step, rank, CPU)
        for name in ("send_rows", "local_rows"):
            rows = getattr(step.tables(rank), name)
            rounds = _rounds(step, rank, name, CPU)
            most = max(most, len(rounds))
            values = torch.from_numpy(np.random.default_rng(0).normal(size=(len(rows), 3)))
            expected, found = (torch.zeros(int(laid_out.row_counts[rank]), 3, dtype=torch.float64) for _ in range(2))
            expected.index_add_(0, torch.from_numpy(rows.astype(np.int64)), values)
            for index, places in rounds:
                assert len(index.unique()) == len(index)
                found.index_add_(0, index, values if places is None else values[places])
            assert torch.equal(found, expected)
    assert most > 1 or layout != "random" or width == 2  # segments of single tokens reach the same rows
