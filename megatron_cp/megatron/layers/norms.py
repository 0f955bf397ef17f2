"""Norms for the cases in which Megatron's own refuse to be built, or are mamba_ssm's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import silu

from megatron_cp.linear.gates.gated_norm import gated_norm
from megatron_cp.linear.gates.tensors import has_kernels


class Norm:
    """torch's norm as Megatron wraps it, also under sequence parallelism and for any spec."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False  # the wrapper refuses it, although it only requires marking the weights
        norm = WrappedTorchNorm(plain, hidden_size, eps, **others)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm


class GatedRMSNorm(nn.Module):
    """Megatron's `ExtendedRMSNorm`: `weight * y / rms(y)` in groups of features, with y = x silu(z).

    On CUDA it uses mamba_ssm's kernel if that is installed, else ours; elsewhere it uses torch.
    """

    tp_group: Any

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        fused = _fused_norm() if x.is_cuda else None
        if fused is not None:
            shape = {"eps": self.eps, "group_size": self.group_size}
            normed: Tensor = fused(x, self.weight, None, z=z, norm_before_gate=False, **shape)
            return normed
        if has_kernels(x, *([] if z is None else [z]), self.weight):
            return gated_norm(x, z, self.weight, self.eps, self.group_size)
        full = x.to(_acc_dtype(x)) if z is None else silu_gated(x, z)
        groups = full.unflatten(-1, (-1, self.group_size))
        groups = groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (groups.flatten(-2) * self.weight).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Returns the weight, of which every tensor-parallel rank has a share."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state


def silu_gated(x: Tensor, z: Tensor) -> Tensor:
    """Computes `x silu(z)` in at least float32."""
    return x.to(_acc_dtype(x)) * silu(z.to(_acc_dtype(x)))


def _acc_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@cache
def _fused_norm() -> Callable[..., Tensor] | None:
    try:
        found: Callable[..., Tensor] = import_module("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn
    except ImportError:
        return None
    return found
