"""`Mask`: which keys a query sees. Pure data; no torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.layout.packing import Packing


@dataclass(frozen=True)
class Mask:
    """Which keys of its own document each query sees: `causal`, those not after it; otherwise all of them."""

    packing: Packing
    is_causal: bool

    @classmethod
    def causal(cls, packing: Packing) -> Mask:
        """A query sees the keys of its document up to and including its own position."""
        return cls(packing, is_causal=True)

    @classmethod
    def full(cls, packing: Packing) -> Mask:
        """A query sees every key of its document."""
        return cls(packing, is_causal=False)

    @property
    def area(self) -> int:
        """The number of visible (query, key) pairs, exactly."""
        lengths = self.packing.lengths
        return int((lengths * (lengths + 1) // 2 if self.is_causal else lengths * lengths).sum())

    def describe(self) -> str:
        return f"{'causal' if self.is_causal else 'full'} in each document"
