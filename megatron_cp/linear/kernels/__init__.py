"""Backends that compute a linear layer over whole documents for one rank's heads.

`reference` reads like the equation, token by token; `chunked` is plain torch with matrix products, the CPU default;
`fla` calls flash-linear-attention on CUDA. `base` fixes what a kernel is given and what it returns.
"""

from __future__ import annotations

from megatron_cp.linear.kernels.base import GatedDeltaKernel, LinearCall
from megatron_cp.linear.kernels.chunked import ChunkedGatedDelta
from megatron_cp.linear.kernels.fla import FlaGatedDelta
from megatron_cp.linear.kernels.reference import ReferenceGatedDelta

__all__ = ["KERNELS", "GatedDeltaKernel", "LinearCall"]

KERNELS: tuple[GatedDeltaKernel, ...] = (FlaGatedDelta(), ChunkedGatedDelta(), ReferenceGatedDelta())  # fastest first
