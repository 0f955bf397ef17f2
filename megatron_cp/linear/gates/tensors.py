"""What the gates of all layers need of tensors: which a kernel takes, and parameters of which a rank has a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_cp.exchange.kernels.copies import runs_on

_WIDEST = 16  # bytes of an access of a GPU's thread
_DENSE = torch.contiguous_format
_TYPES = {torch.bfloat16, torch.float16, torch.float32}  # a kernel computes in float32


def has_kernels(*tensors: Tensor) -> bool:
    """Whether there are kernels for tensors of one device."""
    return runs_on(tensors[0].device) and {each.dtype for each in tensors} <= _TYPES


def unit_of(x: Tensor) -> int:
    """The elements of 16 bytes, which a kernel reads at once, or 1 where a head of `[T, h, d]` is no whole number."""
    unit = _WIDEST // x.element_size()
    return 1 if x.shape[2] % unit else unit


def dense(tensors: Sequence[Tensor], units: Sequence[int]) -> list[Tensor]:
    """The tensors as kernels take them, which few must be copied for: dense rows, from unit to unit."""
    return [
        each if (unit == 1 and each.is_contiguous()) or _fits(each, unit) else each.clone(memory_format=_DENSE)
        for each, unit in zip(tensors, units, strict=True)
    ]


def _fits(x: Tensor, unit: int) -> bool:
    begins_on_units = unit == 1 or (x.data_ptr() % _WIDEST == 0 and x.stride(0) % unit == 0)
    return begins_on_units and (x.is_contiguous() or _has_dense_rows(x))


def _has_dense_rows(x: Tensor) -> bool:
    size = 1
    for length, stride in zip(x.shape[:0:-1], x.stride()[:0:-1], strict=True):
        if length != 1 and stride != size:
            return False
        size *= length
    return x.ndim > 1


def own_part(parameter: Tensor, heads: slice, width: int = 1) -> Tensor:
    """Of a parameter `[all heads * width]`, what belongs to some heads."""
    start, end = heads.start * width, heads.stop * width
    return parameter if end - start == parameter.shape[0] else parameter[start:end]


def whole(gradient: Tensor, of: tuple[int, torch.dtype], heads: slice, width: int = 1) -> Tensor:
    """The way back: the gradient of a parameter of a length and a type, zero for the other heads."""
    length, dtype = of
    before, after = heads.start * width, length - heads.stop * width
    gradient = gradient.to(dtype)
    return F.pad(gradient, (before, after)) if before or after else gradient
