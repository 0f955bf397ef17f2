"""`Expansion` and `Absorption`: compute tiles of latents, expanded to keys and values or as they are.

Shapes: `n` features of a key without the shared ones, `v` features of a value, `r` features of a latent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.executor.attend import TileWork
from megatron_cp.layout.tiles import Tiles
from megatron_cp.plan.head_chunks import HeadChunk


class _OverKeys:
    """Has a computation of tiles of keys and values."""

    work: TileWork

    @property
    def unrounded_partials(self) -> bool:
        return self.work.unrounded_partials


class Expansion(_OverKeys):
    """Computes tiles of latents: expands them, and sums the gradient of the up-projection.

    Args:
        work: computes tiles of keys and values.
        up: `[heads, n + v, r]`, of all heads of the layer.
        value_size: `v`.
    """

    def __init__(self, work: TileWork, up: Tensor, value_size: int) -> None:
        self.work, self.up, self.own_size = work, up, up.shape[1] - value_size
        self.gradient: Tensor | None = None

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, chunk: HeadChunk
    ) -> None:
        """Computes the tiles for a chunk's heads; see `TileWork`. k and v are shared keys and latents."""
        self.work.forward(out, lse, q, *self._expanded(k, v, chunk), tiles, _every_head(chunk))

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, dlse: Tensor | None, tiles: Tiles, chunk: HeadChunk,
    ) -> None:  # fmt: skip
        """Computes the gradients of the tiles for a chunk's heads; see `TileWork`."""
        keys, values = self._expanded(k, v, chunk)
        dkeys, dvalues = torch.empty_like(keys, dtype=dk.dtype), torch.empty_like(values, dtype=dv.dtype)
        self.work.backward(dq, dkeys, dvalues, dout, q, keys, values, out, lse, dlse, tiles, _every_head(chunk))
        dk.copy_(dkeys[..., self.own_size :].sum(-2, keepdim=True))
        up = self._up(chunk).flatten(0, 1)
        dexpanded = torch.cat([dkeys[..., : self.own_size], dvalues], -1).flatten(-2).to(up.dtype)
        dv.copy_((dexpanded @ up).unsqueeze(-2))
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.up, dtype=accumulation_dtype(self.up.dtype))
        product = dexpanded.flatten(0, -2).T @ v.flatten(0, -2)
        self._chunk_rows(self.gradient, chunk).add_(product.view(-1, *self.up.shape[1:]))

    def _expanded(self, k: Tensor, v: Tensor, chunk: HeadChunk) -> tuple[Tensor, Tensor]:
        up = self._up(chunk)
        expanded = (v.squeeze(-2) @ up.flatten(0, 1).T).unflatten(-1, up.shape[:2])
        shared = k.expand(*k.shape[:-2], len(up), k.shape[-1])
        return torch.cat([expanded[..., : self.own_size], shared], -1), expanded[..., self.own_size :]

    def _up(self, chunk: HeadChunk) -> Tensor:
        return self._chunk_rows(self.up, chunk)

    @staticmethod
    def _chunk_rows(weight: Tensor, chunk: HeadChunk) -> Tensor:
        return weight.narrow(0, chunk.first_head, chunk.heads.stop - chunk.heads.start)


class Absorption(_OverKeys):
    """Computes tiles of latents by queries that have absorbed the up-projection.

    The key that all heads share is the latent and the shared key, and its value is the latent.
    """

    def __init__(self, work: TileWork) -> None:
        self.work = work

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, chunk: HeadChunk
    ) -> None:
        """Computes the tiles for a chunk's heads; see `TileWork`. k and v are shared keys and latents."""
        self.work.forward(out, lse, q, torch.cat([v, k], -1), v, tiles, chunk)

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, dlse: Tensor | None, tiles: Tiles, chunk: HeadChunk,
    ) -> None:  # fmt: skip
        """Computes the gradients of the tiles for a chunk's heads; see `TileWork`."""
        keys = torch.cat([v, k], -1)
        dkeys, dvalues = (torch.empty_like(x, dtype=accumulation_dtype(dv.dtype)) for x in (keys, v))
        self.work.backward(dq, dkeys, dvalues, dout, q, keys, v, out, lse, dlse, tiles, chunk)
        dk.copy_(dkeys[..., v.shape[-1] :])
        dv.copy_(dvalues.add_(dkeys[..., : v.shape[-1]]))


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
