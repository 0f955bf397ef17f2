"""What a built model is asked: which of our layers are in it."""

from __future__ import annotations

from torch import nn

from megatron_cp.megatron.layers.base import ContextParallelModule
from megatron_cp.planner.batch import Slot


def slots_of(*models: nn.Module) -> list[Slot]:
    """The kinds of layers in one or several model chunks: what `shard_batch` plans for."""
    return list(dict.fromkeys(layer_slots(*models)))


def layer_slots(*models: nn.Module) -> list[Slot]:
    """The slot of every layer in one or several model chunks, in order: what `choose_layout` chooses a layout for."""
    return [module.slot for model in models for module in model.modules() if isinstance(module, ContextParallelModule)]
