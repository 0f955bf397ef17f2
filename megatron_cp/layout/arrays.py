"""Arrays of numpy and torch, told apart here and nowhere else, so that a data loader without torch can shard."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_cp.layout.packing import IntArray


def take(array: Any, rows: IntArray) -> Any:
    """A copy of these rows."""
    if isinstance(array, np.ndarray):
        return array[rows]
    import torch

    return array.index_select(0, torch.tensor(rows, device=array.device))


def concatenate(arrays: list[Any]) -> Any:
    """The arrays end to end."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    import torch

    return torch.cat(arrays)


def lengthened(array: Any, rows: int, fill: float) -> Any:
    """The array with so many more rows of `fill` at its end."""
    if rows == 0:
        return array
    shape = (rows, *array.shape[1:])
    added = np.full(shape, fill, array.dtype) if isinstance(array, np.ndarray) else array.new_full(shape, fill)
    return concatenate([array, added])


def able_to_hold(value: int, array: Any) -> Any:
    """The array, as 64-bit integers if its type has no `value`: token ids on disk are often unsigned."""
    if isinstance(array, np.ndarray):
        limits: Any = np.iinfo(array.dtype)
        return array if limits.min <= value <= limits.max else array.astype(np.int64)
    import torch

    limits = torch.iinfo(array.dtype)
    return array if limits.min <= value <= limits.max else array.long()
