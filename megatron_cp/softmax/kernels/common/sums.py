"""Sums of partial results, for rows whose keys or queries are in several calls of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.executor.partials import merge
from megatron_cp.layout.packing import IntArray

RowIndex = slice | Tensor  # a range, or an index without duplicates


@dataclass(frozen=True)
class Cover:
    """The coverage of one axis by parts, in the order in which they are added.

    Attributes:
        is_first: for each part, True if no earlier part has any of its rows, so that it is written and not added.
        is_whole: True if every row is written before anything is added to it, so that no row needs to be zeroed first.
    """

    is_first: tuple[bool, ...]
    is_whole: bool

    @classmethod
    def from_parts(cls, parts: Sequence[slice | IntArray], num_rows: int) -> Cover:
        """Returns the cover of `num_rows` rows by `parts`."""
        covered, is_first, is_whole = np.zeros(num_rows, dtype=bool), [], True
        for rows in parts:
            before = covered[rows]
            is_first.append(not before.any())
            is_whole &= is_first[-1] or bool(before.all())
            covered[rows] = True
        return cls(tuple(is_first), is_whole and bool(covered.all()))

    def repeated(self, times: int) -> Cover:
        """Returns the cover in which each part is repeated `times` times in a row."""
        if times == 1:
            return self
        return Cover(tuple(first and n == 0 for first in self.is_first for n in range(times)), self.is_whole)

    @property
    def adds(self) -> bool:
        return not all(self.is_first)


class OutputSum:
    """Merges `out` and `lse` of parts of the keys, in at least fp32, and rounds once."""

    def __init__(self, out: Tensor, lse: Tensor, cover: Cover) -> None:
        self.out, self.lse = out, lse
        self.sum = torch.empty_like(out, dtype=accumulation_dtype(out.dtype)) if cover.adds else out
        if not cover.is_whole:
            self.sum.zero_()
            lse.fill_(-torch.inf)

    def add(self, rows: RowIndex, part: Tensor, part_lse: Tensor, *, is_first: bool) -> None:
        """Merges the result of further keys for the queries in `rows`: `part` `[t, h, d]` and `part_lse` `[h, t]`."""
        if is_first:
            put(self.sum, rows, part)
            put(self.lse.T, rows, part_lse.T)
            return
        out, lse = self.sum[rows], self.lse[:, rows]
        merge(out, lse, part.to(out.dtype), part_lse)
        if not isinstance(rows, slice):  # a range is a view and has been merged in place
            put(self.sum, rows, out)
            put(self.lse.T, rows, lse.T)

    def finish(self) -> None:
        if self.sum is not self.out:
            self.out.copy_(self.sum)


class GradientSum:
    """Adds parts of a gradient in order, in at least fp32, and rounds once."""

    def __init__(self, target: Tensor, cover: Cover) -> None:
        self.target = target
        self.sum = torch.empty_like(target, dtype=accumulation_dtype(target.dtype)) if cover.adds else target
        if not cover.is_whole:
            self.sum.zero_()

    def add(self, rows: RowIndex, part: Tensor, *, is_first: bool) -> None:
        """Adds `part` `[t, h, d]` to the gradient of `rows`."""
        if is_first:
            put(self.sum, rows, part)
        elif isinstance(rows, slice):
            self.sum[rows].add_(part)
        else:
            self.sum.index_add_(0, rows, part.to(self.sum.dtype))  # deterministic, since no row is repeated

    def finish(self) -> None:
        if self.sum is not self.target:
            self.target.copy_(self.sum)


def put(target: Tensor, rows: RowIndex, values: Tensor) -> None:
    """Writes `values` into rows of `target`, converting their type."""
    if isinstance(rows, slice):
        target[rows].copy_(values)
    else:
        target.index_copy_(0, rows, values.to(target.dtype))
