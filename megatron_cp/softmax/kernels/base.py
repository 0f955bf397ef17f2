"""What an attention kernel is given and what it must write."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp.executor.kernels import Kernel
from megatron_cp.layout.tiles import Tiles

__all__ = ["AttentionCall", "AttentionKernel", "Tiles"]


@dataclass(frozen=True)
class AttentionCall:
    """What all kernel calls of one attention have in common: what a kernel needs to know whether it can run them.

    Attributes:
        scale: what scores are multiplied by before anything else.
        head_dim, value_head_dim: features of a key and of a value head.
        dtype, device: of q, k and v.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
        dropout: the share of weights that become zero, after the softmax; the others grow by `1 / (1 - dropout)`.
        seed: of the dropout mask, which is a function of seed, head, query token and key token alone.
        for_graphs: kernels that serve no CUDA graph are passed over.
    """

    scale: float
    head_dim: int
    value_head_dim: int
    dtype: torch.dtype
    device: torch.device
    softcap: float = 0.0
    dropout: float = 0.0
    seed: int = 0
    for_graphs: bool = False


class AttentionKernel(Kernel):
    """Softmax attention of the queries of one call over its keys, with one ratio of query to key/value heads.

    Shapes: q, out `[T, h, d]`, k and v `[S, g, d]` with h a multiple of g and query head i reading key/value head
    `i // (h // g)`; lse `[h, T]`, natural log. Tensors may be strided with a dense last axis. T, S, h, g and the number
    of bands are at least 1.

    `out` and the gradients have the type of q, or a wider one, where the call is a part whose results are merged: then
    a kernel that can writes them unrounded, as `unrounded_partials` says. lse is at least fp32.

    Attributes:
        unrounded_partials: results are not rounded to the type of q where the caller asks for a wider one.
    """

    unrounded_partials: bool

    def prepare(self, tiles: Tiles, device: torch.device) -> None:
        """Makes what calls with these tiles need on the host and on the device, so that no layer has to."""

    @abstractmethod
    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall,
        first_head: int,
    ) -> None:  # fmt: skip
        """Writes all of `out` and `lse`: 0 and -inf for a query that sees nothing.

        Args:
            first_head: number of the first query head in the whole layer: for dropout.
        """

    @abstractmethod
    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, tiles: Tiles, call: AttentionCall, first_head: int,
    ) -> None:  # fmt: skip
        """Writes all of `dq`, `dk` and `dv`: the share of these tiles.

        `out` and `lse` are those of the whole softmax, of which these tiles may be a part: the weights are
        `exp(score - lse)`, and `rowsum(dout * out)` is that of all keys. Of `out` nothing else is used: it may be any
        tensor of this product, and where partials are unrounded of a wider type than q.
        """
