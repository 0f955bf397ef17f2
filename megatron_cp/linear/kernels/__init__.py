"""Backends that compute a linear layer over whole documents for one rank's heads.

`reference` reads like the equation, token by token; `chunked` is plain torch with matrix products, the CPU default;
`fla` calls flash-linear-attention on CUDA. `base` fixes what a kernel is given and what it returns.
"""

from __future__ import annotations

from megatron_cp.errors import ArgumentError
from megatron_cp.linear.kernels.base import GatedDeltaKernel, LinearCall
from megatron_cp.linear.kernels.chunked import ChunkedGatedDelta
from megatron_cp.linear.kernels.fla import FlaGatedDelta
from megatron_cp.linear.kernels.reference import ReferenceGatedDelta

KERNELS: tuple[GatedDeltaKernel, ...] = (FlaGatedDelta(), ChunkedGatedDelta(), ReferenceGatedDelta())  # fastest first


def choose(name: str, call: LinearCall) -> GatedDeltaKernel:
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
