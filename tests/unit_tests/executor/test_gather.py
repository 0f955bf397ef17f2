"""`gather` and `relayout`: rows as the oracle has them in odd layouts, and losses whose gradients need no transfer.

The functional tests have their options (`test_options.py`), and `test_arguments.py` what they refuse.
"""

import pytest
import torch

from megatron_cp.executor.gather import gather
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from tests.fuzz_cases import Call, Case
from tests.fuzz_check import check

LENGTHS = (7, 1, 13, 0, 2)
PLACES = {
    "zigzag": {"layout": "zigzag", "align": 4},
    "one rank, shuffled and padded": {"layout": (((9, 23), (0, 9)),), "align": 4},
    "empty ranks": {"layout": ((), ((5, 23), (1, 5)), (), ((0, 1),))},
    "padded empty ranks": {"layout": ((), ((5, 23), (0, 5)), ()), "align": 2},
    "fewer tokens than ranks": {"lengths": (1, 1), "layout": "zigzag"},
    "no tokens": {"lengths": (0,)},
    "gradients are one number": {"layout": "zigzag", "ones": True},
}
RANKS = {"one rank, shuffled and padded": 1, "empty ranks": 4}


@pytest.mark.parametrize(("operation", "scheme"), [("gather", "same_loss"), ("gather", "own_loss"), ("relayout", "")])
@pytest.mark.parametrize("place", PLACES)
def test_rows_lie_anywhere(place, operation, scheme):
    call = Call(operation, **{"lengths": LENGTHS, "scheme": scheme, "kv_layout": "random", "batch": 1, **PLACES[place]})
    check(Case(RANKS.get(place, 3), (call,), poison=True))


def test_same_loss_sends_nothing_backward():
    layout = Layout.contiguous(Packing(LENGTHS), 3)

    def rank_main(group):
        local = torch.ones(int(layout.row_counts[group.rank]), requires_grad=True)
        full = gather(local, layout, group, same_loss=True)
        group.start_all_to_all = group.start_messages = None  # on which every other call of a ThreadGroup is built
        full.sum().backward()
        return local.grad

    assert all((gradient == 1).all() for gradient in run_ranks(rank_main, 3))


def test_no_group_is_one_rank():
    local = torch.arange(23.0)
    assert torch.equal(gather(local, Layout.contiguous(Packing(LENGTHS), 1), None), local)
