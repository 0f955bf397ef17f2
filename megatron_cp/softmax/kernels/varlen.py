"""torch's variable-length flash attention on CUDA: all documents in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel


class VarlenAttention(AttentionKernel):
    """`torch.nn.attention.varlen`, through the two operators behind it.

    The public function differentiates neither through its lse nor into buffers of ours, so forward and backward are
    called as the operators that it registers.
    """

    name = "varlen"
    package = "torch with CUDA"
    devices = ("cuda",)

    def refusal(self, call: AttentionCall) -> str | None:
        if call.device.type != "cuda":
            return f"runs on CUDA, the tensors are on {call.device.type}; use cpu or reference"
        if call.dtype not in (torch.bfloat16, torch.float16):
            return f"has bfloat16 and float16, not {call.dtype}; use reference"
        if call.head_dim != call.value_head_dim:
            return f"needs value heads of the key size, {call.head_dim}, not {call.value_head_dim}; use reference"
        if call.head_dim > 256 or call.head_dim % 8:
            return f"needs a head size of at most 256 and a multiple of 8, not {call.head_dim}; use reference"
        return None

    def forward(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        values, document_lse, _ = _operators()._varlen_attn(q, k, v, *_documents(call), call.mask.is_causal, call.scale)
        out.copy_(values)
        lse.copy_(document_lse)

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, call: AttentionCall,
    ) -> None:  # fmt: skip
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        gradients = _operators()._varlen_attn_backward(
            dout.contiguous(), q, k, v, out, lse, *_documents(call), call.mask.is_causal, no_dropout, call.scale
        )
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)


def _operators() -> Any:
    import torch.nn.attention.varlen  # registers the operators; absent on builds without it

    return torch.ops.torch_attn


def _documents(call: AttentionCall) -> tuple[Tensor, Tensor, int, int]:
    packing = call.mask.packing
    offsets = packing.table(("cu_seqlens", call.device), lambda: on_device(packing.cu_seqlens, call.device))
    return offsets, offsets, packing.max_length, packing.max_length
