"""torch's variable-length flash attention on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.softmax.kernels.base import AttentionCall
from megatron_cp.softmax.kernels.common.varlen_calls import DeviceSegments
from megatron_cp.softmax.kernels.common.varlen_kernel import SegmentedAttention, common_refusal
from megatron_cp.torch_private import current_flash_attention_impl, varlen_operators


class VarlenAttention(SegmentedAttention):
    """`torch.nn.attention.varlen`, by the two operators behind it.

    The public function's backward cannot use the output and lse of a larger softmax, so the forward and backward
    operators that it registers are called.
    """

    name = "varlen"
    package = "torch with CUDA"

    def refusal(self, call: AttentionCall) -> str | None:
        refusal = common_refusal(call)
        if refusal is None and call.softcap:
            return f"has no soft cap, and softcap is {call.softcap}; use flash_attn or reference"
        if refusal is None and varlen_operators() is None:
            return f"needs operators that torch {torch.__version__} does not have; use flash_attn or reference"
        # The operators go through torch's dispatcher, whose backward refuses windows then, as -1 for no limit is one.
        if refusal is None and current_flash_attention_impl() == "FA4":
            return "cannot run while torch's FA4 is active; use flash_attn_4, or call restore_flash_attention_impl"
        return refusal

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, segments: DeviceSegments, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        out, lse, _ = _operators()[0](q, k, v, *_shape(segments), segments.is_causal, call.scale, list(segments.window))
        return out, lse

    def attend_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: DeviceSegments,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return _operators()[1](
            dout.contiguous(), q, k, v, out, lse, *_shape(segments), segments.is_causal, no_dropout, call.scale,
            list(segments.window),
        )  # fmt: skip


def _operators() -> tuple[Any, Any]:
    operators = varlen_operators()
    assert operators is not None  # `refusal` has asked
    return operators


def _shape(segments: DeviceSegments) -> tuple[Tensor, Tensor, int, int]:
    queries, keys = segments.queries, segments.keys
    return queries.offsets, keys.offsets, queries.longest, keys.longest
