"""torch's FlexAttention, one compiled kernel for bands, head sizes and soft caps that fused kernels refuse."""

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

BLOCK = 128  # rows and keys of a block in FlexAttention's kernels
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# By default FlexAttention uses another kernel below 128 queries, which puts the queries of all heads of a key head into
# one block, and does not compile where that is more than 128 rows.
_ONE_KERNEL = {"BACKEND": "TRITON"}
_TRACING = threading.Lock()  # torch traces once for a process, whose threads may be ranks


class FlexAttention(AttentionKernel):
    """`torch.nn.attention.flex_attention` with a mask that looks up each query's ranges of keys.

    The public function's backward is that of its own softmax, which may be a part of a larger one. So gradients are
    computed for the part's output and log-sum-exp, of which the whole output is made:

        O = sum over parts of w O_p, w = exp(lse_p - lse)        dO_p = w dO        dlse_p = w (dO . O_p - dO . O)

    This costs one more forward in backward.
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
            return (
                f"has no dropout that is the same on any number of ranks, and dropout is {call.dropout}; use reference"
            )
        return None

    def prepare(self, tiles: Tiles, device: torch.device) -> None:
        _visibility(tiles, device)

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
        """Returns `out` `[T, h, d]` and `lse` `[h, T]`, which are 0 and -inf where a query sees no key."""
        visibility = _visibility(tiles, q.device)
        heads, several = (q.shape[1] // k.shape[1], q.shape[2], v.shape[2]), visibility.blocks.kv_indices.shape[-1] > 1
        operator = _operator(q.device.type, q.dtype, call.softcap, heads, visibility.num_ranges, several)
        with _TRACING:
            out, aux = operator(
                *(x.transpose(0, 1)[None] for x in (q, k, v)),
                score_mod=_soft_cap(call.softcap) if call.softcap else None,
                block_mask=visibility.blocks,
                scale=call.scale,
                enable_gqa=q.shape[1] != k.shape[1],
                return_aux=flex.AuxRequest(lse=True),
                kernel_options=_ONE_KERNEL,
            )
        seen = visibility.seen
        return torch.where(seen[:, None, None], out[0].transpose(0, 1), 0), torch.where(seen, aux.lse[0], -torch.inf)


@cache
def _operator(device: str, *kind: object) -> Callable[..., Any]:
    """Returns FlexAttention, compiled on CUDA, since the eager one keeps all scores in memory.

    There is one function for every `kind`, the properties that a compilation depends on. Each has a code object of its
    own, because Dynamo limits the number of compilations of a code object.
    """
    if device != "cuda":
        return flex.flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return flex.flex_attention(q, k, v, **options)

    own_code = FunctionType(attend.__code__.replace(), attend.__globals__, f"flex_attention of {kind}")
    return torch.compile(own_code, dynamic=True)


@cache
def _soft_cap(softcap: float) -> Callable[..., Tensor]:
    """Returns a `score_mod`; the same function for equal caps, so that it is compiled once."""
    # A captured float would be an input of the code that is compiled for dynamic shapes, which Inductor refuses in a
    # score_mod. A captured string is a constant.
    text = repr(softcap)

    def score_mod(score: Tensor, *_places: Tensor) -> Tensor:
        cap = float(text)
        return cap * torch.tanh(score / cap)

    return score_mod


@dataclass(frozen=True)
class _Visibility:
    """The keys that each query sees, on a device."""

    blocks: flex.BlockMask
    seen: Tensor  # [T] bools: the query sees a key
    num_ranges: int  # the largest number of ranges of keys of a query


def _visibility(tiles: Tiles, device: torch.device) -> _Visibility:
    return tiles.memo(("flex", device), lambda: _make_visibility(tiles, device))


def _make_visibility(tiles: Tiles, device: torch.device) -> _Visibility:
    queries, keys = len(tiles.q_tokens), len(tiles.k_tokens)
    starts, ends = ranges_of_queries(tiles.bands, queries)
    some, whole = block_tables(tiles.bands, queries, keys)
    from_, to = (on_device(table, device) for table in (starts, ends))

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        zero = query * 0  # torch 2.9 takes tensors alone as indices here
        seen = (key >= from_[zero, query]) & (key < to[zero, query])
        for number in range(1, len(starts)):
            seen = seen | ((key >= from_[zero + number, query]) & (key < to[zero + number, query]))
        return seen

    counts, indices, full_counts, full_indices = (
        on_device(table, device) for table in (*_block_lists(some & ~whole), *_block_lists(whole))
    )
    with torch.inference_mode(False):  # it makes tables of its own, which outlive an evaluation
        blocks = flex.BlockMask.from_kv_blocks(
            counts, indices, full_counts, full_indices, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(queries, keys)
        )
    return _Visibility(blocks, on_device((ends > starts).any(0), device, torch.bool), len(starts))


def ranges_of_queries(bands: IntArray, queries: int) -> tuple[IntArray, IntArray]:
    """Returns the starts and the ends of each query's m ranges of keys, `[m, queries]` each; 0 and 0 for no range."""
    rows = np.repeat(np.arange(len(bands)), bands[:, 1] - bands[:, 0])
    query = np.arange(rows.size) - np.repeat(
        np.cumsum(bands[:, 1] - bands[:, 0]) - bands[:, 1], bands[:, 1] - bands[:, 0]
    )
    order = np.argsort(query, kind="stable")
    rows, query = rows[order], query[order]
    slot = np.arange(query.size) - np.searchsorted(query, query)  # number of the band among those of its query
    starts, ends = np.zeros((2, max(int(slot.max(initial=0)) + 1, 1), queries), dtype=np.int64)
    _, _, k_start, k_end, lo, hi = bands[rows].T
    starts[slot, query] = np.maximum(k_start, query + lo)
    ends[slot, query] = np.minimum(k_end, query + hi + 1)
    return starts, ends


def block_tables(bands: IntArray, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns bools `[query blocks, key blocks]`: some pair is visible; one band makes every pair visible."""
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


def _block_lists(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[1, 1, rows]`, the number of key blocks of each query block, and `[1, 1, rows, all]`, those first."""
    order = np.argsort(~table, axis=1, kind="stable")
    return table.sum(1)[None, None], order[None, None]
