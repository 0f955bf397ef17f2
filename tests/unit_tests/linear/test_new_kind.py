"""A kind of linear layer that is a record, an operation and nothing else: retention (RetNet, arXiv 2307.08621, eq. 6).

It convolves nothing, and its recurrence is Mamba-2's with steps of one.
"""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.arguments import check_plan
from megatron_cp.executor.launch import run_ranks
from megatron_cp.linear import on_rank
from megatron_cp.linear.kernels import StateSpace
from megatron_cp.linear.on_rank import LinearOnRank
from megatron_cp.plan.kinds import KINDS, Argument, Dim, LinearKind, Per, SectionKind, Transition
from megatron_cp.plan.recurrence import Halo
from megatron_cp.planner import capabilities
from megatron_cp.planner.capabilities import Capability

HEADS, KEY_DIM, VALUE_DIM = 5, 3, 4
LENGTHS = (7, 1, 30, 0, 2)
RETENTION = LinearKind(
    "retention", "retention", "retention, which has no convolution",
    sections=(
        SectionKind("q", Per.GROUP, Dim.KEY), SectionKind("k", Per.GROUP, Dim.KEY),
        SectionKind("v", Per.HEAD, Dim.VALUE),
    ),
    convolved=0, keys="k", values="v", transition=Transition.SCALAR, recurrence="mamba",
    arguments=(
        Argument("heads", "heads"), Argument("key_dim", "head_dim"), Argument("value_dim", "value_head_dim", "key_dim"),
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(KINDS, "retention", RETENTION)
    rows = (*capabilities.CAPABILITIES, Capability("kind", "retention", True, RETENTION.remark))
    monkeypatch.setattr(capabilities, "CAPABILITIES", rows)


def retention(q, k, v, decay, plan, group=None, kernel="auto"):
    check_plan(plan, "retention", "plan_linear")
    layer = LinearOnRank(plan, group, kernel, "v", v)
    comm = layer.agree("retention", {"q": q, "k": k, "v": v, "decay": decay})

    def gates(chunk, *arrived):
        q, k, v = chunk.sections(*arrived)
        return [v, v.new_ones(v.shape[:2]), decay[chunk.heads], k, q]

    return layer.run(
        comm,
        [q.flatten(1), k.flatten(1), v.flatten(1)],
        gates=gates,
        rule=lambda chunk, *inputs: [chunk.recurrence(StateSpace(*inputs), 1.0)],
    )


def token_by_token(q, k, v, decay):
    outputs = []
    for document in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        state = q.new_zeros(HEADS, KEY_DIM, VALUE_DIM)
        for q_t, k_t, v_t in zip(*document, strict=True):
            state = decay.exp()[:, None, None] * state + torch.einsum("hk,hv->hkv", k_t, v_t)
            outputs.append(torch.einsum("hk,hkv->hv", q_t, state))
    return torch.stack(outputs)


def plan_of(layout, mode, **more):
    sizes = {"heads": HEADS, "head_dim": KEY_DIM, "value_head_dim": VALUE_DIM, "hidden_size": 16}
    return cp.plan_linear(layout.packing, layout, "retention", mode=mode, **sizes, **more)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize(("mode", "cp_size"), [("headwise", 1), ("headwise", 3), ("chunkwise", 3), ("redistribute", 2)])
def test_equals_the_recurrence(mode, cp_size, kernel):
    layout = cp.Layout.zigzag(cp.Packing(LENGTHS), cp_size)
    random = torch.Generator().manual_seed(0)
    shapes = ((HEADS, KEY_DIM), (HEADS, KEY_DIM), (HEADS, VALUE_DIM))
    leaves = [torch.randn(layout.packing.total, *s, generator=random, dtype=torch.float64) for s in shapes]
    leaves = [leaf.requires_grad_() for leaf in (*leaves, -torch.rand(HEADS, generator=random, dtype=torch.float64))]
    expected = token_by_token(*leaves)
    weights = torch.randn(expected.shape, generator=random, dtype=torch.float64)
    gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    plan = plan_of(layout, mode)

    def rank(group):
        rows = torch.from_numpy(plan.layout.tokens(group.rank))  # where hidden states are redistributed to, if they are
        own = [x.detach()[rows].requires_grad_() for x in leaves[:3]]
        own.append(leaves[3].detach().clone().requires_grad_())
        out = retention(*own, plan.inside, group, kernel)
        return rows, out.detach(), torch.autograd.grad((out * weights[rows]).sum(), own)

    of_decay = torch.zeros(HEADS, dtype=torch.float64)
    for rows, out, (*of_rows, share) in run_ranks(rank, cp_size):
        torch.testing.assert_close(out, expected.detach()[rows], rtol=0, atol=1e-12)
        for found, whole in zip(of_rows, gradients[:3], strict=True):
            torch.testing.assert_close(found, whole[rows], rtol=0, atol=1e-12)
        of_decay += share
    torch.testing.assert_close(of_decay, gradients[3], rtol=0, atol=1e-11)


def test_has_no_convolution_and_a_slot_with_the_sizes_that_it_has():
    layout = cp.Layout.contiguous(cp.Packing(LENGTHS), 3)
    plan = plan_of(layout, "chunkwise")
    assert not any(isinstance(step, Halo) for step in plan.steps)
    assert "convolution" not in plan.explain()
    gdn = cp.plan_linear(layout.packing, layout, "gdn", heads=HEADS, head_dim=KEY_DIM, mode="chunkwise")
    assert "convolution" in gdn.explain()
    assert plan.collectives(forward=True) == gdn.collectives(forward=True) - 1
    layout = cp.Layout.zigzag(cp.Packing(LENGTHS), 2)
    slot = cp.LinearSpec("retention", HEADS, HEADS, KEY_DIM, VALUE_DIM, mode="headwise", head_chunks=2)
    assert slot.plan(layout).steps == plan_of(layout, "headwise", head_chunks=2).steps
    channels = cp.LinearSpec("conv1d", 6, 6, 8, 8, mode="headwise").plan(layout)
    assert channels.steps == cp.plan_linear(layout.packing, layout, "conv1d", channels=6, mode="headwise").steps


def test_chooses_no_kernel_for_a_convolution_that_it_has_not(monkeypatch):
    def refuse(*_):
        raise AssertionError("a convolution")

    monkeypatch.setattr(on_rank, "choose_conv", refuse)
    plan = plan_of(cp.Layout.contiguous(cp.Packing(LENGTHS), 1), "headwise")
    rows = [torch.ones(sum(LENGTHS), HEADS, dim) for dim in (KEY_DIM, KEY_DIM, VALUE_DIM)]
    retention(*rows, -torch.ones(HEADS), plan)
