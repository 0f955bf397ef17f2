"""Messages of a head exchange: their form, and views of the sections in them.

A message is bytes, so that sections of different types share it. The token side cuts features: for each rank the
columns of its heads, copied by slices. The head side orders tokens: rows arrive grouped by rank and are gathered into
stream order, or viewed if that is their order already. Each direction has one pack and one unpack, in `token_side` and
`head_side`:

    to heads    token side --copy columns--> message ==transport==> message --gather rows--> head side (views)
    to tokens   head side --gather rows--> message ==transport==> message --copy columns--> token side

With a codec, coding takes the place of the copy on the side that sends, and decoding on the side that receives.

A message to heads is row-major: a token's sections are one row, and rows are viewed, or gathered whole. A message to
tokens may be section-major, each section dense (`Geometry.section_major`): sections then come from tensors of their
own, and a CPU copies dense blocks into the columns of a tensor in half the time that columns of rows take.

Shapes: `t` a rank's tokens, `T` all tokens, `b` batch (absent for packed THD input), `f` features, `h` heads, `d` head
size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.sections import SCALE_SIZE, HeadCopy, Section

# Bytes that are copied, or coded, at a time. Cutting touches a page for every run, and a CPU's TLB holds some thousand
# pages; coding passes over its numbers several times, which should stay in the cache.
_CUT_AT_A_TIME, _CODED_AT_A_TIME = 2**23, 2**21


def no_own_piece() -> None:
    """Writes nothing: the piece from a rank to itself is part of the messages."""


def section_columns(rows: Sequence[Tensor], exchange: Exchange) -> list[Tensor]:
    """Splits `[n, f]` tensors, laid end to end along the features, into one `[n, width]` view for each section."""
    views, blocks = [], iter(exchange.sections.blocks)
    for tensor in rows:
        start = 0
        while start < tensor.shape[1] and (block := next(blocks, None)):
            views.append(tensor[:, start : start + block.width])
            start += block.width
        if start != tensor.shape[1]:
            break
    if len(views) != len(exchange.sections.blocks) or start != tensor.shape[1]:
        names = ", ".join(f"{block.name} ({block.width})" for block in exchange.sections.blocks)
        raise ArgumentError("tensors", f"{[row.shape[1] for row in rows]} features", f"the sections in order: {names}")
    return views


def section_views(table: Tensor, at: Geometry, rows: int | None = None) -> list[Tensor]:
    """Returns `[T, (b,) h, d]` views of a dense table of rows, one for each section; `rows` limits a shorter table."""
    typed = {table.dtype: table}
    views = []
    for dtype, shape, stride, start, is_empty in at.places:
        shape = shape if rows is None else (rows, *shape[1:])
        if is_empty:
            views.append(table.new_empty(shape, dtype=dtype))
            continue
        if dtype not in typed:
            typed[dtype] = table.view(dtype)
        views.append(typed[dtype].as_strided(shape, stride, typed[dtype].storage_offset() + start))
    return views


def section_view(rows: Tensor, block: Section, dtype: torch.dtype, heads: int, offset: int) -> Tensor:
    """Returns `[..., h, d]`: the section that begins `offset` bytes from the start of each row of bytes."""
    lead = rows.shape[:-1]
    if heads == 0 or lead.numel() == 0:
        return rows.new_empty(*lead, heads, block.head_dim, dtype=dtype)
    size = heads * block.head_dim * dtype.itemsize
    return rows[..., offset : offset + size].view(dtype).unflatten(-1, (heads, block.head_dim))


def payload_and_scales(rows: Tensor, head_copy: HeadCopy, block: Section) -> tuple[Tensor, Tensor]:
    """Returns `[..., heads, d]` bytes and `[..., heads]` scales of coded heads in rows of bytes."""
    assert head_copy.scales is not None
    size = head_copy.num_heads * block.head_dim
    if not size or not rows.numel():
        heads = (*rows.shape[:-1], head_copy.num_heads)
        return rows.new_empty(*heads, block.head_dim), rows.new_empty(heads, dtype=torch.float32)
    payload = rows[..., head_copy.offset : head_copy.offset + size].unflatten(-1, (head_copy.num_heads, block.head_dim))
    scales = rows[..., head_copy.scales : head_copy.scales + head_copy.num_heads * SCALE_SIZE].view(torch.float32)
    return payload, scales


def row_blocks(rows: int, row_bytes: int, at: Geometry) -> list[slice]:
    """Splits rows into blocks of the size that a CPU copies fastest."""
    if at.device.type != "cpu":
        return [slice(0, rows)]
    step = max(1, (_CODED_AT_A_TIME if any(at.coded) else _CUT_AT_A_TIME) // max(row_bytes, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def fits_words(*views: Tensor) -> bool:
    """Returns True if views of one shape and type can be copied in 8-byte words, which torch does faster."""
    dtype, size = views[0].dtype, views[0].dtype.itemsize
    if size >= 8:
        return False
    for view in views:  # loops instead of generators: this runs for every block of every layer
        *strides, last = view.stride()
        if view.dtype != dtype or not view.numel() or last != 1:
            return False
        if view.shape[-1] * size % 8 or view.data_ptr() % 8:
            return False
        for stride in strides:
            if stride * size % 8:
                return False
    return True


def byte_offset(tensor: Tensor) -> int:
    """Returns the offset of a tensor in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def like_rows(*tensors: Tensor) -> list[Tensor]:
    """Returns uninitialised tensors with the relative positions of `tensors`: `empty_like` for the sections of one
    table.

    A kernel that writes gradients into them gives the exchange a message that needs no packing. For tensors that are
    not separate columns of one table the results are plain `empty_like`.
    """
    first = _start_of_columns(tensors)
    if first is None:
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    rows, dtype = tensors[0].shape[:-2].numel(), tensors[0].dtype
    table = torch.empty(rows * tensors[0].stride(-3), dtype=dtype, device=tensors[0].device)
    typed = {dtype: table}
    found = []
    for tensor in tensors:
        if tensor.dtype not in typed:
            typed[tensor.dtype] = table.view(tensor.dtype)
        start = (byte_offset(tensor) - first) // tensor.dtype.itemsize
        found.append(typed[tensor.dtype].as_strided(tensor.shape, tensor.stride(), start))
    return found


def _start_of_columns(tensors: Sequence[Tensor]) -> int | None:
    """Returns the byte offset of the first of `[T, (b,) h, d]` tensors that are dense column ranges of one table.

    Returns None if they are not, or if two share a byte.
    """
    ranges = []
    storage = tensors[0].untyped_storage().data_ptr()
    lead, row = tensors[0].shape[:-2], 0
    for tensor in tensors:
        size, stride = tensor.dtype.itemsize, tensor.stride()
        if tensor.ndim not in (3, 4) or not tensor.numel() or tensor.shape[:-2] != lead:
            return None
        row = row or stride[-3] * size
        if (
            tensor.untyped_storage().data_ptr() != storage
            or stride[-3] * size != row
            or stride[-2:] != (tensor.shape[-1], 1)
            or (tensor.ndim == 4 and stride[0] != tensor.shape[1] * stride[-3])
        ):
            return None
        start = byte_offset(tensor)
        ranges.append((start, start + tensor.shape[-2] * tensor.shape[-1] * size, size))
    ranges.sort()
    begin, end = ranges[0][0], ranges[0][0]
    for first, last, size in ranges:
        # Relative to `begin`, a view must start on an element.
        if first < end or (first - begin) % size:
            return None
        end = last
    return begin if end - begin <= row else None
