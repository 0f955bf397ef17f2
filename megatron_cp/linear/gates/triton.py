"""Launches the gates' kernels: one forward, and two backward, of which one is for the parameters' gradients."""

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

ELEMENTS = 2048  # elements of a tile: 16 for each of 128 threads
# These numbers fix the order of sums, and must not depend on the number of heads of a rank.
TOKENS, COLUMNS = 64, 16  # shape of a tile where heads have one channel
STEPS = 4  # tiles of a program where heads have more channels
SUMMED = 64  # sums of programs that are added at a time
EXACT = {"enable_fp_fusion": False}  # rounds products before they are added, as torch does


class _DeltaLaunch(NamedTuple):
    """The sizes of a launch for a delta rule's gates, and the number of blocks of tokens with sums of their own."""

    programs: int
    # Tokens, key heads, units of a key head, heads, units of a head, programs for norms, programs for write strengths.
    numbers: tuple[int, ...]
    constants: dict[str, int | float]
    blocks: int


@lru_cache(maxsize=256)
def _delta_launch(
    tokens: int, key_heads: int, head_dim: int, unit: int, heads: int = 0, channels: int = 1, x_unit: int = 1, *,
    bounded: bool = False,
) -> _DeltaLaunch:  # fmt: skip
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
    return _DeltaLaunch(programs, numbers, constants, blocks)


Tensors = Sequence[Tensor]


def norms(inputs: Tensors, unit: int) -> tuple[Tensor, Tensor]:
    """Divides q and k by their norms. Here and below, tensors have been made dense for their units by `dense`."""
    q, k = inputs
    launch = _delta_launch(*q.shape, unit)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    if launch.programs:
        with torch.cuda.device_of(q):
            delta_forward[(launch.programs,)](
                q, k, None, None, q.stride(0), k.stride(0), 0, 0, None, None, 0, 0.0,
                *launch.numbers, q_out, k_out, None, None, **launch.constants,
            )  # fmt: skip
    return q_out, k_out


def norm_gradients(inputs: Tensors, gradients: Tensors, unit: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients of q and k, given those of the results of `norms`."""
    (q, k), (dq_out, dk_out) = inputs, gradients
    launch = _delta_launch(*q.shape, unit)
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    if launch.programs:
        with torch.cuda.device_of(q):
            delta_backward[(launch.programs,)](
                q, k, None, None, q.stride(0), k.stride(0), 0, 0, None, None, 0, 0.0,
                *launch.numbers, dq_out, dk_out, None, None, dq_out.stride(0), dk_out.stride(0), 0, 0,
                dq, dk, None, None, None, **launch.constants,
            )  # fmt: skip
    return dq, dk


def delta(
    inputs: Tensors, first: int, lower_bound: float | None, units: tuple[int, int], g_shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns normalised q and k, g, and `sigmoid(beta)`."""
    (q, k, beta, x, rates, bias), (unit, x_unit) = inputs, units
    launch = _delta_launch(*q.shape, unit, *x.shape[1:], x_unit, bounded=lower_bound is not None)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    g, beta_out = x.new_empty(g_shape, dtype=torch.float32), x.new_empty(beta.shape[:2], dtype=torch.float32)
    if launch.programs:
        with torch.cuda.device_of(x):
            delta_forward[(launch.programs,)](
                q, k, beta, x, q.stride(0), k.stride(0), beta.stride(0), x.stride(0), rates,
                bias, first, lower_bound or 0.0, *launch.numbers, q_out, k_out, beta_out, g, **launch.constants,
            )  # fmt: skip
    return q_out, k_out, g, beta_out


def delta_gradients(
    inputs: Tensors, gradients: Tensors, first: int, lower_bound: float | None, units: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Returns the gradients of all inputs, given those of the results of `delta`."""
    (q, k, beta, x, rates, bias), (unit, x_unit) = inputs, units
    dq_out, dk_out, dg, dbeta_out = gradients
    launch = _delta_launch(*q.shape, unit, *x.shape[1:], x_unit, bounded=lower_bound is not None)
    dq, dk, dbeta, dx, drates, dbias = dinputs = tuple([each.new_empty(each.shape) for each in inputs])
    heads, channels = x.shape[1:]
    sums = x.new_empty((launch.blocks, 2, heads * channels), dtype=torch.float32)
    with torch.cuda.device_of(x):
        if launch.programs:
            delta_backward[(launch.programs,)](
                q, k, beta, x, q.stride(0), k.stride(0), beta.stride(0), x.stride(0), rates,
                bias, first, lower_bound or 0.0, *launch.numbers, dq_out, dk_out, dbeta_out, dg,
                dq_out.stride(0), dk_out.stride(0), dbeta_out.stride(0), dg.stride(0),
                dq, dk, dbeta, dx, sums, **launch.constants,
            )  # fmt: skip
        delta_parameters[(rates.shape[0],)](
            sums, rates, drates, dbias, launch.blocks, first, heads, channels,
            BLOCKS=max(SUMMED // _power_of_2(channels), 4), CHANNELS=_power_of_2(channels), **EXACT,
        )  # fmt: skip
    return dinputs


def steps(
    inputs: Sequence[Tensor | None], heads: slice, limit: tuple[float, float] | None, *, softplus: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the steps `[T, h]` of x `[T, h, 1]`, and `-exp(rates)` `[h]`; `inputs` are x, rates and bias."""
    x, rates, bias = inputs
    assert x is not None
    tokens, own, _ = x.shape
    out = x.new_empty((tokens, own), dtype=torch.float32)
    decays = None if rates is None else x.new_empty(own, dtype=torch.float32)
    if own:  # decays are needed without tokens too
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
    """Returns the gradients of x, rates and bias, given those of the results of `steps`."""
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
    """Returns the smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()
