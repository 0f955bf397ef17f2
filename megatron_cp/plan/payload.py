"""Rows that an attention sends: their kinds, and the bytes of a row. No torch in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_cp.plan.flows import RowFlow


class Payload(NamedTuple):
    """Rows of one kind that travel in one direction of an attention.

    Attributes:
        name: the kind of row, one of `ROW_BYTES`.
        flow: the transfer of these rows, once for each head chunk.
    """

    name: str
    flow: RowFlow


class RowSizes(NamedTuple):
    """Features of a key head and of a value head, and bytes of an element."""

    head_dim: int
    value_head_dim: int
    item: int

    @property
    def wide(self) -> int:
        """Bytes of an element of a sum, which is kept in at least fp32."""
        return max(self.item, 4)


def _remote_queries_and_gradients(sizes: RowSizes, heads: int, _: int) -> int:
    """Bytes of queries and output gradients, and of log-sum-exps and row sums, which are as wide as sums."""
    row = heads * ((sizes.head_dim + sizes.value_head_dim) * sizes.item + 2 * sizes.wide)
    return -(-row // sizes.wide) * sizes.wide


SUMMED = ("results", "sums of gradients of keys")  # sent in the type of the sum
# Bytes of a row, given the sizes, the number of query heads and the number of key/value heads.
ROW_BYTES: dict[str, Callable[[RowSizes, int, int], int]] = {
    "keys": lambda sizes, _, groups: groups * (sizes.head_dim + sizes.value_head_dim) * sizes.item,
    "gradients of keys": lambda sizes, _, groups: groups * (sizes.head_dim + sizes.value_head_dim) * sizes.item,
    "sums of gradients of keys": lambda sizes, _, groups: groups * (sizes.head_dim + sizes.value_head_dim) * sizes.wide,
    "remote queries": lambda sizes, heads, _: heads * sizes.head_dim * sizes.item,
    "results": lambda sizes, heads, _: heads * (sizes.value_head_dim + 1) * sizes.wide,
    "remote queries and gradients": _remote_queries_and_gradients,
    "gradients of remote queries": lambda sizes, heads, _: heads * sizes.head_dim * sizes.item,
}
