"""`Traffic`: who sends how much to whom. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.layout.packing import IntArray


@dataclass(frozen=True, eq=False)
class Traffic:
    """What one all-to-all moves, as every rank of it knows.

    Attributes:
        counts: `[senders, receivers]` elements, those that a rank keeps on the diagonal.
    """

    counts: IntArray

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.counts)

    def sent_by(self, rank: int) -> list[int]:
        """Elements to each rank."""
        return self.counts[rank].tolist()

    def received_by(self, rank: int) -> list[int]:
        """Elements from each rank."""
        return self.counts[:, rank].tolist()

    def reversed(self) -> Traffic:
        """The way back."""
        return Traffic(self.counts.T)

    def times(self, elements: int) -> Traffic:
        """Of rows, each so many elements long."""
        return Traffic(self.counts * elements)
