"""What a built model is asked: which kinds of our layers are in it."""

from __future__ import annotations

from torch import nn

from megatron_cp.megatron.layers.base import ContextParallelModule
from megatron_cp.planner.batch import Slot


def slots_of(*models: nn.Module) -> list[Slot]:
    """The kinds of layers in one or several model chunks: what `shard_batch` plans for."""
    return list(
        dict.fromkeys(
            module.slot for model in models for module in model.modules() if isinstance(module, ContextParallelModule)
        )
    )
