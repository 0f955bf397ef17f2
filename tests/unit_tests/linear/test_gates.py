"""Gates: torch's own bits on the CPU, in few operators, and the kernels beside them under Triton's interpreter.

The interpreter has a process of its own, since it changes Triton for good.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_cp.linear.activations import sigmoid_value, softplus
from megatron_cp.linear.gates import delta, steps
from megatron_cp.linear.gates.tensors import dense
from megatron_cp.linear.reductions import L2_EPS, expand_to_tokens
from tests.commands import run_module

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Sizes(NamedTuple):
    """The sizes of a delta rule's gates; `before` and `after` are the heads of other ranks."""

    tokens: int
    key_heads: int
    head_dim: int
    heads: int
    channels: int = 1
    lower_bound: float | None = None
    before: int = 0
    after: int = 0


DELTA = [
    Sizes(130, 3, 24, 5, before=2, after=1), Sizes(7, 2, 8, 4), Sizes(1, 1, 1, 1),
    Sizes(33, 2, 16, 4, channels=16, before=1), Sizes(70, 1, 20, 3, channels=20, lower_bound=-5.0, after=2),
    Sizes(600, 1, 8, 17, channels=3), Sizes(0, 2, 8, 4, after=1), Sizes(5, 0, 8, 0, before=3, channels=4),
]  # fmt: skip
LIMITS = [(None, True), ((0.5, 2.0), True), ((0.0, 1.0), False), ((0.0, float("inf")), False)]
STEPS = [(130, 5), (7, 40), (1, 1), (0, 3), (4, 0)]


def delta_inputs(sizes: Sizes, dtype: torch.dtype, width: int = 3, device: str = "cpu") -> list[Tensor]:
    """Sections of a table of rows, `width` wider than they need, and parameters."""
    tokens, key_heads, dim, heads, channels, _, before, after = sizes
    draw = torch.Generator().manual_seed(sum(map(ord, str(sizes))))
    shapes = [(key_heads, dim), (key_heads, dim), (heads, 1), (heads, channels)]
    table = torch.randn(tokens, sum(h * d for h, d in shapes) + width, generator=draw, dtype=FP64)
    table[:, -heads * channels - width :] *= 4
    columns = table.to(dtype).to(device).split([*(h * d for h, d in shapes), width], 1)
    sections = [x.unflatten(1, shape) if shape[0] else x.reshape(tokens, *shape) for x, shape in zip(columns, shapes)]  # noqa: B905
    of_all = before + heads + after
    return [*sections, *(torch.randn(n, generator=draw).to(device) for n in (of_all, of_all * channels))]


def with_gradients(function: Callable[..., Any], *inputs: Tensor | None) -> list[Tensor]:
    """Outputs and the gradients of all inputs."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    outputs = [y for y in function(*leaves) if y is not None]
    draw = torch.Generator().manual_seed(1)
    gradients = [torch.randn(y.shape, generator=draw).to(y) for y in outputs]
    given = [x for x in leaves if x is not None]
    return [*outputs, *torch.autograd.grad(outputs, given, gradients, materialize_grads=True)]


class Sigmoid(torch.autograd.Function):
    """Ours, which overflows to the right limits, and its gradient."""

    @staticmethod
    def forward(ctx, x):
        y = sigmoid_value(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (y * (1 - y))


def l2_by_autograd(x: Tensor) -> Tensor:
    full = x.to(torch.promote_types(x.dtype, FP32))
    return (full * (full.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).to(x.dtype)


def delta_by_autograd(sizes: Sizes) -> Callable[..., Any]:
    """Computes the gates step by step, by autograd."""

    def gates(q, k, beta, x, rates, bias):
        dtype, (tokens, heads, channels) = torch.promote_types(x.dtype, FP32), x.shape
        own = slice(sizes.before, sizes.before + heads)
        rate = expand_to_tokens(rates[own].to(dtype).exp(), tokens)[..., None]
        own_bias = bias.unflatten(0, (-1, channels))[own].flatten().to(dtype)
        shifted = x.to(dtype) + expand_to_tokens(own_bias, tokens).view(x.shape)
        bound = sizes.lower_bound
        g = -rate * softplus(shifted) if bound is None else bound * Sigmoid.apply(rate * shifted)
        strength = Sigmoid.apply(beta.squeeze(-1).to(dtype))
        return l2_by_autograd(q), l2_by_autograd(k), g if channels > 1 else g.squeeze(-1), strength

    return gates


def delta_by(function: Any, sizes: Sizes) -> Callable[..., Any]:
    own = slice(sizes.before, sizes.before + sizes.heads)
    return lambda *inputs: function.apply(*inputs, own, sizes.lower_bound, sizes.channels > 1)


def steps_by_autograd(heads: slice, limit: Any, softplus_too: bool) -> Callable[..., Any]:
    def gates(x, rates, bias):
        dtype = torch.promote_types(x.dtype, FP32)
        step = x.squeeze(-1).to(dtype)
        if bias is not None:
            step = step + expand_to_tokens(bias[heads].to(dtype), len(step))
        if softplus_too:
            step = softplus(step)
        return step if limit is None else step.clamp(*limit), None if rates is None else -rates[heads].to(dtype).exp()

    return gates


def steps_by(function: Any, *options: Any) -> Callable[..., Any]:
    return lambda *inputs: function.apply(*inputs, *options)


def with_either(
    by: Callable[..., Any], functions: tuple[Any, Any], options: tuple[Any, ...], inputs: Sequence[Tensor | None]
) -> list[list[Tensor]]:
    """Outputs and gradients of `by(function, *options)` for each of two functions: the kernels', and torch's."""
    return [with_gradients(by(function, *options), *inputs) for function in functions]


def step_inputs(tokens: int, heads: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    draw = torch.Generator().manual_seed(tokens + heads)
    table = torch.randn(tokens, heads + 2, generator=draw).to(dtype).to(device)
    return [table[:, 1:-1, None], *(torch.randn(heads + 3, generator=draw).to(device) for _ in range(2))]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(*(z.contiguous().view(torch.uint8) for z in (x, y)))
        for x, y in zip(found, expected, strict=True)
    )


@pytest.mark.any_cpu
@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("sizes", DELTA, ids=str)
def test_gates_of_delta_rules_have_autograds_bits(sizes: Sizes, dtype: torch.dtype):
    inputs = delta_inputs(sizes, dtype)
    expected = with_gradients(delta_by_autograd(sizes), *inputs)
    assert same_bits(with_gradients(delta_by(delta._Eager, sizes), *inputs), expected)
    norms = with_gradients(lambda *both: map(l2_by_autograd, both), *inputs[:2])
    assert same_bits(with_gradients(delta.normalised, *inputs[:2]), norms)


def clamp_has_a_gradient_at_its_limits() -> bool:
    """True up to torch 2.13, for mamba_ssm's kernels and for ours; torch 2.14 takes the other subgradient."""
    one = torch.ones((), requires_grad=True)
    one.clamp(0, 1).backward()
    return bool(one.grad)


@pytest.mark.any_cpu
@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize(("limit", "softplus_too"), LIMITS, ids=str)
@pytest.mark.parametrize(("tokens", "heads"), STEPS)
def test_steps_have_autograds_bits(tokens: int, heads: int, limit: Any, softplus_too: bool, dtype: torch.dtype):
    options, (x, rates, bias) = (slice(1, 1 + heads), limit, softplus_too), step_inputs(tokens, heads, dtype)
    if limit is not None and not clamp_has_a_gradient_at_its_limits():
        x = x.where((x != limit[0]) & (x != limit[1]), x + 0.125)
    for inputs in [(x, rates, bias), (x, None, bias), (x, rates, None), (x, None, None)]:
        expected = with_gradients(steps_by_autograd(*options), *inputs)
        assert same_bits(with_gradients(steps_by(steps._Eager, *options), *inputs), expected)


@pytest.mark.any_cpu
def test_parameters_may_have_a_type_of_their_own():
    sizes = DELTA[0]
    inputs = delta_inputs(sizes, FP32)
    inputs[2], inputs[4], inputs[5] = inputs[2].double(), inputs[4].bfloat16(), inputs[5].double()
    expected = with_gradients(delta_by_autograd(sizes), *inputs)
    assert same_bits(with_gradients(delta_by(delta._Eager, sizes), *inputs), expected)


def test_what_kernels_take_is_copied_only_where_it_must_be():
    table = torch.zeros(4, 64, dtype=BF16)
    begins, strides = table[:, 8:24].unflatten(1, (2, 8)), torch.zeros(4, 36, dtype=BF16)[:, :16].unflatten(1, (2, 8))
    later, apart = table[:, 1:17].unflatten(1, (2, 8)), table.unflatten(1, (2, 32))[..., :8]
    assert dense((begins,), (8,))[0] is begins
    assert dense((later, strides, apart), (1, 1, 1))[:2] == [later, strides]
    for copied in dense((later, strides, apart), (8, 8, 8)):
        assert copied.is_contiguous()
        assert copied.data_ptr() % 16 == 0
    rates = torch.arange(8.0)  # of heads: a vector has no rows, so that its elements must be dense
    assert dense((rates,), (1,))[0] is rates
    assert dense((rates[::2],), (1,))[0].stride() == (1,)


CHECKS = ["delta_rules", "alone", "extremes", "step_sizes"]
EVERY = {"delta_rules": 5, "step_sizes": 5}  # of their cases, in `make test`
INTERPRETED = [[f"{check}={EVERY.get(check, 1)}" for check in CHECKS]]  # each list in one process
INTERPRETED += [pytest.param([f"{check}=1"], marks=pytest.mark.thorough) for check in EVERY]


@pytest.mark.parametrize("checks", INTERPRETED, ids=" ".join)
def test_interpreted(checks: list[str]):
    run_module("tests.unit_tests.linear.test_gates", *checks, TRITON_INTERPRET="1")


# Kernels, and torch beside them.
DELTA_RULES, NORMS = (delta._Fused, delta._Eager), (delta._FusedNorms, delta._EagerNorms)
STEP_SIZES = (steps._Fused, steps._Eager)
# Of a number. A GPU's exp is off by as many units as its argument; kernels and torch round before they store.
ROUNDING = {FP32: 1e-5, BF16: 2**-7, FP16: 2**-10}


def assert_equal_but_for_rounding(found: list[Tensor], expected: list[Tensor]) -> None:
    """Elementwise, and beside a thousandth of the largest: sums have other orders, and differences cancel."""
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert x.dtype == y.dtype, number
        largest = y.double().abs().max().item() if y.numel() else 0.0
        torch.testing.assert_close(
            x, y, rtol=ROUNDING[y.dtype], atol=1e-3 * ROUNDING[y.dtype] * largest + 1e-6 * largest, equal_nan=True,
            msg=lambda text, number=number: f"{number}: {text}",
        )  # fmt: skip


def delta_rules(device: str = "cpu", every: int = 1) -> None:
    for dtype, sizes, width in [*itertools.product((FP32, BF16, FP16), DELTA, (3, 8))][::every]:
        inputs = delta_inputs(sizes, dtype, width, device)
        found, expected = with_either(delta_by, DELTA_RULES, (sizes,), inputs)
        assert_equal_but_for_rounding(found, expected)
        assert same_bits(with_gradients(delta_by(delta._Fused, sizes), *inputs), found)
        assert_equal_but_for_rounding(*with_either(steps_by, NORMS, (), inputs[:2]))


def alone(device: str = "cpu") -> None:
    """A head, and a token, has the bits that it has among others, wherever its rows begin."""
    for sizes in (Sizes(40, 4, 24, 4), Sizes(40, 3, 16, 3, channels=16), Sizes(40, 3, 12, 3, 12, lower_bound=-3.0)):
        inputs = delta_inputs(sizes, BF16, device=device)
        heads, channels = sizes.heads, sizes.channels
        whole = with_gradients(delta_by(delta._Fused, sizes), *inputs)
        of_tokens = [*range(8)]  # the outputs and four of the gradients
        for first, last in ((0, 1), (2, 3), (1, heads)):
            own = sizes._replace(key_heads=last - first, heads=last - first, before=first, after=heads - last)
            some = [x[:, first:last] for x in inputs[:4]]

            leaves = [x.detach().requires_grad_() for x in (*some, *inputs[4:])]
            outputs = delta_by(delta._Fused, own)(*leaves)
            draw = torch.Generator().manual_seed(1)
            gradients = [torch.randn(y.shape, generator=draw).to(y)[:, first:last] for y in whole[:4]]
            found = [*outputs, *torch.autograd.grad(outputs, leaves, gradients)]
            assert same_bits([found[i] for i in of_tokens], [whole[i][:, first:last] for i in of_tokens])
            assert same_bits([found[8][first:last]], [whole[8][first:last]])
            columns = slice(first * channels, last * channels)
            assert same_bits([found[9][columns]], [whole[9][columns]])
            for gradient, width in ((found[8], 1), (found[9], channels)):
                others = torch.cat([gradient[: first * width], gradient[last * width :]])
                assert not others.any()
        some = with_gradients(delta_by(delta._Fused, sizes), *(x[5:30] for x in inputs[:4]), *inputs[4:])
        assert same_bits(some[:4], [x[5:30] for x in whole[:4]])


def extremes(device: str = "cpu") -> None:
    """Infinities and NaN, and where exp overflows: as torch has them."""
    rare = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 88.0, -88.0, 120.0, -120.0, 3e38, 1e-30]
    values = torch.tensor(rare, device=device)
    for lower_bound in (None, -5.0):
        sizes = Sizes(len(values), 1, 4, 2, channels=2, lower_bound=lower_bound)
        q, k, beta, x, rates, bias = delta_inputs(sizes, FP32, device=device)
        x, beta, q = x.clone(), beta.clone(), q.clone()
        x[:, 0, 0] = beta[:, 0, 0] = values
        q[:6, 0, 0] = torch.tensor([float("nan"), float("inf"), 0.0, 1e19, 1e30, 1e-30], device=device)
        bias[:] = 0
        outputs = [delta_by(function, sizes)(q, k, beta, x, rates, bias) for function in (delta._Fused, delta._Eager)]
        for found, expected in zip(*outputs, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-30, equal_nan=True)
        some = slice(3, 9)  # without infinities and NaN
        given = k[some], k[some], beta[some], x[some], rates, bias
        found, expected = with_either(delta_by, DELTA_RULES, (sizes,), given)
        assert_equal_but_for_rounding(found, expected)
        assert all(y.isfinite().all() for y in found)
    for limit in (None, (0.5, 2.0)):
        inputs = values[:, None, None], torch.zeros(1, device=device), torch.zeros(1, device=device)
        found, expected = with_either(steps_by, STEP_SIZES, (slice(0, 1), limit, True), inputs)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-30, equal_nan=True)


def step_sizes(device: str = "cpu", every: int = 1) -> None:
    drawn = [*itertools.product((FP32, BF16, FP16), STEPS, LIMITS)]
    for dtype, (tokens, heads), (limit, softplus_too) in drawn[::every]:
        x, rates, bias = step_inputs(tokens, heads, dtype, device)
        options = slice(1, 1 + heads), limit, softplus_too
        for inputs in [(x, rates, bias), (x, None, bias), (x, rates, None), (x, None, None)]:
            assert_equal_but_for_rounding(*with_either(steps_by, STEP_SIZES, options, inputs))


if __name__ == "__main__":
    from tools.triton_interpreter import interpret_triton, round_as_hardware_does

    interpret_triton()
    round_as_hardware_does()
    for check in sys.argv[1:]:
        name, every = check.split("=")
        globals()[name](**({} if every == "1" else {"every": int(every)}))
