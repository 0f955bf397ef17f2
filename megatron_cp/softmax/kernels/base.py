"""What an attention kernel is given and what it must write."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp.executor.kernels import Kernel
from megatron_cp.layout.mask import Mask


@dataclass(frozen=True)
class AttentionCall:
    """Everything about a call but the tensors.

    Attributes:
        mask: which keys a query sees, over the whole packed stream that the kernel is given. Queries and keys of a
            document start at the same position, so causal alignment is the diagonal.
        scale: what scores are multiplied by before the softmax.
        head_dim, value_head_dim: features of a key and of a value head.
        dtype, device: of q, k and v.
    """

    mask: Mask
    scale: float
    head_dim: int
    value_head_dim: int
    dtype: torch.dtype
    device: torch.device


class AttentionKernel(Kernel):
    """Softmax attention of whole documents with one ratio of query to key/value heads.

    Shapes: q, out `[T, h, d]`, k and v `[T, g, d]` with h a multiple of g and query head i reading key/value head
    `i // (h // g)`; lse `[h, T]`, natural log, at least fp32. T, h and g are at least 1. Inputs and outputs may be
    strided with a dense last axis.
    """

    @abstractmethod
    def forward(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        """Writes `out` (rounded to its type once) and `lse`."""

    @abstractmethod
    def backward(
        self,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: AttentionCall,
    ) -> None:
        """Writes `dq`, `dk` and `dv`."""
