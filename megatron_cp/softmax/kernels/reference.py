"""Softmax attention as the equations say, one head of one document at a time. Any type, head size and device.

S = scale * Q K^T + mask        lse = log sum exp S        P = exp(S - lse)        O = P V
dV = P^T dO        dP = dO V^T        dS = P * (dP - rowsum(dO * O)) * scale        dQ = dS K        dK = dS^T Q
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel


class ReferenceAttention(AttentionKernel):
    """The equations above, with all scores of a head of a document in memory."""

    name = "reference"
    package = "torch"

    def refusal(self, call: AttentionCall) -> str | None:
        return None

    def forward(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        for tokens, head, group in _heads_of_documents(q, k, call):
            scores = _scores(_wide(q, tokens, head), _wide(k, tokens, group), call)
            head_lse = scores.logsumexp(-1)
            lse[head, tokens] = head_lse
            out[tokens, head] = ((scores - head_lse[:, None]).exp() @ _wide(v, tokens, group)).to(out.dtype)

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, call: AttentionCall,
    ) -> None:  # fmt: skip
        dk_sum, dv_sum = (torch.zeros_like(x, dtype=_wide_type(x)) for x in (dk, dv))
        for tokens, head, group in _heads_of_documents(q, k, call):
            queries, keys, values = _wide(q, tokens, head), _wide(k, tokens, group), _wide(v, tokens, group)
            dhead, head_out = _wide(dout, tokens, head), _wide(out, tokens, head)
            weights = (_scores(queries, keys, call) - lse[head, tokens, None]).exp()
            dscores = weights * (dhead @ values.T - (dhead * head_out).sum(-1, keepdim=True)) * call.scale
            dq[tokens, head] = (dscores @ keys).to(dq.dtype)
            dk_sum[tokens, group] += dscores.T @ queries
            dv_sum[tokens, group] += weights.T @ dhead
        dk.copy_(dk_sum)
        dv.copy_(dv_sum)


def _heads_of_documents(q: Tensor, k: Tensor, call: AttentionCall) -> Iterator[tuple[slice, int, int]]:
    """The tokens, the query head and the key/value head that it reads, for each head of each document."""
    ratio = q.shape[1] // k.shape[1]
    for start, end in call.mask.packing.spans():
        for head in range(q.shape[1]):
            yield slice(start, end), head, head // ratio


def _wide(x: Tensor, tokens: slice, head: int) -> Tensor:
    """One head of one document as `[L, d]` in at least fp32.

    A dense copy: matrix products round differently with the stride and alignment of their operands, and those must
    not depend on which other heads a rank has.
    """
    return x[tokens, head].to(_wide_type(x), copy=True, memory_format=torch.contiguous_format)


def _wide_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scores(queries: Tensor, keys: Tensor, call: AttentionCall) -> Tensor:
    scores = queries @ keys.T * call.scale
    if call.mask.is_causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores
