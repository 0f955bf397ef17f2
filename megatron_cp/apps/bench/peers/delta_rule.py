"""The gated delta rule in megatron-core's own function, for comparison with ours."""

from __future__ import annotations

from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule
from torch import Tensor


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Computes megatron-core's gated delta rule in plain torch on one document, with keys repeated for each head.

    Args:
        q, k: `[t, key_heads, head_dim]`
        v: `[t, heads, value_head_dim]`
        g: `[t, heads]` log decay.
        beta: `[t, heads]`

    Returns:
        `[t, heads, value_head_dim]`
    """
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))  # as `GatedDeltaNet.forward` does
    out, _ = torch_chunk_gated_delta_rule(*(x[None] for x in (q, k, v, g, beta)))
    return out[0]
