"""Kernels of the caller's are chosen by their name, and refused by it."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.softmax.kernels import KERNELS
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from tests.refusals import rejects
from tests.unit_tests.softmax.test_attention import plan_for, tensors
from tests.unit_tests.softmax.test_kernels import EmulatedFlash, call_for


class Mine(ReferenceAttention):
    name = "mine"

    def __init__(self):
        self.calls = 0

    def forward(self, *args):
        self.calls += 1
        super().forward(*args)


class FixedSizes(Mine):
    def refusal(self, call):
        return None if call.value_head_dim in (8, 16) else f"has heads of 8 and 16, not {call.value_head_dim}"


@pytest.fixture(autouse=True)
def _restored():
    before = list(KERNELS)
    yield
    KERNELS[:] = before


def test_a_registered_kernel_is_chosen_by_name_everywhere():
    rejects("^kernel: got 'mine'", cp.attention, *tensors(), plan_for(), kernel="mine")
    kernel = Mine()
    cp.register_kernel(kernel)
    out = cp.attention(*tensors(), plan_for(), kernel="mine")
    assert torch.equal(out, cp.attention(*tensors(), plan_for(), kernel="reference"))
    assert kernel.calls > 0
    assert cp.nn.Attention(16, 4, kernel="mine").kernel == "mine"
    rejects("or mine", cp.attention, *tensors(), plan_for(), kernel="none")
    assert choose_kernel(KERNELS, "auto", call_for(softcap=1.0)).name == "reference"


def test_registering_a_class_again_replaces_its_object():
    first, second = Mine(), Mine()
    cp.register_kernel(first)
    cp.register_kernel(second)
    assert choose_kernel(KERNELS, "mine", call_for()) is second
    assert first not in KERNELS


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
    cp.register_kernel(FixedSizes())
    given = {"plan": plan_for(), "kernel": "mine", "return_lse": True}
    rejects("mine: has heads of 8 and 16, not 9.*one more value feature", cp.attention, *tensors(), **given)
    with torch.no_grad():
        assert len(cp.attention(*tensors(), **given)) == 2
    assert cp.attention(*tensors(), plan_for(), kernel="mine").shape == (12, 4, 8)


class SeesFiniteNumbers(ReferenceAttention):
    def backward(self, *args):
        assert all(x.isfinite().all() for x in args[3:8])
        super().backward(*args)


@pytest.mark.parametrize("sink", [None, -torch.inf])
def test_a_gradient_for_queries_that_see_nothing_reaches_no_kernel(sink):
    packing = cp.Packing([12])
    mask = cp.Mask.from_slices(packing, [(3, 8, 0, 8, "causal")])
    plan = cp.plan_attention(packing, cp.Layout.zigzag(packing, 1), heads=4, kv_heads=2, head_dim=8, mask=mask)
    leaves = [*(x.requires_grad_() for x in tensors()), *([] if sink is None else [torch.full((4,), sink).double()])]
    leaves[-1].requires_grad_()
    kernel = SeesFiniteNumbers()
    options = {} if sink is None else {"sink": leaves[3]}
    out, lse = cp.attention(*leaves[:3], plan, kernel=kernel, return_lse=True, **options)
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
