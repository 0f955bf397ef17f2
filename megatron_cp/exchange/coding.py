"""Coding and decoding of messages: one byte an element and a float32 scale for each token and head.

    scale = max|x| / largest        code = round(x / scale)        x' = scale * code

The arithmetic is in float32. Of a head whose largest element is m, an element x comes back within |x| / 16 or m / 2^18,
whichever is more, in E4M3; within |x| / 8 or m / 2^32 in E5M2; and within m / 254 in INT8. Below 2^-126 * largest it is
within 2^-126, in all three. A head with an element that is not finite comes back with NaN in it, since its scale is not
finite either.

Shapes: `n` any, `h` heads, `d` head size.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_cp.exchange.codec import Format


def encode(x: Tensor, to: Format, payload: Tensor, scales: Tensor) -> None:
    """Codes `[n..., h, d]` into bytes `payload` of that shape and float32 `scales` `[n..., h]`."""
    full = x.to(torch.float32)
    scale = _largest(x).to(torch.float32).div_(to.largest)
    # A scale below the normal numbers would be rounded too coarsely: codes would overflow. NaN stays.
    scale.clamp_min_(torch.finfo(torch.float32).tiny)
    coded = torch.div(full, scale.unsqueeze(-1), out=None if full is x else full)
    dtype: torch.dtype = getattr(torch, to.dtype)
    payload.view(dtype).copy_(coded.round_() if dtype == torch.int8 else coded)
    scales.copy_(scale)


def decode(payload: Tensor, scales: Tensor, come_from: Format) -> Tensor:
    """`[n..., h, d]` in float32."""
    dtype: torch.dtype = getattr(torch, come_from.dtype)
    return _numbers(payload, dtype).mul_(scales.unsqueeze(-1))


def _largest(x: Tensor) -> Tensor:
    """`max|x|` over the last axis, as a copy. NaN if there is one."""
    # Without their signs floats are ordered as their bits are, NaN last; and torch compares integers several times
    # faster than it does floats, between which it must look for NaN.
    bits = x.view(_INTEGERS[x.dtype.itemsize])
    return bits.bitwise_and(torch.iinfo(bits.dtype).max).amax(-1).view(x.dtype)


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _numbers(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes as float32, dense."""
    in_pairs = payload.stride(-1) == 1 and not any(
        size % 2 for size in (payload.shape[-1], payload.storage_offset(), *payload.stride()[:-1])
    )
    if payload.device.type != "cpu" or dtype == torch.int8 or not in_pairs or not payload.numel():
        return payload.view(dtype).to(torch.float32)
    # torch widens FP8 number by number; looking up two at a time takes a fifth of that.
    pairs = payload.view(torch.uint16).to(torch.int32)
    found = _pairs(dtype).index_select(0, pairs.flatten())
    return found.view(torch.float32).view(payload.shape)


@cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """`[65536]` two float32 in a float64, for each two codes of one byte."""
    with torch.inference_mode(False), _disable_current_modes():  # kept, whoever counts or poisons
        codes = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.uint16).view(torch.uint8)
        return codes.view(dtype).to(torch.float32).view(torch.float64)
