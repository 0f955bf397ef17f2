"""The gated norm after a state-space rule."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.extras import import_failure

_MODULE = "mamba_ssm.ops.triton.layernorm_gated"


def gated_norm(x: Tensor, z: Tensor | None, weight: Tensor, eps: float, group_size: int) -> Tensor:
    """Computes `weight * y / rms(y)` in groups of features, with `y = x silu(z)`, in at least float32; differentiable.

    It is mamba_ssm's kernel on CUDA where that is installed, as Mamba-2's recurrence is; torch's operators elsewhere.

    Args:
        x: `[..., features]`
        z: the gate, shaped like x, or None for no gate.
        weight: `[features]`

    Returns:
        A tensor like x.
    """
    if x.is_cuda and x.dtype != torch.float64 and import_failure(_MODULE) is None:
        from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

        fused: Tensor = rmsnorm_fn(x, weight, None, z=z, eps=eps, group_size=group_size, norm_before_gate=False)
        return fused
    full = x.to(accumulation_dtype(x.dtype)) if z is None else silu_gated(x, z)
    groups = full.unflatten(-1, (-1, group_size))
    groups = groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (groups.flatten(-2) * weight).to(x.dtype)


def silu_gated(x: Tensor, z: Tensor) -> Tensor:
    """Computes `x silu(z)` in at least float32."""
    acc_dtype = accumulation_dtype(x.dtype)
    return x.to(acc_dtype) * silu(z.to(acc_dtype))
