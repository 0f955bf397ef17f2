"""Launches of the gates' kernels: one each way, and backward a second one for the parameters' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp.linear.gates.triton_kernels import (
    delta_backward,
    delta_forward,
    delta_parameters,
    step_backward,
    step_forward,
    step_parameters,
)
from megatron_cp.linear.reductions import L2_EPS

ELEMENTS = 2048  # of a tile: 16 for each of 128 threads
# These numbers fix the order of sums, and must not depend on how many heads a rank has.
TOKENS, COLUMNS = 64, 16  # of a tile where heads have one channel
STEPS = 4  # tiles of a program where they have more
SUMMED = 64  # programs' sums at a time
EXACT = {"enable_fp_fusion": False}  # products are rounded before they are added, as torch's are


class _Delta(NamedTuple):
    """What a launch for a delta rule's gates is told, and the number of blocks of tokens whose sums are kept."""

    programs: int
    numbers: tuple[int, ...]  # tokens, key heads, their units, heads, their units, programs of norms and of strengths
    constants: dict[str, int | float]
    blocks: int


@lru_cache(maxsize=256)
def _delta(
    tokens: int, key_heads: int, head_dim: int, unit: int, heads: int = 0, channels: int = 1, x_unit: int = 1, *,
    bounded: bool = False,
) -> _Delta:  # fmt: skip
    dim, per_feature = _power_of_2(head_dim), channels > 1
    norm_tokens = max(ELEMENTS // dim, 1)
    norms = _blocks(tokens, norm_tokens) * key_heads
    betas = _blocks(tokens, TOKENS) * _blocks(heads, COLUMNS)
    columns = _power_of_2(channels) if per_feature else COLUMNS
    tile_tokens, steps = (max(ELEMENTS // columns, 1), STEPS) if per_feature else (TOKENS, 1)
    blocks = _blocks(tokens, tile_tokens * steps)
    constants = {
        "EPS": L2_EPS, "UNIT": unit, "NORM_TOKENS": norm_tokens, "DIM": dim, "BETA_TOKENS": TOKENS,
        "BETA_COLUMNS": COLUMNS, "X_UNIT": x_unit, "TOKENS": tile_tokens, "COLUMNS": columns, "STEPS": steps,
        "PER_FEATURE": per_feature, "BOUNDED": bounded, **EXACT,
    }  # fmt: skip
    numbers = (tokens, key_heads, head_dim // unit, heads, channels // x_unit, norms, betas)
    programs = norms + betas + blocks * (heads if per_feature else _blocks(heads, columns))
    return _Delta(programs, numbers, constants, blocks)


Tensors = Sequence[Tensor]


def norms(inputs: Tensors, unit: int) -> tuple[Tensor, Tensor]:
    """q and k divided by their norms. Tensors are as `dense` makes them for these units, here and below."""
    q, k = inputs
    told = _delta(*q.shape, unit)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    if told.programs:
        with torch.cuda.device_of(q):
            delta_forward[(told.programs,)](
                q, k, None, None, q.stride(0), k.stride(0), 0, 0, None, None, 0, 0.0,
                *told.numbers, q_out, k_out, None, None, **told.constants,
            )  # fmt: skip
    return q_out, k_out


def norm_gradients(inputs: Tensors, gradients: Tensors, unit: int) -> tuple[Tensor, Tensor]:
    """The gradients of q and k, from those of what `norms` returned."""
    (q, k), (dq_out, dk_out) = inputs, gradients
    told = _delta(*q.shape, unit)
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    if told.programs:
        with torch.cuda.device_of(q):
            delta_backward[(told.programs,)](
                q, k, None, None, q.stride(0), k.stride(0), 0, 0, None, None, 0, 0.0,
                *told.numbers, dq_out, dk_out, None, None, dq_out.stride(0), dk_out.stride(0), 0, 0,
                dq, dk, None, None, None, **told.constants,
            )  # fmt: skip
    return dq, dk


def delta(
    inputs: Tensors, first: int, lower_bound: float | None, units: tuple[int, int], g_shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k normalised, g and beta as the rule takes them.

    Args:
        inputs: q, k, beta, x, rates and bias, as `delta_gates` has them.
        first: of the own heads.
        lower_bound: of g, or None.
        units: of q and k, and of x.
        g_shape: g's.
    """
    (q, k, beta, x, rates, bias), (unit, x_unit) = inputs, units
    told = _delta(*q.shape, unit, *x.shape[1:], x_unit, bounded=lower_bound is not None)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    g, beta_out = x.new_empty(g_shape, dtype=torch.float32), x.new_empty(beta.shape[:2], dtype=torch.float32)
    if told.programs:
        with torch.cuda.device_of(x):
            delta_forward[(told.programs,)](
                q, k, beta, x, q.stride(0), k.stride(0), beta.stride(0), x.stride(0), rates,
                bias, first, lower_bound or 0.0, *told.numbers, q_out, k_out, beta_out, g, **told.constants,
            )  # fmt: skip
    return q_out, k_out, g, beta_out


def delta_gradients(
    inputs: Tensors, gradients: Tensors, first: int, lower_bound: float | None, units: tuple[int, int]
) -> tuple[Tensor, ...]:
    """The gradients of all inputs, from those of what `delta` returned."""
    (q, k, beta, x, rates, bias), (unit, x_unit) = inputs, units
    dq_out, dk_out, dg, dbeta_out = gradients
    told = _delta(*q.shape, unit, *x.shape[1:], x_unit, bounded=lower_bound is not None)
    dq, dk, dbeta, dx, drates, dbias = of_inputs = tuple([each.new_empty(each.shape) for each in inputs])
    heads, channels = x.shape[1:]
    sums = x.new_empty((told.blocks, 2, heads * channels), dtype=torch.float32)
    with torch.cuda.device_of(x):
        if told.programs:
            delta_backward[(told.programs,)](
                q, k, beta, x, q.stride(0), k.stride(0), beta.stride(0), x.stride(0), rates,
                bias, first, lower_bound or 0.0, *told.numbers, dq_out, dk_out, dbeta_out, dg,
                dq_out.stride(0), dk_out.stride(0), dbeta_out.stride(0), dg.stride(0),
                dq, dk, dbeta, dx, sums, **told.constants,
            )  # fmt: skip
        delta_parameters[(rates.shape[0],)](
            sums, rates, drates, dbias, told.blocks, first, heads, channels,
            BLOCKS=max(SUMMED // _power_of_2(channels), 4), CHANNELS=_power_of_2(channels), **EXACT,
        )  # fmt: skip
    return of_inputs


def steps(
    inputs: Sequence[Tensor | None], heads: slice, limit: tuple[float, float] | None, *, softplus: bool
) -> tuple[Tensor, Tensor | None]:
    """Steps `[T, h]` of x `[T, h, 1]`, and `-exp(rates)` `[h]` of own heads; inputs are x, rates and bias."""
    x, rates, bias = inputs
    assert x is not None
    tokens, own, _ = x.shape
    out = x.new_empty((tokens, own), dtype=torch.float32)
    decays = None if rates is None else x.new_empty(own, dtype=torch.float32)
    if own:  # without tokens too, for the decays
        with torch.cuda.device_of(x):
            step_forward[(max(_blocks(tokens, TOKENS), 1) * _blocks(own, COLUMNS),)](
                x, x.stride(0), rates, bias, heads.start, *(limit or (0.0, 0.0)), tokens, own, out, decays,
                TOKENS=TOKENS, COLUMNS=COLUMNS, SOFTPLUS=softplus, CLAMPED=limit is not None, **EXACT,
            )  # fmt: skip
    return out, decays


def step_gradients(
    inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], heads: slice,
    limit: tuple[float, float] | None, *, softplus: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, rates and bias, from those of what `steps` returned."""
    (x, rates, bias), (dout, ddecays) = inputs, gradients
    assert x is not None
    assert dout is not None
    tokens, own, _ = x.shape
    dx = x.new_empty(x.shape)
    drates = None if rates is None else rates.new_empty(rates.shape)
    dbias = None if bias is None else bias.new_empty(bias.shape)
    blocks = _blocks(tokens, TOKENS)
    sums = None if bias is None else x.new_empty((blocks, own), dtype=torch.float32)
    with torch.cuda.device_of(x):
        if programs := blocks * _blocks(own, COLUMNS):
            step_backward[(programs,)](
                x, x.stride(0), bias, heads.start, *(limit or (0.0, 0.0)), tokens, own, dout, dout.stride(0), dx,
                sums, TOKENS=TOKENS, COLUMNS=COLUMNS, SOFTPLUS=softplus, CLAMPED=limit is not None, **EXACT,
            )  # fmt: skip
        parameters = [each for each in (rates, bias) if each is not None]
        if parameters:
            step_parameters[(parameters[0].shape[0],)](
                sums, rates, ddecays, drates, dbias, blocks, heads.start, own, BLOCKS=SUMMED, **EXACT
            )  # fmt: skip
    return dx, drates, dbias


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _power_of_2(number: int) -> int:
    """The least one that is no less."""
    return 1 << (number - 1).bit_length()
