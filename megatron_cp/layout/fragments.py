"""Fragments: ranges of the packed stream, the check that they cover it once, and their canonical form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.packing import Packing

T = TypeVar("T")
Numbers = TypeVar("Numbers", bound=NDArray)

MAX_CP_SIZE = 1024
_BLOCK = 2**15  # numbers that fit a core's cache


class Fragment(NamedTuple):
    """A half-open range `[start, end)` of the packed stream, held by one rank."""

    start: int
    end: int


def checked_fragments(packing: Packing, fragments: Sequence[Iterable[tuple[int, int]]]) -> tuple[IntArray, IntArray]:
    """Returns `[n, 2]` the fragments of all ranks in order, and `[ranks + 1]` the offsets of each rank's."""
    per_rank = _parsed(fragments)
    if not 1 <= len(per_rank) <= MAX_CP_SIZE:
        raise ArgumentError("fragments", f"those of {len(per_rank)} ranks", f"those of 1 to {MAX_CP_SIZE} ranks")
    flat = np.array([piece for pieces in per_rank for piece in pieces], dtype=np.int64).reshape(-1, 2)
    _check_partition(packing, flat)
    return flat, np.concatenate([[0], np.cumsum([len(pieces) for pieces in per_rank])]).astype(np.int64)


def _parsed(fragments: Sequence[Iterable[tuple[int, int]]]) -> list[list[Fragment]]:
    try:
        return [[_fragment(*_ordered(piece)) for piece in _ordered(ranges)] for ranges in _ordered(fragments)]
    except (TypeError, ValueError) as error:
        raise ArgumentError("fragments", fragments, "pairs of integers for each rank", str(error)) from None


def _fragment(start: int, end: int) -> Fragment:
    return Fragment(checked_integer("start", start, -(2**63)), checked_integer("end", end, -(2**63)))


def _ordered(values: Iterable[T]) -> Iterable[T]:
    if isinstance(values, Set | Mapping):
        raise TypeError(f"a {type(values).__name__} has no order")
    return values


def arange_ranges(starts: IntArray, ends: IntArray) -> IntArray:
    """Returns the integers of each `[start, end)`, one range after another."""
    sizes = ends - starts
    stops = sizes.cumsum()
    return _counted((starts - stops + sizes).repeat(sizes))


def index_ranges(starts: IntArray, ends: IntArray) -> NDArray[np.int32] | IntArray:
    """Returns `arange_ranges` in 32 bits if all ends fit: half the memory, and the type of index tables on a device."""
    if int(ends.max(initial=0)) >= 2**31:
        return arange_ranges(starts, ends)
    sizes = ends - starts
    stops = sizes.cumsum()
    return _counted((starts - stops + sizes).astype(np.int32).repeat(sizes))


def _counted(numbers: Numbers) -> Numbers:
    """Adds to each number its position, in place: a second table costs page faults, which take longer than the sums."""
    counting = np.arange(min(_BLOCK, numbers.size), dtype=numbers.dtype)
    for first in range(0, numbers.size, _BLOCK):
        block = numbers[first : first + _BLOCK]
        block += counting[: block.size]
        if first + _BLOCK < numbers.size:
            counting += _BLOCK
    return numbers


def joined_up(starts: IntArray, ends: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Drops empty fragments and joins touching neighbours of one rank: the canonical form of the same tokens."""
    kept = np.flatnonzero(ends > starts)
    starts, ends, offsets = starts[kept], ends[kept], np.searchsorted(kept, offsets)
    begins = np.ones(starts.size + 1, dtype=bool)  # fragment i begins a run; the last entry ends the last run
    np.not_equal(starts[1:], ends[:-1], out=begins[1:-1])
    begins[offsets] = True
    firsts = np.flatnonzero(begins[:-1])
    joined = (
        starts[firsts].astype(np.int64),
        ends[np.flatnonzero(begins[1:])].astype(np.int64),
        np.searchsorted(firsts, offsets),
    )
    for array in joined:
        array.flags.writeable = False
    return joined


def _check_partition(packing: Packing, fragments: IntArray) -> None:
    ordered = fragments[np.argsort(fragments[:, 0], kind="stable")]
    if (ordered[:, 1] < ordered[:, 0]).any():
        bad = ordered[ordered[:, 1] < ordered[:, 0]][0]
        raise ArgumentError("fragments", tuple(bad.tolist()), "ranges that end no earlier than they start")
    ordered = ordered[ordered[:, 1] > ordered[:, 0]]
    ends = np.concatenate([[0], ordered[:, 1]])
    starts = np.concatenate([ordered[:, 0], [packing.total]])
    broken = np.flatnonzero(ends != starts)
    if broken.size:
        end, start = int(ends[broken[0]]), int(starts[broken[0]])
        raise ArgumentError("fragments", _fault(end, start, packing.total), f"every token of [0, {packing.total}) once")


def _fault(end: int, start: int, total: int) -> str:
    """Describes the error where fragments in stream order reach `end` and the next one, or the end, is at `start`."""
    if start < 0 or end > total:
        return f"a fragment starts at {start}" if start < 0 else f"a fragment ends at {end}"
    if start > end:
        return (
            f"token {end} is held by no rank"
            if start == end + 1
            else f"tokens {end} to {start - 1} are held by no rank"
        )
    return f"token {start} is held twice"
