"""Backends that compute softmax attention over bands of visible pairs, for one rank's heads.

`reference` reads like the equations and runs anything anywhere. `cpu` is torch's flash kernel for CPUs. On CUDA,
`varlen` is torch's variable-length flash attention, `flash_attn` and `flash_attn_3` are flash-attn's, and `flex` is
torch's FlexAttention, for types, head sizes and a soft cap that those have not. `base` fixes what a kernel is given and
must write. In `common/`, `varlen_calls` and `varlen_kernel` turn bands into variable-length calls, `partials` adds up
results that are computed in parts, `dropout` says which weights stay.
"""

from __future__ import annotations

from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel, Tiles
from megatron_cp.softmax.kernels.cpu import CpuFlashAttention
from megatron_cp.softmax.kernels.flash_attn import FlashAttention2, FlashAttention3
from megatron_cp.softmax.kernels.flex import FlexAttention
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.softmax.kernels.varlen import VarlenAttention

__all__ = ["KERNELS", "AttentionCall", "AttentionKernel", "Tiles"]

# Fastest first; but torch's own before flash-attn 2, the same code in another package, and flash-attn 3 last of these
# though it is the fastest on Hopper: "auto" would warn that it passed it over wherever it was not built.
KERNELS: tuple[AttentionKernel, ...] = (
    VarlenAttention(),
    FlashAttention2(),
    FlashAttention3(),
    FlexAttention(),
    CpuFlashAttention(),
    ReferenceAttention(),
)
