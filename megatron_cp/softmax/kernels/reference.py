"""Softmax attention as the equations say, one document at a time. Any type, any head sizes, any device.

S = scale * Q K^T + mask        lse = log sum exp S        P = exp(S - lse)        O = P V
dV = P^T dO        dP = dO V^T        dS = P * (dP - rowsum(dO * O)) * scale        dQ = dS K        dK = dS^T Q
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel


class ReferenceAttention(AttentionKernel):
    """The equations above, with all scores of a document in memory."""

    name = "reference"
    package = "torch"

    def refusal(self, call: AttentionCall) -> str | None:
        return None

    def forward(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        ratio = q.shape[1] // k.shape[1]
        for start, end in call.mask.packing.spans():
            scores = _scores(_heads_first(q, start, end), _heads_first(k, start, end, ratio), call)
            document_lse = scores.logsumexp(-1, keepdim=True)
            values = (scores - document_lse).exp() @ _heads_first(v, start, end, ratio)
            out[start:end].copy_(values.transpose(0, 1))
            lse[:, start:end].copy_(document_lse.squeeze(-1))

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, call: AttentionCall,
    ) -> None:  # fmt: skip
        ratio = q.shape[1] // k.shape[1]
        for start, end in call.mask.packing.spans():
            queries, keys, values = (_heads_first(q, start, end), *(_heads_first(x, start, end, ratio) for x in (k, v)))
            douts, outs = (_heads_first(x, start, end) for x in (dout, out))
            weights = (_scores(queries, keys, call) - lse[:, start:end, None]).exp()
            dweights = douts @ values.transpose(1, 2)
            dscores = weights * (dweights - (douts * outs).sum(-1, keepdim=True)) * call.scale
            dq[start:end].copy_((dscores @ keys).transpose(0, 1))
            for target, gradient in ((dk, dscores.transpose(1, 2) @ queries), (dv, weights.transpose(1, 2) @ douts)):
                target[start:end].copy_(gradient.unflatten(0, (-1, ratio)).sum(1).transpose(0, 1))


def _heads_first(x: Tensor, start: int, end: int, repeats: int = 1) -> Tensor:
    """One document as `[h, L, d]` in at least fp32, each head repeated for the query heads that read it."""
    wide = x[start:end].transpose(0, 1).to(torch.promote_types(x.dtype, torch.float32))
    return wide.repeat_interleave(repeats, 0) if repeats > 1 else wide


def _scores(queries: Tensor, keys: Tensor, call: AttentionCall) -> Tensor:
    scores = queries @ keys.transpose(1, 2) * call.scale
    if call.mask.is_causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores
