"""Backends that compute softmax attention over bands of visible pairs, for one rank's heads.

`reference` reads like the equations and supports every call on every device. `cpu` is torch's flash kernel for CPUs.
On CUDA, `varlen` is torch's variable-length flash attention, `flash_attn` and `flash_attn_3` are flash-attn's, and
`flex` is torch's FlexAttention, for types, head sizes and a soft cap that the others lack. `base` defines a kernel's
interface. In `common/`, `varlen_calls` and `varlen_kernel` turn bands into variable-length calls, `partials` adds
results that are computed in parts, and `dropout` chooses the weights that are kept.
"""

from __future__ import annotations

from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel, Tiles
from megatron_cp.softmax.kernels.cpu import CpuFlashAttention
from megatron_cp.softmax.kernels.flash_attn import FlashAttention2, FlashAttention3
from megatron_cp.softmax.kernels.flex import FlexAttention
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.softmax.kernels.varlen import VarlenAttention

__all__ = ["KERNELS", "AttentionCall", "AttentionKernel", "Tiles"]

# In the order in which "auto" tries them, fastest first, with two exceptions: torch's own is before flash-attn 2, which
# is the same code in another package, and flash-attn 3, the fastest on Hopper, is after both, because "auto" would warn
# that it skipped it wherever it is not built.
KERNELS: tuple[AttentionKernel, ...] = (
    VarlenAttention(),
    FlashAttention2(),
    FlashAttention3(),
    FlexAttention(),
    CpuFlashAttention(),
    ReferenceAttention(),
)
