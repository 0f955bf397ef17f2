"""Results that are computed in parts: a row's keys, or a row's queries, in several calls of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_cp.executor.partials import merge
from megatron_cp.layout.packing import IntArray

Rows = slice | Tensor  # a range, or an index of rows of which none is there twice


@dataclass(frozen=True)
class Cover:
    """How parts cover the rows of one axis, in the order in which they are added.

    Attributes:
        is_first: for each part, whether no part before it has any of its rows: it is written, not added.
        is_whole: every row is written before anything is added to it, so that nothing has to be filled beforehand.
    """

    is_first: tuple[bool, ...]
    is_whole: bool

    @classmethod
    def of(cls, parts: Sequence[slice | IntArray], num_rows: int) -> Cover:
        """The cover of `num_rows` rows by `parts`."""
        covered, is_first, is_whole = np.zeros(num_rows, dtype=bool), [], True
        for rows in parts:
            before = covered[rows]
            is_first.append(not before.any())
            is_whole &= is_first[-1] or bool(before.all())
            covered[rows] = True
        return cls(tuple(is_first), is_whole and bool(covered.all()))

    def repeated(self, times: int) -> Cover:
        """The cover in which each part comes so many times in a row."""
        if times == 1:
            return self
        return Cover(tuple(first and n == 0 for first in self.is_first for n in range(times)), self.is_whole)

    @property
    def adds(self) -> bool:
        return not all(self.is_first)


def acc_dtype_of(x: Tensor) -> torch.dtype:
    """What parts of results of this type are added up in."""
    return torch.promote_types(x.dtype, torch.float32)


class OutputSum:
    """`out` and `lse` from parts over some of the keys each, merged in at least fp32 and rounded once."""

    def __init__(self, out: Tensor, lse: Tensor, cover: Cover) -> None:
        self.out, self.lse = out, lse
        self.sum = torch.empty_like(out, dtype=acc_dtype_of(out)) if cover.adds else out
        if not cover.is_whole:
            self.sum.zero_()
            lse.fill_(-torch.inf)

    def add(self, rows: Rows, part: Tensor, part_lse: Tensor, *, is_first: bool) -> None:
        """`part` `[t, h, d]` and `part_lse` `[h, t]`: what the queries in `rows` get from keys not added yet."""
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
    """A gradient from parts, added in order in at least fp32 and rounded once."""

    def __init__(self, target: Tensor, cover: Cover) -> None:
        self.target = target
        self.sum = torch.empty_like(target, dtype=acc_dtype_of(target)) if cover.adds else target
        if not cover.is_whole:
            self.sum.zero_()

    def add(self, rows: Rows, part: Tensor, *, is_first: bool) -> None:
        """`part` `[t, h, d]`: a share of the gradient of the rows `rows`."""
        if is_first:
            put(self.sum, rows, part)
        elif isinstance(rows, slice):
            self.sum[rows].add_(part)
        else:
            self.sum.index_add_(0, rows, part.to(self.sum.dtype))  # no row is there twice: no order to depend on

    def finish(self) -> None:
        if self.sum is not self.target:
            self.target.copy_(self.sum)


def put(target: Tensor, rows: Rows, values: Tensor) -> None:
    """Writes `values` into rows of `target`, whatever their types."""
    if isinstance(rows, slice):
        target[rows].copy_(values)
    else:
        target.index_copy_(0, rows, values.to(target.dtype))
