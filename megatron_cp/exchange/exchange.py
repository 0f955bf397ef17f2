"""`Exchange`: which tokens and heads change places. Pure data; `pack.py` moves the bytes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.sections import ROW_ALIGNMENT, Sections
from megatron_cp.layout import Layout


@dataclass(frozen=True)
class Exchange:
    """Between two ways of dealing one set of rows and columns to the ranks.

    On the *token side* a rank holds all heads of its own tokens; on the *head side* it holds its own heads of all
    tokens, in stream order. Both directions are one collective between one local pack and one local unpack, and each
    is the other's adjoint: going to the head side, a head that several ranks need is sent to each; coming back, what
    they return is summed.
    """

    layout: Layout
    sections: Sections

    def __post_init__(self) -> None:
        if self.sections.cp_size != self.layout.cp_size:
            raise ArgumentError(
                "sections",
                f"heads dealt to {self.sections.cp_size} ranks",
                f"heads dealt to the layout's {self.layout.cp_size} ranks",
            )

    @property
    def is_local(self) -> bool:
        """True on a single rank whose rows are the packed stream: nothing moves."""
        return self.layout.cp_size == 1 and self.layout.in_stream_order and not self.layout.pad_rows.any()

    def bytes_sent(self, item_size: int, *, to_heads: bool, alignment: int = ROW_ALIGNMENT) -> list[int]:
        """For each rank, the bytes that it sends to other ranks in one direction, for elements of `item_size` bytes."""
        item_sizes = [item_size] * len(self.sections.blocks)
        rows, tokens = self.sections.row_format(item_sizes, alignment).row_bytes, self.layout.token_counts.tolist()
        if to_heads:
            return [count * (sum(rows) - rows[rank]) for rank, count in enumerate(tokens)]
        return [rows[rank] * (sum(tokens) - count) for rank, count in enumerate(tokens)]
