"""Lists our layers in a built model."""

from __future__ import annotations

from torch import nn

from megatron_cp.megatron.layers.base import ContextParallelModule, LinearModule
from megatron_cp.planner.batch import Slot


def slots_of(*models: nn.Module) -> list[Slot]:
    """Returns the kinds of layers in one or several model chunks, for `shard_batch`."""
    return list(dict.fromkeys(layer_slots(*models)))


def layer_slots(*models: nn.Module) -> list[Slot]:
    """Returns the spec of every layer in one or several model chunks, in order, for `choose_layout`.

    Raises:
        ArgumentError: `--linear-cp-mode redistribute` for a linear layer around which nothing moves hidden states.
    """
    layers = [module for model in models for module in model.modules() if isinstance(module, ContextParallelModule)]
    for layer in layers:
        if isinstance(layer, LinearModule):
            layer.refuse_outside_of_stack(layer.ranks.size)
    return [layer.slot for layer in layers]
