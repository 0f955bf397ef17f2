"""Softmax attention by the equations, one head and one block of queries at a time.

It supports any type, head size, scale and device.

X = scale * Q K^T        S = cap * tanh(X / cap), or X        lse = log sum exp S over the visible keys
P = exp(S - lse), 0 where not visible        D = 1 / (1 - dropout) where a weight is kept, else 0        O = (P * D) V

dV = (P * D)^T dO        dP = D * (dO V^T)        dS = P * (dP - rowsum(dO * O))
dX = dS * (1 - (S / cap)^2)        dQ = scale * dX K        dK = scale * dX^T Q
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.layout import bands as band
from megatron_cp.layout.packing import IntArray
from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel, Tiles
from megatron_cp.softmax.kernels.common import dropout

# The largest number of scores in memory: a document of 2,048 tokens is one block, of 32 MiB in float64.
_MAX_SCORES = 1 << 22


class ReferenceAttention(AttentionKernel):
    """The equations above; the scores of one head and one block of queries are in memory at a time."""

    name = "reference"
    package = "torch"
    unrounded_partials = True

    def refusal(self, call: AttentionCall) -> str | None:
        return None

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall,
        first_head: int,
    ) -> None:  # fmt: skip
        out.zero_()
        lse.fill_(-torch.inf)
        acc_dtype = _acc_dtype_of(q, out)
        for block, head, group in _heads_of_blocks(q, k, tiles):
            scores, _ = block.scores(
                _acc_rows(q, block.queries, head, acc_dtype), _acc_rows(k, block.keys, group, acc_dtype), call
            )
            head_lse = scores.logsumexp(-1)
            weights = (scores - head_lse[:, None]).exp()
            if call.dropout:
                weights *= block.dropout_factors(first_head + head, call, acc_dtype)
            lse[head, block.queries] = head_lse.to(lse.dtype)
            out[block.queries, head] = (weights @ _acc_rows(v, block.keys, group, acc_dtype)).to(out.dtype)

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, tiles: Tiles, call: AttentionCall, first_head: int,
    ) -> None:  # fmt: skip
        acc_dtype = _acc_dtype_of(q, dq)
        dq.zero_()
        dk_sum, dv_sum = (torch.zeros_like(x, dtype=acc_dtype) for x in (dk, dv))
        for block, head, group in _heads_of_blocks(q, k, tiles):
            queries, dhead, head_out = (_acc_rows(x, block.queries, head, acc_dtype) for x in (q, dout, out))
            keys, values = (_acc_rows(x, block.keys, group, acc_dtype) for x in (k, v))
            scores, slopes = block.scores(queries, keys, call)
            weights = (scores - lse[head, block.queries, None].to(acc_dtype)).exp()
            dweights = dhead @ values.T
            kept_weights = weights
            if call.dropout:
                factors = block.dropout_factors(first_head + head, call, acc_dtype)
                kept_weights = weights * factors
                dweights *= factors
            dscores = weights * (dweights - (dhead * head_out).sum(-1, keepdim=True)) * call.scale
            if slopes is not None:
                dscores *= slopes
            dq[block.queries, head] = (dscores @ keys).to(dq.dtype)
            block.add_to_keys(dk_sum[:, group], dscores.T @ queries)
            block.add_to_keys(dv_sum[:, group], kept_weights.T @ dhead)
        dk.copy_(dk_sum)
        dv.copy_(dv_sum)


@dataclass(frozen=True)
class _ScoreBlock:
    """Queries that see the same bands, and the keys that any of them sees.

    Attributes:
        queries: rows of q.
        keys: for each band, rows of k. Concatenated they are the columns of the block's scores.
        visible: `[rows, columns]` bools.
        q_tokens, k_tokens: `[rows]` and `[columns]` positions in the packed stream.
    """

    queries: slice
    keys: tuple[slice, ...]
    visible: Tensor
    q_tokens: Tensor
    k_tokens: Tensor

    def scores(self, queries: Tensor, keys: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Returns S, -inf where not visible, and the soft cap's `1 - (S / cap)^2`, or None without a cap."""
        scores, slopes = queries @ keys.T * call.scale, None
        if call.softcap:
            shares = (scores / call.softcap).tanh()
            scores, slopes = call.softcap * shares, 1 - shares.square()
        return scores.masked_fill_(~self.visible, -torch.inf), slopes

    def dropout_factors(self, head: int, call: AttentionCall, dtype: torch.dtype) -> Tensor:
        """Returns D for query head `head` of the whole layer."""
        kept = dropout.kept(self.q_tokens, self.k_tokens, head=head, seed=call.seed, dropout=call.dropout)
        return kept.to(dtype) / (1 - call.dropout)

    def add_to_keys(self, total: Tensor, columns: Tensor) -> None:
        """Adds the rows of `columns`, one for each column of the scores, to the rows of their keys."""
        for rows, part in zip(self.keys, columns.split([rows.stop - rows.start for rows in self.keys]), strict=True):
            total[rows] += part


def _heads_of_blocks(q: Tensor, k: Tensor, tiles: Tiles) -> Iterator[tuple[_ScoreBlock, int, int]]:
    """Yields a block, a query head, and the key/value head that it reads, for each head of each block."""
    ratio = q.shape[1] // k.shape[1]
    for bands in tiles.memo("reference", lambda: cut_to_blocks(tiles.bands)):
        block = _block(bands, tiles, q.device)
        for head in range(q.shape[1]):
            yield block, head, head // ratio


def cut_to_blocks(bands: IntArray, most_rows: int = _MAX_SCORES) -> list[IntArray]:
    """Returns, for each block, the bands of its queries, cut to them, in the order of their keys.

    Blocks are cut where a band begins or ends, and so between documents: no row's result depends on another document.
    """
    edges = np.unique(bands[:, :2])
    pieces, number = band.cut(bands, edges[:-1], edges[1:], queries=True)
    columns = np.zeros(len(edges) - 1, dtype=np.int64)
    np.add.at(columns, number, pieces[:, 3] - pieces[:, 2])
    rows = np.clip(_MAX_SCORES // np.maximum(columns, 1), 1, most_rows)
    starts = np.concatenate([np.arange(*span) for span in zip(edges[:-1], edges[1:], rows, strict=True)])
    pieces, number = band.cut(bands, starts, np.append(starts[1:], edges[-1]), queries=True)
    order = np.lexsort((pieces[:, 2], number))
    return np.split(pieces[order], np.flatnonzero(np.diff(number[order])) + 1)


def _block(bands: IntArray, tiles: Tiles, device: torch.device) -> _ScoreBlock:
    first, last = bands[0, :2].tolist()
    queries = torch.arange(first, last, device=device)
    keys, visible = [], []
    for k_start, k_end, lo, hi in bands[:, 2:].tolist():
        keys.append(torch.arange(k_start, k_end, device=device))
        ahead = keys[-1] - queries[:, None]
        visible.append((ahead >= lo) & (ahead <= hi))
    q_tokens, k_tokens = tiles.memo(
        ("tokens", device),
        lambda: [on_device(tokens, device, torch.int64) for tokens in (tiles.q_tokens, tiles.k_tokens)],
    )
    return _ScoreBlock(
        slice(first, last),
        tuple(slice(start, end) for start, end in bands[:, 2:4].tolist()),
        torch.cat(visible, dim=1),
        q_tokens[queries],
        k_tokens[torch.cat(keys)],
    )


def _acc_rows(x: Tensor, rows: slice | tuple[slice, ...], head: int, dtype: torch.dtype) -> Tensor:
    """Copies rows of one head to a dense `[L, d]`.

    Matrix products round differently with the stride and alignment of their operands, which must not depend on the
    other heads of a rank.
    """
    parts = [x[part, head] for part in ((rows,) if isinstance(rows, slice) else rows)]
    return torch.cat(parts).to(dtype)


def _acc_dtype_of(x: Tensor, target: Tensor) -> torch.dtype:
    return accumulation_dtype(torch.promote_types(x.dtype, target.dtype))
