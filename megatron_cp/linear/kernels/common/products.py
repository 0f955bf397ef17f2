"""Matrix products whose gradients are computed in the type of their operands, also under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.no_compile import no_compile_backward


def product(a: Tensor, b: Tensor) -> Tensor:
    """Computes `a @ b` of tensors with as many axes each; differentiable once.

    Autograd's own backward is a product that autocast would lower if `backward()` is called under it.
    """
    return _Product.apply(a, b)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradients[0] @ b.transpose(-2, -1), a.transpose(-2, -1) @ gradients[0]
