"""Attention kernels agree with the equations; each refuses what it cannot run."""

import pytest
import torch

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.sections import HeadDeal
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.layout import Packing
from megatron_cp.layout.mask import Mask
from megatron_cp.softmax.attention import head_runs
from megatron_cp.softmax.kernels import KERNELS, AttentionCall

BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def call_for(lengths, head_dim=8, value_head_dim=None, dtype=torch.float64, device="cpu", causal=True):
    mask = Mask(Packing(lengths), is_causal=causal)
    return AttentionCall(mask, 0.37, head_dim, value_head_dim or head_dim, dtype, torch.device(device))


def forward(kernel, q, k, v, call):
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.promote_types(q.dtype, torch.float32))
    kernel.forward(out, lse, q, k, v, call)
    return out, lse


def backward(kernel, dout, q, k, v, out, lse, call):
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    kernel.backward(*gradients, dout, q, k, v, out, lse, call)
    return gradients


def draw(call, heads=4, groups=2, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    total = call.mask.packing.total
    sizes = (
        (heads, call.head_dim),
        (groups, call.head_dim),
        (groups, call.value_head_dim),
        (heads, call.value_head_dim),
    )
    return [torch.randn(total, *size, generator=random, dtype=torch.float64).to(dtype) for size in sizes]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_reference_is_the_softmax_of_visible_scores_token_by_token(causal):
    call = call_for([3, 0, 1, 4], causal=causal)
    q, k, v, _ = draw(call)
    out, lse = forward(BY_NAME["reference"], q, k, v, call)
    for start, end in call.mask.packing.spans():
        for token in range(start, end):
            seen = slice(start, token + 1 if causal else end)
            for head in range(4):
                scores = torch.stack([call.scale * q[token, head] @ key for key in k[seen, head // 2]])
                assert torch.allclose(lse[head, token], scores.exp().sum().log(), atol=1e-14)
                assert torch.allclose(out[token, head], scores.softmax(0) @ v[seen, head // 2], atol=1e-14)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_reference_gradients_are_those_of_its_forward(causal):
    call = call_for([3, 1], head_dim=3, value_head_dim=2, causal=causal)
    q, k, v, dout = draw(call, heads=2, groups=1)
    kernel = BY_NAME["reference"]
    gradients = backward(kernel, dout, q, k, v, *forward(kernel, q, k, v, call), call)
    for place, (tensor, gradient) in enumerate(zip((q, k, v), gradients, strict=True)):
        direction = torch.randn_like(tensor)
        moved = [
            [x + step * direction if index == place else x for index, x in enumerate((q, k, v))]
            for step in (1e-6, -1e-6)
        ]
        difference = sum(
            sign * (forward(kernel, *x, call)[0] * dout).sum() for sign, x in zip((1, -1), moved, strict=True)
        )
        assert torch.allclose(difference / 2e-6, (gradient * direction).sum(), atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_cpu_kernel_agrees_with_the_reference(dtype, groups):
    call, exact = (call_for([70, 1, 0, 33], dtype=t) for t in (dtype, torch.float64))
    tensors = draw(exact, groups=groups)
    short = [x.to(dtype) for x in tensors]
    q, k, v, dout = (x.double() for x in short)
    out, lse = forward(BY_NAME["reference"], q, k, v, exact)
    expected = [out, lse, *backward(BY_NAME["reference"], dout, q, k, v, out, lse, exact)]
    q, k, v, dout = short
    out, lse = forward(BY_NAME["cpu"], q, k, v, call)
    actual = [out, lse, *backward(BY_NAME["cpu"], dout, q, k, v, out, lse, call)]
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip(actual, expected, strict=True):
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize(
    ("name", "call", "says"),
    [
        ("cpu", call_for([3], value_head_dim=4), "value heads"),
        ("cpu", call_for([3], device="cuda"), "cuda"),
        ("varlen", call_for([3]), "CUDA"),
        ("varlen", call_for([3], device="cuda"), "float64"),
        ("varlen", call_for([3], device="cuda", dtype=torch.bfloat16, value_head_dim=16), "value heads"),
        ("varlen", call_for([3], device="cuda", dtype=torch.bfloat16, head_dim=264), "256"),
        ("varlen", call_for([3], device="cuda", dtype=torch.bfloat16, head_dim=12), "multiple of 8"),
    ],
    ids=str,
)
def test_rejects_what_a_kernel_cannot_run(name, call, says):
    with pytest.raises(ArgumentError, match=says) as error:
        choose_kernel(KERNELS, name, call)
    assert error.value.argument == "kernel"
    assert "use " in str(error.value)


def test_rejects_an_unknown_kernel():
    with pytest.raises(ArgumentError, match="auto or varlen or cpu or reference"):
        choose_kernel(KERNELS, "flash", call_for([3]))


def test_auto_takes_the_fastest_that_can():
    assert choose_kernel(KERNELS, "auto", call_for([3])).name == "cpu"
    assert choose_kernel(KERNELS, "auto", call_for([3], value_head_dim=4)).name == "reference"
    assert choose_kernel(KERNELS, "auto", call_for([3], device="cuda", dtype=torch.bfloat16)).name == "varlen"


def test_auto_says_on_cuda_why_it_passes_a_kernel_over():
    with pytest.warns(UserWarning, match="reference, not on varlen .*float64"):
        assert choose_kernel(KERNELS, "auto", call_for([3], device="cuda")).name == "reference"


@pytest.mark.parametrize(
    ("heads", "groups", "expected"),
    [
        ((0, 6), (0, 2), [((0, 6), (0, 2))]),
        ((2, 4), (0, 2), [((0, 2), (0, 2))]),  # one head of each group: still one ratio
        ((1, 5), (0, 2), [((0, 4), (0, 2))]),
        ((1, 4), (0, 2), [((0, 2), (0, 1)), ((2, 3), (1, 2))]),
        ((2, 9), (0, 3), [((0, 1), (0, 1)), ((1, 7), (1, 3))]),
        ((4, 4), (1, 1), []),
    ],
    ids=str,
)
def test_head_runs_have_one_ratio_each(heads, groups, expected):
    runs = head_runs(HeadDeal((heads,), (groups,)), 0, heads_per_group=3)
    assert [((h.start, h.stop), (g.start, g.stop)) for h, g in runs] == expected
