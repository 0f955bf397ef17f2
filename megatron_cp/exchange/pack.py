"""Packing and unpacking the messages of a head exchange: the local work on each side of the collective.

A message is bytes, so that sections of different types share it. The token side cuts features: for each rank the
columns of its heads, copied by slices. The head side orders tokens: rows arrive rank after rank and are gathered into
stream order, or viewed where that is the order already. Each direction has one pack and one unpack:

    to heads    token side --copy columns--> message ==transport==> message --gather rows--> head side (views)
    to tokens   head side --gather rows--> message ==transport==> message --copy columns--> token side

With a codec, coding takes the place of the copy on the side that sends, and decoding on the side that receives.

A message to heads is row-major: a token's sections are one row, and rows are viewed, or gathered whole. A message to
tokens may be section-major, each section dense (`Geometry.section_major`): sections then come from tensors of their
own, and a processor copies dense blocks into the columns of a tensor in half the time that columns of rows take.

Shapes: `t` a rank's tokens, `T` all tokens, `b` batch (absent for packed THD input), `f` features, `h` heads, `d` head
size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.coding import decode, encode
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.kernels import copies
from megatron_cp.exchange.sections import ROW_ALIGNMENT, SCALE_SIZE, HeadCopy, Section

# Bytes that are copied, or coded, before the next are. Cutting touches a page for every run, and processors know the
# addresses of some thousand; coding goes over its numbers several times, and they had better stay in the cache.
_CUT_AT_A_TIME, _CODED_AT_A_TIME = 2**23, 2**21


# -- the token side --------------------------------------------------------------------------------------------------


def pack_tokens(tensors: Sequence[Tensor], at: Geometry, buffers: Buffers) -> Tensor:
    """Every rank's message, end to end, from `[rows, (b,) f]` tensors whose features are the sections in order."""
    local = [_token_rows(tensor, at) for tensor in tensors]
    sources = section_columns(local, at.exchange)
    message = buffers.acquire(at.token_side_bytes, at.device)
    if copies.runs_on(at.device) and copies.pack_tokens(local, message, at):
        return message
    moves: list[tuple[tuple[Tensor, ...], Tensor]] = []
    for head_copy in at.format.head_copies:
        source = _head_view(sources[head_copy.section], head_copy, at)
        if head_copy.scales is not None:
            moves.append((_coded_views(message, head_copy, at), _by_heads(source, head_copy, at)))
            continue
        target = _message_view(message, head_copy, at)
        moves.append(((_words(target),), _words(source)) if _has_words(target, source) else ((target,), source))
    for span in _blocks(at.local_rows, sum(tensor[:1].nbytes for tensor in local), at):
        for targets, source in moves:
            if len(targets) == 1:
                targets[0][:, span].copy_(source[:, span])
            else:
                encode(source[:, span], at.coding, targets[0][:, span], targets[1][:, span])
    return message


def unpack_tokens(messages: Sequence[Tensor], at: Geometry, widths: Sequence[int]) -> list[Tensor]:
    """The inverse of `pack_tokens`, from the messages of every part: `[rows, (b,) width]` tensors.

    What several ranks return for one head is summed, in rank order, in fp32 where the type is shorter; pad rows are
    zero.
    """
    rows = int(at.layout.row_counts[at.rank])
    lead = (rows,) if at.batch is None else (rows, at.batch)
    dtypes = iter(_type_of_each(widths, at))
    tensors = [torch.empty(*lead, width, dtype=next(dtypes), device=at.device) for width in widths]
    if copies.runs_on(at.device) and copies.unpack_tokens(messages, [x.flatten(0, -2) for x in tensors], at):
        return tensors
    for tensor in tensors:
        tensor[int(at.layout.token_counts[at.rank]) :].zero_()
    local = [_token_rows(tensor, at) for tensor in tensors]
    if at.section_major and not at.exchange.sections.replicated:
        _join(messages, local, at)
    else:
        _put_back(messages, local, at)
    return tensors


def _put_back(messages: Sequence[Tensor], local: Sequence[Tensor], at: Geometry) -> None:
    """Fills the columns of `[rows, width]` tensors, and sums where a head comes from several ranks."""
    targets = section_columns(local, at.exchange)
    sums = {
        index: target.new_empty(target.shape, dtype=torch.float32)
        for index, (block, target) in enumerate(zip(at.exchange.sections.blocks, targets, strict=True))
        if block.replicated and target.dtype.itemsize < 4
    }
    arrived = [
        (head_copy, part, message)
        for part, message in zip(at.parts, messages, strict=True)
        for head_copy in part.format.head_copies
    ]
    # By ranks, whatever part a head comes in: a sum has one order, and its first term is the one that is copied.
    arrived.sort(key=lambda each: each[0].first_rank)
    moves: list[tuple[tuple[Tensor, ...], Tensor, int]] = []
    for head_copy, part, message in arrived:
        target = _head_view(sums.get(head_copy.section, targets[head_copy.section]), head_copy, part)
        shared = head_copy.shared_heads * part.blocks[head_copy.section].head_dim
        if head_copy.scales is not None:
            moves.append((_coded_views(message, head_copy, part), target, shared))
            continue
        source = _message_view(message, head_copy, part, section_major=part.section_major)
        as_words = not shared and _has_words(source, target)
        moves.append(((_words(source),), _words(target), 0) if as_words else ((source,), target, shared))
    for span in _blocks(at.local_rows, sum(tensor[:1].nbytes for tensor in local), at):
        for sources, target, shared in moves:
            source = sources[0][:, span]
            if len(sources) > 1:
                source = decode(source, sources[1][:, span], at.coding).flatten(-2)
            _add(source, target[:, span], shared)
    for index, total in sums.items():
        targets[index].copy_(total)


def _add(source: Tensor, target: Tensor, shared: int) -> None:
    """Fills `[ranks, rows, features]`, and adds to the first `shared` features, of heads that came before."""
    if not shared:
        target.copy_(source)
        return
    target[..., :shared].add_(source[..., :shared])
    target[..., shared:].copy_(source[..., shared:])


def _join(messages: Sequence[Tensor], local: Sequence[Tensor], at: Geometry) -> None:
    """Fills `[rows, width]` tensors from section-major messages, heads in order: row by row, each from end to end."""
    if not at.local_rows:
        return
    heads: list[dict[int, Tensor]] = [{} for _ in at.exchange.sections.blocks]  # by section and first head
    for part, message in zip(at.parts, messages, strict=True):
        for head_copy in part.format.head_copies:
            of_ranks = _message_view(message, head_copy, part, section_major=True)
            for number, block in enumerate(of_ranks):
                heads[head_copy.section][head_copy.first_head + number * head_copy.head_step] = block
    sections = ([of_section[first] for first in sorted(of_section)] for of_section in heads)
    for rows in local:
        blocks: list[Tensor] = []
        while sum(block.shape[1] for block in blocks) < rows.shape[1]:
            blocks += next(sections)
        torch.cat(blocks, 1, out=rows)


def section_columns(rows: Sequence[Tensor], exchange: Exchange) -> list[Tensor]:
    """`[n, f]` tensors, laid end to end along the features, as one `[n, width]` view for each section.

    Raises:
        ArgumentError: the features are not the sections, whole and in order.
    """
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


def _blocks(rows: int, row_bytes: int, at: Geometry) -> list[slice]:
    """All rows, in turns of as many as a processor moves best."""
    if at.device.type != "cpu":
        return [slice(0, rows)]
    step = max(1, (_CODED_AT_A_TIME if any(at.coded) else _CUT_AT_A_TIME) // max(row_bytes, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _type_of_each(widths: Sequence[int], at: Geometry) -> list[torch.dtype]:
    """The type of each token-side tensor: that of the first section in it."""
    types, blocks = [], list(zip(at.exchange.sections.blocks, at.dtypes, strict=True))
    for width in widths:
        types.append(blocks[0][1])
        while blocks and width > 0:
            width -= blocks.pop(0)[0].width
    return types


def _token_rows(tensor: Tensor, at: Geometry) -> Tensor:
    """`[rows, (b,) f]` as the `[t * b, f]` message rows of this rank's tokens, pad rows left out."""
    tokens = tensor[: int(at.layout.token_counts[at.rank])]
    return tokens if at.batch is None else tokens.flatten(0, 1)


def _message_view(message: Tensor, head_copy: HeadCopy, at: Geometry, *, section_major: bool = False) -> Tensor:
    """`[ranks, rows, features]`: one section's heads in the messages of neighbouring ranks."""
    block, dtype = at.blocks[head_copy.section], at.dtypes[head_copy.section]
    size = head_copy.num_heads * block.head_dim * dtype.itemsize
    if not section_major or not at.local_rows:
        return _message_bytes(message, head_copy, at)[..., head_copy.offset : head_copy.offset + size].view(dtype)
    of_ranks = _message_bytes(message, head_copy, at).flatten(1)
    start = at.local_rows * head_copy.offset
    return of_ranks[:, start : start + at.local_rows * size].view(dtype).unflatten(1, (at.local_rows, -1))


def _coded_views(message: Tensor, head_copy: HeadCopy, at: Geometry) -> tuple[Tensor, Tensor]:
    """`[ranks, rows, heads, d]` bytes and `[ranks, rows, heads]` scales, likewise."""
    return _payload_and_scales(_message_bytes(message, head_copy, at), head_copy, at.blocks[head_copy.section])


def _payload_and_scales(rows: Tensor, head_copy: HeadCopy, block: Section) -> tuple[Tensor, Tensor]:
    assert head_copy.scales is not None
    size = head_copy.num_heads * block.head_dim
    if not size or not rows.numel():
        heads = (*rows.shape[:-1], head_copy.num_heads)
        return rows.new_empty(*heads, block.head_dim), rows.new_empty(heads, dtype=torch.float32)
    payload = rows[..., head_copy.offset : head_copy.offset + size].unflatten(-1, (head_copy.num_heads, block.head_dim))
    scales = rows[..., head_copy.scales : head_copy.scales + head_copy.num_heads * SCALE_SIZE].view(torch.float32)
    return payload, scales


def _message_bytes(message: Tensor, head_copy: HeadCopy, at: Geometry) -> Tensor:
    """`[ranks, rows, bytes]`: the messages of neighbouring ranks."""
    start = at.local_rows * at.format.row_starts[head_copy.first_rank]
    row = at.format.row_bytes[head_copy.first_rank]
    return message[start : start + head_copy.num_ranks * at.local_rows * row].view(
        head_copy.num_ranks, at.local_rows, row
    )


def _head_view(features: Tensor, head_copy: HeadCopy, at: Geometry) -> Tensor:
    """`[ranks, rows, features]`: the same heads where they stand in a `[rows, width]` section."""
    dim = at.blocks[head_copy.section].head_dim
    size, step = head_copy.num_heads * dim, head_copy.head_step * dim
    start = head_copy.first_head * dim
    taken = features[:, start : start + (head_copy.num_ranks - 1) * step + size]
    return taken.unsqueeze(0) if head_copy.num_ranks == 1 else taken.unfold(1, size, step).transpose(0, 1)


def _by_heads(features: Tensor, head_copy: HeadCopy, at: Geometry) -> Tensor:
    return features.unflatten(-1, (head_copy.num_heads, at.blocks[head_copy.section].head_dim))


def _has_words(*views: Tensor) -> bool:
    """Whether views of one shape and type can be copied in words of 8 bytes: torch does that faster than in 2."""
    if views[0].dtype.itemsize >= 8 or any(view.dtype != views[0].dtype or not view.numel() for view in views):
        return False
    size = views[0].dtype.itemsize
    return all(
        view.stride(-1) == 1
        and (view.shape[-1] * size) % 8 == 0
        and view.data_ptr() % 8 == 0
        and all(stride * size % 8 == 0 for stride in view.stride()[:-1])
        for view in views
    )


def _words(view: Tensor) -> Tensor:
    return view.view(torch.int64)


# -- the head side ---------------------------------------------------------------------------------------------------


def unpack_heads(message: Tensor, at: Geometry) -> list[Tensor]:
    """`[T, (b,) h, d]` for each section, in stream order: views of one buffer of rows.

    The buffer is the message itself if `keeps_message(at)`.
    """
    rows = message.view(at.layout.packing.total, at.copies * at.format.row_bytes[at.rank])
    if any(at.coded):
        return _decoded(rows, at)
    if not at.layout.in_stream_order:
        rows = _gathered(rows, at.index("inverse_order"))
    return section_views(rows, at)


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
    if at.layout.in_stream_order:
        if table is None:
            table = _new_table(at, buffers)
            if copies.runs_on(at.device) and copies.pack_heads(sections, table.flatten(), at, None):
                return table.flatten()
            for view, section in zip(section_views(table, at), sections, strict=True):
                view.copy_(section)
        return table.flatten()
    order, ordered = at.index("order"), _new_table(at, buffers)
    if table is not None:
        return _gathered(table, order, out=ordered).flatten()
    if copies.runs_on(at.device) and copies.pack_heads(sections, ordered.flatten(), at, order):
        return ordered.flatten()
    for view, section in zip(section_views(ordered, at), sections, strict=True):
        torch.index_select(section, 0, order, out=view)
    return ordered.flatten()


def _pack_section_major(sections: Sequence[Tensor], at: Geometry, buffers: Buffers) -> Tensor:
    message = buffers.acquire(at.head_side_bytes, at.device)
    order = None if at.layout.in_stream_order else at.index("order")
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
    if _has_words(source, out):
        source, out = _words(source), _words(out)
    torch.index_select(source, 0, index, out=out)


def _is_one_block(at: Geometry) -> bool:
    """Whether a message is the rows of one section, without gaps: row-major and section-major are then the same."""
    block, row = at.blocks[0], at.format.row_bytes[at.rank]
    return len(at.blocks) == 1 and row == block.heads_on(at.rank) * block.head_dim * at.dtypes[0].itemsize


def _decoded(rows: Tensor, at: Geometry) -> list[Tensor]:
    total, row = at.layout.packing.total, at.table_format.row_bytes[at.rank]
    table = torch.empty(total, at.copies * row, dtype=torch.uint8, device=at.device)
    views = section_views(table, at)
    index = None if at.layout.in_stream_order else at.index("inverse_order")
    if copies.runs_on(at.device) and copies.unpack_heads(rows.flatten(), views, at, index):
        return views
    for tokens in _blocks(total, at.copies * row, at):
        for view, source in zip(views, _wire_views(rows, at), strict=True):
            if isinstance(source, Tensor):
                view[tokens].copy_(_taken(source, index, tokens))
            else:
                payload, scales = (_taken(part, index, tokens) for part in source)
                view[tokens].copy_(decode(payload, scales, at.coding))
    return views


def _encoded(sections: Sequence[Tensor], at: Geometry, buffers: Buffers) -> Tensor:
    message = buffers.acquire(at.head_side_bytes, at.device)
    index = None if at.layout.in_stream_order else at.index("order")
    if copies.runs_on(at.device) and copies.pack_heads(sections, message, at, index):
        return message
    rows = message.view(at.layout.packing.total, at.copies * at.format.row_bytes[at.rank])
    for tokens in _blocks(len(rows), at.copies * at.table_format.row_bytes[at.rank], at):
        for section, target in zip(sections, _wire_views(rows, at), strict=True):
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


def _wire_views(rows: Tensor, at: Geometry) -> list[Tensor | tuple[Tensor, Tensor]]:
    """For each section its `[T, (b,) h, d]` in the messages' rows, or bytes and scales where it is coded."""
    lead = rows.shape[:1] if at.batch is None else (rows.shape[0], at.batch)
    rows = rows.view(*lead, at.format.row_bytes[at.rank])
    views: list[Tensor | tuple[Tensor, Tensor]] = []
    for index, (block, is_coded) in enumerate(zip(at.blocks, at.coded, strict=True)):
        heads, offset = block.heads_on(at.rank), at.format.offsets[at.rank][index]
        if not is_coded:
            views.append(_section_view(rows, block, at.dtypes[index], heads, offset))
            continue
        scales = at.format.scales[at.rank][index]
        views.append(_payload_and_scales(rows, HeadCopy(index, 0, 1, 0, 0, heads, 0, offset, scales), block))
    return views


def section_views(table: Tensor, at: Geometry) -> list[Tensor]:
    """`[T, (b,) h, d]` views of a `[T, b * row]` byte table, one for each section."""
    total, row = at.layout.packing.total, at.table_format.row_bytes[at.rank]
    lead = (total,) if at.batch is None else (total, at.batch)
    rows, offsets = table.view(*lead, row), at.table_format.offsets[at.rank]
    return [
        _section_view(rows, block, dtype, block.heads_on(at.rank), offset)
        for block, dtype, offset in zip(at.blocks, at.dtypes, offsets, strict=True)
    ]


def _section_view(rows: Tensor, block: Section, dtype: torch.dtype, heads: int, offset: int) -> Tensor:
    lead = rows.shape[:-1]
    if heads == 0 or lead.numel() == 0:
        return rows.new_empty(*lead, heads, block.head_dim, dtype=dtype)
    size = heads * block.head_dim * dtype.itemsize
    return rows[..., offset : offset + size].view(dtype).unflatten(-1, (heads, block.head_dim))


def _gathered(table: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of a byte table in another order, moved in words: rows and tables are aligned for it."""
    if not table.shape[1]:
        return table  # a rank without heads
    out = torch.empty_like(table) if out is None else out
    if copies.runs_on(table.device):
        copies.gather_rows(table, out, index)
        return out
    torch.index_select(table.view(torch.int64), 0, index, out=out.view(torch.int64))
    return out


def _new_table(at: Geometry, buffers: Buffers) -> Tensor:
    table = buffers.acquire(at.head_side_bytes, at.device)
    return table.view(at.layout.packing.total, at.copies * at.format.row_bytes[at.rank])


def _shared_table(sections: Sequence[Tensor], at: Geometry) -> Tensor | None:
    """The byte table that all `sections` are already views of, each in its place, or None.

    A kernel that writes its gradients where its inputs stood (`like_rows`) hands over a finished message.
    """
    first = next((index for index, section in enumerate(sections) if section.numel()), None)
    if first is None:
        return None
    storage = sections[first].untyped_storage()
    rows, row = at.layout.packing.total * at.copies, at.table_format.row_bytes[at.rank]
    offsets = at.table_format.offsets[at.rank]
    start = _byte_offset(sections[first]) - offsets[first]
    if start < 0 or start % ROW_ALIGNMENT or start + rows * row > storage.nbytes():
        return None
    table = torch.empty(0, dtype=torch.uint8, device=at.device)
    table.set_(storage, start, (at.layout.packing.total, at.copies * row), (at.copies * row, 1))
    for section, expected in zip(sections, section_views(table, at), strict=True):
        same = not section.numel() or (
            section.dtype == expected.dtype
            and section.untyped_storage().data_ptr() == storage.data_ptr()
            and section.storage_offset() == expected.storage_offset()
            and section.stride() == expected.stride()
        )
        if not same:
            return None
    return table


def _byte_offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def like_rows(*tensors: Tensor) -> list[Tensor]:
    """Uninitialised tensors that lie to each other as `tensors` do: `empty_like` for the sections of one table.

    A kernel that writes gradients into them hands the exchange a message that needs no packing. Tensors that are not
    separate columns of one table come back as plain `empty_like`.
    """
    if not _are_columns_of_one_table(tensors):
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    rows, first = tensors[0].shape[:-2].numel(), min(_byte_offset(tensor) for tensor in tensors)
    size = rows * tensors[0].stride(-3) * tensors[0].dtype.itemsize
    buffer = torch.empty(size, dtype=torch.uint8, device=tensors[0].device).untyped_storage()
    return [
        tensor.new_empty(0).set_(
            buffer, (_byte_offset(tensor) - first) // tensor.dtype.itemsize, tensor.shape, tensor.stride()
        )
        for tensor in tensors
    ]


def _are_columns_of_one_table(tensors: Sequence[Tensor]) -> bool:
    """True if `[T, (b,) h, d]` tensors are dense column ranges of one table's rows, and no two share a byte."""
    if any(tensor.ndim not in (3, 4) for tensor in tensors):
        return False
    first, ranges = tensors[0], []
    for tensor in tensors:
        row, *inner = tensor.stride()[-3:]
        if (
            tensor.numel() == 0
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or tensor.shape[:-2] != first.shape[:-2]
            or row * tensor.dtype.itemsize != first.stride(-3) * first.dtype.itemsize
            or inner != [tensor.shape[-1], 1]
            or (tensor.ndim == 4 and tensor.stride(0) != tensor.shape[1] * row)
        ):
            return False
        start = _byte_offset(tensor)
        ranges.append((start, start + tensor.shape[-2:].numel() * tensor.dtype.itemsize))
    begin = min(ranges)[0]
    if any((start - begin) % tensor.dtype.itemsize for tensor, (start, _) in zip(tensors, ranges, strict=True)):
        return False  # rebased to `begin`, a view would not start on an element
    ranges.sort()
    disjoint = all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    return disjoint and ranges[-1][1] - begin <= first.stride(-3) * first.dtype.itemsize
