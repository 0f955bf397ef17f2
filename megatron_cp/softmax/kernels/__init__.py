"""Backends that compute softmax attention over whole documents for one rank's heads.

`reference` reads like the equation and runs anywhere; `cpu` is torch's flash kernel for CPUs; `varlen` is torch's
variable-length flash attention on CUDA. `base` fixes what a kernel is given and must write.
"""

from __future__ import annotations

from megatron_cp.errors import ArgumentError
from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel
from megatron_cp.softmax.kernels.cpu import CpuFlashAttention
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.softmax.kernels.varlen import VarlenAttention

KERNELS: tuple[AttentionKernel, ...] = (VarlenAttention(), CpuFlashAttention(), ReferenceAttention())  # fastest first


def choose(name: str, call: AttentionCall) -> AttentionKernel:
    """The kernel called `name`, or for "auto" the fastest that can run `call`.

    Raises:
        ArgumentError: no such kernel, or it cannot run the call, with its reason.
    """
    if name == "auto":
        return next(kernel for kernel in KERNELS if kernel.refusal(call) is None)
    for kernel in KERNELS:
        if kernel.name == name:
            reason = kernel.refusal(call)
            if reason:
                raise ArgumentError("kernel", name, "a kernel that can run this call", f"{name}: {reason}")
            return kernel
    raise ArgumentError("kernel", name, " or ".join(["auto", *(kernel.name for kernel in KERNELS)]))
