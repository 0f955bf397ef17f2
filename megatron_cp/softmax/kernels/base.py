"""The interface of attention kernels: their arguments and the results that they write."""

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
    """Arguments that all kernel calls of one attention share, by which a kernel decides whether it supports them.

    Attributes:
        scale: scores are multiplied by it before anything else.
        head_dim, value_head_dim: features of a key and of a value head.
        dtype, device: type and device of q, k and v.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
        dropout: the share of weights that are zeroed after the softmax; the others are multiplied by
            `1 / (1 - dropout)`.
        seed: seed of the dropout mask, which is a function of seed, head, query token and key token only.
        for_graphs: True to exclude kernels that do not support CUDA graphs.
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
    """A kernel for softmax attention of the queries of one call over its keys.

    Shapes: q and out are `[T, h, d]`, k and v `[S, g, d]`, where h is a multiple of g and query head i reads key/value
    head `i // (h // g)`; lse is `[h, T]`, a natural logarithm in at least fp32. Tensors may be strided with a dense
    last axis. T, S, h, g and the number of bands are at least 1.

    `out` and the gradients have the type of q, or a wider one where the call computes a partial result that is merged
    with others. A kernel with `unrounded_partials` then writes them unrounded.

    Attributes:
        unrounded_partials: True if results are not rounded to the type of q where `out` or a gradient is wider.
    """

    unrounded_partials: bool

    def prepare(self, tiles: Tiles, device: torch.device) -> None:
        """Builds the tables for these tiles on the host and on the device, so that no layer has to."""

    @abstractmethod
    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall,
        first_head: int,
    ) -> None:  # fmt: skip
        """Writes all of `out` and `lse`: 0 and -inf for a query that sees no key.

        Args:
            first_head: number, in the whole layer, of the first query head, for dropout.
        """

    @abstractmethod
    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, tiles: Tiles, call: AttentionCall, first_head: int,
    ) -> None:  # fmt: skip
        """Writes all of `dq`, `dk` and `dv`: the contribution of these tiles.

        `out` and `lse` belong to the whole softmax, of which these tiles may be a part: the weights are
        `exp(score - lse)`, and `rowsum(dout * out)` covers all keys. `out` is used for this product only: it may be
        any tensor with the same product, and may have a wider type than q where `unrounded_partials` is True.
        """
