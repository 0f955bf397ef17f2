"""Arrays of numpy and torch, told apart here and nowhere else, so that a data loader without torch can shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError, as_number
from megatron_cp.layout.packing import IntArray, Packing, if_offsets


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
    least, most = _limits(array)
    if least <= value <= most:
        return array
    return array.astype(np.int64) if isinstance(array, np.ndarray) else array.long()


# -- checks ----------------------------------------------------------------------------------------------------------


def check_array(
    argument: str, array: Any, rows: int, allowed: str, *, integral: bool = False, packing: Packing | None = None
) -> None:
    """Refuses what is no dense array or tensor of so many rows.

    Args:
        argument: as the caller spells it.
        array: what was given.
        rows: how many it must have.
        allowed: so many rows, in words.
        integral: its numbers must be integers, of which truth values are none.
        packing: of a stream, the documents that it must have the tokens of.

    Raises:
        ArgumentError: it is something else.
    """
    if not _is_dense(array):
        raise ArgumentError(argument, array, "a numpy array or a dense torch tensor")
    if integral and _kind(array) not in "iu":
        raise ArgumentError(argument, f"{array.dtype}", "an array or a tensor of integers")
    if array.ndim == 0:
        raise ArgumentError(argument, "no rows", allowed)
    if len(array) != rows:
        remedy = "" if packing is None else if_offsets(packing, len(array))
        raise ArgumentError(argument, f"{len(array)} rows", allowed, remedy)


def check_shards(shards: Any, row_counts: list[int]) -> None:
    """Refuses what are not the rows of every rank, of one type, in order."""
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
    """Refuses a number that the array's type does not have: 1.5 or NaN among integers, 300 among bytes."""
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
            fits = True  # text and the like, which numpy fills as it can
    if not fits:
        raise ArgumentError(argument, value, f"a number that {array.dtype} has")


def _is_dense(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return not isinstance(array, np.ma.MaskedArray)  # whose mask would be ignored
    torch = sys.modules.get("torch")  # nobody has a tensor who has not imported it
    return torch is not None and isinstance(array, torch.Tensor) and not array.is_nested and _is_strided(array)


def _is_strided(tensor: Any) -> bool:
    import torch

    return bool(tensor.layout == torch.strided)


def _kind(array: Any) -> str:
    """numpy's letter for the kind of its numbers."""
    if isinstance(array, np.ndarray):
        return str(array.dtype.kind)
    import torch

    if array.dtype == torch.bool:
        return "b"
    return "f" if array.dtype.is_floating_point else "c" if array.dtype.is_complex else "i"


def _limits(array: Any) -> tuple[int, int]:
    """The least and the greatest integer of its type."""
    if isinstance(array, np.ndarray):
        of_numpy = np.iinfo(array.dtype)
        return int(of_numpy.min), int(of_numpy.max)
    import torch

    limits = torch.iinfo(array.dtype)
    return limits.min, limits.max


def _largest(array: Any) -> float:
    """The greatest number of its type that is finite."""
    if isinstance(array, np.ndarray):
        return float(np.finfo(array.dtype).max)
    import torch

    return torch.finfo(array.dtype).max


def _device(array: Any) -> Any:
    return getattr(array, "device", None)


def _described(array: Any) -> str:
    return f"{type(array).__name__} of {array.dtype} {list(array.shape)} on {_device(array)}"
