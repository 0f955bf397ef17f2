"""`Pieces`: a table, read by kernels, that maps bytes of the messages to bytes of the tensors.

A message is one or several blocks of rows, end to end, with the same number of rows in each. Row `i` of a block and row
`i` of the tensors belong to one token. A *piece* is a range of bytes that is contiguous in a tensor's row and in a
block's row:

    tensor     from  i * stride + offset               size bytes
    message    from  rows * start + i * row + place    size bytes

Pieces are cut into *units*, one access of a thread each: 16 bytes if both sides are aligned for it; 8, 4, 2 or 1
otherwise. Units of one kind are adjacent, so that a program makes one kind of access. `rows` and the addresses of the
tensors are arguments of the launch: a table depends only on their alignment.

A piece can be coded: one byte an element, and a float32 scale for each head. Its units are heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.exchange.device import on_device

MOST = 8  # the most tensors, and the most messages, of one launch
# A program takes `ROWS` rows of `UNITS` units: 16 KiB for units of 16 bytes. The last units of a kind, if at most half
# of `UNITS`, would leave most of a program idle: programs take `FEW` of them, and more rows in proportion.
UNITS, ROWS = 64, 16
FEW = 8
PARTS = UNITS // FEW
GROUP = PARTS * ROWS  # rows: `PARTS` programs for each `UNITS` units, and one for each `FEW`
HEADS = 4  # coded heads of one program, with `ROWS` rows
ACCESS_BYTES = (16, 8, 4, 2, 1)  # bytes of an access
WIDEST = ACCESS_BYTES[0]
# A unit's kind is the bytes of an access, plus a multiple of `TYPE_STEP` for the type, if elements are computed with.
TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TYPE_STEP = 32
# The columns of the table: the fields of a piece, and further fields of a unit. A sum has `MORE` terms after its
# first, entries from `EXTRA` on. A scale is `SCALE` bytes after its head in the message.
TENSOR, OFFSET, SIZE, START, ROW, PLACE, MESSAGE, HEAD_DIM, SCALE, KIND, MORE, EXTRA = range(12)


class Piece(NamedTuple):
    """A range of bytes in rows of a tensor and in rows of a message.

    Attributes:
        tensor: number of the tensor.
        offset: bytes from the start of the tensor's row.
        size: bytes in the tensor.
        start: bytes of one row in all blocks before this one.
        row: bytes of one row in this block.
        place: bytes from the start of the block's row.
        message: number of the message.
        head_dim: elements of a head, if heads are coded; else 0.
        scale: bytes from the start of the block's row to the heads' scales.
    """

    tensor: int
    offset: int
    size: int
    start: int
    row: int
    place: int
    message: int = 0
    head_dim: int = 0
    scale: int = 0


@dataclass(frozen=True, eq=False)
class Pieces:
    """The table on a device.

    Attributes:
        table: `[columns, entries]` int32: units, `UNITS` of one kind together; then others, `FEW` of one kind
            together; then heads, `HEADS` of one kind together; then the further terms of sums.
        head_dim: the most elements of a coded head.
        most: the most terms of a sum after its first.
        alignment: alignment of the tensors, then of the messages.
        types: types of the tensors.
        tensor_bytes: for each tensor, the end of the furthest piece in its rows.
        message_bytes: for each message, the bytes of a row in all its blocks.
        to_tensors: True if it is for writing to the tensors.
        compiled: kernels for this table that have been compiled.
    """

    table: Tensor
    unit_blocks: int
    few_blocks: int
    head_blocks: int
    head_dim: int
    most: int
    kinds: tuple[int, ...]
    head_kinds: tuple[int, ...]
    alignment: tuple[int, ...]
    types: tuple[torch.dtype, ...]
    tensor_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    to_tensors: bool
    compiled: dict[Any, Any] = field(default_factory=dict)

    @property
    def programs(self) -> tuple[int, int, int]:
        """The numbers of programs in each group of rows: with `UNITS` units, with any units, and all.

        Program `i` of a group has the units from `i * FEW` on, or is one of `PARTS` that share them by rows.
        """
        wide, units = PARTS * self.unit_blocks, PARTS * self.unit_blocks + self.few_blocks
        return wide, units, units + PARTS * self.head_blocks


def alignment_of(tensors: Sequence[Tensor], messages: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the alignment of the rows of each tensor and each message: 16 bytes or a smaller power of two.

    A table holds for one alignment, so this is part of its cache key.
    """
    starts = [tensor.data_ptr() | tensor.stride(0) * tensor.element_size() for tensor in tensors]
    starts += [message.data_ptr() for message in messages]
    return tuple(_power_of_two(start | WIDEST) for start in starts)


def has_dense_rows(x: Tensor) -> bool:
    """Returns True if the elements of each row, along all axes but the first, are adjacent."""
    size = 1
    for length, stride in zip(x.shape[:0:-1], x.stride()[:0:-1], strict=True):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def copy_table(
    pieces: Sequence[Piece],
    *,
    types: Sequence[torch.dtype],
    alignment: tuple[int, ...],
    device: torch.device,
    to_tensors: bool,
) -> Pieces:
    """Makes the table of some pieces.

    Args:
        pieces: in any order, except for the terms of a sum.
        to_tensors: True for writing to the tensors: bytes of several pieces are then a sum, of elements, in the order
            of the pieces. In the other direction they are copied to each place.
    """
    given = np.array([*pieces], dtype=np.int64).reshape(-1, len(Piece._fields))
    given = given[given[:, SIZE] > 0]
    num_messages = len(alignment) - len(types)
    assert max(len(types), num_messages) <= MOST, f"{len(types)} tensors and {num_messages} messages: {MOST} fit"
    assert (given >= 0).all(), given
    item = np.array([dtype.itemsize for dtype in types], dtype=np.int64)[given[:, TENSOR]]
    is_coded = given[:, HEAD_DIM] > 0
    in_message = given[:, PLACE] + np.where(is_coded, given[:, SIZE] // item, given[:, SIZE])
    assert (in_message <= given[:, ROW]).all(), given

    copied = given[~is_coded]
    heads = _heads(given[is_coded], item[is_coded])
    if to_tensors:
        copied_ranges, head_ranges = _common_ranges(copied), _grouped(heads, _place_in_tensors(heads))
    else:
        copied_ranges, head_ranges = _one_each(copied), _one_each(heads)
    alike = np.array(alignment, dtype=np.int64)
    tensors, messages = alike[: len(types)], alike[len(types) :]
    units = list(_unit_runs(copied_ranges, types, tensors, messages))
    coded = list(_head_runs(head_ranges, types, tensors, messages))
    table, unit_blocks, few_blocks, head_blocks = _table(units, coded)
    assert table.max(initial=0) < 2**31, "rows of 2 GiB"
    return Pieces(
        on_device(table, device),
        unit_blocks,
        few_blocks,
        head_blocks,
        int(given[:, HEAD_DIM].max(initial=0)),
        int(table[MORE].max(initial=0)),
        tuple(run.kind for run in units),
        tuple(run.kind for run in coded),
        alignment,
        tuple(types),
        _most(len(types), given[:, TENSOR], given[:, OFFSET] + given[:, SIZE]),
        _most(num_messages, given[:, MESSAGE], given[:, START] + given[:, ROW]),
        to_tensors,
    )


class _Ranges(NamedTuple):
    """Ranges of bytes of the tensors' rows, each one piece or the sum of several of the same size."""

    terms: NDArray  # [terms of all ranges, fields of a piece], grouped by range
    first: NDArray  # index of each range's first term
    length: NDArray  # number of each range's terms

    @property
    def firsts(self) -> NDArray:
        return self.terms[self.first]


def _one_each(pieces: NDArray) -> _Ranges:
    return _Ranges(pieces, np.arange(len(pieces)), np.ones(len(pieces), dtype=np.int64))


def _grouped(pieces: NDArray, key: NDArray) -> _Ranges:
    """Groups pieces of one key, in order, as terms of one range."""
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    return _Ranges(pieces[order], first, np.diff(first, append=len(order)))


def _place_in_tensors(pieces: NDArray) -> NDArray:
    return pieces[:, TENSOR] << 32 | pieces[:, OFFSET]


def _common_ranges(pieces: NDArray) -> _Ranges:
    """Cuts pieces where others begin or end, so that two have all bytes in common or none."""
    begin = _place_in_tensors(pieces)
    end = begin + pieces[:, SIZE]
    cuts = np.unique(np.concatenate([begin, end]))
    first = np.searchsorted(cuts, begin)
    index, number = _counted(np.searchsorted(cuts, end) - first)
    cut = first[index] + number
    parts = pieces[index]
    parts[:, [OFFSET, PLACE]] += (cuts[cut] - begin[index])[:, None]
    parts[:, SIZE] = cuts[cut + 1] - cuts[cut]
    return _grouped(parts, cut)


def _heads(pieces: NDArray, item: NDArray) -> NDArray:
    """Splits coded pieces into single heads; `SCALE` becomes the distance from the head to its scale."""
    size = pieces[:, HEAD_DIM] * item
    assert not (pieces[:, SIZE] % size).any(), "a part of a head"
    index, number = _counted(pieces[:, SIZE] // size)
    heads = pieces[index]
    heads[:, SIZE] = size[index]
    heads[:, OFFSET] += number * heads[:, SIZE]
    heads[:, PLACE] += number * heads[:, HEAD_DIM]
    heads[:, SCALE] += number * 4 - heads[:, PLACE]
    return heads


class _Run(NamedTuple):
    """Units with one kind of access, as columns of the table."""

    kind: int
    units: NDArray
    terms: NDArray  # further terms of sums; `units[EXTRA]` counts from the first of them

    @property
    def num_wide(self) -> int:
        """The number of units that programs take `UNITS` at a time."""
        num_units = self.units.shape[1]
        left = num_units % UNITS
        return num_units if left > UNITS // 2 else num_units - left


def _unit_runs(ranges: _Ranges, types: Sequence[torch.dtype], tensors: NDArray, messages: NDArray) -> Iterator[_Run]:
    terms = ranges.terms
    low = tensors[terms[:, TENSOR]] | messages[terms[:, MESSAGE]] | terms[:, START] | terms[:, ROW]
    # An access is aligned on both sides if it is on one, and both have the same offset within an access.
    reach = _reach(ranges, low | (terms[:, OFFSET] - terms[:, PLACE]))
    begin = ranges.firsts[:, OFFSET]
    end = begin + ranges.firsts[:, SIZE]
    # Numbers of types, from 1 on; 0 if elements need no type.
    number = np.where(ranges.length > 1, _type_numbers(types)[ranges.firsts[:, TENSOR]], 0)
    assert (number >= 0).all(), f"no sums of all of {types}"
    for type_number, widths in enumerate((ACCESS_BYTES, *((WIDEST, dtype.itemsize) for dtype in TYPES))):
        index = np.flatnonzero(number == type_number)
        for width, unit, at in _units(begin[index], end[index], reach[index], widths):
            yield _run(ranges, index[unit], at - begin[index[unit]], type_number * TYPE_STEP + width)


def _units(
    begin: NDArray, end: NDArray, reach: NDArray, widths: Sequence[int]
) -> Iterator[tuple[int, NDArray, NDArray]]:
    """Cuts ranges to the fewest accesses. Yields for each width the range of each access and its start."""
    index = np.arange(len(begin))
    for width in widths:
        fits = reach[index] >= width
        lo = np.where(fits, np.minimum(-(-begin // width) * width, end), end)
        hi = np.where(fits, np.maximum(end // width * width, lo), end)
        unit, number = _counted((hi - lo) // width)
        if len(unit):
            yield width, index[unit], lo[unit] + number * width
        # The remainders lie before and after.
        begin, end, index = np.concatenate([begin, hi]), np.concatenate([lo, end]), np.concatenate([index, index])
        left = begin < end
        begin, end, index = begin[left], end[left], index[left]
    assert not len(index), "a part of an element"


def _head_runs(ranges: _Ranges, types: Sequence[torch.dtype], tensors: NDArray, messages: NDArray) -> Iterator[_Run]:
    terms = ranges.terms
    item = np.array([dtype.itemsize for dtype in types], dtype=np.int64)[terms[:, TENSOR]]
    in_tensor = tensors[terms[:, TENSOR]] | terms[:, OFFSET] | terms[:, SIZE]
    in_message = messages[terms[:, MESSAGE]] | terms[:, START] | terms[:, ROW]
    assert not ((in_message | (terms[:, PLACE] + terms[:, SCALE])) % 4).any(), "a scale is not aligned"
    assert not (in_tensor % item).any(), "an element is not aligned"
    # The elements of one access to the tensor are as many bytes of the message.
    is_widest = _reach(ranges, in_tensor | (in_message | terms[:, PLACE]) * item) == WIDEST
    number = _type_numbers(types)[ranges.firsts[:, TENSOR]]
    assert (number >= 0).all(), f"not all of {types} can be coded"
    for type_number, dtype in enumerate(TYPES, 1):
        for width, chosen in ((WIDEST, is_widest), (dtype.itemsize, ~is_widest)):
            index = np.flatnonzero((number == type_number) & chosen)
            if len(index):
                yield _run(ranges, index, 0 * index, type_number * TYPE_STEP + width)


def _run(ranges: _Ranges, index: NDArray, moved: NDArray, kind: int) -> _Run:
    """Makes units of one kind, `moved` bytes from the start of the ranges `index`."""
    first, more = ranges.first[index], ranges.length[index] - 1
    units = _columns(ranges.terms[first], moved)
    units[KIND], units[MORE], units[EXTRA] = kind, more, np.cumsum(more) - more
    unit, number = _counted(more)
    return _Run(kind, units, _columns(ranges.terms[first[unit] + 1 + number], moved[unit]))


def _columns(terms: NDArray, moved: NDArray) -> NDArray:
    columns = np.zeros((EXTRA + 1, len(terms)), dtype=np.int64)
    columns[: terms.shape[1]] = terms.T
    columns[[OFFSET, PLACE]] += moved
    return columns


def _table(units: Sequence[_Run], heads: Sequence[_Run]) -> tuple[NDArray, int, int, int]:
    """Returns all columns, and the number of blocks of `UNITS` units, of `FEW` units, and of heads."""
    num_terms = 0
    for run in (*units, *heads):
        run.units[EXTRA] += num_terms
        num_terms += run.terms.shape[1]
    empty = np.zeros((EXTRA + 1, 0), dtype=np.int64)
    wide = np.concatenate([empty, *(_filled(run.units[:, : run.num_wide], UNITS) for run in units)], axis=1)
    few = np.concatenate([empty, *(_filled(run.units[:, run.num_wide :], FEW) for run in units)], axis=1)
    coded = np.concatenate([empty, *(_filled(run.units, HEADS) for run in heads)], axis=1)
    blocks = np.concatenate([wide, few, coded], axis=1)
    blocks[EXTRA] += blocks.shape[1]
    table = np.concatenate([blocks, *(run.terms for run in (*units, *heads))], axis=1)
    return table, wide.shape[1] // UNITS, few.shape[1] // FEW, coded.shape[1] // HEADS


def _filled(units: NDArray, size: int) -> NDArray:
    """Pads to whole blocks with units that have only a kind."""
    left = np.zeros((EXTRA + 1, -units.shape[1] % size), dtype=np.int64)
    left[TENSOR], left[KIND] = -1, units[KIND, :1]
    return np.concatenate([units, left], axis=1)


def _type_numbers(types: Sequence[torch.dtype]) -> NDArray:
    return np.array([TYPES.index(dtype) + 1 if dtype in TYPES else -1 for dtype in types], dtype=np.int64)


def _reach(ranges: _Ranges, low: NDArray) -> NDArray:
    """Returns the widest access for all terms of each range; `low` must be a multiple of it."""
    low = low | WIDEST
    return _power_of_two(np.bitwise_or.reduceat(low, ranges.first) if len(ranges.first) else low)


def _counted(counts: NDArray) -> tuple[NDArray, NDArray]:
    """Returns for each of `sum(counts)` items the index of its count, and its number within that."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def _power_of_two(number: Any) -> Any:
    """Returns the largest power of two that divides the number."""
    return number & -number


def _most(length: int, index: NDArray, values: NDArray) -> tuple[int, ...]:
    """Returns for each of `length` indices the largest of its values, or 0."""
    most = np.zeros(length, dtype=np.int64)
    np.maximum.at(most, index, values)
    return tuple(most.tolist())
