"""`KernelWork`: computes tiles of keys and values by an `AttentionKernel`, with a batch and all heads of a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_cp.executor.arguments import narrow
from megatron_cp.executor.attend import Queries, QueryGradients
from megatron_cp.executor.transfers import Keys
from megatron_cp.layout.tiles import Tiles
from megatron_cp.plan.head_chunks import HeadChunk
from megatron_cp.softmax.kernels import AttentionCall, AttentionKernel

_ENTRY_STEP = 2**31 - 1  # between the seeds of a batch's entries: more than callers have layers and steps


class KernelWork(NamedTuple):
    """Computes tiles of keys and values; see `TileWork`.

    A kernel takes heads of one ratio and no batch. So it is called for each run of such heads of each entry of the
    batch; entries differ in the seed of their dropout.

    Attributes:
        kernel: the kernel.
        call: the arguments that all its calls share.
    """

    kernel: AttentionKernel
    call: AttentionCall

    @property
    def unrounded_partials(self) -> bool:
        return self.kernel.unrounded_partials

    def forward(self, rows: Queries, keys: Keys, tiles: Tiles, chunk: HeadChunk) -> None:
        """Computes the tiles for a chunk's heads."""
        (q, out, lse), (k, v) = rows, keys
        if q.ndim == 3 and len(chunk.runs) == 1:  # the kernel takes all heads at once, and needs no views of them
            self.kernel.forward(out, lse, q, k, v, tiles, self.call, chunk.first_head)
            return
        for entry, heads, groups, call in self._kernel_calls(chunk, q):
            self.kernel.forward(
                _heads_of(out, entry, heads), _lse_of(lse, entry, heads),
                _heads_of(q, entry, heads), _heads_of(k, entry, groups), _heads_of(v, entry, groups),
                tiles, call, chunk.first_head + heads.start,
            )  # fmt: skip

    def backward(self, rows: QueryGradients, keys: Keys, gradients: Keys, tiles: Tiles, chunk: HeadChunk) -> None:
        """Computes the gradients of the tiles for a chunk's heads."""
        (dq, dout, q, out, lse, dlse), (k, v), (dk, dv) = rows, keys, gradients
        if dlse is not None:
            self._backward_with_lse(rows, dlse, keys, gradients, tiles, chunk)
            return
        if q.ndim == 3 and len(chunk.runs) == 1:
            self.kernel.backward(dq, dk, dv, dout, q, k, v, out, lse, tiles, self.call, chunk.first_head)
            return
        for entry, heads, groups, call in self._kernel_calls(chunk, q):
            own_dk, own_dv, own_k, own_v = [_heads_of(x, entry, groups) for x in (dk, dv, k, v)]
            own_dq, own_dout, own_q, own_out = [_heads_of(x, entry, heads) for x in (dq, dout, q, out)]
            self.kernel.backward(
                own_dq, own_dk, own_dv, own_dout, own_q, own_k, own_v, own_out, _lse_of(lse, entry, heads),
                tiles, call, chunk.first_head + heads.start,
            )  # fmt: skip

    def _backward_with_lse(
        self, rows: QueryGradients, dlse: Tensor, keys: Keys, gradients: Keys, tiles: Tiles, chunk: HeadChunk
    ) -> None:
        """Adds the gradient of the log-sum-exp, which a kernel's backward does not take.

        The gradient of a score is `P (dP - rowsum(dout * out) + dlse)`. So one more value feature is added, which is 0
        in v, 1 in dout and `-dlse` in out: it changes nothing but the row sums, also where dout is zero.
        """
        (k, v), (dk, dv) = keys, gradients
        out = rows.out.to(dlse.dtype) if self.unrounded_partials else rows.out
        out = torch.cat([out, -dlse.movedim(-1, 0).unsqueeze(-1).to(out.dtype)], -1)
        rows = rows._replace(dout=pad(rows.dout, (0, 1), value=1.0), out=out, dlse=None)
        wide_dv = dv.new_empty(*dv.shape[:-1], dv.shape[-1] + 1)
        wide = KernelWork(self.kernel, one_more_feature(self.call))
        wide.backward(rows, (k, pad(v, (0, 1))), (dk, wide_dv), tiles, chunk)
        dv.copy_(wide_dv[..., :-1])

    def _kernel_calls(self, chunk: HeadChunk, q: Tensor) -> Iterator[tuple[int | None, slice, slice, AttentionCall]]:
        """Yields the entry, the query heads, the key/value heads and the arguments of each call of the kernel."""
        for heads, groups in chunk.runs:
            if q.ndim == 3:
                yield None, heads, groups, self.call
                continue
            for entry in range(q.shape[1]):
                call = replace(self.call, seed=self.call.seed + entry * _ENTRY_STEP) if self.call.dropout else self.call
                yield entry, heads, groups, call


def one_more_feature(call: AttentionCall) -> AttentionCall:
    """Returns the call with one more value feature, by which a kernel's backward takes a gradient of the lse."""
    return replace(call, value_head_dim=call.value_head_dim + 1)


def _heads_of(x: Tensor, entry: int | None, heads: slice) -> Tensor:
    """Selects heads of one entry of the batch from `[t, (b,) h, d]`."""
    return narrow(x if entry is None else x[:, entry], 1, heads)


def _lse_of(lse: Tensor, entry: int | None, heads: slice) -> Tensor:
    """Selects heads of one entry of the batch from `[(b,) h, t]`."""
    return narrow(lse if entry is None else lse[entry], 0, heads)
