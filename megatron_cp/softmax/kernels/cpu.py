"""torch's flash attention for CPUs, one document at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp.exchange.sections import ROW_ALIGNMENT
from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel

# The operator behind scaled_dot_product_attention, called by name because only it returns the log-sum-exp. It takes
# grouped key/value heads as they are. It must not see an empty tensor: it divides by the sizes, and the process dies.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CpuFlashAttention(AttentionKernel):
    """One call of torch's flash kernel a document."""

    name = "cpu"
    package = "torch"
    devices = ("cpu",)

    def refusal(self, call: AttentionCall) -> str | None:
        if call.device.type != "cpu":
            return f"runs on the CPU, the tensors are on {call.device.type}; use varlen or reference"
        if call.dtype not in _DTYPES:
            return f"has no {call.dtype}; use reference"
        if call.head_dim != call.value_head_dim:
            return f"needs value heads of the key size, {call.head_dim}, not {call.value_head_dim}; use reference"
        if call.scale <= 0:
            return f"gives NaN under a causal mask unless the scale is above 0, not {call.scale}; use reference"
        return None

    def forward(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        for start, end in call.mask.packing.spans():
            document = (_heads_first(x[start:end]) for x in (q, k, v))
            values, document_lse = _flash(*document, 0.0, call.mask.is_causal, scale=call.scale)
            out[start:end].copy_(values[0].transpose(0, 1))
            lse[:, start:end].copy_(document_lse[0])

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, call: AttentionCall,
    ) -> None:  # fmt: skip
        for start, end in call.mask.packing.spans():
            document = (_heads_first(x[start:end]) for x in (dout, q, k, v, out))
            gradients = _flash_backward(
                *document, lse[None, :, start:end].contiguous(), 0.0, call.mask.is_causal, scale=call.scale
            )
            for target, gradient in zip((dq, dk, dv), gradients, strict=True):
                target[start:end].copy_(gradient[0].transpose(0, 1))


def _heads_first(x: Tensor) -> Tensor:
    """`[L, h, d]` as `[1, h, L, d]` with every row on a 16-byte boundary, copied where that is not so.

    The operator ignores the stride of the last axis, and its products round differently with the alignment of rows,
    which must not depend on which other heads a rank has.
    """
    size = x.dtype.itemsize
    if x.stride(-1) == 1 and not any(place * size % ROW_ALIGNMENT for place in (x.storage_offset(), *x.stride()[:-1])):
        return x.transpose(0, 1)[None]
    length, heads, dim = x.shape
    rows = x.new_empty(heads, length, -(-dim * size // ROW_ALIGNMENT) * ROW_ALIGNMENT // size)[..., :dim]
    return rows.copy_(x.transpose(0, 1))[None]
