"""Packs and unpacks the messages of a head exchange.

    to heads    token side --pack_tokens--> message ==transport==> message --unpack_heads--> head side
    to tokens   head side --pack_heads--> message ==transport==> message --unpack_tokens--> token side

A message is bytes, so that sections of different types share it: a row for each token, and in it the sections one after
another. The token side cuts features: a rank gets the columns of its heads. The head side orders tokens: rows arrive
grouped by rank, and are gathered whole into stream order, or viewed if that is their order already.

Each side has a list of pairs: the places of the same heads in a tensor and in a message. Packing copies every pair from
the tensor to the message, unpacking copies it back, or adds it where several ranks return a head. So the two directions
of a side are each other's adjoint. With a codec, coding and decoding take the place of these copies. On CUDA kernels
copy all pairs in one launch (`kernels/copies.py`).

Shapes: `t` a rank's tokens, `T` all tokens, `b` batch (absent for packed THD input), `f` features, `h` heads, `d` head
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.coding import decode, encode
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.kernels import copies
from megatron_cp.exchange.sections import ROW_ALIGNMENT, SCALE_SIZE, HeadCopy


def pack_tokens(tensors: Sequence[Tensor], at: Geometry, buffers: Buffers) -> Tensor:
    """Packs every rank's message, end to end, from `[rows, (b,) f]` tensors whose features are the sections in
    order.
    """
    message = buffers.acquire(at.token_side_bytes, at.device)
    if copies.runs_on(at.device) and copies.pack_tokens(_rows(tensors, at), message, at):
        return message
    columns = section_columns([_token_rows(tensor, at) for tensor in tensors], at.exchange)
    _to_messages(_token_pairs(columns, message, at), at)
    return message


def unpack_tokens(messages: Sequence[Tensor], at: Geometry, widths: Sequence[int]) -> list[Tensor]:
    """Assembles `[rows, (b,) width]` tensors from the messages of every part: the adjoint of `pack_tokens`.

    If several ranks return values for one head, they are summed in rank order, in fp32 if the type is shorter; pad rows
    are zero.
    """
    tensors = [torch.empty(shape, dtype=dtype, device=at.device) for shape, dtype in _tensor_shapes(widths, at)]
    if copies.runs_on(at.device) and copies.unpack_tokens(messages, _rows(tensors, at), at):
        return tensors
    if at.num_rows > at.num_tokens:
        for tensor in tensors:
            tensor[at.num_tokens :].zero_()
    columns = section_columns([_token_rows(tensor, at) for tensor in tensors], at.exchange)
    totals = list(columns)
    for index, block in enumerate(at.exchange.sections.blocks):
        if block.replicated and columns[index].dtype.itemsize < 4:
            totals[index] = torch.empty_like(columns[index], dtype=torch.float32)
    pairs: list[_Pair] = []
    for part, message in zip(at.parts, messages, strict=True):
        pairs += _token_pairs(totals, message, part)
    # By rank across parts: a sum has one order, and its first term is copied.
    _from_messages(sorted(pairs, key=lambda pair: pair.first_rank), at)
    for column, total in zip(columns, totals, strict=True):
        if total is not column:
            column.copy_(total)
    return tensors


def pack_heads(sections: Sequence[Tensor], at: Geometry, buffers: Buffers) -> Tensor:
    """Packs every rank's message, end to end, from `[T, (b,) h, d]` for each section: the adjoint of `unpack_heads`.

    Sections that lie like a message, such as gradients in tensors of `like_rows`, are sent as they lie.
    """
    table, index = None if at.is_coded else _shared_table(sections, at), at.order
    if table is not None and index is None:
        return table
    message = buffers.acquire(at.head_side_bytes, at.device)
    if table is not None and index is not None:
        _gather(table, index, message, at)
    elif not (copies.runs_on(at.device) and copies.pack_heads(sections, message, at)):
        _to_messages(_head_pairs(sections, message, at), at, index)
    return message


def unpack_heads(message: Tensor, at: Geometry) -> list[Tensor]:
    """Returns `[T, (b,) h, d]` for each section, in stream order: views of one buffer of rows.

    The buffer is the message itself if `keeps_message(at)`.
    """
    index = at.inverse_order
    if index is None and not at.is_coded:
        return section_views(message, at)
    table = torch.empty(at.table_bytes // at.dtypes[0].itemsize, dtype=at.dtypes[0], device=at.device)
    views = section_views(table, at)
    if index is not None and not at.is_coded:
        _gather(message, index, table, at)
    elif not (copies.runs_on(at.device) and copies.unpack_heads(message, views, at)):
        _from_messages(_head_pairs(views, message, at), at, index)
    return views


def keeps_message(at: Geometry) -> bool:
    """Returns True if the results of `unpack_heads` are views of the message, which then belongs to their user."""
    return at.layout.in_stream_order and not at.is_coded


class _Pair(NamedTuple):
    """The places of the same heads in a tensor and in a message.

    Attributes:
        tensor: `[rows, ..., h, d]`.
        message: as the tensor; the bytes of codes if the section is coded.
        scales: `[rows, ..., h]` of a coded section; else None.
        first_rank: the rank, or the first of the neighbouring ranks, whose message it is.
        shared: the number of leading heads that are in messages of lower ranks too.
    """

    tensor: Tensor
    message: Tensor
    scales: Tensor | None
    first_rank: int
    shared: int


def _token_pairs(columns: Sequence[Tensor], message: Tensor, at: Geometry) -> list[_Pair]:
    """Returns the pairs of each section's `[rows, width]` columns and the messages of all ranks in one part."""
    pairs = []
    for head_copy in at.format.head_copies:
        dim, row = at.blocks[head_copy.section].head_dim, at.format.row_bytes[head_copy.first_rank]
        size, step = head_copy.num_heads * dim, head_copy.head_step * dim
        first = head_copy.first_head * dim
        heads = columns[head_copy.section][:, first : first + (head_copy.num_ranks - 1) * step + size]
        tensor = heads.unfold(1, size, max(step, 1)).unflatten(-1, (head_copy.num_heads, dim))  # [rows, ranks, h, d]
        start = at.local_rows * at.format.row_starts[head_copy.first_rank]
        by_rank = message[start : start + head_copy.num_ranks * at.local_rows * row]
        rows = by_rank.view(head_copy.num_ranks, at.local_rows, row).transpose(0, 1)
        pairs.append(_Pair(tensor, *_heads_in_rows(rows, head_copy, at), head_copy.first_rank, head_copy.shared_heads))
    return pairs


def _head_pairs(sections: Sequence[Tensor], message: Tensor, at: Geometry) -> list[_Pair]:
    """Returns the pairs of each section's `[T, (b,) h, d]` and the messages, whose rows have another order."""
    lead = (at.layout.packing.total,) if at.batch is None else (at.layout.packing.total, at.batch)
    rows, pairs = message.view(*lead, at.format.row_bytes[at.rank]), []
    places = zip(at.format.offsets[at.rank], at.format.scales[at.rank], strict=True)
    for index, (section, (offset, scales)) in enumerate(zip(sections, places, strict=True)):
        first, last = at.blocks[index].ranges[at.rank]
        own = HeadCopy(index, at.rank, at.rank + 1, first, 0, last - first, 0, offset, scales)
        pairs.append(_Pair(section, *_heads_in_rows(rows, own, at), at.rank, 0))
    return pairs


def _heads_in_rows(rows: Tensor, head_copy: HeadCopy, at: Geometry) -> tuple[Tensor, Tensor | None]:
    """Returns `[..., h, d]` heads in rows `[..., bytes]` of messages, and `[..., h]` their scales if they are coded."""
    heads, dim, scales = head_copy.num_heads, at.blocks[head_copy.section].head_dim, head_copy.scales
    shape = (*rows.shape[:-1], heads, dim)
    if 0 in shape:  # nothing is coded
        return rows.new_empty(shape, dtype=at.dtypes[head_copy.section]), None
    dtype = at.dtypes[head_copy.section] if scales is None else torch.uint8
    values = rows[..., head_copy.offset : head_copy.offset + heads * dim * dtype.itemsize].view(dtype).view(shape)
    if scales is None:
        return values, None
    return values, rows[..., scales : scales + heads * SCALE_SIZE].view(torch.float32)


def _to_messages(pairs: Iterable[_Pair], at: Geometry, index: Tensor | None = None) -> None:
    """Copies pairs to messages, or codes them: row `index[i]` of the tensor to row `i`."""
    for tensor, message, scales, *_ in pairs:
        if scales is not None:
            encode(_taken(tensor, index), at.coding, message, scales)
        elif index is not None:
            torch.index_select(tensor, 0, index, out=message)
        else:
            message.copy_(tensor)


def _from_messages(pairs: Iterable[_Pair], at: Geometry, index: Tensor | None = None) -> None:
    """Copies or decodes pairs to tensors, row `index[i]` of the message to row `i`; adds heads that are shared."""
    for tensor, message, scales, _, shared in pairs:
        arrived = _taken(message, index)
        if scales is not None:
            arrived = decode(arrived, _taken(scales, index), at.coding)
        if shared:
            tensor[..., :shared, :].add_(arrived[..., :shared, :])
        tensor[..., shared:, :].copy_(arrived[..., shared:, :])


def _taken(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _gather(rows: Tensor, index: Tensor, out: Tensor, at: Geometry) -> None:
    """Gathers rows of a flat table into `out`, in words, for which both are aligned."""
    row = at.rows_per_token * at.format.row_bytes[at.rank]
    if not row or not len(index):  # a rank without heads
        return
    if copies.runs_on(at.device):
        copies.gather_rows(rows, out, row, index, at)
    else:
        source, target = (table.view(torch.int64).view(-1, row // 8) for table in (rows, out))
        torch.index_select(source, 0, index, out=target)


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


def section_views(table: Tensor, at: Geometry) -> list[Tensor]:
    """Returns `[T, (b,) h, d]` views of a dense table of rows, one for each section."""
    typed = {table.dtype: table}
    views = []
    for dtype, shape, stride, start, is_empty in at.table_views:
        if is_empty:
            views.append(table.new_empty(shape, dtype=dtype))
            continue
        if dtype not in typed:
            typed[dtype] = table.view(dtype)
        views.append(typed[dtype].as_strided(shape, stride, typed[dtype].storage_offset() + start))
    return views


def _tensor_shapes(widths: Sequence[int], at: Geometry) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and type of each token-side tensor: the type is that of the first section in it."""
    key = ("shapes", *widths)
    if key in at.remembered:
        kept: list[tuple[tuple[int, ...], torch.dtype]] = at.remembered[key]
        return kept
    lead = (at.num_rows,) if at.batch is None else (at.num_rows, at.batch)
    found, blocks = [], list(zip(at.exchange.sections.blocks, at.dtypes, strict=True))
    for width in widths:
        found.append(((*lead, width), blocks[0][1]))
        while blocks and width > 0:
            width -= blocks.pop(0)[0].width
    at.remembered[key] = found
    return found


def _rows(tensors: Sequence[Tensor], at: Geometry) -> Sequence[Tensor]:
    """Flattens `[rows, (b,) f]` to `[rows * b, f]`."""
    return tensors if at.batch is None else [tensor.flatten(0, 1) for tensor in tensors]


def _token_rows(tensor: Tensor, at: Geometry) -> Tensor:
    """Flattens this rank's tokens to `[tokens * b, f]`, without pad rows."""
    tokens = tensor if at.num_rows == at.num_tokens else tensor[: at.num_tokens]
    return tokens if at.batch is None else tokens.flatten(0, 1)


def _byte_offset(tensor: Tensor) -> int:
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
        start = (_byte_offset(tensor) - first) // tensor.dtype.itemsize
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
        start = _byte_offset(tensor)
        ranges.append((start, start + tensor.shape[-2] * tensor.shape[-1] * size, size))
    ranges.sort()
    begin, end = ranges[0][0], ranges[0][0]
    for first, last, size in ranges:
        # Relative to `begin`, a view must start on an element.
        if first < end or (first - begin) % size:
            return None
        end = last
    return begin if end - begin <= row else None


def _shared_table(sections: Sequence[Tensor], at: Geometry) -> Tensor | None:
    """Returns the flat byte table that all `sections` are views of, each in its place; None if there is none.

    A kernel that writes its gradients in the place of its inputs (`like_rows`) provides a finished message.
    """
    storage, first = None, 0
    for section, view in zip(sections, at.table_views, strict=True):
        if view.is_empty:
            continue
        start = (int(section.storage_offset()) - view.start) * view.dtype.itemsize
        if section.dtype != view.dtype or section.stride() != view.stride:
            return None
        if storage is None:
            storage, first = section.untyped_storage(), start
            if start < 0 or start % ROW_ALIGNMENT or start + at.table_bytes > storage.nbytes():
                return None
        elif start != first or section.untyped_storage().data_ptr() != storage.data_ptr():
            return None
    if storage is None:
        return None
    return torch.empty(0, dtype=torch.uint8, device=at.device).set_(storage, first, (at.table_bytes,), (1,))
