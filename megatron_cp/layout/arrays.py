"""Operations on arrays of numpy or torch, here and nowhere else, so that a data loader without torch can shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError, as_number
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.packing import Packing, check_signed, offsets_remedy


def take(array: Any, rows: IntArray) -> Any:
    """Returns a copy of the given rows."""
    if isinstance(array, np.ndarray):
        return array[rows]
    import torch

    return array.index_select(0, torch.tensor(rows, device=array.device))


def concatenate(arrays: list[Any]) -> Any:
    """Joins arrays along their rows."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    import torch

    return torch.cat(arrays)


def append_rows(array: Any, rows: int, fill: float) -> Any:
    """Appends `rows` rows of `fill` to an array."""
    if rows == 0:
        return array
    shape = (rows, *array.shape[1:])
    added = np.full(shape, fill, array.dtype) if isinstance(array, np.ndarray) else array.new_full(shape, fill)
    return concatenate([array, added])


def widen_for(value: int, array: Any) -> Any:
    """Returns the array, as 64-bit integers if its type cannot hold `value`: token ids on disk are often unsigned."""
    least, most = _limits(array)
    if least <= value <= most:
        return array
    return array.astype(np.int64) if isinstance(array, np.ndarray) else array.long()


def check_array(
    argument: str, array: Any, rows: int, allowed: str, *, integral: bool = False, packing: Packing | None = None
) -> None:
    """Refuses anything but a dense array or tensor with `rows` rows.

    Args:
        allowed: the required rows in words, for the message.
        integral: its elements must be integers of 64 bits with a sign; booleans are not.
        packing: for an array over the stream, the documents whose tokens it must have.
    """
    if not _is_dense(array):
        raise ArgumentError(argument, array, "a numpy array or a dense torch tensor")
    if integral and _kind(array) not in "iu":
        raise ArgumentError(argument, f"{array.dtype}", "an array or a tensor of integers")
    if integral and "uint64" in str(array.dtype):
        check_signed(argument, array if isinstance(array, np.ndarray) else array.cpu().numpy())
    if array.ndim == 0:
        raise ArgumentError(argument, "no rows", allowed)
    if len(array) != rows:
        if tuple(array.shape[:2]) == (1, rows):
            remedy = f"It has a batch axis of one: use {argument}[0]."
            raise ArgumentError(argument, f"shape {list(array.shape)}", allowed, remedy)
        remedy = "" if packing is None else offsets_remedy(packing, len(array))
        raise ArgumentError(argument, f"{len(array)} rows", allowed, remedy)


def check_shards(shards: Any, row_counts: list[int]) -> None:
    """Raises unless the shards are the rows of every rank, in order and of one type."""
    allowed = f"one for each of {len(row_counts)} ranks"
    is_list = isinstance(shards, Sequence) and not isinstance(shards, str | bytes)
    if not is_list and not (_is_dense(shards) and shards.ndim):
        raise ArgumentError("shards", shards, f"a list of arrays or of tensors, {allowed}")
    if len(shards) != len(row_counts):
        raise ArgumentError("shards", f"{len(shards)} tensors", allowed)
    first = shards[0]
    for rank, shard in enumerate(shards):
        check_array(f"shards[{rank}]", shard, row_counts[rank], f"{row_counts[rank]} rows")
        alike = isinstance(shard, np.ndarray) == isinstance(first, np.ndarray) and shard.dtype == first.dtype
        if not alike or shard.shape[1:] != first.shape[1:] or _device(shard) != _device(first):
            raise ArgumentError(f"shards[{rank}]", _described(shard), f"rows like those of rank 0, {_described(first)}")


def check_fill(argument: str, value: Any, array: Any) -> None:
    """Raises unless the array's type can hold the number: it refuses 1.5 or NaN for integers, 300 for bytes."""
    match _kind(array):
        case "b":
            fits = isinstance(value, Integral) and value in (0, 1)
        case "i" | "u":
            least, most = _limits(array)
            fits = as_number(value).is_integer() and least <= int(value) <= most
        case "f" | "c":
            plain = isinstance(value, Real) and not isinstance(value, bool)
            fits = plain and (value != value or abs(as_number(value)) <= _largest(array) or abs(value) == np.inf)
        case _:
            fits = True  # text and other types, which numpy converts
    if not fits:
        raise ArgumentError(argument, value, f"a number that {array.dtype} has")


def _is_dense(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return not isinstance(array, np.ma.MaskedArray)  # its mask would be ignored
    torch = sys.modules.get("torch")  # imported by whoever made a tensor
    if torch is None or not isinstance(array, torch.Tensor):
        return False
    return not array.is_nested and bool(array.layout == torch.strided)


def _kind(array: Any) -> str:
    """Returns numpy's letter for the kind of the elements."""
    if isinstance(array, np.ndarray):
        return str(array.dtype.kind)
    import torch

    if array.dtype == torch.bool:
        return "b"
    return "f" if array.dtype.is_floating_point else "c" if array.dtype.is_complex else "i"


def _limits(array: Any) -> tuple[int, int]:
    """Returns the least and the greatest integer of the array's type."""
    if isinstance(array, np.ndarray):
        info = np.iinfo(array.dtype)
        return int(info.min), int(info.max)
    import torch

    limits = torch.iinfo(array.dtype)
    return limits.min, limits.max


def _largest(array: Any) -> float:
    """Returns the greatest finite number of the array's type."""
    if isinstance(array, np.ndarray):
        return float(np.finfo(array.dtype).max)
    import torch

    return torch.finfo(array.dtype).max


def _device(array: Any) -> Any:
    return getattr(array, "device", None)


def _described(array: Any) -> str:
    return f"{type(array).__name__} of {array.dtype} {list(array.shape)} on {_device(array)}"
