"""Backends that compute softmax attention over whole documents for one rank's heads.

`reference` reads like the equation and runs anywhere; `cpu` is torch's flash kernel for CPUs; `varlen` is torch's
variable-length flash attention on CUDA. `base` fixes what a kernel is given and must write.
"""

from __future__ import annotations

from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel
from megatron_cp.softmax.kernels.cpu import CpuFlashAttention
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.softmax.kernels.varlen import VarlenAttention

__all__ = ["KERNELS", "AttentionCall", "AttentionKernel"]

KERNELS: tuple[AttentionKernel, ...] = (VarlenAttention(), CpuFlashAttention(), ReferenceAttention())  # fastest first
