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
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(params=OURS)
def name(request) -> str:
    return request.param


def inputs() -> Tensor:
    """Both tails, both sides of zero, and numbers so small that `1 + x` loses them."""
    tails = torch.tensor([0.0, -0.0, 1e-300, -1e-300, 1e-17, -1e-17, 36.7, -36.7, 700.0, -700.0], dtype=torch.float64)
    return torch.cat([torch.linspace(-40, 40, 2001, dtype=torch.float64), tails])


def test_values_and_gradients_equal_torchs(name: str):
    torch.testing.assert_close(OURS[name](inputs()), TORCHS[name](inputs()), rtol=2e-15, atol=2e-15)
    x = torch.linspace(-6, 6, 13, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(OURS[name], x)
    assert torch.autograd.gradgradcheck(OURS[name], x)
    gradients = []
    for function in (OURS[name], TORCHS[name]):
        x = inputs().requires_grad_()
        function(x).backward(torch.linspace(-1, 1, len(x), dtype=torch.float64))
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=2e-15)
    x = torch.randn(7)
    before = x.clone()
    OURS[name](x)
    assert torch.equal(x, before)


def test_sigmoid_equals_torch():
    torch.testing.assert_close(activations.sigmoid_value(inputs()), torch.sigmoid(inputs()), rtol=2e-15, atol=2e-15)
    assert activations.sigmoid_value(torch.tensor([-1e4, 1e4])).tolist() == [0.0, 1.0]


LIMITS = {  # at the far left and the far right: value, gradient
    "silu": ((0.0, 0.0), (1e4, 1.0)),
    "softplus": ((0.0, 0.0), (1e4, 1.0)),
}


def test_values_and_gradients_reach_their_limits_in_fp32(name: str):
    x = torch.tensor([-1e4, 1e4], requires_grad=True)
    y = OURS[name](x)
    y.sum().backward()
    assert list(zip(y.tolist(), x.grad.tolist(), strict=True)) == list(LIMITS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nothing_overflows_on_the_way(name: str, dtype: torch.dtype):
    """Around +-88 (fp32) and +-11 (fp16), where exp overflows, and far out."""
    x = torch.cat([torch.linspace(-120, 120, 961), torch.tensor([-6e4, -1e4, 1e4, 6e4])]).to(dtype).requires_grad_()
    y = OURS[name](x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def with_gradient(function: Function) -> Function:
    """The gradient, where the gradient from above is not one everywhere."""

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        function(leaf).backward(x / 2 - 1)
        return leaf.grad

    return gradient


BASE: dict[str, Function] = {
    "torch.exp": torch.exp,
    "torch.log1p": lambda x: torch.log1p(x.abs()),
    "sigmoid": activations.sigmoid_value,
}
GRADIENTS = {f"gradient of {name}": with_gradient(function) for name, function in OURS.items()}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
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
