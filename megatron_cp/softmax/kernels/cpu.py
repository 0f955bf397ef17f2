"""torch's flash attention for CPUs, with one call for each piece of the mask that the operator can express.

full                                 one call
causal, square                       one call that skips hidden pairs
causal, more keys than queries       a full rectangle and a causal square, merged
window, or a limit on the left       blocks of query rows over the keys that they see, with an additive mask
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp.exchange.sections import ROW_ALIGNMENT
from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.layout.bands import UNBOUNDED
from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel, Tiles
from megatron_cp.softmax.kernels.common.sums import Cover, GradientSum, OutputSum
from megatron_cp.torch_private import cpu_flash, cpu_flash_backward

# `cpu_flash` accepts grouped key/value heads. It must not be given an empty tensor, since it divides by the sizes and
# the process dies, nor a row whose keys are all masked, for which it returns an lse of 0.

# Rows of a masked block, which computes rows + width keys a row where width are visible. 128 is the fastest of 32 to
# 256, or within a tenth of it, forward and backward, at widths of 16 to 2,048 and 1 or 4 heads of 64 on two cores of an
# EPYC.
_BLOCK_ROWS = 128
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CpuFlashAttention(AttentionKernel):
    """torch's flash kernel on pieces of the mask. Partial results are computed and added in at least fp32."""

    name = "cpu"
    package = "torch"
    devices = ("cpu",)
    unrounded_partials = True

    def refusal(self, call: AttentionCall) -> str | None:
        if call.device.type != "cpu":
            return f"runs on the CPU, the tensors are on {call.device.type}; use varlen or reference"
        if cpu_flash is None or cpu_flash_backward is None:
            return f"needs an operator that torch {torch.__version__} does not have; use reference"
        if call.dtype not in _DTYPES:
            return f"has no {call.dtype}; use reference"
        if call.scale <= 0:
            return f"gives NaN under a causal mask unless the scale is above 0, not {call.scale}; use reference"
        if call.softcap:
            return f"has no soft cap, and softcap is {call.softcap}; use reference"
        if call.dropout:
            return (
                f"has no dropout that is the same on any number of ranks, and dropout is {call.dropout}; use reference"
            )
        return None

    def prepare(self, tiles: Tiles, device: torch.device) -> None:
        _work(tiles)

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall,
        first_head: int,
    ) -> None:  # fmt: skip
        work = _work(tiles)
        dtype = accumulation_dtype(out.dtype) if work.queries.adds or out.dtype != q.dtype else q.dtype
        size = max(call.head_dim, call.value_head_dim)
        queries, keys, values = (_heads_first(x, dtype, size) for x in (q, k, v))
        result = OutputSum(out, lse, work.queries)
        for piece, is_first in zip(work.pieces, work.queries.is_first, strict=True):
            part, part_lse = cpu_flash(
                queries[:, :, piece.queries], keys[:, :, piece.keys], values[:, :, piece.keys],
                0.0, piece.is_causal, attn_mask=work.mask(piece, tiles, dtype), scale=call.scale,
            )  # fmt: skip
            result.add(piece.queries, _rows_first(part, out), part_lse[0], is_first=is_first)
        result.finish()

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, tiles: Tiles, call: AttentionCall, first_head: int,
    ) -> None:  # fmt: skip
        work = _work(tiles)
        adds = work.queries.adds or work.keys.adds
        dtype = accumulation_dtype(dq.dtype) if adds or dq.dtype != q.dtype else q.dtype
        size = max(call.head_dim, call.value_head_dim)
        dout, queries, keys, values, out = (_heads_first(x, dtype, size) for x in (dout, q, k, v, out))
        lse = lse[None].to(accumulation_dtype(dtype))
        sets = _head_sets(queries, keys)
        query_sums = [GradientSum(dq[:, heads], work.queries) for heads in sets]
        covered = work.keys.repeated(len(sets))
        key_sums = [GradientSum(x, covered) for x in (dk, dv)]
        is_first = iter(covered.is_first)
        for number, piece in enumerate(work.pieces):
            rows, columns = piece.queries, piece.keys
            for heads, total in zip(sets, query_sums, strict=True):
                at = slice(None), heads, rows
                part, *parts = cpu_flash_backward(
                    dout[at], queries[at], keys[:, :, columns], values[:, :, columns], out[at],
                    lse[at].contiguous(), 0.0, piece.is_causal,
                    attn_mask=work.mask(piece, tiles, dtype), scale=call.scale,
                )  # fmt: skip
                total.add(rows, _rows_first(part, total.target), is_first=work.queries.is_first[number])
                begins = next(is_first)
                for key_sum, gradient in zip(key_sums, parts, strict=True):
                    key_sum.add(columns, _rows_first(gradient, key_sum.target), is_first=begins)
        for total in (*query_sums, *key_sums):
            total.finish()


def _head_sets(queries: Tensor, keys: Tensor) -> list[slice]:
    """Returns the query heads of each backward call: all, or one of each group where the operator adds in 16 bits.

    The operator adds the gradients that a group's heads contribute to a key in the type of q, and the sum of eight of
    them in bfloat16 has twice the error of each. With one head of each group a call, the sum is made here, in fp32.
    """
    ratio = queries.shape[1] // keys.shape[1]
    is_acc_dtype = accumulation_dtype(queries.dtype) == queries.dtype
    return [slice(None)] if is_acc_dtype or ratio == 1 else [slice(first, None, ratio) for first in range(ratio)]


@dataclass(frozen=True)
class _MaskPiece:
    """A call of the operator.

    Attributes:
        queries, keys: rows of q and of k.
        is_causal: True if there are as many keys as queries, and query i sees keys up to i.
        width: query i sees keys i to i + width, or all keys from i on if it is UNBOUNDED; None if it sees all.
    """

    queries: slice
    keys: slice
    is_causal: bool = False
    width: int | None = None


@dataclass(frozen=True)
class _Work:
    """The pieces of a mask, their covers of queries and keys, and for each width the shape of its largest mask."""

    pieces: list[_MaskPiece]
    queries: Cover
    keys: Cover
    mask_shapes: dict[int, tuple[int, int]]

    def mask(self, piece: _MaskPiece, tiles: Tiles, dtype: torch.dtype) -> Tensor | None:
        """Returns the additive mask of a piece: a corner of the mask that all pieces of its width share."""
        width = piece.width
        if width is None:
            return None
        mask = tiles.memo(("cpu", width, dtype), lambda: _additive_mask(*self.mask_shapes[width], width, dtype))
        return mask[:, :, : _size(piece.queries), : _size(piece.keys)]


def _work(tiles: Tiles) -> _Work:
    return tiles.memo("cpu", lambda: _planned(tiles))


def _planned(tiles: Tiles) -> _Work:
    pieces = [piece for band in tiles.canonical.tolist() for piece in _pieces(*band)]
    shapes: dict[int, tuple[int, int]] = {}
    for piece in pieces:
        if piece.width is not None:
            rows, columns = shapes.get(piece.width, (0, 0))
            shapes[piece.width] = max(rows, _size(piece.queries)), max(columns, _size(piece.keys))
    return _Work(
        pieces,
        Cover.from_parts([piece.queries for piece in pieces], len(tiles.q_tokens)),
        Cover.from_parts([piece.keys for piece in pieces], len(tiles.k_tokens)),
        shapes,
    )


def _pieces(q_start: int, q_end: int, k_start: int, k_end: int, lo: int, hi: int) -> list[_MaskPiece]:
    """Returns the pieces of a canonical band."""
    queries = slice(q_start, q_end)
    if lo <= -UNBOUNDED and hi >= UNBOUNDED:
        return [_MaskPiece(queries, slice(k_start, k_end))]
    if lo <= -UNBOUNDED:
        corner = k_end - (q_end - q_start)
        square = _MaskPiece(queries, slice(corner, k_end), is_causal=True)
        return [square, _MaskPiece(queries, slice(k_start, corner))] if corner > k_start else [square]
    width = UNBOUNDED if hi >= UNBOUNDED else hi - lo
    blocks = [(start, min(start + _BLOCK_ROWS, q_end)) for start in range(q_start, q_end, _BLOCK_ROWS)]
    return [
        _MaskPiece(slice(start, end), slice(start + lo, min(k_end, end + hi)), width=width) for start, end in blocks
    ]


def _additive_mask(rows: int, columns: int, width: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # masks outlive an evaluation
        ahead = torch.arange(columns) - torch.arange(rows)[:, None]
        mask = torch.zeros(rows, columns, dtype=dtype)
        return mask.masked_fill_((ahead < 0) | (ahead > width), -torch.inf)[None, None]


def _size(rows: slice) -> int:
    return rows.stop - rows.start


def _heads_first(x: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    """Returns `[L, h, d]` as `[1, h, L, size]` with every row on a 16-byte boundary; copies where it is not.

    The operator ignores the stride of the last axis, and its products round differently with the alignment of rows,
    which must not depend on the other heads of a rank. It also requires values of the size of keys: padding with zeros
    changes no score and no other feature of the output.
    """
    length, heads, dim = x.shape
    item = dtype.itemsize
    if x.dtype == dtype and dim == size and x.stride(-1) == 1:  # noqa: SIM102
        if not any(place * item % ROW_ALIGNMENT for place in (x.storage_offset(), *x.stride()[:-1])):
            return x.transpose(0, 1)[None]
    rows = x.new_empty(heads, length, -(-size * item // ROW_ALIGNMENT) * ROW_ALIGNMENT // item, dtype=dtype)[..., :size]
    rows[..., :dim].copy_(x.transpose(0, 1))
    rows[..., dim:].zero_()
    return rows[None]


def _rows_first(x: Tensor, target: Tensor) -> Tensor:
    """Returns `[1, h, L, size]` as `[L, h, d]`, without the padding of the last axis."""
    return x[0].transpose(0, 1)[..., : target.shape[-1]]
