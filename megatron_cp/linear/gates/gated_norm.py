"""The gated norm after a state-space rule, `weight * y / rms(y)` with `y = x silu(z)`, by kernels for CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.no_compile import no_compile_backward

ELEMENTS = 1024  # elements of a tile, at least one token's group of features: 8 for each of 128 threads
STEPS = 4  # tiles of a program, which adds the weight's sums of all of them
BLOCKS, FEATURES = 32, 64  # shape of a tile of sums
EXACT = {"enable_fp_fusion": False}  # rounds products before they are added, as torch does


def gated_norm(x: Tensor, z: Tensor | None, weight: Tensor, eps: float, group_size: int) -> Tensor:
    """Computes the gated norm by one kernel forward and two backward; differentiable once.

    Args:
        x: `[..., features]`; `has_kernels` must be True for it and the other tensors.
        z: the gate, shaped like x, or None for no gate.
        weight: `[features]`
        eps: added to the mean of a group's squares.
        group_size: number of features of a group.

    Returns:
        A tensor like x.
    """
    out: Tensor = _GatedNorm.apply(x, z, weight, eps, group_size)
    return out


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor | None, weight: Tensor, eps: float, size: int) -> Tensor:
        from megatron_cp.linear.gates.norm_kernels import norm_forward

        rows, gates, weight = _rows(x), None if z is None else _rows(z), weight.contiguous()
        ctx.save_for_backward(rows, gates, weight)
        ctx.shape, ctx.eps, ctx.size = x.shape, eps, size
        out, (tokens, width) = x.new_empty(x.shape), rows.shape
        tile = _tile(size)
        if tokens:
            with torch.cuda.device_of(x):
                norm_forward[(-(-tokens // tile["TOKENS"]) * (width // size),)](
                    rows, gates, rows.stride(0), 0 if gates is None else gates.stride(0), weight, out, eps, tokens,
                    width // size, size, **tile, **EXACT,
                )  # fmt: skip
        return out

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from megatron_cp.linear.gates.norm_kernels import norm_backward, norm_weight

        rows, gates, weight = ctx.saved_tensors
        dout, size, (tokens, width), tile = _rows(gradients[0]), ctx.size, rows.shape, _tile(ctx.size)
        dx, dz = rows.new_empty(ctx.shape), None if gates is None else gates.new_empty(ctx.shape)
        blocks = -(-tokens // (tile["TOKENS"] * STEPS))
        sums, dweight = rows.new_empty((blocks, width), dtype=torch.float32), torch.empty_like(weight)
        with torch.cuda.device_of(rows):
            if blocks:
                norm_backward[(blocks * (width // size),)](
                    rows, gates, rows.stride(0), 0 if gates is None else gates.stride(0), weight, dout,
                    dout.stride(0), dx, dz, sums, ctx.eps, tokens, width // size, size, **tile, STEPS=STEPS, **EXACT,
                )  # fmt: skip
            norm_weight[(-(-width // FEATURES),)](sums, dweight, blocks, width, BLOCKS=BLOCKS, SIZE=FEATURES, **EXACT)
        return dx, dz, dweight, None, None


def _rows(x: Tensor) -> Tensor:
    """Returns x as `[tokens, features]` with dense features."""
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tile(size: int) -> dict[str, int]:
    """Returns the tokens, the features and the warps of a tile."""
    padded = 1 << (size - 1).bit_length()
    return {"TOKENS": max(ELEMENTS // padded, 1), "SIZE": padded, "num_warps": min(max(padded // 256, 4), 16)}
