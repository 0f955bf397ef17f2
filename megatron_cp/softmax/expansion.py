"""`Expansion` and `Absorption`: compute tiles of latents, expanded to keys and values or as they are.

Shapes: `n` features of a key without the shared ones, `v` features of a value, `r` features of a latent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.executor.attend import Queries, QueryGradients, TileWork
from megatron_cp.executor.transfers import Keys
from megatron_cp.layout.tiles import Tiles
from megatron_cp.plan.head_chunks import HeadChunk


class Expansion:
    """Computes tiles of latents: expands them, and sums the gradient of the up-projection.

    Args:
        work: computes tiles of keys and values.
        up: `[heads, n + v, r]`, of all heads of the layer.
        value_size: `v`.

    Attributes:
        gradient: that of `up`, in at least fp32; None until a tile has been differentiated.
    """

    def __init__(self, work: TileWork, up: Tensor, value_size: int) -> None:
        self.work, self.up, self.own_size = work, up, up.shape[1] - value_size
        self.unrounded_partials = work.unrounded_partials
        self.gradient: Tensor | None = None

    def forward(self, rows: Queries, keys: Keys, tiles: Tiles, chunk: HeadChunk) -> None:
        """Computes the tiles for a chunk's heads; see `TileWork`. Keys are shared keys and latents."""
        self.work.forward(rows, self._expanded(keys, chunk), tiles, _every_head(chunk))

    def backward(self, rows: QueryGradients, keys: Keys, gradients: Keys, tiles: Tiles, chunk: HeadChunk) -> None:
        """Computes the gradients of the tiles for a chunk's heads; see `TileWork`."""
        (_, latents), (dshared, dlatents) = keys, gradients
        expanded = self._expanded(keys, chunk)
        dkeys, dvalues = [torch.empty_like(x, dtype=y.dtype) for x, y in zip(expanded, gradients, strict=True)]
        self.work.backward(rows, expanded, (dkeys, dvalues), tiles, _every_head(chunk))
        dshared.copy_(dkeys[..., self.own_size :].sum(-2, keepdim=True))
        up = self._up(chunk).flatten(0, 1)
        dexpanded = torch.cat([dkeys[..., : self.own_size], dvalues], -1).flatten(-2).to(up.dtype)
        dlatents.copy_((dexpanded @ up).unsqueeze(-2))
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.up, dtype=accumulation_dtype(self.up.dtype))
        product = dexpanded.flatten(0, -2).T @ latents.flatten(0, -2)
        self._chunk_rows(self.gradient, chunk).add_(product.view(-1, *self.up.shape[1:]))

    def _expanded(self, keys: Keys, chunk: HeadChunk) -> Keys:
        """Returns the keys and values of every head of the chunk."""
        (shared, latents), up = keys, self._up(chunk)
        expanded = (latents.squeeze(-2) @ up.flatten(0, 1).T).unflatten(-1, up.shape[:2])
        shared = shared.expand(*shared.shape[:-2], len(up), shared.shape[-1])
        return torch.cat([expanded[..., : self.own_size], shared], -1), expanded[..., self.own_size :]

    def _up(self, chunk: HeadChunk) -> Tensor:
        return self._chunk_rows(self.up, chunk)

    @staticmethod
    def _chunk_rows(weight: Tensor, chunk: HeadChunk) -> Tensor:
        return weight.narrow(0, chunk.first_head, chunk.heads.stop - chunk.heads.start)


class Absorption:
    """Computes tiles of latents by queries that have absorbed the up-projection.

    The key that all heads share is the latent and the shared key, and its value is the latent.
    """

    def __init__(self, work: TileWork) -> None:
        self.work, self.unrounded_partials = work, work.unrounded_partials

    def forward(self, rows: Queries, keys: Keys, tiles: Tiles, chunk: HeadChunk) -> None:
        """Computes the tiles for a chunk's heads; see `TileWork`. Keys are shared keys and latents."""
        shared, latents = keys
        self.work.forward(rows, (torch.cat([latents, shared], -1), latents), tiles, chunk)

    def backward(self, rows: QueryGradients, keys: Keys, gradients: Keys, tiles: Tiles, chunk: HeadChunk) -> None:
        """Computes the gradients of the tiles for a chunk's heads; see `TileWork`."""
        (shared, latents), (dshared, dlatents) = keys, gradients
        both, size = torch.cat([latents, shared], -1), latents.shape[-1]
        dboth, dvalues = [torch.empty_like(x, dtype=accumulation_dtype(dlatents.dtype)) for x in (both, latents)]
        self.work.backward(rows, (both, latents), (dboth, dvalues), tiles, chunk)
        dshared.copy_(dboth[..., size:])
        dlatents.copy_(dvalues.add_(dboth[..., :size]))


def absorbed(q: Tensor, up: Tensor) -> Tensor:
    """Returns queries `[t, (b,) h, r + shared]` that meet latents and shared keys.

    Args:
        q: `[t, (b,) h, n + shared]`.
        up: the keys' part of the up-projection, `[h, n, r]`.
    """
    own, rest = q.split([up.shape[1], q.shape[-1] - up.shape[1]], -1)
    return torch.cat([torch.einsum("...hn,hnr->...hr", own, up), rest], -1)


def of_tokens(product: Callable[[Tensor], Tensor], x: Tensor, tokens: int) -> Tensor:
    """Returns a product of the first rows of x, and zeros for its pads, which may hold anything, as gradients may."""
    made = product(x[:tokens])
    return made if len(x) == tokens else torch.cat([made, made.new_zeros(len(x) - tokens, *made.shape[1:])])


def _every_head(chunk: HeadChunk) -> HeadChunk:
    """Returns the chunk with keys and values of each head."""
    every = slice(0, chunk.heads.stop - chunk.heads.start)
    return replace(chunk, groups=every, runs=((every, every),))
