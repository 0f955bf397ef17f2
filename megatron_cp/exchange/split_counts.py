"""`SplitCounts`: the amount that each rank sends to each other rank, and the sizes of message buffers. No torch in
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.layout.packing import IntArray

_STEPS = 8  # buffer sizes between two powers of two
_MOST_COUNTS = 2**17  # entries in a table of `count_by_owner`: 1 MiB, which fits caches
SPARE = 2  # a buffer may be this many times as large as its message, so that ragged batches share buffers


def rounded(size: int) -> int:
    """Returns the bytes of a buffer for a message of `size` bytes."""
    step = max(1 << max(size.bit_length() - 1, 0), 512) // _STEPS
    return -(-max(size, 1) // step) * step


def count_by_owner(
    owner: IntArray, amount: IntArray, starts: IntArray, ends: IntArray, offsets: IntArray, ranks: int
) -> IntArray:
    """Returns `[ranks, readers]` the amount that each reader gets from each rank.

    Args:
        owner, amount: `[n]` the rank that has each piece, and the size of the piece.
        starts, ends: ranges of the `n` pieces that readers want, grouped by reader.
        offsets: `[readers + 1]` offsets of the groups.
    """
    counts = np.zeros((ranks, offsets.size - 1), dtype=np.int64)
    wanting = np.flatnonzero(np.diff(offsets))
    # Cumulative amounts of each rank before each piece: their differences are the rank's amounts in a range.
    block = max(1, _MOST_COUNTS // max(owner.size, starts.size, 1))
    for first in range(0, ranks if wanting.size else 0, block):
        in_block = np.flatnonzero((owner >= first) & (owner < first + block))
        before = np.zeros((owner.size + 1, min(block, ranks - first)), dtype=np.int64)
        before[in_block + 1, owner[in_block] - first] = amount[in_block]
        np.cumsum(before, axis=0, out=before)
        found = np.add.reduceat(before[ends] - before[starts], offsets[wanting], axis=0)
        counts[first : first + block, wanting] = found.T
    return counts


@dataclass(frozen=True, eq=False)
class SplitCounts:
    """The element counts of one all-to-all, known to every rank.

    Attributes:
        counts: `[senders, receivers]` elements; the diagonal is what a rank keeps.
    """

    counts: IntArray

    @property
    def size(self) -> int:
        return len(self.counts)

    def sent_by(self, rank: int) -> list[int]:
        """Returns the elements that a rank sends to each rank."""
        return self._sent[rank]

    def received_by(self, rank: int) -> list[int]:
        """Returns the elements that a rank receives from each rank."""
        return self._received[rank]

    @cached_property
    def _sent(self) -> list[list[int]]:
        return self.counts.tolist()

    @cached_property
    def _received(self) -> list[list[int]]:
        return self.counts.T.tolist()

    def reversed(self) -> SplitCounts:
        """Returns the counts of the reverse direction."""
        return SplitCounts(self.counts.T)

    def times(self, elements: int) -> SplitCounts:
        """Returns the counts of rows of `elements` elements each."""
        return SplitCounts(self.counts * elements)
