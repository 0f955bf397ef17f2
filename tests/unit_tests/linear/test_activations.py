"""The nonlinearities are torch's to the last bits, and their bits do not depend on what stands beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_cp.linear import activations

Function = Callable[[Tensor], Tensor]

OURS: dict[str, Function] = {"silu": activations.silu, "softplus": activations.softplus}
TORCHS: dict[str, Function] = {
    "silu": torch.nn.functional.silu,
    # torch's softplus returns x itself above its threshold, which is 20 unless told otherwise: 2e-9 off there.
    "softplus": lambda x: torch.nn.functional.softplus(x, threshold=1e9),
}
of_each = pytest.mark.parametrize("name", OURS)


def inputs() -> Tensor:
    """Both tails, both sides of zero, and numbers so small that `1 + x` loses them."""
    tails = torch.tensor([0.0, -0.0, 1e-300, -1e-300, 1e-17, -1e-17, 36.7, -36.7, 700.0, -700.0], dtype=torch.float64)
    return torch.cat([torch.linspace(-40, 40, 2001, dtype=torch.float64), tails])


def with_gradient(function: Function) -> Function:
    """The gradient, where the gradient from above is not one everywhere."""

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        function(leaf).backward(x / 2 - 1)
        return leaf.grad

    return gradient


@of_each
def test_values_and_gradients_equal_torchs(name: str):
    ours, torchs, found = OURS[name], TORCHS[name], []
    for function in (ours, torchs):
        x = inputs().requires_grad_()
        y = function(x)
        y.backward(torch.linspace(-1, 1, len(x), dtype=torch.float64))
        found.append((y.detach(), x.grad))
        assert torch.equal(x, inputs())
    (values, gradients), (right, right_gradients) = found
    torch.testing.assert_close(values, right, rtol=2e-15, atol=2e-15)
    torch.testing.assert_close(gradients, right_gradients, rtol=1e-13, atol=2e-15)
    few = torch.linspace(-6, 6, 13, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, few)
    assert torch.autograd.gradgradcheck(ours, few)


def test_sigmoid_equals_torch():
    torch.testing.assert_close(activations.sigmoid_value(inputs()), torch.sigmoid(inputs()), rtol=2e-15, atol=2e-15)
    assert activations.sigmoid_value(torch.tensor([-1e4, 1e4])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@of_each
def test_nothing_overflows_on_the_way_to_the_limits(name: str, dtype: torch.dtype):
    """Around +-88 (fp32) and +-11 (fp16), where exp overflows, and far out."""
    x = torch.cat([torch.linspace(-120, 120, 961), torch.tensor([-6e4, -1e4, 1e4, 6e4])]).to(dtype).requires_grad_()
    y = OURS[name](x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert torch.equal(y[-4:], x[-4:].relu())
    assert x.grad[-4:].tolist() == [0, 0, 1, 1]


BASE: dict[str, Function] = {
    "torch.exp": torch.exp,
    "torch.log1p": lambda x: torch.log1p(x.abs()),
    "sigmoid": activations.sigmoid_value,
}
GRADIENTS = {f"gradient of {name}": with_gradient(function) for name, function in OURS.items()}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [*OURS, *GRADIENTS, *BASE])
def test_bits_do_not_depend_on_the_columns_beside(function: str, dtype: torch.dtype):
    compute = {**OURS, **GRADIENTS, **BASE}[function]
    draw = torch.Generator().manual_seed(0)
    full = (4 * torch.randn(23, 40, generator=draw, dtype=torch.float64)).to(dtype)
    expected = compute(full)
    differing = [
        (width, start, kind)
        for width in range(1, 18)
        for start in (0, 3, 40 - width)
        for kind, rows, laid_out in (
            ("view", slice(None), lambda x: x),
            ("copy", slice(None), Tensor.contiguous),
            ("one row", slice(5, 6), Tensor.contiguous),
        )
        if not torch.equal(
            bits(compute(laid_out(full[rows, start : start + width]))), bits(expected[rows, start : start + width])
        )
    ]
    assert differing == []
