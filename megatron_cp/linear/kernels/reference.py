"""The gated delta rule as the equation says, token by token (Gated DeltaNet, arXiv 2412.06464, eq. 10).

    S_t = exp(g_t) S_{t-1} + k_t u_t^T        u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)        o_t = scale S_t^T q_t

which is S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T with the state S `[dk, dv]` zero where a
document starts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp.linear.activations import silu
from megatron_cp.linear.kernels.base import GatedDeltaKernel, LinearCall


class ReferenceGatedDelta(GatedDeltaKernel):
    """The equation above, one token after another."""

    name = "reference"
    package = "torch"

    def refusal(self, call: LinearCall) -> str | None:
        return None

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.cat([_document_conv(x[start:end].to(wide), weight.to(wide)) for start, end in call.packing.spans()])
        return silu(y if bias is None else y + bias.to(wide))

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
        wide = torch.promote_types(v.dtype, torch.float32)
        q, k = (torch.stack([x[:, group] for group in groups], 1).to(wide) for x in (q, k))  # one key head a value head
        v_wide, decay, beta = v.to(wide), g.to(wide).exp(), beta.to(wide)
        outputs = []
        for start, end in call.packing.spans():
            state = v_wide.new_zeros(v.shape[1], k.shape[2], v.shape[2])
            for t in range(start, end):
                state = decay[t, :, None, None] * state
                read = torch.bmm(k[t, :, None, :], state)  # S^T k, as rows
                update = beta[t, :, None, None] * (v_wide[t, :, None, :] - read)
                state = state + k[t, :, :, None] * update
                outputs.append(torch.bmm(scale * q[t, :, None, :], state).squeeze(1))
        return torch.stack(outputs).to(v.dtype)


def _document_conv(x: Tensor, weight: Tensor) -> Tensor:
    width = weight.shape[1]
    history = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    return sum(history[tap : tap + len(x)] * weight[:, tap] for tap in range(width))  # type: ignore[return-value]
