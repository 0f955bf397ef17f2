"""The operation: what it accepts, what it refuses, and SBHD batches."""

import re

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.softmax.kernels import KERNELS
from megatron_cp.softmax.kernels.cpu import CpuFlashAttention
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.softmax.on_rank import attention_call
from tests.refusals import rejects


def plan_for(lengths=(5, 1, 6), cp_size=1, heads=4, kv_heads=2, head_dim=8, **options):
    packing = cp.Packing(lengths)
    layout = cp.Layout.zigzag(packing, cp_size, **options)
    return cp.plan_attention(packing, layout, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def tensors(rows=12, heads=4, kv_heads=2, head_dim=8):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(rows, n, head_dim, generator=random, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]


def test_pad_rows_are_zero_and_pass_no_gradient():
    plan = plan_for(cp_size=2, align=4)  # 6 tokens and 2 pad rows on each rank

    def rank(group):
        local = [torch.randn(8, n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
        out = cp.attention(*local, plan, group)
        out.backward(torch.ones_like(out))
        return [out, *(x.grad for x in local)]

    for results in run_ranks(rank, 2):
        for result in results:
            assert result[:6].abs().sum() > 0
            assert torch.equal(result[6:], torch.zeros_like(result[6:]))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q", lambda q, k, v: (q[:-1], k, v)), ("q", lambda q, k, v: (q.flatten(1), k, v)),
        ("k", lambda q, k, v: (q, k[:, :1], v)), ("k", lambda q, k, v: (q, k.float(), v)),
        ("v", lambda q, k, v: (q, k, v[..., :4])), ("v", lambda q, k, v: (q, k, v[:, None])),
        ("k", lambda q, k, v: (q, k.to("meta"), v)), ("q", lambda q, k, v: (q.long(), k.long(), v.long())),
    ],
)  # fmt: skip
def test_rejects_tensors_that_do_not_fit_the_plan(argument, change):
    rejects(f"^{argument}: got ", cp.attention, *change(*tensors()), plan_for())


def test_rejects_plans_and_groups_of_another_kind():
    packing = cp.Packing([12])
    plan = cp.plan_linear(packing, cp.Layout.zigzag(packing, 1), heads=4, key_heads=2, head_dim=8)
    rejects("plan_attention", cp.attention, *tensors(), plan)
    rejects("the 2 ranks", cp.attention, *tensors(), plan_for(cp_size=2), ThreadGroup.create(3)[0])
    rejects("group", cp.attention, *tensors(), plan_for(cp_size=2))
    rejects("plan_attention", cp.attention, *tensors(), None)


class Counting(ReferenceAttention):
    """A kernel of the caller's."""

    name, calls = "counting", 0

    def forward(self, *args):
        self.calls += 1
        super().forward(*args)


def test_a_kernel_of_the_callers_is_the_one_that_runs():
    kernel = Counting()
    out = cp.attention(*tensors(), plan_for(), kernel=kernel)
    assert torch.equal(out, cp.attention(*tensors(), plan_for(), kernel="reference"))
    assert kernel.calls > 0
    kernel = Counting()
    kernel.refusal = lambda call: "it never runs"
    rejects("counting: it never runs", cp.attention, *tensors(), plan_for(), kernel=kernel)


def test_ranks_that_bring_other_kernels_are_told_apart():
    def rank(group):
        kernel = Counting()
        kernel.name = f"of rank {group.rank}"
        cp.attention(*tensors(rows=6), plan_for((5, 1, 6), 2), group, kernel=kernel)

    with pytest.raises(RankError, match="kernel: 'of rank 0'"):
        run_ranks(rank, 2)


def test_rejects_tensors_on_no_device_and_the_heads_first():
    remedy = re.escape("Rows come first, [t, h, d]: use transpose(0, 1) of [h, t, d].")
    rejects(remedy, cp.attention, *(x.transpose(0, 1) for x in tensors()), plan_for())
    rejects(r"^q: got .*cpu or cuda", cp.attention, *(x.to("meta") for x in tensors()), plan_for())
    with pytest.raises(cp.ArgumentError, match=r"^device: got .*cpu or cuda"):
        choose_kernel(KERNELS, "auto", attention_call(plan_for(), torch.float64, torch.device("meta")))


@pytest.mark.parametrize(
    ("order", "remedy"),
    [
        ((1, 0, 2, 3), "Rows come first, [t, b, h, d]: use transpose(0, 1) of [b, t, h, d]."),
        ((1, 2, 0, 3), "Rows come first, [t, b, h, d]: use permute(2, 0, 1, 3) of [b, h, t, d]."),
    ],
    ids=["bshd", "bhsd"],
)
def test_rejects_the_batch_first_and_says_how_to_turn_it(order, remedy):
    batch = [x[:, None].expand(-1, 3, -1, -1) for x in tensors()]
    with pytest.raises(cp.ArgumentError) as error:
        cp.attention(*(x.permute(order) for x in batch), plan_for())
    shape = [batch[0].shape[axis] for axis in order]
    assert str(error.value) == (
        f"q: got 'torch.float64 {shape} on cpu'; allowed: torch.float64 [12, 3, 4, 8] on cpu. {remedy}"
    )
    with pytest.raises(cp.ArgumentError, match=re.escape(remedy)) as error:
        cp.attention(batch[0], *(x.permute(order) for x in batch[1:]), plan_for())
    assert error.value.argument == "k"


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_a_last_axis_that_is_not_dense_is_read_right(kernel):
    spread = [torch.stack([x, x.new_full(x.shape, torch.nan)], -1)[..., 0].requires_grad_() for x in tensors()]
    dense = [x.detach().clone().requires_grad_() for x in spread]
    for inputs in (spread, dense):
        cp.attention(*inputs, plan_for(), kernel=kernel).square().sum().backward()
    for a, b in zip(spread, dense, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_kernels_are_given_a_dense_last_axis(monkeypatch):
    seen = []
    run = CpuFlashAttention.forward

    def spy(self, out, lse, q, k, v, *rest):
        seen.extend(x.stride(-1) for x in (q, k, v))
        run(self, out, lse, q, k, v, *rest)

    monkeypatch.setattr(CpuFlashAttention, "forward", spy)
    cp.attention(*(torch.stack([x, x], -1)[..., 0] for x in tensors()), plan_for(), kernel="cpu")
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("head_dim", [3, 5, 6, 7, 17])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_odd_head_sizes_are_the_same_bits_on_every_rank(head_dim, dtype):
    plan, alone = plan_for([7, 20], 2, head_dim=head_dim), plan_for([7, 20], head_dim=head_dim)
    q, k, v = (x.to(dtype) for x in tensors(27, head_dim=head_dim))
    ranks = run_ranks(
        lambda group: cp.attention(*(plan.layout.shard(x, group.rank) for x in (q, k, v)), plan, group), 2
    )
    assert torch.equal(plan.layout.unshard(ranks), cp.attention(q, k, v, alone, kernel="cpu"))


def test_without_gradients_forward_is_the_same_and_a_sink_alone_has_one():
    q, k, v = (x.requires_grad_() for x in tensors())
    with torch.no_grad():
        quiet = cp.attention(q, k, v, plan_for())
    assert not quiet.requires_grad
    assert torch.equal(quiet, cp.attention(q, k, v, plan_for()).detach())
    sink = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    cp.attention(*tensors(), plan_for(), sink=sink).sum().backward()
    assert sink.grad.abs().min() > 0
    with torch.no_grad():
        assert not cp.attention(*tensors(), plan_for(), sink=sink).requires_grad


@pytest.mark.parametrize(
    "share", [lambda x: (x, x, x), lambda x: (x, x[:, :2], x[:, 2:]), lambda x: (x, x[:, :2], x[:, :2])]
)
def test_inputs_that_share_memory_get_gradients_of_their_own(share):
    x = tensors()[0].requires_grad_()
    plan = plan_for(kv_heads=share(x)[1].shape[1])
    cp.attention(*share(x), plan).square().sum().backward()
    apart = [part.detach().clone().requires_grad_() for part in share(x)]
    cp.attention(*apart, plan).square().sum().backward()
    joined = torch.autograd.grad(share(x), x, [part.grad for part in apart])[0]
    assert torch.allclose(x.grad, joined, atol=1e-14)


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("softcap", -1.0), ("softcap", float("inf")), ("softcap", float("nan")), ("dropout", 1.0), ("dropout", -0.1),
        ("dropout", "much"), ("softmax_scale", float("nan")), ("sink", torch.zeros(3, dtype=torch.float64)),
        ("sink", torch.zeros(4, 1, dtype=torch.float64)), ("sink", torch.zeros(4, dtype=torch.int64)),
    ],
    ids=str,
)  # fmt: skip
def test_rejects_options_that_are_none(argument, given):
    rejects(f"^{argument}: got ", cp.attention, *tensors(), plan_for(), **{argument: given})


@pytest.mark.parametrize(("option", "value"), [("softcap", 2.0), ("dropout", 0.1), ("softmax_scale", -1.0)])
def test_rejects_a_kernel_without_the_feature_and_names_one_with_it(option, value):
    with pytest.raises(cp.ArgumentError, match=r"^kernel: got .*use reference"):
        cp.attention(*tensors(), plan_for(), kernel="cpu", seed=1, **{option: value})
    assert cp.attention(*tensors(), plan_for(), seed=1, **{option: value}).isfinite().all()


def test_rejects_dropout_without_a_seed():
    q, k, v = tensors()
    calls = (
        lambda **given: cp.attention(q, k, v, plan_for(), **given),
        lambda **given: cp.projected_attention(lambda heads, kv_heads: (q, k, v), plan_for(), **given),
    )
    for call in calls:
        rejects(r"seed: got None; .* dropout is 0\.5\. Pass the number of the step", call, dropout=0.5)
        assert not torch.equal(call(dropout=0.5, seed=0), call(dropout=0.5, seed=1))
