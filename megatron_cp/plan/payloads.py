"""`Payload`: the kinds of rows that an attention sends, and how many bytes a row has. No torch in here."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class RowSizes(NamedTuple):
    """The sizes of what rows are made of.

    Attributes:
        head_dim, value_head_dim: features of a query and of an output head.
        key_and_value: features of a key and its value as they travel.
        item: bytes of an element.
        coded: bytes of a coded key and its value; 0 where they travel in their own type.
    """

    head_dim: int
    value_head_dim: int
    key_and_value: int
    item: int
    coded: int = 0

    @property
    def wide(self) -> int:
        """Bytes of an element in the type in which sums are kept: at least four."""
        return max(self.item, 4)


class Payload(Enum):
    """A kind of rows; the value is its name, for `explain` and predictions."""

    KEYS = "keys"
    KEY_GRADIENTS = "gradients of keys"
    KEY_GRADIENT_SUMS = "sums of gradients of keys"
    QUERIES = "remote queries"
    PARTIALS = "partial outputs"
    QUERIES_AND_GRADIENTS = "remote queries and output gradients"
    QUERY_GRADIENTS = "gradients of remote queries"

    @property
    def is_summed(self) -> bool:
        """True where rows travel in the type in which they are summed."""
        return self in (Payload.PARTIALS, Payload.KEY_GRADIENT_SUMS)

    def row_bytes(self, sizes: RowSizes, heads: int, groups: int) -> int:
        """Returns the bytes of a row of some query heads and key/value heads."""
        match self:
            case Payload.KEYS if sizes.coded:
                return groups * sizes.coded
            case Payload.KEYS | Payload.KEY_GRADIENTS:
                return groups * sizes.key_and_value * sizes.item
            case Payload.KEY_GRADIENT_SUMS:
                return groups * sizes.key_and_value * sizes.wide
            case Payload.QUERIES | Payload.QUERY_GRADIENTS:
                return heads * sizes.head_dim * sizes.item
            case Payload.PARTIALS:
                return heads * (sizes.value_head_dim + 1) * sizes.wide
        # Log-sum-exps and row sums, then queries and output gradients, filled up to whole elements of the wider type.
        row = heads * ((sizes.head_dim + sizes.value_head_dim) * sizes.item + 2 * sizes.wide)
        return -(-row // sizes.wide) * sizes.wide
