"""`Geometry`: the form of the messages of one exchange on one rank, and the tables that belong to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.codec import Format
from megatron_cp.exchange.device import CallTables, on_device
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import RowFormat, Section, Sections
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.layout import Layout


class TableView(NamedTuple):
    """A section in the head side's table of rows, as a view of a flat tensor of the section's type.

    Attributes:
        shape: `[T, (b,) h, d]`.
        stride: in elements.
        start: elements before the first.
        is_empty: True if it has no elements: then its position does not matter.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    is_empty: bool


def geometry_of(
    exchange: Exchange, rank: int, dtypes: tuple[torch.dtype, ...], batch: int | None, device: torch.device,
    tables: CallTables | None,
) -> Geometry:  # fmt: skip
    """Returns the geometry of activations, made once for all layers of a batch, with all that it derives."""
    # A copy of the exchange without its memo: otherwise the two would form a cycle, freed only by garbage collection.
    key = (rank, dtypes, batch, device, tables)
    return exchange.memo(key, lambda: Geometry(replace(exchange), rank, dtypes, batch, device, tables=tables))


@dataclass(frozen=True, eq=False)
class Geometry:
    """The form of the messages of one exchange on one rank, for tensors of given types and batch."""

    exchange: Exchange
    rank: int
    dtypes: tuple[torch.dtype, ...]  # for each section
    batch: int | None  # None for THD input, which has no batch axis
    device: torch.device
    part: int = 0  # the part of the exchange in these messages
    forward: bool = True  # True for activations, False for their gradients
    tables: CallTables | None = None  # instead of those that it makes

    @cached_property
    def parts(self) -> list[Geometry]:
        """This geometry for each part of the exchange."""
        return [replace(self, part=part) for part in range(len(self.exchange.parts))]

    @cached_property
    def gradients(self) -> Geometry:
        """The geometry of the gradients of these messages."""
        return replace(self, forward=False)

    @cached_property
    def remembered(self) -> dict[Any, Any]:
        """A cache of values derived from the given tensors, such as kernel launches, by all that they depend on."""
        return {}

    @cached_property
    def num_rows(self) -> int:
        """The number of this rank's rows, pad rows included."""
        return int(self.layout.row_counts[self.rank])

    @cached_property
    def num_tokens(self) -> int:
        """The number of this rank's tokens."""
        return int(self.layout.token_counts[self.rank])

    @cached_property
    def steps(self) -> tuple[str, str]:
        """The names of the exchange of these messages in errors: to tokens, and to heads."""
        names = ", ".join(block.name for block in self.exchange.sections.blocks)
        count, way = len(self.exchange.parts), "forward" if self.forward else "backward"
        chunk = f", chunk {self.part + 1} of {count}" if count > 1 else ""
        to_tokens, to_heads = (f"exchange of {names} to {side}, {way}{chunk}" for side in ("tokens", "heads"))
        return to_tokens, to_heads

    @cached_property
    def sections(self) -> Sections:
        return self.exchange.parts[self.part]

    @cached_property
    def blocks(self) -> tuple[Section, ...]:
        return self.sections.blocks

    @cached_property
    def coded(self) -> tuple[bool, ...]:
        """True for each section that is coded in messages."""
        return self.exchange.coded(self._sizes)

    @cached_property
    def is_coded(self) -> bool:
        """True if any section is coded."""
        return any(self.coded)

    @cached_property
    def coding(self) -> Format:
        """The format of coded sections."""
        codec = self.exchange.codec
        assert codec is not None
        return codec.forward if self.forward else codec.backward

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(dtype.itemsize for dtype in self.dtypes)

    @cached_property
    def format(self) -> RowFormat:
        """The byte layout of the messages' rows."""
        # Also in the layout's memo, since every layer of a batch asks for the same one.
        key = ("row_format", self.sections, self._sizes, self.coded)
        return self.layout.memo(key, lambda: self.sections.row_format(self._sizes, coded=self.coded))

    @cached_property
    def table_format(self) -> RowFormat:
        """The byte layout of rows in the head side's tables, where nothing is coded."""
        if not self.is_coded:
            return self.format
        return self.layout.memo(
            ("row_format", self.sections, self._sizes), lambda: self.sections.row_format(self._sizes)
        )

    @cached_property
    def table_views(self) -> tuple[TableView, ...]:
        """The sections in the head side's table, where nothing is coded."""
        total, row = self.layout.packing.total, self.table_format.row_bytes[self.rank]
        lead = (total,) if self.batch is None else (total, self.batch)
        found = []
        for block, dtype, offset in zip(
            self.blocks, self.dtypes, self.table_format.offsets[self.rank], strict=True
        ):  # fmt: skip
            heads, row_size = block.heads_on(self.rank), row // dtype.itemsize
            steps = (row_size,) if self.batch is None else (self.batch * row_size, row_size)
            is_empty = 0 in (*lead, heads)
            shape, stride = (*lead, heads, block.head_dim), (*steps, block.head_dim, 1)
            found.append(TableView(dtype, shape, stride, offset // dtype.itemsize, is_empty))
        return tuple(found)

    @cached_property
    def table_bytes(self) -> int:
        """Bytes of the head side's table."""
        return self.layout.packing.total * self.rows_per_token * self.table_format.row_bytes[self.rank]

    @cached_property
    def layout(self) -> Layout:
        return self.exchange.layout

    @cached_property
    def rows_per_token(self) -> int:
        """Message rows for each token."""
        return 1 if self.batch is None else self.batch

    @cached_property
    def local_rows(self) -> int:
        """Message rows of this rank's own tokens."""
        return int(self.layout.token_counts[self.rank]) * self.rows_per_token

    @cached_property
    def token_side_bytes(self) -> int:
        """Bytes of the messages to (or from) all ranks, on the side that holds this rank's tokens."""
        return self.local_rows * sum(self.format.row_bytes)

    @cached_property
    def head_side_bytes(self) -> int:
        """Bytes of the messages from (or to) all ranks, on the side that holds this rank's heads."""
        return self.layout.packing.total * self.rows_per_token * self.format.row_bytes[self.rank]

    def split_counts(self, *, to_heads: bool) -> SplitCounts:
        """Returns the bytes from each rank to each rank."""
        return self._both_split_counts[to_heads]

    @cached_property
    def _both_split_counts(self) -> tuple[SplitCounts, SplitCounts]:
        rows, row_bytes = self.layout.token_counts * self.rows_per_token, np.array(self.format.row_bytes)
        counts = np.outer(rows, row_bytes)
        return SplitCounts(counts.T), SplitCounts(counts)

    @cached_property
    def order(self) -> Tensor | None:
        """The stream's row for each row of the messages, end to end; None if both are in stream order."""
        return self._index_table("order")

    @cached_property
    def inverse_order(self) -> Tensor | None:
        """The inverse of `order`; None likewise."""
        return self._index_table("inverse_order")

    def _index_table(self, name: str) -> Tensor | None:
        if self.layout.in_stream_order:
            return None
        return index_table(self.layout, name, self.device) if self.tables is None else self.tables.orders[name]


def index_table(layout: Layout, name: str, device: torch.device) -> Tensor:
    """Returns `layout.order` or `layout.inverse_order` on the device, made once for a batch."""
    return layout.memo((name, device), lambda: on_device(getattr(layout, name), device))


def prepare_tables(layout: Layout, device: torch.device) -> None:
    """Makes the index tables that exchanges from this layout need before any layer asks for them.

    Call it where the batch is sharded, so that the copies to a device are complete when the first layer needs them.
    """
    if not layout.in_stream_order:
        for name in ("order", "inverse_order"):
            index_table(layout, name, device)
