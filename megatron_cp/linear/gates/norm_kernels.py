"""The kernels of `gated_norm.py`. A program computes some tokens of one group of features.

Tokens are independent of each other. Ranks differ in the number of tokens only, for which kernels are not specialized.
"""

# ruff: noqa: N803 - constants of a kernel are in capitals, as in Triton's own

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from megatron_cp.linear.gates.triton_kernels import sigmoid


@triton.jit(do_not_specialize=("tokens",))
def norm_forward(
    x: tl.tensor, z: tl.tensor, x_stride: tl.tensor, z_stride: tl.tensor, weight: tl.tensor, out: tl.tensor,
    eps: tl.float32, tokens: tl.int64, groups: tl.tensor, size: tl.tensor,
    TOKENS: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Computes `weight * y / rms(y)` with `y = x silu(z)`, or x if z is None; there are `groups * size` features."""
    block, feature, is_feature = _place(tl.program_id(0), groups, size, SIZE)
    token, there = _rows(block, 0, tokens, is_feature, TOKENS, 1)
    y = tl.load(x + token * x_stride + feature, there, 0.0).to(tl.float32)
    if z is not None:
        logits = tl.load(z + token * z_stride + feature, there, 0.0).to(tl.float32)
        y *= logits * sigmoid(logits)
    scale = tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / size + eps)
    weights = tl.load(weight + feature, is_feature, 0.0).to(tl.float32)
    tl.store(out + token * (groups * size) + feature, (y * scale * weights).to(out.dtype.element_ty), there)


@triton.jit(do_not_specialize=("tokens",))
def norm_backward(
    x: tl.tensor, z: tl.tensor, x_stride: tl.tensor, z_stride: tl.tensor, weight: tl.tensor, dout: tl.tensor,
    dout_stride: tl.tensor, dx: tl.tensor, dz: tl.tensor, sums: tl.tensor, eps: tl.float32, tokens: tl.int64,
    groups: tl.tensor, size: tl.tensor, TOKENS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
) -> None:  # fmt: skip
    """Computes the gradients of x and z, and the weight's sums `[programs along the tokens, groups * size]`."""
    block, feature, is_feature = _place(tl.program_id(0), groups, size, SIZE)
    width = groups * size
    weight_sum = tl.zeros([1, SIZE], tl.float32)
    for step in range(STEPS):
        token, there = _rows(block, step, tokens, is_feature, TOKENS, STEPS)
        values = tl.load(x + token * x_stride + feature, there, 0.0).to(tl.float32)
        y = values
        if z is not None:
            logits = tl.load(z + token * z_stride + feature, there, 0.0).to(tl.float32)
            opened = sigmoid(logits)
            y = values * (logits * opened)
        scale = tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / size + eps)
        gradient = tl.load(dout + token * dout_stride + feature, there, 0.0).to(tl.float32)
        weight_sum += tl.sum(tl.where(there, gradient * (y * scale), 0.0), 0, keep_dims=True)
        gradient *= tl.load(weight + feature, is_feature, 0.0).to(tl.float32)  # loaded again to save registers
        along = tl.sum(gradient * y, 1, keep_dims=True) / size * (scale * scale * scale)
        dy = gradient * scale - along * y
        if z is None:
            tl.store(dx + token * width + feature, dy.to(dx.dtype.element_ty), there)
        else:
            dz_values = dy * values * (opened * (1 + logits * (1 - opened)))
            tl.store(dx + token * width + feature, (dy * (logits * opened)).to(dx.dtype.element_ty), there)
            tl.store(dz + token * width + feature, dz_values.to(dz.dtype.element_ty), there)
    tl.store(sums + block * width + feature, weight_sum, is_feature)


@triton.jit(do_not_specialize=("blocks",))
def norm_weight(
    sums: tl.tensor, dweight: tl.tensor, blocks: tl.int64, width: tl.tensor, BLOCKS: tl.constexpr, SIZE: tl.constexpr
) -> None:
    """Computes the weight's gradient by adding the sums in order."""
    feature = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for begin in range(0, blocks, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)[:, None]
        there = (block < blocks) & (feature < width)[None, :]
        total += tl.sum(tl.load(sums + block * width + feature[None, :], there, 0.0), 0)
    tl.store(dweight + feature, total.to(dweight.dtype.element_ty), feature < width)


@triton.jit
def _place(program: tl.tensor, groups: tl.tensor, size: tl.tensor, SIZE: tl.constexpr) -> tl.tuple:
    """Returns a program's block of tokens, its features `[1, SIZE]`, and True for those that exist."""
    lane = tl.arange(0, SIZE)[None, :]
    return (program // groups).to(tl.int64), (program % groups) * size + lane, lane < size


@triton.jit
def _rows(
    block: tl.tensor, step: tl.tensor, tokens: tl.tensor, is_feature: tl.tensor, TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    token = (block * STEPS + step) * TOKENS + tl.arange(0, TOKENS)[:, None]
    return token, (token < tokens) & is_feature
