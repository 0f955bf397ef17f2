"""`Exchange`: the tokens and heads that change places. Pure data; `messages.py` moves the bytes."""

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
    """A move between two assignments of the same rows and columns to the ranks.

    On the *token side* a rank holds all heads of its own tokens; on the *head side* it holds its own heads of all
    tokens, in stream order. Both directions are one collective between one local pack and one local unpack, and each
    is the other's adjoint: going to the head side, a head that several ranks need is sent to each; coming back, what
    they return is summed.

    If sections are assigned to fewer ranks than the layout has, that many neighbouring ranks, those of one `kv_rank`,
    exchange among themselves: "all tokens" then means their tokens.

    Attributes:
        layout: the ranks that hold each token.
        sections: the features, and the ranks that compute each head.
        chunks: parts of every rank's heads that travel one after another; empty if all heads travel together.
        codec: the coding of messages; None without one.
    """

    layout: Layout
    sections: Sections
    chunks: tuple[Sections, ...] = ()
    codec: Codec | None = None

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

    def subgroup(self, kv_rank: int) -> Exchange:
        """Returns the exchange among the ranks of one `kv_rank`, as an exchange of all ranks of its own layout."""
        if self.degree == self.layout.cp_size:
            return self
        return self.memo(
            ("subgroup", kv_rank),
            lambda: replace(self, layout=take_ranks(self.layout, kv_rank * self.degree, self.degree)),
        )

    @cached_property
    def parts(self) -> tuple[Sections, ...]:
        """The sections that travel together, in order."""
        return self.chunks or (self.sections,)

    def chunk_exchange(self, number: int) -> Exchange:
        """Returns one chunk as a separate exchange, for tensors that hold only its heads, in rising order."""
        if not self.chunks:
            return self

        def make() -> Exchange:
            return Exchange(self.layout, self.chunks[number].renumbered(), codec=self.codec)

        return self.memo(("chunk", number), make)

    def coded(self, item_sizes: Sequence[int]) -> tuple[bool, ...]:
        """Returns for each section, with elements of the given size, True if it is coded."""
        pairs = zip(self.sections.blocks, item_sizes, strict=True)
        return tuple(self.codec is not None and self.codec.applies(block, size) for block, size in pairs)

    def row_format(self, part: int, item_sizes: Sequence[int], alignment: int = ROW_ALIGNMENT) -> RowFormat:
        """Returns the byte layout of a token in the messages of one part."""
        return self.parts[part].row_format(item_sizes, alignment, self.coded(item_sizes))

    def row_bytes(self, part: int, item_sizes: Sequence[int], alignment: int = ROW_ALIGNMENT) -> tuple[int, ...]:
        """Returns each rank's bytes of one token in messages of one part."""
        return self.row_format(part, item_sizes, alignment).row_bytes

    @cached_property
    def is_local(self) -> bool:
        """True on a single rank whose rows are the packed stream: nothing moves."""
        return self.layout.cp_size == 1 and self.layout.in_stream_order and not self.layout.pad_rows.any()

    def bytes_sent(self, item_size: int, *, to_heads: bool, alignment: int = ROW_ALIGNMENT) -> list[int]:
        """Returns the bytes that each rank sends to others in one direction, for elements of `item_size` bytes."""
        item_sizes = [item_size] * len(self.sections.blocks)
        part_bytes = [self.row_bytes(part, item_sizes, alignment) for part in range(len(self.parts))]
        rows = [sum(rank_bytes) for rank_bytes in zip(*part_bytes, strict=True)]
        sent, row = [], sum(rows)
        for kv_rank in range(self.layout.cp_size // self.degree):
            tokens = self.layout.token_counts[kv_rank * self.degree : (kv_rank + 1) * self.degree].tolist()
            total = sum(tokens)
            sent += [
                count * (row - rank_bytes) if to_heads else rank_bytes * (total - count)
                for count, rank_bytes in zip(tokens, rows, strict=True)
            ]
        return sent
