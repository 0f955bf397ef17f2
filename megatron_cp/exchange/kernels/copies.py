"""The four copies of a head exchange as tables of pieces, each one launch, for CUDA.

The functions take the arguments of those of `messages.py`, and memory to write to. They return False if
they did nothing: more tensors than a launch takes, rows that are not dense and a few other rarities are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_cp.exchange.codec import INT8
from megatron_cp.exchange.kernels.pieces import (
    MOST,
    TYPES,
    WIDEST,
    Piece,
    Pieces,
    alignment_of,
    copy_table,
    has_dense_rows,
)
from megatron_cp.exchange.sections import HeadCopy, RowFormat, Section

if TYPE_CHECKING:
    from megatron_cp.exchange.geometry import Geometry
    from megatron_cp.exchange.kernels.triton import Launch

_CODED_FORMATS = (8, 9)  # the lowest compute capability for which Triton converts to FP8 like torch


def runs_on(device: torch.device) -> bool:
    """Returns True if there are kernels for a device."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def pack_tokens(tensors: Sequence[Tensor], message: Tensor, at: Geometry) -> bool:
    """Cuts columns from `[rows, f]` tensors, whose features are the sections in order, into every rank's message."""
    return _launched(_packs_tokens, tensors, (message,), at)


def unpack_tokens(messages: Sequence[Tensor], tensors: Sequence[Tensor], at: Geometry) -> bool:
    """Copies the messages of every part back; shared heads are summed, and rows beyond the own ones are zero."""
    return _launched(_unpacks_tokens, tensors, messages, at)


def pack_heads(sections: Sequence[Tensor], message: Tensor, at: Geometry) -> bool:
    """Copies rows of `[T, (b,) h, d]` sections, in the order of the messages, into every rank's message."""
    return _launched(_packs_heads, sections, (message,), at)


def unpack_heads(message: Tensor, sections: Sequence[Tensor], at: Geometry) -> bool:
    """Decodes coded messages into the sections."""
    return _launched(_unpacks_heads, sections, (message,), at)


def gather_rows(source: Tensor, target: Tensor, row: int, index: Tensor, at: Geometry) -> None:
    """Copies row `index[i]` of a dense table to row `i` of another; rows are whole units of 16 bytes."""
    addresses = [source.data_ptr(), target.data_ptr()]
    key = ("gather", index.data_ptr(), addresses[0] % WIDEST, addresses[1] % WIDEST)
    launch = at.remembered.get(key)
    if launch is None:
        rows, messages = [source.view(torch.uint8).view(-1, row)], [target.view(torch.uint8)]
        pieces = _row_table(row, alignment_of(rows, messages), source.device)
        launch = at.remembered[key] = _launch(rows, messages, len(index), pieces, index=index)
    launch(addresses)


Make = Callable[[Sequence[Tensor], Sequence[Tensor], "Geometry"], "Launch | None"]


def _launched(make: Make, tensors: Sequence[Tensor], messages: Sequence[Tensor], at: Geometry) -> bool:
    """Queues a launch, which is checked and made once for all layers of a batch, by all that it depends on."""
    key: list[Any] = [make]
    addresses = []
    for tensor in tensors:
        address = tensor.data_ptr()
        key += (tensor.shape, tensor.stride(), tensor.dtype, address % WIDEST)
        addresses.append(address)
    for message in messages:
        address = message.data_ptr()
        key.append(address % WIDEST)
        addresses.append(address)
    known = tuple(key)
    if known not in at.remembered:
        at.remembered[known] = make(tensors, messages, at) if _fits(tensors, messages, at) else None
    launch: Launch | None = at.remembered[known]
    if launch is None:
        return False
    launch(addresses)
    return True


def _packs_tokens(tensors: Sequence[Tensor], messages: Sequence[Tensor], at: Geometry) -> Launch:
    pieces = _token_pieces(tensors, messages, (at.format,), at, to_tensors=False)
    return _launch(tensors, messages, at.local_rows, pieces, at)


def _unpacks_tokens(tensors: Sequence[Tensor], messages: Sequence[Tensor], at: Geometry) -> Launch | None:
    if at.exchange.sections.replicated and not set(at.dtypes) <= set(TYPES):
        return None
    pieces = _token_pieces(tensors, messages, tuple(part.format for part in at.parts), at, to_tensors=True)
    return _launch(tensors, messages, at.local_rows, pieces, at)


def _packs_heads(sections: Sequence[Tensor], messages: Sequence[Tensor], at: Geometry) -> Launch | None:
    if at.rows_per_token > 1 and at.is_coded:
        return None
    pieces = _head_pieces(at, alignment_of(sections, messages), to_tensors=False)
    return _launch(sections, messages, at.layout.packing.total, pieces, at, index=at.order)


def _unpacks_heads(sections: Sequence[Tensor], messages: Sequence[Tensor], at: Geometry) -> Launch | None:
    if at.rows_per_token > 1:
        return None
    pieces = _head_pieces(at, alignment_of(sections, messages), to_tensors=True)
    return _launch(sections, messages, at.layout.packing.total, pieces, at, index=at.inverse_order)


def _launch(
    tensors: Sequence[Tensor], messages: Sequence[Tensor], rows: int, pieces: Pieces, at: Geometry | None = None, *,
    index: Tensor | None = None,
) -> Launch:  # fmt: skip
    from megatron_cp.exchange.kernels.triton import Launch

    coding = at.coding if at is not None and pieces.head_blocks else None  # None also without a head on this rank
    return Launch(tensors, messages, rows, pieces, index=index, coding=coding)


# Tables depend on shapes and not on the batch, so that the latest are cached.


def _token_pieces(
    tensors: Sequence[Tensor], messages: Sequence[Tensor], formats: tuple[RowFormat, ...], at: Geometry, *,
    to_tensors: bool,
) -> Pieces:  # fmt: skip
    widths, types = tuple(tensor.shape[1] for tensor in tensors), tuple(tensor.dtype for tensor in tensors)
    return _token_table(
        at.blocks, formats, at.dtypes, at.coded, widths, types, alignment_of(tensors, messages), at.device,
        to_tensors=to_tensors,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _token_table(
    blocks: tuple[Section, ...],
    formats: tuple[RowFormat, ...],
    dtypes: tuple[torch.dtype, ...],
    coded: tuple[bool, ...],
    widths: tuple[int, ...],
    types: tuple[torch.dtype, ...],
    alignment: tuple[int, ...],
    device: torch.device,
    *,
    to_tensors: bool,
) -> Pieces:
    places = list(_places(blocks, widths))
    found = [
        (rank, _piece(head_copy, rank, form, blocks, dtypes, coded, *places[head_copy.section], part))
        for part, form in enumerate(formats)
        for head_copy in form.head_copies
        for rank in range(head_copy.first_rank, head_copy.last_rank)
    ]
    found.sort(key=lambda pair: pair[0])  # sums have the order of ranks, across parts
    return copy_table(
        [piece for _, piece in found], types=types, alignment=alignment, device=device, to_tensors=to_tensors
    )


def _places(blocks: Iterable[Section], widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields for each section the tensor that contains it, and its first feature there."""
    tensor, start = 0, 0
    for block in blocks:
        while start == widths[tensor]:
            tensor, start = tensor + 1, 0
        yield tensor, start
        start += block.width


def _piece(
    head_copy: HeadCopy, rank: int, form: RowFormat, blocks: Sequence[Section], dtypes: Sequence[torch.dtype],
    coded: Sequence[bool], tensor: int, start: int, part: int,
) -> Piece:  # fmt: skip
    dim, item = blocks[head_copy.section].head_dim, dtypes[head_copy.section].itemsize
    head = head_copy.first_head + (rank - head_copy.first_rank) * head_copy.head_step
    return Piece(
        tensor, (start + head * dim) * item, head_copy.num_heads * dim * item, form.row_starts[rank],
        form.row_bytes[rank], head_copy.offset, part, dim if coded[head_copy.section] else 0, head_copy.scales or 0,
    )  # fmt: skip


def _head_pieces(at: Geometry, alignment: tuple[int, ...], *, to_tensors: bool) -> Pieces:
    return _head_table(
        at.blocks, at.format, at.rank, at.dtypes, at.coded, at.rows_per_token, alignment, at.device,
        to_tensors=to_tensors,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _head_table(
    blocks: tuple[Section, ...],
    form: RowFormat,
    rank: int,
    dtypes: tuple[torch.dtype, ...],
    coded: tuple[bool, ...],
    copies: int,
    alignment: tuple[int, ...],
    device: torch.device,
    *,
    to_tensors: bool,
) -> Pieces:
    row, found = form.row_bytes[rank], []
    for number, (block, offset) in enumerate(zip(blocks, form.offsets[rank], strict=True)):
        heads = block.heads_on(rank)
        size = heads * block.head_dim * dtypes[number].itemsize
        head_dim, scale = (block.head_dim, form.scales[rank][number] or 0) if coded[number] else (0, 0)
        found += [
            Piece(number, copy * size, size, 0, copies * row, copy * row + offset, 0, head_dim, scale)
            for copy in range(copies)
        ]
    return copy_table(found, types=dtypes, alignment=alignment, device=device, to_tensors=to_tensors)


@lru_cache(maxsize=64)
def _row_table(row: int, alignment: tuple[int, ...], device: torch.device) -> Pieces:
    piece = Piece(0, 0, row, 0, row, 0)
    return copy_table([piece], types=(torch.uint8,), alignment=alignment, device=device, to_tensors=False)


def _fits(tensors: Sequence[Tensor], messages: Sequence[Tensor], at: Geometry) -> bool:
    if max(len(tensors), len(messages)) > MOST or not all(map(has_dense_rows, tensors)):
        return False
    if not at.is_coded:
        return True
    is_new = at.device.type != "cuda" or torch.cuda.get_device_capability(at.device) >= _CODED_FORMATS
    return set(at.dtypes) <= set(TYPES) and (is_new or at.coding == INT8)
