"""torch's FlexAttention: any bands, head sizes and a soft cap in one compiled kernel, for what fused kernels refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from megatron_cp.exchange.device import on_device
from megatron_cp.layout import bands as band
from megatron_cp.layout.packing import IntArray
from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel, Tiles

BLOCK = 128  # rows and keys of a block, as FlexAttention's kernels have them
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Left to itself, FlexAttention takes another kernel below 128 queries, which puts those of all heads of a key head into
# one block, and does not compile where that is more than 128 rows.
_ONE_AT_A_TIME = threading.Lock()  # torch traces for a process, and ranks may be its threads
_ONE_KERNEL = {"BACKEND": "TRITON"}


class FlexAttention(AttentionKernel):
    """`torch.nn.attention.flex_attention`, whose mask asks for each query's ranges of keys.

    Its public function has a backward of its own softmax, not of a larger one. So a part's gradients are those of the
    part and of its log-sum-exp, of which the whole is made:

        O = sum over parts of w O_p, w = exp(lse_p - lse)        dO_p = w dO        dlse_p = w (dO . O_p - dO . O)

    The price is one more forward in backward.
    """

    name = "flex"
    package = "torch with CUDA and a compiler"
    devices = ("cuda",)
    unrounded_partials = False

    def refusal(self, call: AttentionCall) -> str | None:
        if call.device.type != "cuda":
            return f"has no backward on {call.device.type}; use cpu or reference"
        if call.dtype not in _DTYPES:
            return f"has no {call.dtype}; use reference"
        if min(call.head_dim, call.value_head_dim) < 16:
            return f"needs heads of at least 16, not {call.head_dim} and {call.value_head_dim}; use reference"
        if call.dropout:
            return f"has no dropout that is the same on any number of ranks, asked for {call.dropout}; use reference"
        return None

    def prepare(self, tiles: Tiles, device: torch.device) -> None:
        _sight(tiles, device)

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall,
        first_head: int,
    ) -> None:  # fmt: skip
        part, part_lse = self.attend(q, k, v, tiles, call)
        out.copy_(part)
        lse.copy_(part_lse)

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, tiles: Tiles, call: AttentionCall, first_head: int,
    ) -> None:  # fmt: skip
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            part, part_lse = self.attend(leaves[0], leaves[1], leaves[2], tiles, call)
        share = torch.exp(part_lse.detach() - lse).nan_to_num_(0.0)  # both -inf where a query sees nothing
        acc_dout = dout.to(lse.dtype)
        difference = (acc_dout * (part.detach() - out)).sum(-1).T
        gradients = torch.autograd.grad(
            [part, part_lse], leaves, [(acc_dout * share.T.unsqueeze(-1)).to(part.dtype), share * difference]
        )
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """`out` `[T, h, d]`, 0 where a query sees nothing, and `lse` `[h, T]`, there -inf."""
        sight = _sight(tiles, q.device)
        heads, several = (q.shape[1] // k.shape[1], q.shape[2], v.shape[2]), sight.blocks.kv_indices.shape[-1] > 1
        operator = _operator(q.device.type, q.dtype, call.softcap, heads, sight.num_ranges, several)
        with _ONE_AT_A_TIME:
            out, aux = operator(
                *(x.transpose(0, 1)[None] for x in (q, k, v)),
                score_mod=_capped(call.softcap) if call.softcap else None,
                block_mask=sight.blocks,
                scale=call.scale,
                enable_gqa=q.shape[1] != k.shape[1],
                return_aux=flex.AuxRequest(lse=True),
                kernel_options=_ONE_KERNEL,
            )
        seen = sight.seen
        return torch.where(seen[:, None, None], out[0].transpose(0, 1), 0), torch.where(seen, aux.lse[0], -torch.inf)


@cache
def _operator(device: str, *kind: object) -> Callable[..., Any]:
    """FlexAttention, compiled where it has kernels: eagerly it holds all scores in memory.

    One for each kind of what a compilation is made for, whatever the lengths. Dynamo counts the compilations of a piece
    of code and after some compiles no more, which would be those of all kinds: so each has code of its own.
    """
    if device != "cuda":
        return flex.flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return flex.flex_attention(q, k, v, **options)

    of_kind = FunctionType(attend.__code__.replace(), attend.__globals__, f"flex_attention of {kind}")
    return torch.compile(of_kind, dynamic=True)


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """One function for each cap, so that it is compiled once."""
    # A float from outside would be an input of what is compiled for any shapes, which Inductor refuses in a score_mod.
    # Text is a constant.
    text = repr(softcap)

    def score_mod(score: Tensor, *_places: Tensor) -> Tensor:
        cap = float(text)
        return cap * torch.tanh(score / cap)

    return score_mod


@dataclass(frozen=True)
class _Sight:
    """What each query sees, on a device."""

    blocks: flex.BlockMask
    seen: Tensor  # [T] whether a query sees any key
    num_ranges: int  # of keys of a query, at most


def _sight(tiles: Tiles, device: torch.device) -> _Sight:
    return tiles.memo(("flex", device), lambda: _placed(tiles, device))


def _placed(tiles: Tiles, device: torch.device) -> _Sight:
    queries, keys = len(tiles.q_tokens), len(tiles.k_tokens)
    starts, ends = ranges_of_queries(tiles.bands, queries)
    some, whole = block_tables(tiles.bands, queries, keys)
    from_, to = (on_device(table, device) for table in (starts, ends))

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key >= from_[0, query]) & (key < to[0, query])
        for number in range(1, len(starts)):
            seen = seen | ((key >= from_[number, query]) & (key < to[number, query]))
        return seen

    counts, indices, full_counts, full_indices = (
        on_device(table, device) for table in (*_listed(some & ~whole), *_listed(whole))
    )
    blocks = flex.BlockMask.from_kv_blocks(
        counts,
        indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )
    return _Sight(blocks, on_device((ends > starts).any(0), device, torch.bool), len(starts))


def ranges_of_queries(bands: IntArray, queries: int) -> tuple[IntArray, IntArray]:
    """`[m, queries]` where each of a query's at most m ranges of keys starts and ends; 0 and 0 for none."""
    rows = np.repeat(np.arange(len(bands)), bands[:, 1] - bands[:, 0])
    query = np.arange(rows.size) - np.repeat(
        np.cumsum(bands[:, 1] - bands[:, 0]) - bands[:, 1], bands[:, 1] - bands[:, 0]
    )
    order = np.argsort(query, kind="stable")
    rows, query = rows[order], query[order]
    slot = np.arange(query.size) - np.searchsorted(query, query)  # the how-manieth band of its query
    starts, ends = np.zeros((2, max(int(slot.max(initial=0)) + 1, 1), queries), dtype=np.int64)
    _, _, k_start, k_end, lo, hi = bands[rows].T
    starts[slot, query] = np.maximum(k_start, query + lo)
    ends[slot, query] = np.minimum(k_end, query + hi + 1)
    return starts, ends


def block_tables(bands: IntArray, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """`[query blocks, key blocks]` where some pair is visible, and where every pair is, by one band."""
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    begins = np.arange(rows) * BLOCK
    pieces, number = band.cut(bands, begins, np.minimum(begins + BLOCK, queries), queries=True)
    some, whole = np.zeros((2, rows, columns + 1), dtype=np.int64)  # steps up where a run begins, down after it
    q0, q1, k0, k1, lo, hi = pieces.T
    np.add.at(some, (number, k0 // BLOCK), 1)
    np.add.at(some, (number, (k1 - 1) // BLOCK + 1), -1)
    first, last = -(-np.maximum(k0, q1 - 1 + lo) // BLOCK), np.minimum(k1, q0 + hi + 1) // BLOCK
    full = (q0 == number * BLOCK) & (q1 == number * BLOCK + BLOCK) & (last > first)
    np.add.at(whole, (number[full], first[full]), 1)
    np.add.at(whole, (number[full], last[full]), -1)
    return tuple(np.cumsum(steps, axis=1)[:, :-1] > 0 for steps in (some, whole))  # type: ignore[return-value]


def _listed(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`[1, 1, rows]` how many blocks of keys each block of queries has, `[1, 1, rows, all]` which, those first."""
    order = np.argsort(~table, axis=1, kind="stable")
    return table.sum(1)[None, None], order[None, None]
