"""Queries that other ranks compute: the order in which results return, and row sums in place of outputs."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.partials import output_with_row_sums, row_sums
from megatron_cp.executor.transfers import AttendOnRank, RowTransfers
from megatron_cp.plan.payloads import Payload
from tests.random_tiles import assign_at_random

RANKS = 4


class Senders(RowTransfers):
    """Returns this rank's number for every query that it was sent, and records the ranks that returned own ones."""

    def compute(self, bound):
        pass

    def compute_remote(self, bound):
        (queries,) = self.queries(bound.do.queries, bound.chunk)
        results = self.buffers[bound.do.results]  # an output and a log-sum-exp, of size 1 each
        results[:, 0], results[:, 1] = self.comm.rank, queries[:, 0, 0]

    def merge(self, bound):
        for index, first, count in bound.pieces:
            senders, queries = self.columns(self.buffers[bound.do.buffer][first : first + count], bound)
            assert torch.equal(queries, self.leaving[0][index.long()])  # each row beside its own query
            assert len(senders.unique()) == 1
            self.found.append(int(senders[0, 0, 0]))


def senders_of_results(group, plan):
    q, k = (layout.tokens(group.rank) for layout in (plan.layout, plan.kv_layout))
    own, keys = (torch.tensor(x, dtype=torch.float64).reshape(-1, 1, 1) for x in (q, k))
    comm = Communicator(group, plan.transport, "attention", plan.scheme)
    senders = Senders(AttendOnRank(plan.attend, group.rank, 0, comm), (keys, keys), [own], forward=True)
    senders.found = []
    senders.run()
    return senders.found


def test_results_return_in_the_order_of_ranks(monkeypatch):
    assign_at_random(monkeypatch)
    packing = cp.Packing([31, 1, 20])
    layout = cp.Layout.zigzag(packing, RANKS)
    plan = cp.plan_attention(packing, layout, heads=1, head_dim=1, scheme="tiled")
    found = run_ranks(senders_of_results, RANKS, plan)
    assert all(senders == sorted(senders) for senders in found)
    assert max(map(len, found)) >= 2


def test_row_sums_of_bf16_are_accumulation_dtype_fp32():
    """256 and 65 ones: bf16 has no 321."""
    out = torch.ones(3, 2, 66, dtype=torch.bfloat16)
    out[..., 0] = 256
    found = row_sums(torch.ones_like(out), out)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.full((3, 2, 1), 321.0))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("wide", [True, False])
def test_an_output_has_the_row_sums_of_the_output(wide, scale):
    """Also of gradients whose squares over- or underflow; where a gradient is zero, of nothing."""
    random = torch.Generator().manual_seed(0)
    out, dout = (torch.randn(19, 2, 5, generator=random) for _ in range(2))
    dout[3], dout[:, 0, 1] = 0, 0
    dout *= scale
    sums = row_sums(dout, out)
    made = output_with_row_sums(dout, sums, wide=wide)
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
    assert plan.attend.row_bytes(Payload.QUERIES_AND_GRADIENTS, 0, 2) == 16
    assert run_ranks(ran, 3, plan) == [True] * 3
