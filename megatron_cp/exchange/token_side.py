"""The token side of a head exchange: cuts features into each rank's message, and assembles them again.

See `messages`. Shapes: `t` a rank's tokens, `T` all tokens, `b` batch (absent for packed THD input), `f` features, `h`
heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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
    section_columns,
)
from megatron_cp.exchange.sections import HeadCopy, split_by_rank


def pack_tokens(tensors: Sequence[Tensor], at: Geometry, buffers: Buffers) -> Tensor:
    """Packs every rank's message, end to end, from `[rows, (b,) f]` tensors whose features are the sections in
    order.
    """
    message = buffers.acquire(at.token_side_bytes, at.device)
    if copies.runs_on(at.device) and copies.pack_tokens(_rows(tensors, at), message, at):
        return message
    _copy_columns(tensors, [(head_copy, _rows_of(message, head_copy, at)) for head_copy in at.format.head_copies], at)
    return message


def pack_tokens_for_peers(
    tensors: Sequence[Tensor], at: Geometry, buffers: Buffers, received: Tensor
) -> tuple[Tensor, Callable[[], None]]:
    """Packs the messages to other ranks, end to end. Returns them, and a function that writes this rank's own piece.

    The own piece is copied only once, while the others are on their way. GPU kernels write all pieces in one launch:
    then the messages include the own piece, and the function does nothing.

    Args:
        received: the messages from all ranks on the head side, where the own piece is written.
    """
    if not at.is_own_separate:
        return pack_tokens(tensors, at, buffers), no_own_piece
    own_row, others, own = at.format.row_bytes[at.rank], [], []
    sent = buffers.acquire(at.token_side_bytes, at.device)[: at.token_side_bytes - at.local_rows * own_row]
    arrives = received[at.own_head_side].view(1, at.local_rows, own_row)
    for head_copy in at.format.head_copies:
        before, within, after = split_by_rank(head_copy, at.rank)
        others += [(part, _rows_of(sent, part, at)) for part in before]
        others += [(part, _rows_of(sent, part, at, skipped=own_row)) for part in after]
        own += [(part, arrives) for part in within]
    _copy_columns(tensors, others, at)
    return sent, partial(_copy_columns, tensors, own, at)


def _copy_columns(tensors: Sequence[Tensor], targets: Sequence[tuple[HeadCopy, Tensor]], at: Geometry) -> None:
    """Copies columns into `[ranks, rows, bytes]` messages."""
    local = [_token_rows(tensor, at) for tensor in tensors]
    sources = section_columns(local, at.exchange)
    moves: list[tuple[tuple[Tensor, ...], Tensor]] = []
    for head_copy, rows in targets:
        source = _head_view(sources[head_copy.section], head_copy, at)
        if head_copy.scales is not None:
            coded = payload_and_scales(rows, head_copy, at.blocks[head_copy.section])
            by_heads = source.unflatten(-1, (head_copy.num_heads, at.blocks[head_copy.section].head_dim))
            moves.append((coded, by_heads))
            continue
        target = _features(rows, head_copy, at)
        if fits_words(target, source):
            target, source = target.view(torch.int64), source.view(torch.int64)
        moves.append(((target,), source))
    for span in row_blocks(at.local_rows, sum(tensor[:1].nbytes for tensor in local), at):
        for views, source in moves:
            if len(views) == 1:
                views[0][:, span].copy_(source[:, span])
            else:
                encode(source[:, span], at.coding, views[0][:, span], views[1][:, span])


def unpack_tokens(messages: Sequence[Tensor], at: Geometry, widths: Sequence[int]) -> list[Tensor]:
    """Assembles `[rows, (b,) width]` tensors from the messages of every part: the inverse of `pack_tokens`.

    If several ranks return values for one head, they are summed in rank order, in fp32 if the type is shorter; pad rows
    are zero.
    """
    tensors = [torch.empty(shape, dtype=dtype, device=at.device) for shape, dtype in _tensor_shapes(widths, at)]
    if copies.runs_on(at.device) and copies.unpack_tokens(messages, _rows(tensors, at), at):
        return tensors
    if at.num_rows > at.num_tokens:
        for tensor in tensors:
            tensor[at.num_tokens :].zero_()
    local = [_token_rows(tensor, at) for tensor in tensors]
    if at.section_major and not at.exchange.sections.replicated:
        _concatenate_heads(messages, local, at)
    else:
        _restore_columns(messages, local, at)
    return tensors


def _restore_columns(messages: Sequence[Tensor], local: Sequence[Tensor], at: Geometry) -> None:
    """Fills the columns of `[rows, width]` tensors, and sums heads that come from several ranks."""
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
    # By rank across parts: a sum has one order, and its first term is copied.
    arrived.sort(key=lambda each: each[0].first_rank)
    moves: list[tuple[tuple[Tensor, ...], Tensor, int]] = []
    for head_copy, part, message in arrived:
        target = _head_view(sums.get(head_copy.section, targets[head_copy.section]), head_copy, part)
        shared = head_copy.shared_heads * part.blocks[head_copy.section].head_dim
        if head_copy.scales is not None:
            rows = _rows_of(message, head_copy, part)
            moves.append((payload_and_scales(rows, head_copy, part.blocks[head_copy.section]), target, shared))
            continue
        source = _message_view(message, head_copy, part, section_major=part.section_major)
        if not shared and fits_words(source, target):
            source, target = source.view(torch.int64), target.view(torch.int64)
        moves.append(((source,), target, shared))
    for span in row_blocks(at.local_rows, sum(tensor[:1].nbytes for tensor in local), at):
        for sources, target, shared in moves:
            source = sources[0][:, span]
            if len(sources) > 1:
                source = decode(source, sources[1][:, span], at.coding).flatten(-2)
            _add(source, target[:, span], shared)
    for index, total in sums.items():
        targets[index].copy_(total)


def _add(source: Tensor, target: Tensor, shared: int) -> None:
    """Fills `[ranks, rows, features]`, and adds to the first `shared` features, whose heads have been filled before."""
    if not shared:
        target.copy_(source)
        return
    target[..., :shared].add_(source[..., :shared])
    target[..., shared:].copy_(source[..., shared:])


def _concatenate_heads(messages: Sequence[Tensor], local: Sequence[Tensor], at: Geometry) -> None:
    """Fills `[rows, width]` tensors from section-major messages by concatenating heads in order."""
    if not at.local_rows:
        return
    heads: list[dict[int, Tensor]] = [{} for _ in at.exchange.sections.blocks]  # by section and first head
    for part, message in zip(at.parts, messages, strict=True):
        for head_copy in part.format.head_copies:
            by_rank = _message_view(message, head_copy, part, section_major=True)
            for number, block in enumerate(by_rank):
                heads[head_copy.section][head_copy.first_head + number * head_copy.head_step] = block
    sections = ([by_head[first] for first in sorted(by_head)] for by_head in heads)
    for rows in local:
        blocks: list[Tensor] = []
        while sum(block.shape[1] for block in blocks) < rows.shape[1]:
            blocks += next(sections)
        torch.cat(blocks, 1, out=rows)


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


def _message_view(message: Tensor, head_copy: HeadCopy, at: Geometry, *, section_major: bool = False) -> Tensor:
    """Returns `[ranks, rows, features]`: one section's heads in the messages of neighbouring ranks."""
    rows = _rows_of(message, head_copy, at)
    if not section_major or not at.local_rows:
        return _features(rows, head_copy, at)
    dtype = at.dtypes[head_copy.section]
    size = head_copy.num_heads * at.blocks[head_copy.section].head_dim * dtype.itemsize
    start = at.local_rows * head_copy.offset
    by_rank = rows.flatten(1)[:, start : start + at.local_rows * size]
    return by_rank.view(dtype).unflatten(1, (at.local_rows, -1))


def _features(rows: Tensor, head_copy: HeadCopy, at: Geometry) -> Tensor:
    """Returns `[ranks, rows, features]` of `[ranks, rows, bytes]`."""
    block, dtype = at.blocks[head_copy.section], at.dtypes[head_copy.section]
    size = head_copy.num_heads * block.head_dim * dtype.itemsize
    return rows[..., head_copy.offset : head_copy.offset + size].view(dtype)


def _rows_of(message: Tensor, head_copy: HeadCopy, at: Geometry, skipped: int = 0) -> Tensor:
    """Returns `[ranks, rows, bytes]`: the messages of neighbouring ranks, in a buffer without the `skipped` bytes a row
    before them.
    """
    start = at.local_rows * (at.format.row_starts[head_copy.first_rank] - skipped)
    row = at.format.row_bytes[head_copy.first_rank]
    return message[start : start + head_copy.num_ranks * at.local_rows * row].view(
        head_copy.num_ranks, at.local_rows, row
    )


def _head_view(features: Tensor, head_copy: HeadCopy, at: Geometry) -> Tensor:
    """Returns `[ranks, rows, features]`: the same heads in a `[rows, width]` section."""
    dim = at.blocks[head_copy.section].head_dim
    size, step = head_copy.num_heads * dim, head_copy.head_step * dim
    start = head_copy.first_head * dim
    taken = features[:, start : start + (head_copy.num_ranks - 1) * step + size]
    return taken.unsqueeze(0) if head_copy.num_ranks == 1 else taken.unfold(1, size, step).transpose(0, 1)
