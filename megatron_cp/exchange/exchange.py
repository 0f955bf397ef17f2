"""`Exchange`: which tokens and heads change places. Pure data; `token_side` and `head_side` move the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.codec import Codec
from megatron_cp.exchange.sections import ROW_ALIGNMENT, RowFormat, Sections
from megatron_cp.layout import Layout
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.rank_sets import take_ranks


@dataclass(frozen=True)
class Exchange(Memo):
    """Between two ways of assigning one set of rows and columns to the ranks.

    On the *token side* a rank holds all heads of its own tokens; on the *head side* it holds its own heads of all
    tokens, in stream order. Both directions are one collective between one local pack and one local unpack, and each
    is the other's adjoint: going to the head side, a head that several ranks need is sent to each; coming back, what
    they return is summed.

    With sections assigned to fewer ranks than the layout has, that many neighbouring ranks, those of one `kv_rank`,
    exchange among themselves: "all tokens" are then theirs.

    Attributes:
        layout: who holds which tokens.
        sections: the features, and whose heads they are.
        chunks: parts of every rank's heads that travel one after another; the heads as a whole where there are none.
        codec: how they are coded on the wire, if they are.
        section_major: whether messages to tokens may hold one section after another, not token by token: so where
            sections leave the head side from tensors of their own, and not from where a message put them.
    """

    layout: Layout
    sections: Sections
    chunks: tuple[Sections, ...] = ()
    codec: Codec | None = None
    section_major: bool = False

    def __post_init__(self) -> None:
        if self.layout.cp_size % self.sections.cp_size:
            raise ArgumentError(
                "sections",
                f"heads assigned to {self.sections.cp_size} ranks",
                f"heads assigned to the layout's {self.layout.cp_size} ranks, or to a divisor of them",
            )

    @cached_property
    def degree(self) -> int:
        """The number of ranks that exchange heads with one another."""
        return self.sections.cp_size

    def within(self, kv_rank: int) -> Exchange:
        """The exchange among the ranks of one `kv_rank`, as one of all ranks of a layout of its own."""
        if self.degree == self.layout.cp_size:
            return self

        def make() -> Exchange:
            return replace(self, layout=take_ranks(self.layout, kv_rank * self.degree, self.degree))

        return self.memo(("within", kv_rank), make)

    @cached_property
    def parts(self) -> tuple[Sections, ...]:
        """What travels together, in order."""
        return self.chunks or (self.sections,)

    def of_chunk(self, number: int) -> Exchange:
        """One chunk as an exchange of its own, of tensors that hold its heads alone, in rising order."""
        if not self.chunks:
            return self

        def make() -> Exchange:
            sections = self.chunks[number].renumbered()
            return Exchange(self.layout, sections, codec=self.codec, section_major=self.section_major)

        return self.memo(("chunk", number), make)

    def coded(self, item_sizes: Sequence[int]) -> tuple[bool, ...]:
        """For each section whether it is coded, having elements of that size."""
        pairs = zip(self.sections.blocks, item_sizes, strict=True)
        return tuple(self.codec is not None and self.codec.applies(block, size) for block, size in pairs)

    def row_format(self, part: int, item_sizes: Sequence[int], alignment: int = ROW_ALIGNMENT) -> RowFormat:
        """The bytes of a token in the messages of one part."""
        return self.parts[part].row_format(item_sizes, alignment, self.coded(item_sizes))

    def row_bytes(self, part: int, item_sizes: Sequence[int], alignment: int = ROW_ALIGNMENT) -> tuple[int, ...]:
        """For each rank, the bytes of one token in messages of one part: of `row_format`, without its copies."""
        return self.parts[part].row_bytes(item_sizes, alignment, self.coded(item_sizes))

    @cached_property
    def is_local(self) -> bool:
        """True on a single rank whose rows are the packed stream: nothing moves."""
        return self.layout.cp_size == 1 and self.layout.in_stream_order and not self.layout.pad_rows.any()

    def bytes_sent(self, item_size: int, *, to_heads: bool, alignment: int = ROW_ALIGNMENT) -> list[int]:
        """For each rank, the bytes that it sends to other ranks in one direction, for elements of `item_size` bytes."""
        item_sizes = [item_size] * len(self.sections.blocks)
        of_parts = [self.row_bytes(part, item_sizes, alignment) for part in range(len(self.parts))]
        rows = [sum(of_rank) for of_rank in zip(*of_parts, strict=True)]
        sent, row = [], sum(rows)
        for kv_rank in range(self.layout.cp_size // self.degree):
            tokens = self.layout.token_counts[kv_rank * self.degree : (kv_rank + 1) * self.degree].tolist()
            total = sum(tokens)
            sent += [
                count * (row - of_rank) if to_heads else of_rank * (total - count)
                for count, of_rank in zip(tokens, rows, strict=True)
            ]
        return sent
