"""Whole layers as torch modules, for models without Megatron: hidden states of this rank in, hidden states out.

Each projects its own rows, runs its operation by the batch's plan, and projects back. Its `.slot` is what the batch is
planned for. No framework but torch in here. Parameters are named and shaped as in the checkpoints of the field.
"""

from __future__ import annotations

from megatron_cp.nn.attention import Attention as Attention
from megatron_cp.nn.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from megatron_cp.nn.kimi_delta_attention import KimiDeltaAttention as KimiDeltaAttention
from megatron_cp.nn.mamba2 import Mamba2 as Mamba2

__all__ = ["Attention", "GatedDeltaNet", "KimiDeltaAttention", "Mamba2"]
