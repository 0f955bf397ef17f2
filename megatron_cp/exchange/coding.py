"""Coding and decoding of messages: one byte an element and a float32 scale for each token and head.

    scale = max|x| / largest        code = round(x / scale)        x' = scale * code

The arithmetic is in float32. Of a head whose largest element is m, an element x comes back within |x| / 16 or m / 2^18,
whichever is more, in E4M3; within |x| / 8 or m / 2^32 in E5M2; and within m / 254 in INT8. Below 2^-126 * largest it is
within 2^-126, in all three. A head with an element that is not finite comes back with NaN in it, since its scale is not
finite either.

Shapes: `n` any, `h` heads, `d` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp.exchange.codec import Format


def encode(x: Tensor, to: Format, payload: Tensor, scales: Tensor) -> None:
    """Codes `[n..., h, d]` into bytes `payload` of that shape and float32 `scales` `[n..., h]`."""
    wide = x.to(torch.float32)
    scale = wide.abs().amax(-1).div_(to.largest)
    # A scale below the normal numbers would be rounded too coarsely: codes would overflow. NaN stays.
    scale.clamp_min_(torch.finfo(torch.float32).tiny)
    coded = wide / scale.unsqueeze(-1)
    dtype: torch.dtype = getattr(torch, to.dtype)
    payload.view(dtype).copy_(coded.round_() if dtype == torch.int8 else coded)
    scales.copy_(scale)


def decode(payload: Tensor, scales: Tensor, come_from: Format) -> Tensor:
    """`[n..., h, d]` in float32."""
    dtype: torch.dtype = getattr(torch, come_from.dtype)
    return payload.view(dtype).to(torch.float32).mul_(scales.unsqueeze(-1))
