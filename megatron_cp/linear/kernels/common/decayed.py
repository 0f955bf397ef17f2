"""KDA's products within a chunk, where every feature has a decay of its own.

    scores(x)_ij = sum_d x_id exp(G_id - G_jd) k_jd  for j <= i, else 0        x is k for the delta rule, q for outputs

Where a read of the state has a key of its own (Gated DeltaNet-2), x is that one, `erase`.

Between blocks of `SUB` tokens the decay is split where the later block begins, exp(G_i - G_e) exp(G_e - G_j), so that
neither factor can overflow, and the rest is a matrix product. Within a block the decays are computed explicitly,
`[SUB, SUB, d]` a block, which is too large to save, so backward computes them again.

Shapes: `[n, h, C, d]` q, k and G; `[n, h, C, C]` scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.no_compile import no_compile_backward

SUB = 16


def decayed_products(q: Tensor, k: Tensor, g: Tensor, erase: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Computes `scores(k)`, or `scores(erase)` if given, and `scores(q)`, where g is G; differentiable."""
    return _DecayedProducts.apply(q, k, g, erase)


class _DecayedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, g: Tensor, erase: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, g, erase)
        rows = k if erase is None else erase, q
        size = k.shape[2]
        scores = k.new_zeros(*k.shape[:2], size, size), k.new_zeros(*k.shape[:2], size, size)
        for own in _blocks(size):
            keys = _decay_within(g, own) * k[:, :, None, own]  # [n, h, i, j, d], zero for j >= i
            for x, found in zip(rows, scores, strict=True):
                found[:, :, own, own] = (keys @ x[:, :, own, :, None]).squeeze(-1)
            if own.start:
                since, until = _decay_between(g, own)
                earlier = (until * k[:, :, : own.start]).transpose(2, 3)
                for x, found in zip(rows, scores, strict=True):
                    found[:, :, own, : own.start] = (since * x[:, :, own]) @ earlier
        for x, found in zip(rows, scores, strict=True):
            found.diagonal(dim1=2, dim2=3).copy_((x * k).sum(-1))  # a token's own decay is 1 for any g
        return scores

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, g, erase = ctx.saved_tensors
        erased = k if erase is None else erase
        row_gradients = torch.zeros_like(k), torch.zeros_like(q)  # the gradients of k or erase, and q, in place of x
        column_gradients = torch.zeros_like(k)
        for own in _blocks(k.shape[2]):
            decay = _decay_within(g, own)
            within = torch.stack([gradient[:, :, own, own] for gradient in gradients], -2)  # [n, h, i, 2, j]
            for row, found in zip((within @ (decay * k[:, :, None, own])).unbind(-2), row_gradients, strict=True):
                found[:, :, own] += row
            weighted = gradients[0][:, :, own, own, None] * erased[:, :, own, None]
            weighted += gradients[1][:, :, own, own, None] * q[:, :, own, None]
            column_gradients[:, :, own] += weighted.mul_(decay).sum(2)
            if own.start:
                since, until = _decay_between(g, own)
                earlier = until * k[:, :, : own.start]
                for x, gradient, found in zip((erased, q), gradients, row_gradients, strict=True):
                    between = gradient[:, :, own, : own.start]
                    found[:, :, own] += since * (between @ earlier)
                    column_gradients[:, :, : own.start] += until * (between.transpose(2, 3) @ (since * x[:, :, own]))
        # A score depends on G_i as on x_i, and on -G_j as on k_j. A token's own score is left out of the gradient of G,
        # since the difference would be noise.
        dk, dq = row_gradients
        k_diagonal, q_diagonal = (gradient.diagonal(dim1=2, dim2=3)[..., None] for gradient in gradients)
        if erase is not None:
            dg = q * dq + erase * dk - k * column_gradients
            own = k_diagonal * erase + q_diagonal * q
            return dq + q_diagonal * k, column_gradients + own, dg, dk + k_diagonal * k
        dg = q * dq + k * (dk - column_gradients)
        return dq + q_diagonal * k, dk + column_gradients + 2 * k_diagonal * k + q_diagonal * q, dg, None


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + SUB, size)) for start in range(0, size, SUB))


def _decay_within(g: Tensor, own: slice) -> Tensor:
    """Returns `exp(G_i - G_j)` for j < i, else 0, as `[n, h, SUB, SUB, d]`."""
    later = torch.ones(own.stop - own.start, own.stop - own.start, dtype=torch.bool, device=g.device).triu()
    # Masked before exp: above the diagonal the difference is positive and could overflow.
    return (g[:, :, own, None] - g[:, :, None, own]).masked_fill_(later[..., None], -torch.inf).exp_()


def _decay_between(g: Tensor, own: slice) -> tuple[Tensor, Tensor]:
    """Returns the decays from the token before a block to the block's tokens, and from all earlier tokens to it."""
    edge = g[:, :, own.start - 1 : own.start]
    return (g[:, :, own] - edge).exp(), (edge - g[:, :, : own.start]).exp()
