"""Halo and scan: what they wait for and when, and what their plans say they send."""

import itertools

import numpy as np
import pytest
import torch

from megatron_cp.executor.halo import start_halo
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.scan import LocalScan, scan
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


class Sums(LocalScan):
    """S_out = S_in + the sum of a segment; every token's output is the state before the segment."""

    def __init__(self, own, events):
        self.own, self.events = own, events
        self.spans = list(zip(own.packing.cu_seqlens, own.packing.cu_seqlens[1:], strict=False))

    def leave(self, tensors):
        (x,) = tensors
        sums = torch.stack([x[a:b].sum() for a, b in self.spans])[:, None, None, None]
        ones = torch.ones_like(sums)
        return sums[torch.tensor(self.own.future)], ones[torch.tensor(self.own.past & self.own.future)], None

    def meanwhile(self, tensors, begun):
        self.events.append("work")
        return begun

    def finish(self, tensors, begun, states):
        (x,) = tensors
        out, waiting = torch.zeros_like(x), iter(states.flatten())
        for (a, b), past in zip(self.spans, self.own.past, strict=True):
            if past:
                out[a:b] = next(waiting)
        return out, []

    def leave_backward(self, tensors, kept, gradient):
        sums = torch.stack([gradient[a:b].sum() for a, b in self.spans])[:, None, None, None]
        return sums[torch.tensor(self.own.past)], None

    def meanwhile_backward(self, tensors, kept, begun, gradient):
        self.events.append("work")
        return begun

    def finish_backward(self, tensors, kept, begun, gradient, states):
        found, waiting = torch.zeros_like(gradient), iter(states.flatten())
        for (a, b), future in zip(self.spans, self.own.future, strict=True):
            if future:
                found[a:b] = next(waiting)
        return [found]


def scan_diary(group):
    step, diary = Scan(LAYOUT, 1, 1, 1, False), Diary(group)
    x = torch.from_numpy(LAYOUT.tokens(group.rank)).double().requires_grad_()
    out = scan(step, diary, Sums(step.segments.local(group.rank), diary.events), x)
    out.backward(torch.ones_like(out))
    return diary.events, out.detach(), x.grad


def test_maps_travel_while_others_work_and_are_folded_in_document_order():
    ranks = run_ranks(scan_diary, 3)
    assert [events for events, _, _ in ranks] == [["start", "work", "wait"] * 2] * 3
    out, gradient = (LAYOUT.unshard([rank[i] for rank in ranks]) for i in (1, 2))
    first_row = np.cumsum(LAYOUT.token_counts)
    starts = [3, *first_row[:-1].tolist(), LAYOUT.packing.total]  # of the second document's segments
    for lo, hi in itertools.pairwise(starts):
        assert (out[lo:hi] == sum(range(3, lo))).all()  # of the tokens before the segment
        assert (gradient[lo:hi] == LAYOUT.packing.total - hi).all()  # one from each token after it
    assert (out[:3] == 0).all()


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
