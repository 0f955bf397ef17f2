"""Prepares tensors for the kernels of gates, and slices parameters of which a rank uses a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_cp.exchange.kernels.copies import runs_on
from megatron_cp.exchange.kernels.pieces import has_dense_rows

_WIDEST = 16  # bytes of the widest access of a GPU's thread
_DENSE = torch.contiguous_format
_TYPES = {torch.bfloat16, torch.float16, torch.float32}  # a kernel computes in float32


def has_kernels(*tensors: Tensor) -> bool:
    """True if there are kernels for the tensors, which are on one device."""
    return runs_on(tensors[0].device) and {each.dtype for each in tensors} <= _TYPES


def unit_of(x: Tensor) -> int:
    """Returns the number of elements in 16 bytes, one access of a kernel; 1 if a head of `[T, h, d]` has a fraction."""
    unit = _WIDEST // x.element_size()
    return 1 if x.shape[2] % unit else unit


def dense(tensors: Sequence[Tensor], units: Sequence[int]) -> list[Tensor]:
    """Returns tensors with dense rows that begin on a multiple of their units; copies those that do not."""
    return [
        each if (unit == 1 and each.is_contiguous()) or _fits(each, unit) else each.clone(memory_format=_DENSE)
        for each, unit in zip(tensors, units, strict=True)
    ]


def _fits(x: Tensor, unit: int) -> bool:
    begins_on_units = unit == 1 or (x.data_ptr() % _WIDEST == 0 and x.stride(0) % unit == 0)
    return begins_on_units and (x.is_contiguous() or (x.ndim > 1 and has_dense_rows(x)))


def own_part(parameter: Tensor, heads: slice, width: int = 1) -> Tensor:
    """Returns the part of a parameter `[all heads * width]` that belongs to `heads`."""
    start, end = heads.start * width, heads.stop * width
    return parameter if end - start == parameter.shape[0] else parameter[start:end]


def whole(gradient: Tensor, parameter: tuple[int, torch.dtype], heads: slice, width: int = 1) -> Tensor:
    """Pads the gradient of `own_part` with zeros to a parameter's length, given its length and type."""
    length, dtype = parameter
    before, after = heads.start * width, length - heads.stop * width
    gradient = gradient.to(dtype)
    return F.pad(gradient, (before, after)) if before or after else gradient
