"""The base of kernels over variable-length flash attention: turns bands into calls and sums the calls' results."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel, Tiles
from megatron_cp.softmax.kernels.common.sums import GradientSum, OutputSum, RowIndex
from megatron_cp.softmax.kernels.common.varlen_calls import DeviceSegments, device_calls

MAX_HEAD_DIM = 256
HEAD_DIM_UNIT = 8


class SegmentedAttention(AttentionKernel):
    """Attention by an operator that takes `cu_seqlens` and one window for all segments, with results of q's type.

    Rows that are in a call's order already are used in place, as in all self-attention over whole documents; others
    are gathered. The results of queries that are in several calls, or several times in one, are merged in fp32.

    Heads of a size that the operator does not support are padded with zeros, which change no score and no other
    feature.
    """

    devices = ("cuda",)
    unrounded_partials = False
    serves_graphs = True

    def head_sizes(self, call: AttentionCall) -> tuple[int, int]:
        """Returns the sizes to which key and value heads are padded for the operator."""
        size = -(-max(call.head_dim, call.value_head_dim) // HEAD_DIM_UNIT) * HEAD_DIM_UNIT
        return size, size

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, segments: DeviceSegments, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Returns `out` `[n, h, d]` and `lse` `[h, n]` of one call."""

    @abstractmethod
    def attend_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: DeviceSegments,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns dq, dk and dv of one call, given `out` and `lse` of the whole softmax."""

    def prepare(self, tiles: Tiles, device: torch.device) -> None:
        device_calls(tiles, device)

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall,
        first_head: int,
    ) -> None:  # fmt: skip
        work = device_calls(tiles, q.device)
        key_size, value_size = self.head_sizes(call)
        q, k, v = _padded(q, key_size), _padded(k, key_size), _padded(v, value_size)
        result = OutputSum(out, lse, work.queries)
        for segments in work.calls:
            rows, columns = segments.queries, segments.keys
            part, part_lse = self.attend(
                _take(q, rows.rows), _take(k, columns.rows), _take(v, columns.rows), segments, call
            )
            for places, targets, is_first in rows.rounds:
                result.add(
                    targets, _take(part, places)[..., : out.shape[-1]], _take(part_lse.T, places).T, is_first=is_first
                )
        result.finish()
        if work.hidden is not None:
            out.masked_fill_(work.hidden[0][:, None, None], 0)
            lse.masked_fill_(work.hidden[0], -torch.inf)

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, tiles: Tiles, call: AttentionCall, first_head: int,
    ) -> None:  # fmt: skip
        work = device_calls(tiles, q.device)
        key_size, value_size = self.head_sizes(call)
        q, k = _padded(q, key_size), _padded(k, key_size)
        v, dout, out = _padded(v, value_size), _padded(dout, value_size), _padded(out, value_size)
        covers = (work.queries, work.keys, work.keys)
        sums = [GradientSum(x, cover) for x, cover in zip((dq, dk, dv), covers, strict=True)]
        for segments in work.calls:
            rows, columns = segments.queries, segments.keys
            parts = self.attend_backward(
                _take(dout, rows.rows).to(q.dtype), _take(q, rows.rows),
                _take(k, columns.rows), _take(v, columns.rows),
                _take(out, rows.rows).to(q.dtype), _take(lse.T, rows.rows).T.float().contiguous(), segments, call,
            )  # fmt: skip
            for total, part, axis in zip(sums, parts, (rows, columns, columns), strict=True):
                for places, targets, is_first in axis.rounds:
                    total.add(targets, _take(part, places)[..., : total.target.shape[-1]], is_first=is_first)
        for total in sums:
            total.finish()
        if work.hidden is not None:
            for gradient, hidden in zip((dq, dk, dv), (*work.hidden, work.hidden[1]), strict=True):
                gradient.masked_fill_(hidden[:, None, None], 0)


def _take(x: Tensor, rows: RowIndex) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _padded(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))


def common_refusal(call: AttentionCall) -> str | None:
    """Returns why no flash attention on CUDA supports a call; None if it may."""
    if call.device.type != "cuda":
        return f"runs on CUDA, the tensors are on {call.device.type}; use cpu or reference"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"has bfloat16 and float16, not {call.dtype}; use reference"
    if max(call.head_dim, call.value_head_dim) > MAX_HEAD_DIM:
        size = max(call.head_dim, call.value_head_dim)
        return f"has heads of at most {MAX_HEAD_DIM} features, not {size}; use reference"
    if call.scale <= 0:
        return f"is known to be right for scales above 0, not for {call.scale}; use reference"
    if call.dropout:
        return f"has no dropout that is the same on any number of ranks, and dropout is {call.dropout}; use reference"
    return None
