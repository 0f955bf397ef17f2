"""The gated delta rule in chunks of `CHUNK` tokens, with matrix products: the CPU default, in plain torch.

Within a chunk, with G_i the sum of g up to token i and S the state before it (Yang et al., arXiv 2412.06464, sec. 3.3):

    (I + A) U = beta (V - exp(G) K S)           A_ij = beta_i exp(G_i - G_j) k_i.k_j  for j < i
    o_i = scale (exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i.k_j) u_j)
    S_next = exp(G_C) S + sum_j exp(G_C - G_j) k_j u_j^T

Everything that does not need S is computed for all chunks of all documents at once; one loop then walks the chunks in
stream order. Chunks begin at document starts, and a document's last chunk is filled with tokens that do nothing.

A head's bits do not depend on the heads beside it, except with one feature a head, where torch turns the products of
a single head, but not those of several, into products with vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp.exchange.device import on_device
from megatron_cp.layout import Packing
from megatron_cp.linear.activations import silu
from megatron_cp.linear.kernels.base import GatedDeltaKernel, LinearCall
from megatron_cp.linear.reductions import for_each_token, sum_over_tokens

CHUNK = 64


class ChunkedGatedDelta(GatedDeltaKernel):
    """The equations above, for all chunks at once but for the walk of the state."""

    name = "chunked"
    package = "torch"

    def refusal(self, call: LinearCall) -> str | None:
        return None

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)  # so that the sum of the taps is rounded once
        y = _CausalConv.apply(x.to(wide), weight.to(wide), _document_heads(call, weight.shape[1]))
        return silu(y if bias is None else y + for_each_token(bias.to(wide), len(y)))

    def rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        groups: list[int],
        scale: float,
        call: LinearCall,
    ) -> Tensor:
        chunks = call.packing.table(("chunks", CHUNK, call.device), lambda: _Chunks(call.packing, call.device))
        wide = torch.promote_types(v.dtype, torch.float32)
        q, k, v_wide, g, beta = (chunks.split(x.to(wide)) for x in (q, k, v, g[..., None], beta[..., None]))
        if groups != list(range(q.shape[1])):  # [chunks, key heads, C, d] -> one key head a value head
            q, k = (torch.cat([x[:, group : group + 1] for group in groups], 1) for x in (q, k))

        total_decay = g.cumsum(2)  # G, [n, h, C, 1]
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
        # Masked before exp: above the diagonal G_i - G_j is positive and could overflow.
        decay = (total_decay - total_decay.transpose(2, 3)).masked_fill(later, -torch.inf).exp()
        keys_t = k.transpose(2, 3)
        mixing = (beta * decay * (k @ keys_t)).tril(-1)  # A
        right = torch.cat([beta * v_wide, beta * total_decay.exp() * k], -1)
        solved = torch.linalg.solve_triangular(mixing, right, upper=False, unitriangular=True)
        updates, reads = solved.split([v_wide.shape[-1], k.shape[-1]], -1)  # U = updates - reads S
        attention = scale * decay * (q @ keys_t)
        queries = scale * total_decay.exp() * q
        last = total_decay[:, :, -1:]
        keys_out = ((last - total_decay).exp() * k).transpose(2, 3)
        carry = last.exp()

        outputs, state = [], v_wide.new_empty(0)  # the first chunk starts a document
        # Unbound, because the gradient of indexing one chunk at a time is a zero-filled copy of all of them.
        walk = zip(*(x.unbind(0) for x in (updates, reads, attention, queries, keys_out, carry)), strict=True)
        for starts, (update, read, weights, query, key, kept) in zip(chunks.starts_document, walk, strict=True):
            if starts:
                outputs.append(torch.bmm(weights, update))
                state = torch.bmm(key, update)
            else:
                update = update - torch.bmm(read, state)
                outputs.append(torch.bmm(query, state) + torch.bmm(weights, update))
                state = kept * state + torch.bmm(key, update)
        return chunks.join(torch.stack(outputs)).to(v.dtype)


class _Chunks:
    """Where the tokens of a packing stand in `[n, C]` chunks that begin at document starts."""

    def __init__(self, packing: Packing, device: torch.device) -> None:
        per_document = -(-packing.lengths // CHUNK)
        first = np.cumsum(per_document) - per_document
        self.num_chunks = int(per_document.sum())
        starts = np.zeros(self.num_chunks, dtype=bool)
        starts[first[per_document > 0]] = True
        self.starts_document: list[bool] = starts.tolist()
        slots = packing.positions() + np.repeat(first * CHUNK, packing.lengths)
        sources = np.full(self.num_chunks * CHUNK, packing.total)  # the slot after the last token holds zeros
        sources[slots] = np.arange(packing.total)
        self.slots, self.sources = on_device(slots, device), on_device(sources, device)

    def split(self, x: Tensor) -> Tensor:
        """`[T, h, d]` to `[n, h, C, d]`, zero where a chunk has no token: a zero key and decay change nothing."""
        filled = _Rechunk.apply(x, self.slots, self.sources, True)
        return filled.unflatten(0, (self.num_chunks, CHUNK)).transpose(1, 2).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        return _Rechunk.apply(x.transpose(1, 2).flatten(0, 1), self.slots, self.sources, False)


class _Rechunk(torch.autograd.Function):
    """Tokens to chunk slots or back; the gradient of one is the other, so that both are gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, sources: Tensor, split: bool) -> Tensor:
        ctx.tables = (slots, sources, split)
        return _rechunked(x, slots, sources, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        slots, sources, split = ctx.tables
        return _rechunked(gradients[0], slots, sources, not split), None, None, None


def _rechunked(x: Tensor, slots: Tensor, sources: Tensor, split: bool) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, sources) if split else x.index_select(0, slots)


class _CausalConv(torch.autograd.Function):
    """`y[t] = sum_s weight[:, -1 - s] x[t - s]` over the `s` for which t - s is in t's document.

    `heads[s]` lists the tokens whose document has no token s places earlier.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, heads: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.heads = heads
        y = x * weight[:, -1]
        for back in range(1, min(weight.shape[1], len(x))):
            y[back:] += _cut(x[:-back] * weight[:, -1 - back], heads[back], back)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (dy,) = gradients
        dx, dweight = dy * weight[:, -1], torch.zeros_like(weight)
        dweight[:, -1] = sum_over_tokens(dy * x)
        for back in range(1, min(weight.shape[1], len(x))):
            reach = _cut(dy[back:].clone(), ctx.heads[back], back)
            dweight[:, -1 - back] = sum_over_tokens(reach * x[:-back])
            dx[:-back] += reach.mul_(weight[:, -1 - back])
        return dx, dweight, None


def _cut(rows: Tensor, heads: Tensor, back: int) -> Tensor:
    """Zeroes the rows of tokens `back ..` whose document does not reach `back` tokens back, in place."""
    return rows.index_fill_(0, heads - back, 0)


def _document_heads(call: LinearCall, width: int) -> list[Tensor]:
    def make() -> list[Tensor]:
        positions = call.packing.positions()
        tokens = np.arange(call.packing.total)
        return [
            on_device(np.flatnonzero((positions < back) & (tokens >= back)), call.device, torch.int64)
            for back in range(width)
        ]

    return call.packing.table(("document_heads", width, call.device), make)
