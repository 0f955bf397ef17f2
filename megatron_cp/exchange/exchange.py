"""`Exchange`: which tokens and heads change places. Pure data; `pack.py` moves the bytes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.sections import ROW_ALIGNMENT, Sections
from megatron_cp.layout import Layout
from megatron_cp.layout.parts import part


@dataclass(frozen=True)
class Exchange:
    """Between two ways of dealing one set of rows and columns to the ranks.

    On the *token side* a rank holds all heads of its own tokens; on the *head side* it holds its own heads of all
    tokens, in stream order. Both directions are one collective between one local pack and one local unpack, and each
    is the other's adjoint: going to the head side, a head that several ranks need is sent to each; coming back, what
    they return is summed.

    With sections dealt to fewer ranks than the layout has, that many neighbouring ranks form a *node* and exchange
    among themselves: "all tokens" are then those of the node.
    """

    layout: Layout
    sections: Sections

    def __post_init__(self) -> None:
        if self.layout.cp_size % self.sections.cp_size:
            raise ArgumentError(
                "sections",
                f"heads dealt to {self.sections.cp_size} ranks",
                f"heads dealt to the layout's {self.layout.cp_size} ranks, or to a divisor of them",
            )

    @property
    def degree(self) -> int:
        """The ranks of one node."""
        return self.sections.cp_size

    def of_node(self, node: int) -> Exchange:
        """The exchange within one node, as one of all ranks of a layout of its own."""
        if self.degree == self.layout.cp_size:
            return self
        return Exchange(part(self.layout, node * self.degree, self.degree), self.sections)

    @property
    def is_local(self) -> bool:
        """True on a single rank whose rows are the packed stream: nothing moves."""
        return self.layout.cp_size == 1 and self.layout.in_stream_order and not self.layout.pad_rows.any()

    def bytes_sent(self, item_size: int, *, to_heads: bool, alignment: int = ROW_ALIGNMENT) -> list[int]:
        """For each rank, the bytes that it sends to other ranks in one direction, for elements of `item_size` bytes."""
        item_sizes = [item_size] * len(self.sections.blocks)
        rows = self.sections.row_format(item_sizes, alignment).row_bytes
        sent = []
        for node in range(self.layout.cp_size // self.degree):
            tokens = self.layout.token_counts[node * self.degree : (node + 1) * self.degree].tolist()
            for lane, count in enumerate(tokens):
                sent.append(count * (sum(rows) - rows[lane]) if to_heads else rows[lane] * (sum(tokens) - count))
        return sent
