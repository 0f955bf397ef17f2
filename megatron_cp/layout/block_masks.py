"""Masks given by tables of blocks: the named ones, and the parts of every table of blocks.

A named table applies to each document: the document is cut into as many blocks as the table has rows, so that a longer
document has longer blocks and never more bands. `Mask.named` makes masks of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import bands as band
from megatron_cp.layout.array_types import BoolArray, IntArray
from megatron_cp.layout.bands import UNBOUNDED
from megatron_cp.layout.packing import Packing

MOST_BLOCKS = 256  # with which thousands of documents are planned within seconds


@dataclass(frozen=True)
class BlockTable:
    """A rule for the blocks of a document that each block sees.

    Attributes:
        name: its spelling, alone or with a number of blocks after a colon.
        num_blocks: rows of the table, unless the user gives another number.
        is_causal: no query sees keys after its own position, whatever the table says.
        sees: returns True where a block is visible, given the numbers of the query's and the key's block and the number
            of blocks.
        multiple_of: a divisor of the number of blocks.
    """

    name: str
    num_blocks: int
    is_causal: bool
    sees: Callable[[IntArray, IntArray, int], BoolArray]
    remark: str
    multiple_of: int = 1

    @property
    def spelling(self) -> str:
        """The form that the command line lists."""
        return f"{self.name}[:BLOCKS]"

    def with_blocks(self, num_blocks: int | None = None) -> BlockTable:
        """Returns the same rule with another number of blocks; unchanged if None."""
        if num_blocks is None:
            return self
        if num_blocks % self.multiple_of or not 1 <= num_blocks <= MOST_BLOCKS:
            kind = f"a multiple of {self.multiple_of}" if self.multiple_of > 1 else "a number"
            allowed = f"{self.name}:BLOCKS with {kind} from {self.multiple_of} to {MOST_BLOCKS}"
            remedy = f"{self.name} has {self.num_blocks} blocks by default."
            raise ArgumentError("mask", f"{self.name}:{num_blocks}", allowed, remedy)
        return replace(self, num_blocks=num_blocks)

    def bands_of_documents(self, starts: IntArray, lengths: IntArray) -> IntArray:
        """Applies the table to each document.

        A document of at least `num_blocks` tokens is cut into `num_blocks` blocks, the first of which are a token
        longer if the number of blocks does not divide its length. A shorter document has blocks of one token, in the
        first rows and columns of the table.

        Returns:
            `[n, 6]` disjoint bands; see `layout/bands.py`.
        """
        queries, keys = np.indices((self.num_blocks, self.num_blocks))
        runs = runs_of_blocks(self.sees(queries, keys, self.num_blocks))
        found = [band.NO_BANDS]
        counts = np.minimum(lengths, self.num_blocks)
        for count in np.unique(counts[counts > 0]).tolist():
            own = counts == count
            rows, first, last = _clip_runs(count, *runs)
            size, longer = np.divmod(lengths[own][:, None], count)
            number = np.arange(count + 1)
            edges = starts[own][:, None] + number * size + np.minimum(number, longer)
            q_starts, q_ends, k_starts, k_ends = (edges[:, places].ravel() for places in (rows, rows + 1, first, last))
            found.append(band.range_bands(q_starts, q_ends, k_starts, k_ends, hi=0 if self.is_causal else UNBOUNDED))
        return band.joined(np.concatenate(found), starts)


# The tables of UltraAttn (SC'25, doi 10.1145/3712285.3759894), whose published measurements use these masks; here
# `strided` is in the order of the document.
BLOCK_TABLES = {
    table.name: table
    for table in (
        BlockTable(
            "strided", 16, False, lambda q, k, n: np.isin(abs(q - k), (0, n // 4, n // 2)),
            "a block of a document (16 of them) sees itself and those 4 and 8 away: a quarter and a half of BLOCKS",
            multiple_of=4,
        ),
        BlockTable(
            "global_local", 16, False, lambda q, k, _: (q == 0) | (k == 0) | (q == k),
            "a block of a document (16 of them) sees itself and the first, and the first sees all",
        ),
        BlockTable(
            "star", 4, True, lambda q, k, _: (k == 0) | (q == k),
            "a block of a document (4 of them) sees itself and the first, causally",
        ),
        BlockTable(
            "streaming", 8, True, lambda q, k, _: (k == 0) | ((q - 2 <= k) & (k <= q)),
            "a block of a document (8 of them) sees itself, the two before it and the first, causally",
        ),
    )
}  # fmt: skip


def is_block_table(spec: str) -> bool:
    """Returns True if the spelling is that of a named table of blocks."""
    return spec.partition(":")[0] in BLOCK_TABLES


def runs_of_blocks(table: BoolArray) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the runs of true blocks along each row: rows, first columns, and one past the last columns."""
    edges = np.diff(table.astype(np.int8), axis=1, prepend=0, append=0)
    rows, first = np.nonzero(edges > 0)
    return rows, first, np.nonzero(edges < 0)[1]


def _clip_runs(count: int, rows: IntArray, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Clips runs to the first `count` rows and columns of a table."""
    kept = (rows < count) & (first < count)
    return rows[kept], first[kept], np.minimum(last[kept], count)


def checked_table(packing: Packing, table: BoolArray, block_size: int) -> BoolArray:
    """Returns a table over the whole stream in blocks of `block_size` tokens, after checking its type and shape."""
    blocks = -(-packing.total // block_size)
    is_array = isinstance(table, np.ndarray) and not np.ma.isMaskedArray(table)
    if not is_array or table.dtype != np.bool_ or table.shape != (blocks, blocks):
        given = f"{type(table).__name__} of {getattr(table, 'dtype', 'no type')} {getattr(table, 'shape', '')}"
        allowed = f"a numpy array of bool [{blocks}, {blocks}]: {packing.total} tokens in blocks of {block_size}"
        raise ArgumentError("table", given, allowed)
    return table
