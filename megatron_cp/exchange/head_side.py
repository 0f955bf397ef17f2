"""The head side of a head exchange: rows of all tokens are put in stream order, and back in the order of ranks.

See `messages`. Shapes: `t` a rank's tokens, `T` all tokens, `b` batch (absent for packed THD input), `f` features, `h`
heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.coding import decode, encode
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.kernels import copies
from megatron_cp.exchange.messages import (
    has_words,
    payload_and_scales,
    row_blocks,
    section_view,
    section_views,
    words,
)
from megatron_cp.exchange.sections import ROW_ALIGNMENT, HeadCopy


def unpack_heads(message: Tensor, at: Geometry) -> list[Tensor]:
    """`[T, (b,) h, d]` for each section, in stream order: views of one buffer of rows.

    The buffer is the message itself if `keeps_message(at)`.
    """
    if any(at.coded):
        return _decoded(message, at)
    if at.inverse_order is None:
        return section_views(message, at)
    table = torch.empty(at.table_bytes // at.dtypes[0].itemsize, dtype=at.dtypes[0], device=at.device)
    _gather(message, at.inverse_order, table, at)
    return section_views(table, at)


def keeps_message(at: Geometry) -> bool:
    """Whether what `unpack_heads` returns are views of the message, which then belongs to whoever uses them."""
    return at.layout.in_stream_order and not any(at.coded)


def pack_heads(sections: Sequence[Tensor], at: Geometry, buffers: Buffers) -> Tensor:
    """The inverse of `unpack_heads`: the messages to every rank, end to end."""
    if any(at.coded):
        return _encoded(sections, at, buffers)
    table = _shared_table(sections, at)
    if at.section_major and (table is None or not _is_one_block(at)):
        return _pack_section_major(sections, at, buffers)
    if at.order is None and table is not None:
        return table
    message = buffers.acquire(at.head_side_bytes, at.device)
    if table is not None and at.order is not None:
        _gather(table, at.order, message, at)
        return message
    if copies.runs_on(at.device) and copies.pack_heads(sections, message, at):
        return message
    for view, section in zip(section_views(message, at), sections, strict=True):
        if at.order is None:
            view.copy_(section)
        else:
            torch.index_select(section, 0, at.order, out=view)
    return message


def _pack_section_major(sections: Sequence[Tensor], at: Geometry, buffers: Buffers) -> Tensor:
    message = buffers.acquire(at.head_side_bytes, at.device)
    order = at.order
    tokens = at.layout.token_counts.tolist()
    row = at.copies * at.format.row_bytes[at.rank]
    first = 0
    if order is not None:  # rows are gathered for every rank, but made dense once
        sections = [section if section[:1].is_contiguous() else section.contiguous() for section in sections]
    for count, to_rank in zip(tokens, message.split([count * row for count in tokens]), strict=True):
        for number, section in enumerate(sections):
            size, start = section[0:1].nbytes, count * at.copies * at.format.offsets[at.rank][number]
            target = to_rank[start : start + count * size].view(section.dtype).view(count, *section.shape[1:])
            if order is None:
                target.copy_(section[first : first + count])
            else:
                _select(section, order[first : first + count], target)
        first += count
    return message


def _select(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Dense rows of `[T, ...]` into others, in words where that can be."""
    source, out = source.flatten(1), out.flatten(1)
    if has_words(source, out):
        source, out = words(source), words(out)
    torch.index_select(source, 0, index, out=out)


def _is_one_block(at: Geometry) -> bool:
    """Whether a message is the rows of one section, without gaps: row-major and section-major are then the same."""
    block, row = at.blocks[0], at.format.row_bytes[at.rank]
    return len(at.blocks) == 1 and row == block.heads_on(at.rank) * block.head_dim * at.dtypes[0].itemsize


def _decoded(message: Tensor, at: Geometry) -> list[Tensor]:
    total, index = at.layout.packing.total, at.inverse_order
    views = section_views(torch.empty(at.table_bytes, dtype=torch.uint8, device=at.device), at)
    if copies.runs_on(at.device) and copies.unpack_heads(message, views, at):
        return views
    rows = message.view(total, at.copies * at.format.row_bytes[at.rank])
    for tokens in row_blocks(total, at.copies * at.table_format.row_bytes[at.rank], at):
        for view, source in zip(views, _message_views(rows, at), strict=True):
            if isinstance(source, Tensor):
                view[tokens].copy_(_taken(source, index, tokens))
            else:
                payload, scales = (_taken(part, index, tokens) for part in source)
                view[tokens].copy_(decode(payload, scales, at.coding))
    return views


def _encoded(sections: Sequence[Tensor], at: Geometry, buffers: Buffers) -> Tensor:
    message = buffers.acquire(at.head_side_bytes, at.device)
    index = at.order
    if copies.runs_on(at.device) and copies.pack_heads(sections, message, at):
        return message
    rows = message.view(at.layout.packing.total, at.copies * at.format.row_bytes[at.rank])
    for tokens in row_blocks(len(rows), at.copies * at.table_format.row_bytes[at.rank], at):
        for section, target in zip(sections, _message_views(rows, at), strict=True):
            sent = _taken(section, index, tokens)
            if isinstance(target, Tensor):
                target[tokens].copy_(sent)
            else:
                payload, scales = target
                encode(sent, at.coding, payload[tokens], scales[tokens])
    return message


def _taken(rows: Tensor, index: Tensor | None, tokens: slice) -> Tensor:
    """`rows[index[tokens]]`."""
    return rows[tokens] if index is None else rows.index_select(0, index[tokens])


def _message_views(rows: Tensor, at: Geometry) -> list[Tensor | tuple[Tensor, Tensor]]:
    """For each section its `[T, (b,) h, d]` in the messages' rows, or bytes and scales where it is coded."""
    lead = rows.shape[:1] if at.batch is None else (rows.shape[0], at.batch)
    rows = rows.view(*lead, at.format.row_bytes[at.rank])
    views: list[Tensor | tuple[Tensor, Tensor]] = []
    for index, (block, is_coded) in enumerate(zip(at.blocks, at.coded, strict=True)):
        heads, offset = block.heads_on(at.rank), at.format.offsets[at.rank][index]
        if not is_coded:
            views.append(section_view(rows, block, at.dtypes[index], heads, offset))
            continue
        scales = at.format.scales[at.rank][index]
        views.append(payload_and_scales(rows, HeadCopy(index, 0, 1, 0, 0, heads, 0, offset, scales), block))
    return views


def _gather(rows: Tensor, index: Tensor, out: Tensor, at: Geometry) -> None:
    """Rows of a flat table in another order, into another one: in words, for which both are aligned."""
    row = at.copies * at.format.row_bytes[at.rank]
    if not row or not len(index):  # a rank without heads
        return
    if copies.runs_on(at.device):
        copies.gather_rows(rows, out, row, index, at)
    else:
        source, target = (table.view(torch.int64).view(-1, row // 8) for table in (rows, out))
        torch.index_select(source, 0, index, out=target)


def _shared_table(sections: Sequence[Tensor], at: Geometry) -> Tensor | None:
    """The flat byte table that all `sections` are already views of, each in its place, or None.

    A kernel that writes its gradients where its inputs stood (`like_rows`) hands over a finished message.
    """
    storage, first = None, 0
    for section, place in zip(sections, at.places, strict=True):
        if place.is_empty:
            continue
        start = (int(section.storage_offset()) - place.start) * place.dtype.itemsize
        if section.dtype != place.dtype or section.stride() != place.stride:
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
