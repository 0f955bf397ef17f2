"""Arithmetic of partial attention: merges results over different keys, and replaces outputs by row sums."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_cp.executor.arguments import accumulation_dtype

# Rows are processed in parts to save memory: eight parts take an eighth of it, and some more launches.
_PARTS = 8


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges a partial result over other keys into `out` and `lse`, in place; `part` is overwritten.

    out = (1 - w) out + w part with w = sigmoid(part_lse - lse), the new keys' share of the softmax's denominator.

    Args:
        out, part: `[t, (b,) h, v]` of one type.
        lse, part_lse: `[(b,) h, t]`, -inf where a query has seen nothing; out is then finite, and part too.
    """
    before, added = row_padded_copy(lse), row_padded_copy(part_lse)
    share = torch.sub(added, before, out=row_padded_copy(lse)).sigmoid_()
    share.nan_to_num_(0.0)  # both -inf: no key has been seen, so the share is 0
    lse.copy_(torch.logaddexp(before, added, out=before))
    weight = share.movedim(-1, 0).unsqueeze(-1).to(out.dtype)
    # No lerp: it rounds differently with the strides that it meets.
    out.mul_(1 - weight).add_(part.mul_(weight))


def row_padded_copy(lse: Tensor) -> Tensor:
    """Returns a copy of `[(b,) h, t]` that elementwise functions process head by head.

    torch computes exp and similar functions by vectors and, at their ends or for strided elements, one by one, which
    rounds differently. In dense tensors vectors span heads, so that bits would depend on the other heads of a rank.
    Here each head begins on a cache line of its own.
    """
    queries = lse.shape[-1]
    return lse.new_empty(*lse.shape[:-1], (queries // 16 + 1) * 16)[..., :queries].copy_(lse)


def row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """Returns `rowsum(dout * out)`, `[t, (b,) h, 1]`, in at least fp32."""
    dtype = accumulation_dtype(out.dtype)
    sums = dout.new_empty(*dout.shape[:-1], 1, dtype=dtype)
    for target, gradient, output in _parts(sums, dout, out):
        torch.sum(output.to(dtype, copy=True).mul_(gradient), -1, keepdim=True, out=target)
    return sums


def output_with_row_sums(dout: Tensor, sums: Tensor, *, wide: bool) -> Tensor:
    """Returns a tensor `[s, (b,) h, v]` whose products with `dout` add up to given row sums.

    Kernels are given the output for `rowsum(dout * out)` alone, so that number travels in place of the output.

    Args:
        dout: `[s, (b,) h, v]`.
        sums: `[s, (b,) h, 1]` in at least fp32.
        wide: True for the type of the sums, with a single element that is not zero: exact up to one rounding. False for
            the type of `dout`: a multiple of dout, so that the roundings of many elements, each as large as those of an
            output, average out.
    """
    made = torch.empty_like(dout, dtype=sums.dtype if wide else dout.dtype)
    fill = _one_element if wide else _scaled
    for target, gradient, row_sum in _parts(made, dout, sums):
        fill(target, gradient, row_sum)
    return made


def _one_element(target: Tensor, dout: Tensor, sums: Tensor) -> None:
    place = dout.abs().argmax(-1, keepdim=True)
    largest = dout.gather(-1, place).to(sums.dtype)
    part = torch.where(largest != 0, sums / torch.where(largest != 0, largest, 1), 0)
    target.zero_().scatter_(-1, place, part)


def _scaled(target: Tensor, dout: Tensor, sums: Tensor) -> None:
    unit = dout.to(sums.dtype, copy=True)
    largest = unit.abs().amax(-1, keepdim=True)
    unit.div_(torch.where(largest > 0, largest, 1))  # so that no square over- or underflows
    norm = unit.square().sum(-1, keepdim=True)
    scale = torch.where(largest > 0, sums / torch.where(largest > 0, largest * norm, 1), 0)
    target.copy_(unit.mul_(scale))


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, -(-len(tensors[0]) // _PARTS))
    return zip(*(x.split(rows) for x in tensors), strict=True)
