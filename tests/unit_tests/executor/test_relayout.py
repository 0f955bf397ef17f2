"""`relayout` moves every row to its new rank, returns gradients, and leaves pad rows zero."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.testing.poison import poisoned
from tests.refusals import rejects

NAMES = st.sampled_from(["contiguous", "zigzag", "random"])


@given(
    cp_size=st.integers(1, 6),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    names=st.tuples(NAMES, NAMES),
    align=st.integers(1, 3),
)
@settings(max_examples=50)
def test_rows_arrive_and_gradients_return(cp_size, lengths, names, align):
    packing = cp.Packing(lengths)
    source = layout_by_name(names[0], packing, cp_size, align=align)
    target = layout_by_name(names[1], packing, cp_size)
    tokens = torch.randn(packing.total, 2, 3)

    def rank(group):
        local = torch.randn(int(source.row_counts[group.rank]), 2, 3)
        local[: int(source.token_counts[group.rank])] = tokens[torch.from_numpy(source.tokens(group.rank))]
        local.requires_grad_()
        with poisoned():
            moved = cp.relayout(local, source, target, group)
            moved.backward(2 * moved.detach())
        return moved.detach(), local.grad

    results = run_ranks(rank, cp_size)
    assert torch.equal(target.unshard([moved for moved, _ in results]), tokens)
    assert torch.equal(source.unshard([gradient for _, gradient in results]), 2 * tokens)
    for held, (_, gradient) in zip(source.token_counts.tolist(), results, strict=True):
        assert not gradient[held:].any()


def test_rejects_rows_and_layouts_that_do_not_belong_together():
    packing = cp.Packing([9, 4])
    layout = cp.Layout.contiguous(packing, 1)
    rejects("13 on rank 0", cp.relayout, torch.zeros(12, 1), layout, layout)
    rejects("same packing", cp.relayout, torch.zeros(13, 1), layout, cp.Layout.contiguous(cp.Packing([13]), 1))
