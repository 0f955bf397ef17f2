"""What an attention sends: kinds of rows, and how many bytes a row has. No torch in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_cp.plan.flows import RowFlow


class Carried(NamedTuple):
    """Rows of one kind that travel in one direction of an attention.

    Attributes:
        name: of what they hold, one of `WIDTHS`.
        flow: how they travel, once for each head chunk.
    """

    name: str
    flow: RowFlow


class RowSizes(NamedTuple):
    """Features of a key and of a value head, and bytes of an element."""

    head_dim: int
    value_head_dim: int
    item: int

    @property
    def wide(self) -> int:
        """Bytes of an element of what is summed."""
        return max(self.item, 4)


def _visitors_and_gradients(sizes: RowSizes, heads: int, _: int) -> int:
    """Queries, their outputs' gradients, log-sum-exps and row sums, of which the last two are as wide as sums are."""
    row = heads * ((sizes.head_dim + sizes.value_head_dim) * sizes.item + 2 * sizes.wide)
    return -(-row // sizes.wide) * sizes.wide


WIDE = ("results", "sums of gradients of keys")  # which travel in the type in which they are summed
# Bytes of a row of some heads, from the sizes, the query heads and the key/value heads.
WIDTHS: dict[str, Callable[[RowSizes, int, int], int]] = {
    "keys": lambda sizes, _, groups: groups * (sizes.head_dim + sizes.value_head_dim) * sizes.item,
    "gradients of keys": lambda sizes, _, groups: groups * (sizes.head_dim + sizes.value_head_dim) * sizes.item,
    "sums of gradients of keys": lambda sizes, _, groups: groups * (sizes.head_dim + sizes.value_head_dim) * sizes.wide,
    "visitors": lambda sizes, heads, _: heads * sizes.head_dim * sizes.item,
    "results": lambda sizes, heads, _: heads * (sizes.value_head_dim + 1) * sizes.wide,
    "visitors and gradients": _visitors_and_gradients,
    "gradients of visitors": lambda sizes, heads, _: heads * sizes.head_dim * sizes.item,
}
