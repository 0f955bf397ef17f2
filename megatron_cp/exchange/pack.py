"""Packing and unpacking the messages of a head exchange: the local work on each side of the collective.

A message is bytes, so that sections of different types share it. The token side cuts features: for each rank the
columns of its heads, copied by slices. The head side orders tokens: rows arrive rank after rank and are gathered into
stream order, or viewed where that is the order already. Each direction has one pack and one unpack:

    to heads    token side --copy columns--> message ==collective==> message --gather rows--> head side (views)
    to tokens   head side --gather rows--> message ==collective==> message --copy columns--> token side

Shapes: `t` a rank's tokens, `T` all tokens, `b` batch (absent for packed THD input), `f` features, `h` heads, `d` head
size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.device import on_device
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import ROW_ALIGNMENT, Columns, RowFormat
from megatron_cp.layout import Layout


@dataclass(frozen=True)
class Geometry:
    """What the messages of one exchange look like on one rank, for tensors of given types and batch."""

    exchange: Exchange
    rank: int
    dtypes: tuple[torch.dtype, ...]  # of each section
    batch: int | None  # None for THD input, which has no batch axis
    device: torch.device

    @cached_property
    def format(self) -> RowFormat:
        # Kept beside the layout's other tables too: every layer of a batch asks for the same one.
        sections, sizes = self.exchange.sections, tuple(dtype.itemsize for dtype in self.dtypes)
        return self.layout.table(("row_format", sections, sizes), lambda: sections.row_format(sizes))

    @property
    def layout(self) -> Layout:
        return self.exchange.layout

    @property
    def copies(self) -> int:
        """Message rows for each token."""
        return 1 if self.batch is None else self.batch

    @cached_property
    def own_rows(self) -> int:
        """Message rows of this rank's own tokens."""
        return int(self.layout.token_counts[self.rank]) * self.copies

    @property
    def token_side_splits(self) -> list[int]:
        """Bytes of the message to (or from) each rank, on the side that holds this rank's own tokens."""
        return [self.own_rows * size for size in self.format.row_bytes]

    @property
    def head_side_splits(self) -> list[int]:
        """Bytes of the message from (or to) each rank, on the side that holds this rank's own heads."""
        row = self.copies * self.format.row_bytes[self.rank]
        return [count * row for count in self.layout.token_counts.tolist()]

    def index(self, name: str) -> Tensor:
        return index_table(self.layout, name, self.device)


def index_table(layout: Layout, name: str, device: torch.device) -> Tensor:
    """`layout.order` or `layout.inverse_order` on the device, made once for a batch."""
    return layout.table((name, device), lambda: on_device(getattr(layout, name), device))


def prepare_tables(layout: Layout, device: torch.device) -> None:
    """Makes the index tables that exchanges from this layout need, so that no layer has to.

    Call it where the batch is sharded: the copies to a device are then long done when the first layer needs them.
    """
    if layout.cp_size > 1 and not layout.in_stream_order:
        for name in ("order", "inverse_order"):
            index_table(layout, name, device)


# -- the token side --------------------------------------------------------------------------------------------------


def pack_tokens(tensors: Sequence[Tensor], at: Geometry) -> Tensor:
    """Every rank's message, end to end, from `[rows, (b,) f]` tensors whose features are the sections in order."""
    sources = section_columns([_token_rows(tensor, at) for tensor in tensors], at.exchange)
    message = torch.empty(sum(at.token_side_splits), dtype=torch.uint8, device=at.device)
    for columns in at.format.columns:
        _message_view(message, columns, at).copy_(_head_view(sources[columns.section], columns, at))
    return message


def unpack_tokens(message: Tensor, at: Geometry, widths: Sequence[int]) -> list[Tensor]:
    """The inverse of `pack_tokens`: `[rows, (b,) width]` tensors; what several ranks return for one head is summed.

    Sums run in rank order, in fp32 where the type is shorter, and pad rows are zero.
    """
    rows = int(at.layout.row_counts[at.rank])
    lead = (rows,) if at.batch is None else (rows, at.batch)
    dtypes = iter(_type_of_each(widths, at))
    tensors = [torch.empty(*lead, width, dtype=next(dtypes), device=at.device) for width in widths]
    for tensor in tensors:
        tensor[int(at.layout.token_counts[at.rank]) :].zero_()
    targets = section_columns([_token_rows(tensor, at) for tensor in tensors], at.exchange)
    sums = {
        index: target.new_empty(target.shape, dtype=torch.float32)
        for index, (block, target) in enumerate(zip(at.exchange.sections.blocks, targets, strict=True))
        if block.replicated and target.dtype.itemsize < 4
    }
    for columns in at.format.columns:
        source = _message_view(message, columns, at)
        target = _head_view(sums.get(columns.section, targets[columns.section]), columns, at)
        shared = columns.shared_heads * at.exchange.sections.blocks[columns.section].head_dim
        if shared:
            target[..., :shared].add_(source[..., :shared])
        target[..., shared:].copy_(source[..., shared:])
    for index, total in sums.items():
        targets[index].copy_(total)
    return tensors


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
    held = tensor[: int(at.layout.token_counts[at.rank])]
    return held if at.batch is None else held.flatten(0, 1)


def _message_view(message: Tensor, columns: Columns, at: Geometry) -> Tensor:
    """`[ranks, rows, features]`: one section's heads in the messages of neighbouring ranks."""
    block, dtype = at.exchange.sections.blocks[columns.section], at.dtypes[columns.section]
    start = at.own_rows * at.format.row_starts[columns.first_rank]
    row = at.format.row_bytes[columns.first_rank]
    messages = message[start : start + columns.num_ranks * at.own_rows * row].view(columns.num_ranks, at.own_rows, row)
    size = columns.num_heads * block.head_dim * dtype.itemsize
    return messages[:, :, columns.offset : columns.offset + size].view(dtype)


def _head_view(features: Tensor, columns: Columns, at: Geometry) -> Tensor:
    """`[ranks, rows, features]`: the same heads where they stand in a `[rows, width]` section."""
    dim = at.exchange.sections.blocks[columns.section].head_dim
    size, step = columns.num_heads * dim, columns.head_step * dim
    start = columns.first_head * dim
    taken = features[:, start : start + (columns.num_ranks - 1) * step + size]
    return taken.unsqueeze(0) if columns.num_ranks == 1 else taken.unfold(1, size, step).transpose(0, 1)


# -- the head side ---------------------------------------------------------------------------------------------------


def unpack_heads(message: Tensor, at: Geometry) -> list[Tensor]:
    """`[T, (b,) h, d]` for each section, in stream order: views of one buffer of rows."""
    table = message.view(at.layout.packing.total, at.copies * at.format.row_bytes[at.rank])
    if not at.layout.in_stream_order:
        table = _gathered(table, at.index("inverse_order"))
    return section_views(table, at)


def pack_heads(sections: Sequence[Tensor], at: Geometry) -> Tensor:
    """The inverse of `unpack_heads`: the messages to every rank, end to end."""
    table = _shared_table(sections, at)
    if at.layout.in_stream_order:
        if table is None:
            table = _new_table(at)
            for view, section in zip(section_views(table, at), sections, strict=True):
                view.copy_(section)
        return table.flatten()
    order = at.index("order")
    if table is not None:
        return _gathered(table, order).flatten()
    table = _new_table(at)
    for view, section in zip(section_views(table, at), sections, strict=True):
        torch.index_select(section, 0, order, out=view)
    return table.flatten()


def section_views(table: Tensor, at: Geometry) -> list[Tensor]:
    """`[T, (b,) h, d]` views of a `[T, b * row]` byte table, one for each section."""
    total, row = at.layout.packing.total, at.format.row_bytes[at.rank]
    lead = (total,) if at.batch is None else (total, at.batch)
    rows = table.view(*lead, row)
    views = []
    for block, dtype, offset in zip(at.exchange.sections.blocks, at.dtypes, at.format.offsets[at.rank], strict=True):
        heads = block.heads_on(at.rank)
        if heads == 0 or total == 0:
            views.append(table.new_empty(*lead, heads, block.head_dim, dtype=dtype))
            continue
        size = heads * block.head_dim * dtype.itemsize
        views.append(rows[..., offset : offset + size].view(dtype).unflatten(-1, (heads, block.head_dim)))
    return views


def _gathered(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a byte table in another order, moved in words: rows and tables are aligned for it."""
    if not table.shape[1]:
        return table  # a rank without heads
    return table.view(torch.int64).index_select(0, index).view(torch.uint8)


def _new_table(at: Geometry) -> Tensor:
    return torch.empty(
        at.layout.packing.total, at.copies * at.format.row_bytes[at.rank], dtype=torch.uint8, device=at.device
    )


def _shared_table(sections: Sequence[Tensor], at: Geometry) -> Tensor | None:
    """The byte table that all `sections` are already views of, each in its place, or None.

    A kernel that writes its gradients where its inputs stood (`like_rows`) hands over a finished message.
    """
    first = next((index for index, section in enumerate(sections) if section.numel()), None)
    if first is None:
        return None
    storage = sections[first].untyped_storage()
    rows, row = at.layout.packing.total * at.copies, at.format.row_bytes[at.rank]
    offsets = at.format.offsets[at.rank]
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
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    return apart and ranges[-1][1] - begin <= first.stride(-3) * first.dtype.itemsize
