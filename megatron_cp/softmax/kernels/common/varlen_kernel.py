"""What kernels over variable-length flash attention have in common: bands become calls, calls' results add up."""

from __future__ import annotations

from abc import abstractmethod
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel, Tiles
from megatron_cp.softmax.kernels.common.partials import GradientSum, OutputSum, Rows
from megatron_cp.softmax.kernels.common.varlen_calls import Segments, on_one_device

MAX_HEAD_DIM = 256
HEAD_DIM_UNIT = 8


class SegmentedAttention(AttentionKernel):
    """Attention by an operator that takes `cu_seqlens`, one window for all segments, and returns results of q's type.

    Rows that lie as a call wants them are used where they lie, as in all self-attention over whole documents; others
    are gathered. Queries in several calls, or several times in one, have their parts merged in fp32.

    Heads of a size that the operator does not have get features of zeros, which change no score and no other feature.
    """

    devices = ("cuda",)
    unrounded_partials = False
    serves_graphs = True

    def head_sizes(self, call: AttentionCall) -> tuple[int, int]:
        """The sizes of key and value heads that the operator is given."""
        size = -(-max(call.head_dim, call.value_head_dim) // HEAD_DIM_UNIT) * HEAD_DIM_UNIT
        return size, size

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """`out` `[n, h, d]` and `lse` `[h, n]` of one call."""

    @abstractmethod
    def attend_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """dq, dk and dv of one call, from `out` and `lse` of the whole softmax."""

    def prepare(self, tiles: Tiles, device: torch.device) -> None:
        on_one_device(tiles, device)

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall,
        first_head: int,
    ) -> None:  # fmt: skip
        work = on_one_device(tiles, q.device)
        key_size, value_size = self.head_sizes(call)
        q, k, v = _padded(q, key_size), _padded(k, key_size), _padded(v, value_size)
        result = OutputSum(out, lse, work.queries)
        for segments in work.calls:
            rows, columns = segments.queries, segments.keys
            part, part_lse = self.attend(
                _taken(q, rows.rows), _taken(k, columns.rows), _taken(v, columns.rows), segments, call
            )
            for places, targets, is_first in rows.rounds:
                result.add(
                    targets, _taken(part, places)[..., : out.shape[-1]], _taken(part_lse.T, places).T, is_first=is_first
                )
        result.finish()
        if work.hidden is not None:
            out.masked_fill_(work.hidden[0][:, None, None], 0)
            lse.masked_fill_(work.hidden[0], -torch.inf)

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, tiles: Tiles, call: AttentionCall, first_head: int,
    ) -> None:  # fmt: skip
        work = on_one_device(tiles, q.device)
        key_size, value_size = self.head_sizes(call)
        q, k = _padded(q, key_size), _padded(k, key_size)
        v, dout, out = _padded(v, value_size), _padded(dout, value_size), _padded(out, value_size)
        covers = (work.queries, work.keys, work.keys)
        sums = [GradientSum(x, cover) for x, cover in zip((dq, dk, dv), covers, strict=True)]
        for segments in work.calls:
            rows, columns = segments.queries, segments.keys
            parts = self.attend_backward(
                _taken(dout, rows.rows).to(q.dtype), _taken(q, rows.rows),
                _taken(k, columns.rows), _taken(v, columns.rows),
                _taken(out, rows.rows).to(q.dtype), _taken(lse.T, rows.rows).T.float().contiguous(), segments, call,
            )  # fmt: skip
            for total, part, axis in zip(sums, parts, (rows, columns, columns), strict=True):
                for places, targets, is_first in axis.rounds:
                    total.add(targets, _taken(part, places)[..., : total.target.shape[-1]], is_first=is_first)
        for total in sums:
            total.finish()
        if work.hidden is not None:
            for gradient, hidden in zip((dq, dk, dv), (*work.hidden, work.hidden[1]), strict=True):
                gradient.masked_fill_(hidden[:, None, None], 0)


def _taken(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _padded(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))


def common_refusal(call: AttentionCall) -> str | None:
    """What no flash attention on CUDA can run."""
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
        return f"has no dropout that is the same on any number of ranks, asked for {call.dropout}; use reference"
    return None


def major_version(package: str) -> int | None:
    """The first number of an installed package's version, None if it is not installed."""
    try:
        return int(version(package).split(".")[0])
    except PackageNotFoundError:
        return None
