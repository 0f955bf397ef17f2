"""The loop over a plan's steps is a program: local work may stand before an exchange, and exchanges start early."""

import dataclasses

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.run import run
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.steps import Compute, ToHeads, ToTokens
from tests.counting_group import Diary

PACKING = Packing([5, 1, 6])
LAYOUT = Layout.zigzag(PACKING, 2)


def plan_of(*, kv_layout=None, head_chunks=1):
    """A head exchange whose heads are doubled between its two sides."""
    cross = {} if kv_layout is None else {"kv_packing": PACKING, "kv_layout": kv_layout}
    made = cp.plan_attention(PACKING, LAYOUT, heads=4, head_dim=3, scheme="a2a", head_chunks=head_chunks, **cross)
    return dataclasses.replace(made, steps=tuple(step for step in made.steps if step is not made.attend))


def streams():
    random = torch.Generator().manual_seed(0)
    return [torch.randn(PACKING.total, 12, generator=random, dtype=torch.float64) for _ in "qkv"]


def shards(layouts, rank):
    return [layout.shard(x, rank).requires_grad_() for layout, x in zip(layouts, streams(), strict=True)]


def shifted_then_exchanged(group, head_chunks):
    """`[Compute, ToHeads, Compute, ToTokens]`: the work before the exchange is on own tokens and all heads."""
    plan, diary = plan_of(head_chunks=head_chunks), Diary(group)
    plan = dataclasses.replace(plan, steps=(Compute("shift"), plan.steps[0], Compute("merge"), plan.steps[-1]))
    local = shards([LAYOUT] * 3, group.rank)

    def shift(*tensors):
        diary.events.append("shift")
        assert [x.shape[1] for x in tensors] == [12] * 3
        return [x + 1 for x in tensors]

    def merge(q, k, v):
        diary.events.append("merge")
        assert q.shape[0] == PACKING.total  # all tokens of own heads
        return [q * k + v]

    comm = Communicator(diary)
    (out,) = run(plan, comm, local, lambda chunk: {"shift": shift, "merge": merge})
    out.backward(LAYOUT.shard(streams()[0], group.rank))
    return out.detach(), [x.grad for x in local], diary.events


@pytest.mark.parametrize("head_chunks", [1, 2])
def test_work_before_an_exchange_is_done_before_it_starts(head_chunks):
    ranks = run_ranks(shifted_then_exchanged, 2, head_chunks)
    q, k, v = (x.requires_grad_() for x in streams())
    expected = (q + 1) * (k + 1) + (v + 1)
    expected.backward(streams()[0])
    assert torch.allclose(LAYOUT.unshard([rank[0] for rank in ranks]), expected, atol=1e-14)
    for number, tensor in enumerate((q, k, v)):
        found = LAYOUT.unshard([rank[1][number] for rank in ranks])
        assert torch.allclose(found, tensor.grad, atol=1e-14)
    forward = ranks[0][2][: 2 + 4 * head_chunks]
    assert forward[: 1 + head_chunks] == ["shift", *["start"] * head_chunks]


def exchanged_while_another_is_made(group):
    """`[ToHeads, Compute, ToHeads, ...]`: the first exchange is under way while the second one's tensors are made."""
    kv_layout, diary = Layout.contiguous(PACKING, 2), Diary(group)
    plan = plan_of(kv_layout=kv_layout)
    first, second, back = plan.steps
    assert isinstance(first, ToHeads)
    assert isinstance(second, ToHeads)
    assert isinstance(back, ToTokens)
    plan = dataclasses.replace(plan, steps=(first, Compute("shift"), second, Compute("merge"), back))
    local = shards([LAYOUT, kv_layout, kv_layout], group.rank)

    def shift(q, k, v):
        diary.events.append("shift")
        return [q, k + 1, v + 1]

    comm = Communicator(diary)
    (out,) = run(plan, comm, local, lambda chunk: {"shift": shift, "merge": lambda q, k, v: [q * k + v]})
    return out.detach(), diary.events


def test_an_exchange_starts_as_early_as_its_inputs_allow():
    ranks = run_ranks(exchanged_while_another_is_made, 2)
    q, k, v = streams()
    assert torch.allclose(LAYOUT.unshard([rank[0] for rank in ranks]), q * (k + 1) + v + 1, atol=1e-14)
    assert ranks[0][1][:3] == ["start", "shift", "start"]


@pytest.mark.parametrize("turned", ["queries", "keys", "both"])
def test_one_rank_has_the_same_bits_in_whatever_order_its_rows_are(turned):
    packing = Packing([37, 30])
    straight, other = Layout.contiguous(packing, 1), Layout.from_fragments(packing, [[(20, 67), (0, 20)]])
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(packing.total, 2, 8, generator=random) for _ in "qkv")

    def attended(layout, kv_layout):
        plan = cp.plan_attention(
            packing, layout, heads=2, head_dim=8, mask=cp.Mask.full(packing, packing), scheme="a2a",
            kv_packing=packing, kv_layout=kv_layout,
        )  # fmt: skip
        rows = [layout.shard(q, 0), kv_layout.shard(k, 0), kv_layout.shard(v, 0)]
        return layout.unshard([cp.attention(*rows, plan, None)])

    layouts = [other if turned in (name, "both") else straight for name in ("queries", "keys")]
    assert torch.equal(attended(*layouts), attended(straight, straight))
