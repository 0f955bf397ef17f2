"""Backends that compute a linear layer for one rank: whole documents on its heads, or all heads of its tokens.

`reference` reads like the equations, token by token. `chunked` is plain torch with matrix products, the CPU default.
On CUDA, `fla` calls flash-linear-attention, and `mamba_ssm` and `causal_conv1d` call the packages of those names.
`base` defines a kernel's interface.
"""

from __future__ import annotations

from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.linear.kernels.base import (
    ConvKernel,
    Delta,
    Inputs,
    LinearCall,
    LinearKernel,
    RuleKernel,
    ScanWork,
    StateSpace,
)
from megatron_cp.linear.kernels.causal_conv1d import CausalConv1dConv
from megatron_cp.linear.kernels.chunked import ChunkedRule
from megatron_cp.linear.kernels.conv import TorchConv
from megatron_cp.linear.kernels.fla import FlaConv, FlaRule
from megatron_cp.linear.kernels.mamba_ssm import MambaSsmRule
from megatron_cp.linear.kernels.reference import ReferenceConv, ReferenceRule

__all__ = [
    "CONVS",
    "RULES",
    "ConvKernel",
    "Delta",
    "Inputs",
    "LinearCall",
    "LinearKernel",
    "RuleKernel",
    "ScanWork",
    "StateSpace",
    "choose_conv",
    "choose_rule",
]

# Fastest first.
RULES: tuple[RuleKernel, ...] = (FlaRule(), MambaSsmRule(), ChunkedRule(), ReferenceRule())
CONVS: tuple[ConvKernel, ...] = (FlaConv(), CausalConv1dConv(), TorchConv(), ReferenceConv())


def choose_rule(name: str | RuleKernel, call: LinearCall) -> RuleKernel:
    """Returns the recurrence's kernel for a call; see `choose_kernel`."""
    return choose_kernel([kernel for kernel in RULES if call.kind in kernel.kinds], name, call)


def choose_conv(name: str | ConvKernel, call: LinearCall) -> ConvKernel:
    """Returns the convolution's kernel, given the recurrence's: that of the same name, else the fastest."""
    names = {kernel.name for kernel in RULES} - {kernel.name for kernel in CONVS}
    return choose_kernel(CONVS, "auto" if isinstance(name, str) and name in names else name, call)
