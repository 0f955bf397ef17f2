"""Kernels of the gated delta rule and its convolution agree with the equations, and gradients stay finite."""

import pytest
import torch

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.layout import Packing
from megatron_cp.linear.kernels import KERNELS, LinearCall

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
RAGGED = (70, 1, 0, 129, 64, 2)


def call_for(lengths, dtype=torch.float64, head_dim=8):
    return LinearCall(Packing(lengths), dtype, torch.device("cpu"), head_dim)


def draw(call, heads=4, key_heads=2, dk=8, dv=6):
    random = torch.Generator().manual_seed(0)
    total = call.packing.total
    q, k = (
        torch.nn.functional.normalize(torch.randn(total, key_heads, dk, generator=random, dtype=torch.float64), dim=-1)
        for _ in range(2)
    )
    v, dout = (torch.randn(total, heads, dv, generator=random, dtype=torch.float64) for _ in range(2))
    g = -torch.rand(total, heads, generator=random, dtype=torch.float64)
    beta = torch.rand(total, heads, generator=random, dtype=torch.float64)
    return [q, k, v, g, beta], dout


def with_gradients(function, tensors, dout):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_rule(name, tensors, dout, groups, call):
    return with_gradients(lambda *x: BY_NAME[name].rule(*x, groups, 0.4, call), tensors, dout)


def test_reference_rule_is_the_recurrence_with_its_transition_matrix():
    call = call_for([3, 2])
    (q, k, v, g, beta), _ = draw(call)
    out = BY_NAME["reference"].rule(q, k, v, g, beta, [0, 0, 1, 1], 0.4, call)
    for head in range(4):
        for start, end in call.packing.spans():
            state = torch.zeros(8, 6, dtype=torch.float64)
            for t in range(start, end):
                key, query = k[t, head // 2], q[t, head // 2]
                erase = torch.eye(8, dtype=torch.float64) - beta[t, head] * torch.outer(key, key)
                state = g[t, head].exp() * erase @ state + beta[t, head] * torch.outer(key, v[t, head])
                assert torch.allclose(out[t, head], 0.4 * state.T @ query, atol=1e-14)


@pytest.mark.parametrize("groups", [[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]], ids=str)
def test_chunked_rule_agrees_with_the_reference(groups):
    call = call_for(RAGGED)
    tensors, dout = draw(call)
    actual, expected = (run_rule(name, tensors, dout, groups, call) for name in ("chunked", "reference"))
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= 1e-13 * max(1, b.abs().max())


@pytest.mark.parametrize("name", ["chunked", "reference"])
def test_strong_decay_neither_overflows_nor_gives_nan(name):
    call = call_for([100, 3], torch.float32)
    tensors, dout = draw(call)
    tensors[3] *= 1000
    results = run_rule(name, [x.float() for x in tensors], dout.float(), [0, 0, 1, 1], call)
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["chunked", "reference"])
def test_convolution_is_torchs_conv1d_of_each_document(name, width, bias):
    call = call_for([5, 1, 0, 3, 40, 2])
    random = torch.Generator().manual_seed(0)
    total, channels = call.packing.total, 6
    x, dout = (torch.randn(total, channels, generator=random, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(channels, width, generator=random, dtype=torch.float64)
    tensors = [x, weight, *([torch.randn(channels, generator=random, dtype=torch.float64)] if bias else [])]

    def ours(x, weight, bias=None):
        return BY_NAME[name].conv(x, weight, bias, call)

    def torchs(x, weight, bias=None):
        history = [torch.nn.functional.pad(x[a:b].T[None], (width - 1, 0)) for a, b in call.packing.spans()]
        outs = [torch.nn.functional.conv1d(h, weight[:, None], bias, groups=channels)[0].T for h in history]
        return torch.nn.functional.silu(torch.cat(outs))

    for a, b in zip(with_gradients(ours, tensors, dout), with_gradients(torchs, tensors, dout), strict=True):
        assert (a - b).abs().max() <= 1e-13 * max(1, b.abs().max())


def test_rejects_an_unknown_kernel():
    with pytest.raises(ArgumentError, match="auto or fla or chunked or reference"):
        choose_kernel(KERNELS, "triton", call_for([3]))


def test_auto_is_chunked_on_the_cpu():
    assert choose_kernel(KERNELS, "auto", call_for([3])).name == "chunked"
