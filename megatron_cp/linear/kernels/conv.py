"""The causal depthwise convolution in plain torch, tap by tap over all tokens at once: the CPU default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.layout import Packing
from megatron_cp.linear.activations import silu as apply_silu
from megatron_cp.linear.kernels.base import ConvKernel, LinearCall
from megatron_cp.linear.reductions import expand_to_tokens, sum_over_tokens


class TorchConv(ConvKernel):
    """A multiply and an add a tap. Taps that reach before a segment are added after its history has arrived."""

    name = "chunked"
    package = "torch"
    serves_graphs = True

    def refusal(self, call: LinearCall) -> str | None:
        return None

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, *, silu: bool,
        history: Callable[[], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        acc_dtype = accumulation_dtype(x.dtype)  # so that the sum of the taps is rounded once
        y = _CausalConv.apply(x.to(acc_dtype), weight.to(acc_dtype), _piece_heads(call, weight.shape[1]))
        if history is not None:
            y = add_history(y, history().to(acc_dtype), weight.to(acc_dtype), call)
        if bias is not None:
            y = y + expand_to_tokens(bias.to(acc_dtype), len(y))
        return apply_silu(y) if silu else y


def add_history(y: Tensor, history: Tensor, weight: Tensor, call: LinearCall) -> Tensor:
    """Adds, in place, the contribution of the inputs before segments with a past to their convolution.

    `y[i] += sum_{s > i} weight[:, -1 - s] history[i - s]` for a segment's i-th row; y is before the activation.

    Args:
        y: `[T, c]`
        history: `[n, width - 1, c]`
        weight: `[c, width]`
    """
    assert call.segments is not None
    reach = weight.shape[1] - 1
    if call.streams:
        assert call.tables is not None
        history = history.masked_fill(call.tables["history"]["before"][:, None], 0)
    rows, places = call.segments_table(("history rows", reach), lambda: _history_rows(call, reach))
    terms = []
    for row in range(reach):  # at a segment's row, taps s > row multiply history[reach + row - s]
        taps = weight[:, : reach - row]  # the last is s = row + 1, the first s = reach
        terms.append((history[:, row:] * taps.t()).sum(1))
    added = (torch.stack(terms, 1).flatten(0, 1) if terms else history.flatten(0, 1)).index_select(0, places)
    if call.streams:
        assert call.tables is not None
        added = added.masked_fill(call.tables["history"]["beyond"][:, None], 0)
    return y.index_add_(0, rows, added)


def _history_rows(call: LinearCall, reach: int) -> tuple[Tensor, Tensor]:
    """Returns the first rows of segments with a past, and the place of each in `[n * reach]`."""
    assert call.segments is not None
    waiting = np.flatnonzero(call.segments.past)
    first, lengths = call.packing.cu_seqlens[:-1][waiting], call.packing.lengths[waiting]
    row = np.arange(reach)
    there = row < lengths[:, None]
    rows, places = first[:, None] + row, np.arange(waiting.size * reach).reshape(-1, reach)
    return tuple(on_device(table[there], call.device, torch.int64) for table in (rows, places))  # type: ignore[return-value]


class _CausalConv(torch.autograd.Function):
    """`y[t] = sum_s weight[:, -1 - s] x[t - s]` over all `s` for which token t - s is in the piece of token t.

    `heads[s]` has the tokens whose piece has no token s positions earlier, as an index or as bools `[T]`.
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
    @no_compile_backward
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
    """Zeroes the rows of tokens `back ..` whose piece does not reach `back` tokens back, in place."""
    if heads.dtype == torch.bool:
        return rows.masked_fill_(heads[back:, None], 0)
    return rows.index_fill_(0, heads - back, 0)


def fixed_heads(packing: Packing, width: int) -> dict[str, NDArray]:
    """Returns the heads of pieces as tables whose shapes depend on the number of tokens only, for CUDA graphs."""
    positions = packing.positions()
    return {f"heads {back}": positions < back for back in range(width)}


def fixed_history(packing: Packing, start: int, num_rows: int, width: int) -> dict[str, NDArray]:
    """Returns which inputs before a rank's rows are of other documents, and which rows take none of them.

    Args:
        start: the place of the first row in the stream.
        num_rows: the number of rows.

    Returns:
        `before`, `[width - 1]` bools, True for tokens before the document of the first row; and `beyond`, True for
        those of the first `width - 1` rows that are in later documents, `[0]` on the first rank.
    """
    reach = width - 1
    first, last = packing.cu_seqlens[packing.documents_of(np.array([start]))[0] :][:2]
    rows = np.arange(min(reach, num_rows) if start else 0)
    return {"before": start - first < reach - np.arange(reach), "beyond": start + rows >= last}


def _piece_heads(call: LinearCall, width: int) -> list[Tensor]:
    def make() -> list[Tensor]:
        positions = call.packing.positions()
        tokens = np.arange(call.packing.total)
        return [
            on_device(np.flatnonzero((positions < back) & (tokens >= back)), call.device, torch.int64)
            for back in range(width)
        ]

    key = ("piece heads", width, call.device)
    found: list[Tensor] = call.packing.memo(key, make) if call.tables is None else call.tables["heads"]
    return found
