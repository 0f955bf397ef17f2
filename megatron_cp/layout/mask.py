"""`Mask`: which keys a query sees. Pure data; no torch in here."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout import bands as band
from megatron_cp.layout.bands import FAR
from megatron_cp.layout.packing import IntArray, Packing
from megatron_cp.layout.tables import Tables, frozen


class Mask(Tables):
    """Which keys each query sees, as disjoint bands over the packed streams of queries and keys.

    A query sees keys of its own document only. Immutable, and compared and hashed by value.

    Attributes:
        packing: the documents of the queries.
        kv_packing: the documents of the keys; `packing` itself but for cross-attention.
        bands: `[n, 6]` disjoint and tight, in the order of their first query; see `layout/bands.py`.
        name: how the mask was asked for, such as "causal" or "window:127,0".

    Example:
        >>> Mask.causal(Packing([3, 1])).area
        7
        >>> Mask.window(Packing([5]), left=1, right=0).seen.tolist()
        [1, 2, 2, 2, 2]
    """

    def __init__(self, packing: Packing, kv_packing: Packing, bands: IntArray, name: str) -> None:
        bands = band.tight(bands)
        self.packing, self.kv_packing, self.name = packing, kv_packing, name
        self.bands = frozen(bands[np.lexsort((bands[:, 2], bands[:, 0]))])

    @classmethod
    def causal(cls, packing: Packing, kv_packing: Packing | None = None) -> Mask:
        """A query sees the keys of its document up to and including its own position.

        Where documents have more or fewer keys than queries, the last query sees the last key, as in flash-attn.
        """
        return cls._of_documents(packing, kv_packing, -FAR, 0, "causal")

    @classmethod
    def full(cls, packing: Packing, kv_packing: Packing | None = None) -> Mask:
        """A query sees every key of its document."""
        return cls._of_documents(packing, kv_packing, -FAR, FAR, "full")

    @classmethod
    def window(cls, packing: Packing, left: int, right: int = 0) -> Mask:
        """A query sees `left` keys before its own position, its own, and `right` after it; -1 for no limit."""
        left, right = checked_integer("left", left, -1), checked_integer("right", right, -1)
        lo, hi = -FAR if left < 0 else -left, FAR if right < 0 else right
        return cls._of_documents(packing, None, lo, hi, f"window:{left},{right}")

    @classmethod
    def _of_documents(cls, packing: Packing, kv_packing: Packing | None, lo: int, hi: int, name: str) -> Mask:
        """One band a document, its bounds counted from the corner where the last query meets the last key."""
        kv_packing = packing if kv_packing is None else kv_packing
        if packing.num_documents != kv_packing.num_documents:
            raise ArgumentError(
                "kv_packing", f"{kv_packing.num_documents} documents", f"the {packing.num_documents} of the queries"
            )
        q_ends, k_ends = packing.cu_seqlens[1:], kv_packing.cu_seqlens[1:]
        corner = k_ends - q_ends
        bounds = (np.full_like(corner, bound) if abs(bound) >= FAR else corner + bound for bound in (lo, hi))
        return cls(
            packing,
            kv_packing,
            np.stack([packing.cu_seqlens[:-1], q_ends, kv_packing.cu_seqlens[:-1], k_ends, *bounds], axis=1),
            name,
        )

    @cached_property
    def area(self) -> int:
        """The number of visible (query, key) pairs, exactly."""
        return band.area(self.bands)

    @cached_property
    def seen(self) -> IntArray:
        """`[total]` the number of keys that each query sees."""
        return frozen(band.keys_seen(self.bands, self.packing.total))

    @property
    def value(self) -> tuple[object, ...]:
        """All that makes masks over the same packings equal."""
        return (self.bands.tobytes(),)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mask)
            and (self.packing, self.kv_packing) == (other.packing, other.kv_packing)
            and np.array_equal(self.bands, other.bands)
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.packing, self.kv_packing, self.bands.tobytes()))

    def __repr__(self) -> str:
        return f"Mask({self.name!r}, {self.packing!r}, {len(self.bands)} bands, {self.area} pairs)"

    def describe(self) -> str:
        """The mask in words and, for what differs without differing in name, the hash of its bands."""
        return f"{self.name} in each document"
