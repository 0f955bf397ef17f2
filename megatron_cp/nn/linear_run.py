"""`LinearRun`: consecutive blocks of linear layers, between which hidden states that are redistributed stay moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from megatron_cp.batch.shard import LocalBatch
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import Group, RankGroup
from megatron_cp.nn.base import Layer, LinearLayer, redistributed
from megatron_cp.planner.batch import BatchPlan, LinearSpec


class LinearRun(nn.Module):
    """Consecutive blocks that mix tokens by linear layers only, and redistribute hidden states together or not at all.

    A linear layer whose plan redistributes hidden states moves them in and back. A run moves them once in and once
    back, however many layers it has, and "auto" compares the modes for the whole run.

    Args:
        blocks: modules that are called as `block(hidden, plans, group)` and return hidden states. `plans` is what
            layers of this package take in place of a batch; its `layout` is the one to which hidden states were moved.
            Everything else in a block, such as norms and MLPs, must act on each token alone.

    Raises:
        ArgumentError: no linear layer, or a layer that is no linear one.

    Example:
        >>> import torch
        >>> from megatron_cp.layout import Layout, Packing
        >>> from megatron_cp.nn import GatedDeltaNet
        >>> run = LinearRun([GatedDeltaNet(8, 2, head_dim=4), GatedDeltaNet(8, 2, head_dim=4)])
        >>> layout = Layout.contiguous(Packing([3, 1]), cp_size=1)
        >>> run(torch.ones(4, 8), BatchPlan(layout, run.slots)).shape
        torch.Size([4, 8])
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        given = list(blocks) if isinstance(blocks, Iterable) else [blocks]
        if not all(isinstance(block, nn.Module) for block in given):
            raise ArgumentError("blocks", blocks, "modules, one after another")
        self.blocks = nn.ModuleList(given)
        layers = [module for module in self.modules() if isinstance(module, Layer)]
        others = [type(layer).__name__ for layer in layers if not isinstance(layer, LinearLayer)]
        if others or not layers:
            allowed = "blocks with linear layers, and no layer that mixes tokens otherwise"
            raise ArgumentError("blocks", ", ".join(others) or "none with a linear layer", allowed)
        self._layers = [layer for layer in layers if isinstance(layer, LinearLayer)]
        slots = tuple(replace(layer.slot, run=()) for layer in self._layers)
        for layer in self._layers:
            layer.slot = replace(layer.slot, run=slots)

    @property
    def slots(self) -> list[LinearSpec]:
        """The slots of the run's layers, for `shard_batch(slots=...)`."""
        return [layer.slot for layer in self._layers]

    def forward(self, hidden: Tensor, batch: LocalBatch | BatchPlan, group: Group | None = None) -> Tensor:
        """Computes the blocks one after another.

        Args:
            hidden: `[t, hidden_size]` this rank's rows of the batch's layout; t may be 0.
            batch: the result of `shard_batch`, or its plans.
            group: the context-parallel ranks; None for one.

        Returns:
            `[t, hidden_size]`.

        Raises:
            ArgumentError: see the layers.
        """

        def compute(hidden: Tensor, inside: LocalBatch | BatchPlan, _: RankGroup) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden, inside, group)
            return hidden

        return redistributed(self._layers, compute, hidden, batch, group)
