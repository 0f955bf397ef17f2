"""flash-linear-attention's Triton kernels on CUDA (package fla-core)."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from megatron_cp.linear.kernels.base import GatedDeltaKernel, LinearCall


class FlaGatedDelta(GatedDeltaKernel):
    """`causal_conv1d` and `chunk_gated_delta_rule` of flash-linear-attention."""

    name = "fla"
    package = "fla-core"

    def refusal(self, call: LinearCall) -> str | None:
        if find_spec("fla") is None:
            return "fla-core is not installed; pip install 'megatron_cp[fla]'"
        if call.device.type != "cuda":
            return f"runs on CUDA, the tensors are on {call.device.type}; use chunked or reference"
        if call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"has no {call.dtype}; use chunked or reference"
        return None

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        from fla.modules.conv import causal_conv1d

        y, _ = causal_conv1d(
            x=x[None], weight=weight, bias=bias, activation="silu", cu_seqlens=_offsets(call),
            cu_seqlens_cpu=_offsets(call, torch.device("cpu")),
        )  # fmt: skip
        return y[0]

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
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        even = q.shape[1] and v.shape[1] % q.shape[1] == 0
        if not even or groups != [head // (v.shape[1] // q.shape[1]) for head in range(v.shape[1])]:
            q, k = (torch.stack([x[:, group] for group in groups], 1) for x in (q, k))
        out, _ = chunk_gated_delta_rule(
            q[None], k[None], v[None], g[None], beta[None], scale=scale, cu_seqlens=_offsets(call),
            cu_seqlens_cpu=_offsets(call, torch.device("cpu")),
        )  # fmt: skip
        return out[0]


def _offsets(call: LinearCall, device: torch.device | None = None) -> Tensor:
    device = device or call.device
    # fla caches by tensor identity and has no use for documents without tokens.
    lengths = call.packing.lengths[call.packing.lengths > 0]
    return call.packing.table(
        ("fla offsets", device),
        lambda: torch.nn.functional.pad(torch.from_numpy(lengths).cumsum(0), (1, 0)).to(device),
    )
