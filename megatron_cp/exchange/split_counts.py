"""`SplitCounts`: who sends how much to whom, and the memory that messages take. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_cp.layout.packing import IntArray

_STEPS = 8  # sizes of buffers between one power of two and the next
SPARE = 2  # times a message's size that its buffer may have, so that ragged batches share buffers


def rounded(size: int) -> int:
    """The bytes of a buffer for a message of `size`."""
    step = max(1 << max(size.bit_length() - 1, 0), 512) // _STEPS
    return -(-max(size, 1) // step) * step


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
