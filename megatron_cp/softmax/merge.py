"""Merges attentions of the same queries over different keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.arguments import accumulation_dtype, check_dense, check_tensor
from megatron_cp.executor.no_compile import no_compile, no_compile_backward
from megatron_cp.executor.partials import merge as merge_in_place


@no_compile
def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges attentions of the same queries over disjoint sets of keys into the attention over all; differentiable.

        lse = log sum over parts of exp(lse_p)        out = sum over parts of exp(lse_p - lse) out_p

    Nothing is sent. A part is what `attention` returns with `return_lse`, or what any other code computes.

    Args:
        parts: for each set of keys the output `[t, heads, value_head_dim]` and the log-sum-exp `[t, heads]`, a natural
            logarithm; or both with a batch, `[t, b, heads, ...]`. The log-sum-exp is -inf where a query sees no key of
            the set; the output is then not read, and neither gets a gradient.

    Returns:
        The output in the type of the first part's, and the log-sum-exp in at least fp32. Both are computed in at least
        fp32 and the output is rounded once: zero and -inf where a query sees no key of any part.

    Raises:
        ArgumentError: no part, or tensors that do not fit one another.

    Example:
        >>> out, lse = torch.ones(3, 2, 4), torch.zeros(3, 2)
        >>> nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        >>> merged, merged_lse = merge([(out, lse), nothing])
        >>> torch.equal(merged, out) and torch.equal(merged_lse, lse)
        True
    """
    return _Merge.apply(*_checked(parts))


def _checked(parts: object) -> list[Tensor]:
    allowed = "at least one pair of an output and its log-sum-exp"
    if not isinstance(parts, list | tuple) or not parts:
        raise ArgumentError("parts", parts, allowed)
    tensors: list[Tensor] = []
    for number, pair in enumerate(parts):
        name = f"parts[{number}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ArgumentError(name, f"a {type(pair).__name__}", "a pair of an output and its log-sum-exp")
        for tensor in pair:
            check_dense(name, tensor)
        first = tensors[0] if tensors else pair[0]
        if first.ndim not in (3, 4):
            raise ArgumentError(name, f"an output of shape {list(first.shape)}", "[t, heads, d] or [t, b, heads, d]")
        check_tensor(name, pair[0], tuple(first.shape), like=first, same_dtype=True)
        check_tensor(name, pair[1], tuple(first.shape[:-1]), like=first)
        tensors += pair
    return tensors


class _Merge(torch.autograd.Function):
    """Merges as the schemes do whose keys arrive in parts.

    With w_p = exp(lse_p - lse) the gradients are `dout_p = w_p dout` and
    `dlse_p = w_p (rowsum(dout * out_p) - rowsum(dout * out) + dlse)`.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(tensors[0].dtype)
        (out, lse), *others = [
            (part.to(dtype).masked_fill(_unseen(part_lse)[..., None], 0), part_lse.to(dtype).movedim(0, -1))
            for part, part_lse in _pairs(tensors)
        ]
        lse = lse.clone()
        for part, part_lse in others:
            merge_in_place(out, lse, part, part_lse)
        lse = lse.movedim(-1, 0)
        ctx.save_for_backward(lse, *tensors)
        return out.to(tensors[0].dtype), lse

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        lse, *tensors = ctx.saved_tensors
        shares = [(part_lse.to(lse.dtype) - lse).exp_() for _, part_lse in _pairs(tensors)]
        products = [(dout.to(lse.dtype) * part).sum(-1) for part, _ in _pairs(tensors)]
        for (_, part_lse), *both in zip(_pairs(tensors), shares, products, strict=True):
            for x in both:
                x.masked_fill_(_unseen(part_lse), 0)  # NaN where no part sees a key, or an output is none
        whole = sum(share * product for share, product in zip(shares, products, strict=True))
        gradients: list[Tensor] = []
        for (part, part_lse), share, product in zip(_pairs(tensors), shares, products, strict=True):
            part_dlse = (share * (product - whole + dlse)).masked_fill_(_unseen(part_lse), 0)
            gradients += [(share[..., None] * dout).to(part.dtype), part_dlse.to(part_lse.dtype)]
        return tuple(gradients)


def _pairs(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _unseen(lse: Tensor) -> Tensor:
    return lse == -torch.inf
