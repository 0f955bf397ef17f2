"""`SplitCounts`: who sends how much to whom, and the memory that messages take. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.layout.packing import IntArray

_STEPS = 8  # sizes of buffers between one power of two and the next
_MOST_COUNTS = 2**17  # in one table of `count_by_owner`: 1 MiB, which caches hold
SPARE = 2  # times a message's size that its buffer may have, so that ragged batches share buffers


def rounded(size: int) -> int:
    """The bytes of a buffer for a message of `size`."""
    step = max(1 << max(size.bit_length() - 1, 0), 512) // _STEPS
    return -(-max(size, 1) // step) * step


def count_by_owner(
    owner: IntArray, amount: IntArray, starts: IntArray, ends: IntArray, offsets: IntArray, ranks: int
) -> IntArray:
    """`[ranks, readers]` how much each reader gets from each rank.

    Args:
        owner, amount: `[n]` the rank that has each piece, and how much that is.
        starts, ends: the pieces that readers want, as ranges of the `n`, one reader's after the other's.
        offsets: `[readers + 1]` where the ranges of each reader begin.
        ranks: their number.
    """
    counts = np.zeros((ranks, offsets.size - 1), dtype=np.int64)
    wanting = np.flatnonzero(np.diff(offsets))
    # Of each rank what it has before each piece: differences of these are what a range holds of it.
    block = max(1, _MOST_COUNTS // max(owner.size, starts.size, 1))
    for first in range(0, ranks if wanting.size else 0, block):
        of_block = np.flatnonzero((owner >= first) & (owner < first + block))
        before = np.zeros((owner.size + 1, min(block, ranks - first)), dtype=np.int64)
        before[of_block + 1, owner[of_block] - first] = amount[of_block]
        np.cumsum(before, axis=0, out=before)
        found = np.add.reduceat(before[ends] - before[starts], offsets[wanting], axis=0)
        counts[first : first + block, wanting] = found.T
    return counts


@dataclass(frozen=True, eq=False)
class SplitCounts:
    """What one all-to-all moves, as every rank of it knows.

    Attributes:
        counts: `[senders, receivers]` elements, those that a rank keeps on the diagonal.
    """

    counts: IntArray

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.counts)

    def sent_by(self, rank: int, size: int | None = None) -> list[int]:
        """Elements to each rank.

        Args:
            rank: which sends.
            size: of what it sends; where the own piece is not among it, that counts none.
        """
        sent = self._sent[rank]
        if size is None or size == sum(sent):
            return sent
        return [*sent[:rank], 0, *sent[rank + 1 :]]

    def received_by(self, rank: int) -> list[int]:
        """Elements from each rank."""
        return self._received[rank]

    @cached_property
    def _sent(self) -> list[list[int]]:
        return self.counts.tolist()

    @cached_property
    def _received(self) -> list[list[int]]:
        return self.counts.T.tolist()

    def reversed(self) -> SplitCounts:
        """The way back."""
        return SplitCounts(self.counts.T)

    def times(self, elements: int) -> SplitCounts:
        """Of rows, each so many elements long."""
        return SplitCounts(self.counts * elements)
