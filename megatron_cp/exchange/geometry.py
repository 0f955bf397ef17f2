"""`Geometry`: what the messages of one exchange look like on one rank, and the tables that go with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.codec import Format
from megatron_cp.exchange.device import on_device
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import RowFormat, Section, Sections
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.layout import Layout


@dataclass(frozen=True)
class Geometry:
    """What the messages of one exchange look like on one rank, for tensors of given types and batch."""

    exchange: Exchange
    rank: int
    dtypes: tuple[torch.dtype, ...]  # of each section
    batch: int | None  # None for THD input, which has no batch axis
    device: torch.device
    part: int = 0  # of the exchange's parts, the one that these messages carry
    forward: bool = True  # activations; else their gradients

    @cached_property
    def parts(self) -> list[Geometry]:
        """This, for each part of the exchange."""
        return [replace(self, part=part) for part in range(len(self.exchange.parts))]

    @property
    def sections(self) -> Sections:
        return self.exchange.parts[self.part]

    @property
    def blocks(self) -> tuple[Section, ...]:
        return self.sections.blocks

    @cached_property
    def coded(self) -> tuple[bool, ...]:
        """Whether each section is coded on the wire."""
        return self.exchange.coded(self._sizes)

    @cached_property
    def section_major(self) -> bool:
        """Whether messages to tokens are section-major."""
        # A GPU's kernels move pieces that lie in any way, and all ranks' in one launch if rows are whole.
        return self.exchange.section_major and self.device.type == "cpu" and not any(self.coded)

    @property
    def coding(self) -> Format:
        """The format of what is coded."""
        codec = self.exchange.codec
        assert codec is not None
        return codec.forward if self.forward else codec.backward

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(dtype.itemsize for dtype in self.dtypes)

    @cached_property
    def format(self) -> RowFormat:
        """Of the messages."""
        # Kept beside the layout's other tables too: every layer of a batch asks for the same one.
        key = ("row_format", self.sections, self._sizes, self.coded)
        return self.layout.memo(key, lambda: self.sections.row_format(self._sizes, coded=self.coded))

    @cached_property
    def table_format(self) -> RowFormat:
        """Of the head side's tables, where nothing is coded."""
        if not any(self.coded):
            return self.format
        return self.layout.memo(
            ("row_format", self.sections, self._sizes), lambda: self.sections.row_format(self._sizes)
        )

    @property
    def layout(self) -> Layout:
        return self.exchange.layout

    @property
    def copies(self) -> int:
        """Message rows for each token."""
        return 1 if self.batch is None else self.batch

    @cached_property
    def local_rows(self) -> int:
        """Message rows of this rank's own tokens."""
        return int(self.layout.token_counts[self.rank]) * self.copies

    @property
    def token_side_bytes(self) -> int:
        """Of the messages to (or from) every rank, on the side that holds this rank's own tokens."""
        return self.local_rows * sum(self.format.row_bytes)

    @property
    def head_side_bytes(self) -> int:
        """Of the messages from (or to) every rank, on the side that holds this rank's own heads."""
        return self.layout.packing.total * self.copies * self.format.row_bytes[self.rank]

    def split_counts(self, *, to_heads: bool) -> SplitCounts:
        """Bytes from each rank to each."""
        rows, row_bytes = self.layout.token_counts * self.copies, np.array(self.format.row_bytes)
        counts = np.outer(rows, row_bytes)
        return SplitCounts(counts if to_heads else counts.T)

    def index(self, name: str) -> Tensor:
        return index_table(self.layout, name, self.device)


def index_table(layout: Layout, name: str, device: torch.device) -> Tensor:
    """`layout.order` or `layout.inverse_order` on the device, made once for a batch."""
    return layout.memo((name, device), lambda: on_device(getattr(layout, name), device))


def prepare_tables(layout: Layout, device: torch.device) -> None:
    """Makes the index tables that exchanges from this layout need, so that no layer has to.

    Call it where the batch is sharded: the copies to a device are then long done when the first layer needs them.
    """
    if not layout.in_stream_order:
        for name in ("order", "inverse_order"):
            index_table(layout, name, device)
