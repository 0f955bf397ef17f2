"""The same layers in independent code: one document at a time, through torch's own functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_cp.layout import Packing

_ALONE = "Give it the tokens of each path from a root to a leaf, end to end."


def attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, is_causal: bool, scale: float | None) -> Tensor:
    """Runs each document through torch's `scaled_dot_product_attention`. q `[T, h, d]`, k and v `[T, g, d]`."""
    packing.refuse_branches("packing", packing, "documents that share no tokens", _ALONE)
    ratio = q.shape[1] // k.shape[1]
    outputs = []
    for start, end in packing.spans():
        query, key, value = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        key, value = (x.repeat_interleave(ratio, 1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def gated_delta_net(
    qkv: Tensor,
    beta: Tensor,
    alpha: Tensor,
    packing: Packing,
    rule: Rule,
    *,
    heads: int,
    key_heads: int,
    head_dim: int,
    conv: Tensor,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
) -> Tensor:
    """Runs each document through torch's `conv1d`, `silu`, `softplus` and a given rule.

    Args:
        rule: `rule(q, k, v, g, beta)` for one document, `[1, L, h, d]` and `[1, L, h]`, returning `[1, L, h, dv]`; it
            scales queries by `head_dim ** -0.5` itself.
        qkv, beta, alpha, conv, A_log, dt_bias: see `megatron_cp.gated_delta_net`; over all tokens.
    """
    packing.refuse_branches("packing", packing, "documents that share no tokens", _ALONE)
    key_width, width = key_heads * head_dim, conv.shape[-1]
    outputs = []
    for start, end in packing.spans():
        history = F.pad(qkv[start:end].t()[None], (width - 1, 0))
        mixed = F.silu(F.conv1d(history, conv[:, None], groups=conv.shape[0]))[0].t()[None]
        q, k, v = mixed.split([key_width, key_width, mixed.shape[-1] - 2 * key_width], -1)
        q, k = (x.unflatten(-1, (key_heads, head_dim)).repeat_interleave(heads // key_heads, 2) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        g = -A_log.exp() * F.softplus(alpha[None, start:end] + dt_bias)
        out = rule(q, k, v.unflatten(-1, (heads, -1)), g, beta[None, start:end].sigmoid())
        outputs.append(out[0])
    return torch.cat(outputs)
