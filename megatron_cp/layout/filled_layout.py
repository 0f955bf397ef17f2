"""`FilledLayout`: a layout of a pack that is filled up to a capacity, for CUDA graphs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from megatron_cp.layout.layout import Layout
from megatron_cp.layout.packing import Packing


class FilledLayout(Layout):
    """A layout of a pack that is filled up, so that all packs of its kind have as many rows and documents.

    Attributes:
        given: the documents alone.
        keeps_order: True if every such pack is held in stream order. Otherwise tables move the rows of every pack, also
            of one whose tokens happen to be in order.
    """

    def __init__(self, layout: Layout, given: Packing, room: tuple[Any, ...], *, keeps_order: bool) -> None:
        super().__init__(layout.packing, layout.starts, layout.ends, layout.fragment_offsets)
        self.given, self.room, self.keeps_order = given, room, keeps_order

    @cached_property
    def in_stream_order(self) -> bool:
        return self.keeps_order

    @property
    def value(self) -> tuple[Any, ...]:
        return (*super().value, self.given.lengths.tobytes(), self.room, self.keeps_order)
