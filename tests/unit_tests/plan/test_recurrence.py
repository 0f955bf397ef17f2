"""Halo and scan: that a halo travels while others work, and what their plans say they send."""

import pytest
import torch

from megatron_cp.executor.halo import start_halo
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.recurrence import Halo, Scan
from tests.counting_group import Diary

LAYOUT = Layout.contiguous(Packing([3, 20]), 3)  # the second document is on all ranks


class Noting(torch.autograd.Function):
    """The work that a transfer hides behind."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append("work")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.events.append("work")
        return gradient * 2, None


def halo_diary(group):
    diary = Diary(group)
    x = torch.arange(float(LAYOUT.token_counts[group.rank] * 2)).view(-1, 2).requires_grad_()
    alias, history = start_halo(Halo(LAYOUT, 4, 2), diary, x)
    y = Noting.apply(alias, diary.events)
    (y.sum() + history().sum()).backward()
    return diary.events


def test_a_halo_travels_while_others_work_in_both_directions():
    for events in run_ranks(halo_diary, 3):
        assert events == ["start", "work", "wait"] * 2


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("item_size", [2, 4, 8])
def test_maps_are_sent_in_at_least_four_bytes(item_size, dense):
    step = Scan(LAYOUT, heads=2, key_dim=3, value_dim=5, dense=dense)
    width, state, transition = max(item_size, 4), 2 * 3 * 5, 2 * 3 * 3 if dense else 2
    # The first rank's segment goes to the two others without M, the middle one's to the last.
    assert step.bytes_sent(item_size, forward=True) == [2 * state * width, (state + transition) * width, 0]
    assert step.bytes_sent(item_size, forward=False) == [0, (state + transition) * width, 2 * state * width]


def test_what_travels_is_part_of_a_description():
    assert Halo(LAYOUT, 4, 2).describe() != Halo(LAYOUT, 3, 2).describe() != Halo(LAYOUT, 3, 4).describe()
    steps = [Scan(LAYOUT, 2, 3, 5, True), Scan(LAYOUT, 2, 5, 3, True), Scan(LAYOUT, 2, 3, 5, False)]
    assert len({step.describe() for step in steps}) == 3
