"""Queries that visit other ranks, by themselves: in which order results come home, and numbers in place of outputs."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.visitors import Visitors, row_sums, stand_in
from tests.random_tiles import assign_at_random

RANKS = 4


def came_home(group, plan):
    """`(senders, rows)` of what came home, rank after rank: each rank sends its number with every visitor."""
    step, found = plan.attend, []
    q = plan.layout.tokens(group.rank)
    own = torch.tensor(q, dtype=torch.float64).reshape(-1, 1, 1)
    comm = Communicator(group, plan.transport, "attention", plan.scheme, plan)
    visitors = Visitors(step, group.rank, comm, [own], ("queries", "results"), forward=True)
    (chunk,) = step.chunks(0)
    stage = next(stage for stage in step.stages if stage.remote_queries is not None)
    visitors.start(stage, chunk)
    (arrived,) = visitors.arrive(stage, chunk)
    message = visitors.message_like(len(arrived), 2, torch.float64)
    message[:, 0], message[:, 1] = group.rank, arrived[:, 0, 0]
    visitors.leave()
    visitors.start_home(stage, chunk, message)
    for home in visitors.come_home():
        assert torch.equal(home.message[:, 1], own[home.rows.long(), 0, 0])  # each row beside its own query
        assert len(home.message[:, 0].unique()) == 1
        found.append(int(home.message[0, 0]))
    return found


def test_results_come_home_in_the_order_of_ranks(monkeypatch):
    assign_at_random(monkeypatch)
    packing = cp.Packing([31, 1, 20])
    layout = cp.Layout.zigzag(packing, RANKS)
    plan = cp.plan_attention(packing, layout, heads=1, head_dim=1, scheme="tiled")
    found = run_ranks(came_home, RANKS, plan)
    assert all(senders == sorted(senders) for senders in found)
    assert max(map(len, found)) >= 2


def test_row_sums_of_bf16_are_summed_in_fp32():
    """256 and 65 ones: bf16 has no 321."""
    out = torch.ones(3, 2, 66, dtype=torch.bfloat16)
    out[..., 0] = 256
    found = row_sums(torch.ones_like(out), out)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.full((3, 2, 1), 321.0))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("wide", [True, False])
def test_a_stand_in_has_the_row_sums_of_the_output(wide, scale):
    """Also of gradients whose squares over- or underflow; where a gradient is zero, of nothing."""
    random = torch.Generator().manual_seed(0)
    out, dout = (torch.randn(19, 2, 5, generator=random) for _ in range(2))
    dout[3], dout[:, 0, 1] = 0, 0
    dout *= scale
    sums = row_sums(dout, out)
    made = stand_in(dout, sums, wide=wide)
    assert torch.allclose((made * dout).sum(-1, keepdim=True) / scale, sums / scale, rtol=1e-5, atol=1e-6)
    assert made.abs().max() <= 100  # as large as outputs: what rounds it must not drown the sum
    assert not made[3].any()


def ran(group, plan):
    sizes = plan.sections.blocks
    rows = int(plan.layout.row_counts[group.rank])
    local = [torch.ones(rows, x.num_heads, x.head_dim, dtype=torch.bfloat16, requires_grad=True) for x in sizes]
    out = cp.attention(*local, plan, group)
    out.sum().backward()
    return bool((out == 1).all()) and bool((local[2].grad > 0).all())


def test_rows_of_odd_sizes_are_as_wide_as_sums_divide(monkeypatch):
    """bf16 of three elements beside fp32: 14 bytes, which no fp32 of the next row could follow."""
    assign_at_random(monkeypatch)
    packing = cp.Packing([31])
    layout = cp.Layout.contiguous(packing, 3)
    plan = cp.plan_attention(packing, layout, heads=1, head_dim=1, value_head_dim=2, scheme="tiled")
    assert plan.attend.row_bytes("remote queries and gradients", 0, 2) == 16
    assert run_ranks(ran, 3, plan) == [True] * 3
