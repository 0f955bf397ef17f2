"""Whole layers as torch modules, for models without Megatron: they map this rank's hidden states to hidden states.

Each layer projects its own rows, runs its operation by the batch's plan, and projects back. Batches are planned for its
`.slot`. Linear layers whose plan redistributes hidden states move them in and back, a `LinearRun` of them once for all
of its layers. No framework but torch in here. Names and shapes of parameters are those of published
checkpoints, or of Megatron's layers where there are none.
"""

from __future__ import annotations

from megatron_cp.nn.attention import Attention as Attention
from megatron_cp.nn.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from megatron_cp.nn.gated_delta_net_2 import GatedDeltaNet2 as GatedDeltaNet2
from megatron_cp.nn.gated_delta_product import GatedDeltaProduct as GatedDeltaProduct
from megatron_cp.nn.kimi_delta_attention import KimiDeltaAttention as KimiDeltaAttention
from megatron_cp.nn.linear_run import LinearRun as LinearRun
from megatron_cp.nn.mamba2 import Mamba2 as Mamba2

__all__ = [
    "Attention",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "KimiDeltaAttention",
    "LinearRun",
    "Mamba2",
]
