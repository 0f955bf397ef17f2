"""The head side of a head exchange: puts rows of all tokens in stream order, and back in the order of ranks.

See `messages`. Shapes: `t` a rank's tokens, `T` all tokens, `b` batch (absent for packed THD input), `f` features, `h`
heads, `d` head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.coding import decode, encode
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.kernels import copies
from megatron_cp.exchange.messages import (
    fits_words,
    no_own_piece,
    payload_and_scales,
    row_blocks,
    section_view,
    section_views,
)
from megatron_cp.exchange.sections import ROW_ALIGNMENT, HeadCopy


def unpack_heads(message: Tensor, at: Geometry) -> list[Tensor]:
    """Returns `[T, (b,) h, d]` for each section, in stream order: views of one buffer of rows.

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
    """Returns True if the results of `unpack_heads` are views of the message, which then belongs to their user."""
    return at.layout.in_stream_order and not any(at.coded)


def pack_heads(sections: Sequence[Tensor], at: Geometry, buffers: Buffers) -> Tensor:
    """Packs the messages to every rank, end to end: the inverse of `unpack_heads`."""
    table = None if any(at.coded) else _shared_table(sections, at)
    if _is_message(table, at):
        return table
    sections = _dense(sections, at)
    message = buffers.acquire(at.head_side_bytes, at.device)
    if table is None and copies.runs_on(at.device) and copies.pack_heads(sections, message, at):
        return message
    _pack(sections, table, _rank_rows(at), message, at)
    return message


def pack_heads_for_peers(
    sections: Sequence[Tensor], at: Geometry, buffers: Buffers, received: Tensor
) -> tuple[Tensor, Callable[[], None]]:
    """Packs the messages to other ranks, end to end. Returns them, and a function that writes this rank's own piece.

    See `pack_tokens_for_peers`. Sections that already form a message are sent as they are, the own piece included.
    """
    table = None if any(at.coded) else _shared_table(sections, at)
    if not at.is_own_separate or _is_message(table, at):
        return pack_heads(sections, at, buffers), no_own_piece
    tokens, row = at.layout.token_counts.tolist(), at.copies * at.format.row_bytes[at.rank]
    sections = _dense(sections, at)
    sent = buffers.acquire(at.head_side_bytes, at.device)[: at.head_side_bytes - tokens[at.rank] * row]
    ranks, first, end = _rank_rows(at), sum(tokens[: at.rank]), sum(tokens[: at.rank]) * row
    _pack(sections, table, ranks[: at.rank], sent[:end], at)
    _pack(sections, table, ranks[at.rank + 1 :], sent[end:], at)
    own = slice(first, first + tokens[at.rank])
    return sent, partial(_pack, sections, table, [own], received[at.own_token_side], at)


def _dense(sections: Sequence[Tensor], at: Geometry) -> Sequence[Tensor]:
    """Copies sections without dense rows once, if their rows are gathered for every rank."""
    if not at.section_major or at.order is None:
        return sections
    return [section if section[:1].is_contiguous() else section.contiguous() for section in sections]


def _rank_rows(at: Geometry) -> list[slice]:
    """Returns the rows of each rank's messages."""
    ends = list(itertools.accumulate(at.layout.token_counts.tolist(), initial=0))
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _is_message(table: Tensor | None, at: Geometry) -> TypeGuard[Tensor]:
    """Returns True if a table is already the message to send."""
    return table is not None and at.order is None and (not at.section_major or _is_one_block(at))


def _pack(sections: Sequence[Tensor], table: Tensor | None, ranks: Sequence[slice], out: Tensor, at: Geometry) -> None:
    """Writes the messages to some neighbouring ranks, given by their rows of all messages."""
    if not ranks or ranks[0].start == ranks[-1].stop:
        return
    if at.section_major and not (table is not None and _is_one_block(at)):
        _pack_section_major(sections, ranks, out, at)
        return
    rows = slice(ranks[0].start, ranks[-1].stop)
    is_all = rows.stop - rows.start == at.layout.packing.total
    order = at.order if at.order is None or is_all else at.order[rows]
    if any(at.coded):
        _encode(sections, rows, out, at)
    elif table is not None and order is not None:
        _gather(table, order, out, at)
    else:
        for view, section in zip(section_views(out, at, rows.stop - rows.start), sections, strict=True):
            if order is None:
                view.copy_(section[rows])
            else:
                torch.index_select(section, 0, order, out=view)


def _pack_section_major(sections: Sequence[Tensor], ranks: Sequence[slice], out: Tensor, at: Geometry) -> None:
    row = at.copies * at.format.row_bytes[at.rank]
    counts = [rows.stop - rows.start for rows in ranks]
    for rows, count, to_rank in zip(ranks, counts, out.split([count * row for count in counts]), strict=True):
        for number, section in enumerate(sections):
            size, start = section[0:1].nbytes, count * at.copies * at.format.offsets[at.rank][number]
            target = to_rank[start : start + count * size].view(section.dtype).view(count, *section.shape[1:])
            if at.order is None:
                target.copy_(section[rows])
            else:
                _select(section, at.order[rows], target)


def _select(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Gathers dense rows of `[T, ...]` into `out`, in 8-byte words if possible."""
    source, out = source.flatten(1), out.flatten(1)
    if fits_words(source, out):
        source, out = source.view(torch.int64), out.view(torch.int64)
    torch.index_select(source, 0, index, out=out)


def _is_one_block(at: Geometry) -> bool:
    """Returns True if a message is the rows of one section without gaps: then row-major and section-major are equal."""
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
                view[tokens].copy_(_take_rows(source, index, tokens))
            else:
                payload, scales = (_take_rows(part, index, tokens) for part in source)
                view[tokens].copy_(decode(payload, scales, at.coding))
    return views


def _encode(sections: Sequence[Tensor], rows: slice, out: Tensor, at: Geometry) -> None:
    targets = _message_views(out.view(rows.stop - rows.start, at.copies * at.format.row_bytes[at.rank]), at)
    for tokens in row_blocks(rows.stop - rows.start, at.copies * at.table_format.row_bytes[at.rank], at):
        stream_rows = slice(rows.start + tokens.start, rows.start + tokens.stop)
        for section, target in zip(sections, targets, strict=True):
            sent = _take_rows(section, at.order, stream_rows)
            if isinstance(target, Tensor):
                target[tokens].copy_(sent)
            else:
                payload, scales = target
                encode(sent, at.coding, payload[tokens], scales[tokens])


def _take_rows(rows: Tensor, index: Tensor | None, tokens: slice) -> Tensor:
    """Returns `rows[index[tokens]]`."""
    return rows[tokens] if index is None else rows.index_select(0, index[tokens])


def _message_views(rows: Tensor, at: Geometry) -> list[Tensor | tuple[Tensor, Tensor]]:
    """Returns each section's `[T, (b,) h, d]` in the messages' rows, or its bytes and scales if it is coded."""
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
    """Gathers rows of a flat table into `out`, in words, for which both are aligned."""
    row = at.copies * at.format.row_bytes[at.rank]
    if not row or not len(index):  # a rank without heads
        return
    if copies.runs_on(at.device):
        copies.gather_rows(rows, out, row, index, at)
    else:
        source, target = (table.view(torch.int64).view(-1, row // 8) for table in (rows, out))
        torch.index_select(source, 0, index, out=target)


def _shared_table(sections: Sequence[Tensor], at: Geometry) -> Tensor | None:
    """Returns the flat byte table that all `sections` are views of, each in its place; None if there is none.

    A kernel that writes its gradients in the place of its inputs (`like_rows`) provides a finished message.
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
