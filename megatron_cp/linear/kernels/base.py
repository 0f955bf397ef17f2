"""What a linear-layer kernel is given and what it returns."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp.executor.kernels import Kernel
from megatron_cp.layout import Packing


@dataclass(frozen=True)
class LinearCall:
    """Everything about a call but the tensors.

    Attributes:
        packing: the documents of the packed stream; states and convolutions start anew with each.
        dtype, device: of q, k and v.
        head_dim: of q and k.
    """

    packing: Packing
    dtype: torch.dtype
    device: torch.device
    head_dim: int


class GatedDeltaKernel(Kernel):
    """The causal convolution and the gated delta rule of one rank's heads over all tokens. Differentiable.

    Shapes: `T` tokens, `h` value heads, `g` key heads, each read by consecutive value heads. T, h and g are at least 1.
    """

    @abstractmethod
    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        """Depthwise causal convolution of each document, then SiLU.

        x `[T, c]`, weight `[c, width]` whose last column meets the current token, bias `[c]`; returns `[T, c]`,
        in the type of x or a wider one: the caller rounds.
        """

    @abstractmethod
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
        """The gated delta rule of each document.

        q, k `[T, g, dk]`, v `[T, h, dv]`, g (log decay, at most 0) and beta `[T, h]`; `groups[i]` is the key head that
        value head i reads. Returns `[T, h, dv]` in the type of v.
        """
