"""Norms for the cases in which Megatron's own refuse to be built, or are mamba_ssm's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_cp.linear.gated_norm import gated_norm


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
    """Megatron's `ExtendedRMSNorm`, computed by `gated_norm`."""

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
        return gated_norm(x, z, self.weight, self.eps, self.group_size)

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
