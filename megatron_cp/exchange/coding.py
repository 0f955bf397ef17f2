"""Coding and decoding of messages: one byte an element and a float32 scale for each token and head.

    scale = max(max|x| / largest, 2^-126)        code = round(x / scale)        x' = scale * code

The arithmetic is in float32. The error of an element x is at most |x| / 16 or scale / 2^10, whichever is more, in E4M3;
|x| / 8 or scale / 2^17 in E5M2; and scale / 2 in INT8. A head with an element that is not
finite decodes to NaN, since its scale is not finite either.

Shapes: `n` any, `h` heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from megatron_cp.exchange.codec import Format
from megatron_cp.exchange.sections import SCALE_SIZE
from megatron_cp.torch_private import no_modes


def encode(x: Tensor, target: Format, payload: Tensor, scales: Tensor) -> None:
    """Codes `[n..., h, d]` into bytes `payload` of that shape and float32 `scales` `[n..., h]`."""
    full = x.to(torch.float32)
    scale = _largest(x).to(torch.float32).div_(target.largest)
    # A subnormal scale would be rounded too coarsely, and codes would overflow. NaN stays.
    scale.clamp_min_(torch.finfo(torch.float32).tiny)
    coded = torch.div(full, scale.unsqueeze(-1), out=None if full is x else full)
    dtype: torch.dtype = getattr(torch, target.dtype)
    payload.view(dtype).copy_(coded.round_() if dtype == torch.int8 else coded)
    scales.copy_(scale)


def decode(payload: Tensor, scales: Tensor, source: Format) -> Tensor:
    """Returns the decoded `[n..., h, d]` in float32."""
    dtype: torch.dtype = getattr(torch, source.dtype)
    return _numbers(payload, dtype).mul_(scales.unsqueeze(-1))


def encode_together(tensors: Sequence[Tensor], target: Format, row_bytes: int) -> Tensor:
    """Returns `[n..., h, row_bytes]` bytes: the scales of tensors `[n..., h, d]`, then their codes; see `Codec`."""
    rows = tensors[0].new_zeros(*tensors[0].shape[:-1], row_bytes, dtype=torch.uint8)
    for x, payload, scales in zip(tensors, *_parts(rows, [x.shape[-1] for x in tensors]), strict=True):
        for part in _in_cache(x):
            encode(x[part], target, payload[part], scales[part])
    return rows


def decode_together(rows: Tensor, sizes: Sequence[int], source: Format, dtype: torch.dtype) -> list[Tensor]:
    """Returns the tensors `[n..., h, size]` of `encode_together`, decoded to a type."""
    decoded = []
    for payload, scales in zip(*_parts(rows, sizes), strict=True):
        decoded.append(x := payload.new_empty(payload.shape, dtype=dtype))
        for part in _in_cache(x):
            x[part] = decode(payload[part], scales[part], source)
    return decoded


def _in_cache(x: Tensor) -> list[slice]:
    """Splits rows into blocks that a CPU's cache holds while they are coded; devices take all at once."""
    if x.device.type != "cpu":
        return [slice(0, len(x))]
    step = max(1, _AT_A_TIME * len(x) // max(x.numel(), 1))
    return [slice(start, start + step) for start in range(0, len(x), step)]


_AT_A_TIME = 2**18  # numbers


def _parts(rows: Tensor, sizes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    first = len(sizes) * SCALE_SIZE
    codes = rows[..., first : first + sum(sizes)].split_with_sizes(list(sizes), -1)
    return list(codes), list(rows[..., :first].view(torch.float32).unbind(-1))


def _largest(x: Tensor) -> Tensor:
    """Returns a copy of `max|x|` over the last axis; NaN if any element is NaN."""
    # Without signs, floats have the order of their bits, with NaN last; and torch compares integers several times
    # faster than floats, for which it must look for NaN.
    bits = x.view(_INTEGERS[x.dtype.itemsize])
    return bits.bitwise_and(torch.iinfo(bits.dtype).max).amax(-1).view(x.dtype)


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _numbers(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts codes to a dense float32 tensor."""
    in_pairs = payload.stride(-1) == 1 and not any(
        size % 2 for size in (payload.shape[-1], payload.storage_offset(), *payload.stride()[:-1])
    )
    if payload.device.type != "cpu" or dtype == torch.int8 or not in_pairs or not payload.numel():
        return payload.view(dtype).to(torch.float32)
    # torch converts FP8 one number at a time; looking up two at a time takes a fifth of the time.
    pairs = payload.view(torch.uint16).to(torch.int32)
    found = _pairs(dtype).index_select(0, pairs.flatten())
    return found.view(torch.float32).view(payload.shape)


@cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """Returns `[65536]` pairs of float32, each in a float64, for every pair of one-byte codes."""
    with torch.inference_mode(False), no_modes():  # cached, so outlives modes that count or poison
        codes = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.uint16).view(torch.uint8)
        return codes.view(dtype).to(torch.float32).view(torch.float64)
