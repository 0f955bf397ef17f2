"""The operation: inputs of any form, kernels of the caller's, the gradient of the log-sum-exp, and refusals."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.softmax.kernels import KERNELS
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.softmax.on_rank import attention_call
from tests.fuzz_cases import Call, Case
from tests.fuzz_check import check
from tests.refusals import rejects
from tests.unit_tests.softmax.test_kernels import EmulatedFlash, call_for


def plan_for(lengths=(5, 1, 6), cp_size=1, heads=4, kv_heads=2, head_dim=8, **options):
    packing = cp.Packing(lengths)
    layout = cp.Layout.zigzag(packing, cp_size)
    return cp.plan_attention(packing, layout, heads=heads, kv_heads=kv_heads, head_dim=head_dim, **options)


def tensors(rows=12, heads=4, kv_heads=2, head_dim=8):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(rows, n, head_dim, generator=random, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]


USES = [
    {"shared": "=qkv", "groups": 4}, {"shared": "+qkv"}, {"shared": "=kv"}, {"sink": True, "frozen": ("q", "k", "v")},
    *({"strides": "last", "kernel": kernel} for kernel in ("auto", "reference")),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("use", USES, ids=str)
def test_inputs_may_share_memory_lie_anywhere_and_need_no_gradient(use, size):
    sizes = {"heads": 4, "groups": 2, "head_dim": 8, "value_head_dim": 8, "scheme": "a2a"}
    check(Case(size, (Call("attention", (5, 1, 6), **sizes | use),)))


@pytest.mark.parametrize("head_dim", [3, 5, 6, 7, 17])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_odd_head_sizes_are_the_same_bits_on_every_rank(head_dim, dtype):
    plan, alone = plan_for([7, 20], 2, head_dim=head_dim), plan_for([7, 20], head_dim=head_dim)
    q, k, v = (x.to(dtype) for x in tensors(27, head_dim=head_dim))
    ranks = run_ranks(
        lambda group: cp.attention(*(plan.layout.shard(x, group.rank) for x in (q, k, v)), plan, group), 2
    )
    assert torch.equal(plan.layout.unshard(ranks), cp.attention(q, k, v, alone, kernel="cpu"))


class Mine(ReferenceAttention):
    """A kernel of the caller's, which takes tensors with a dense last axis, as those of other packages do."""

    name = "mine"

    def __init__(self):
        self.calls = 0

    def forward(self, *args):
        self.calls += 1
        assert all(x.stride(-1) == 1 for x in args[2:5])  # q, k and v
        super().forward(*args)


class FixedSizes(Mine):
    def refusal(self, call):
        return None if call.value_head_dim in (8, 16) else f"has heads of 8 and 16, not {call.value_head_dim}"


@pytest.fixture(autouse=True)
def _restored():
    before = list(KERNELS)
    yield
    KERNELS[:] = before


def test_a_kernel_of_the_callers_runs_and_once_registered_has_a_name_everywhere():
    kernel, expected = Mine(), cp.attention(*tensors(), plan_for(), kernel="reference")
    assert torch.equal(cp.attention(*tensors(), plan_for(), kernel=kernel), expected)
    assert kernel.calls == 1
    rejects("^kernel: got 'mine'", cp.attention, *tensors(), plan_for(), kernel="mine")
    cp.register_kernel(Mine())
    cp.register_kernel(kernel)  # replaces the one before it
    assert torch.equal(cp.attention(*tensors(), plan_for(), kernel="mine"), expected)
    assert kernel.calls == 2
    assert [each for each in KERNELS if each.name == "mine"] == [kernel]
    assert cp.nn.Attention(16, 4, kernel="mine").kernel == "mine"
    rejects("or mine", cp.attention, *tensors(), plan_for(), kernel="none")
    assert choose_kernel(KERNELS, "auto", call_for(softcap=1.0)).name == "reference"


def test_kernels_are_given_a_dense_last_axis():
    cp.attention(*(torch.stack([x, x], -1)[..., 0] for x in tensors()), plan_for(), kernel=Mine())


def test_ranks_that_bring_other_kernels_are_told_apart():
    def rank(group):
        kernel = Mine()
        kernel.name = f"of rank {group.rank}"
        cp.attention(*tensors(rows=6), plan_for((5, 1, 6), 2), group, kernel=kernel)

    with pytest.raises(RankError, match="kernel: 'of rank 0'"):
        run_ranks(rank, 2)


def test_rejects_kernels_that_nobody_could_choose():
    rejects("^kernel: got .*an object of a subclass", cp.register_kernel, Mine)
    cp.register_kernel(Mine())
    other = type("Other", (ReferenceAttention,), {"name": "mine"})()
    for name, kernel in {"mine": other, "cpu": EmulatedFlash(), "auto": Mine()}.items():
        kernel.name = name
        rejects(f"^kernel: got .*'{name}'.*another name than auto or varlen", cp.register_kernel, kernel)
    nameless = EmulatedFlash()
    nameless.name = nameless.unrounded_partials = None
    rejects(r"attributes name \(str\), unrounded_partials \(bool\)", cp.register_kernel, nameless)


def test_rejects_a_log_sum_exp_whose_gradient_a_kernel_cannot_compute():
    given = {"plan": plan_for(), "kernel": FixedSizes(), "return_lse": True}
    rejects("mine: has heads of 8 and 16, not 9.*one more value feature", cp.attention, *tensors(), **given)
    with torch.no_grad():
        assert len(cp.attention(*tensors(), **given)) == 2
    assert cp.attention(*tensors(), plan_for(), kernel=FixedSizes()).shape == (12, 4, 8)


class SeesFiniteNumbers(ReferenceAttention):
    def backward(self, *args):
        assert all(x.isfinite().all() for x in args[3:8])
        super().backward(*args)


@pytest.mark.parametrize("sink", [None, -torch.inf])
def test_a_gradient_for_queries_that_see_nothing_reaches_no_kernel(sink):
    plan = plan_for([12], mask=cp.Mask.from_slices(cp.Packing([12]), [(3, 8, 0, 8, "causal")]))
    leaves = [*(x.requires_grad_() for x in tensors()), *([] if sink is None else [torch.full((4,), sink).double()])]
    leaves[-1].requires_grad_()
    options = {} if sink is None else {"sink": leaves[3]}
    out, lse = cp.attention(*leaves[:3], plan, kernel=SeesFiniteNumbers(), return_lse=True, **options)
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.where(lse == -torch.inf, torch.nan, 1.0)])
    assert all(x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize(("kernel", "dtype", "tolerance"), [
    (EmulatedFlash(), torch.float32, 1e-5), ("cpu", torch.bfloat16, 2e-2), ("reference", torch.float16, 5e-3),
])  # fmt: skip
def test_the_log_sum_exp_has_a_gradient_in_every_kernel_and_type(kernel, dtype, tolerance):
    found = []
    for name, kind in ((kernel, dtype), ("reference", torch.float64)):
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in tensors()]
        out, lse = cp.attention(*leaves, plan_for(), kernel=name, return_lse=True)
        assert lse.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
        (lse.square().sum() + out.sum()).backward()
        found.append([x.grad for x in leaves])
    for ours, right in zip(*found, strict=True):
        assert (ours.double() - right).abs().max() <= tolerance * right.abs().max()


LINEAR = cp.plan_linear(cp.Packing([12]), cp.Layout.zigzag(cp.Packing([12]), 1), heads=4, key_heads=2, head_dim=8)
REFUSED = [
    ({"plan": LINEAR}, "plan_attention"), ({"plan": plan_for(cp_size=2)}, "^group: got None"),
    ({"plan": plan_for(cp_size=2), "group": ThreadGroup.create(3)[0]}, "^group: got .*the 2 ranks"),
    ({"softcap": 2.0, "kernel": "cpu"}, "^kernel: got .*use reference"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "says"), REFUSED)
def test_rejects_plans_groups_and_options(given, says):
    rejects(says, cp.attention, *tensors(), **{"plan": plan_for(), **given})


def test_rejects_tensors_on_no_device():
    rejects(r"^q: got .*cpu or cuda", cp.attention, *(x.to("meta") for x in tensors()), plan_for())
    call = attention_call(plan_for(), torch.float64, torch.device("meta"))
    rejects("^device: got .*cpu or cuda", choose_kernel, KERNELS, "auto", call)
