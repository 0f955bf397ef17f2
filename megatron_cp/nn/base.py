"""Base of all layers: checks their sizes and rows, and runs their operation by the batch's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_cp.batch.shard import LocalBatch, local_positions
from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.executor.arguments import DTYPES, check_tensor
from megatron_cp.executor.groups import Group, RankGroup, as_rank_group
from megatron_cp.executor.kernels import Kernel
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.executor.relayout import relayout
from megatron_cp.nn.parts import reset_children
from megatron_cp.planner.batch import BatchPlan, LinearSpec, Slot
from megatron_cp.planner.capabilities import hints_keywords


class Layer(nn.Module):
    """A layer over the ranks of a group.

    Attributes:
        slot: the layer's shape and options of its plan, for `shard_batch(slots=...)`. For other options of the plan,
            such as a transport, set another one before batches are sharded: `layer.slot = replace(layer.slot, ...)`.
        kernel: the kernel of its operation.
    """

    slot: Slot

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            hints_keywords(cls)

    def __init__(self, hidden_size: int, kernel: str | Kernel, kernels: Sequence[Kernel]) -> None:
        super().__init__()
        self.hidden_size, self.kernel = checked_integer("hidden_size", hidden_size, 1), kernel
        names = ["auto", *(known.name for known in kernels)]
        if not isinstance(kernel, Kernel) and not (isinstance(kernel, str) and kernel in names):
            raise ArgumentError("kernel", kernel, f"{' or '.join(names)}, or one of the caller's")

    def reset_parameters(self) -> None:
        """Reinitialises all parameters: with one seed, the same on every rank."""
        reset_children(self)

    def forward(self, hidden: Tensor, batch: LocalBatch | BatchPlan, group: Group | None = None) -> Tensor:
        """Computes the layer within each document.

        Args:
            hidden: `[t, hidden_size]` this rank's rows of the batch's layout; t may be 0.
            batch: the result of `shard_batch`, or its plans.
            group: the context-parallel ranks; None for one.

        Returns:
            `[t, hidden_size]`. A parameter's gradient is this rank's share, to be summed over the group.

        Raises:
            ArgumentError: hidden states, a batch or a group that do not fit one another.
        """
        raise NotImplementedError

    @no_compile
    def _run(
        self, operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], batch: LocalBatch | BatchPlan,
        ranks: RankGroup, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Runs an operation by the batch's plan, out of a compiler's sight."""
        return operation(*inputs, batch.plan(self.slot), ranks, kernel=self.kernel, **options)


@no_compile
def checked_rows(hidden: Tensor, hidden_size: int, batch: LocalBatch | BatchPlan, group: Group | None) -> RankGroup:
    """Returns the group's ranks, after checking that the batch is theirs and that hidden has this rank's rows."""
    if not isinstance(batch, LocalBatch | BatchPlan):
        raise ArgumentError("batch", batch, "what shard_batch returned, or its plans")
    ranks = as_rank_group(group, batch.layout.cp_size)
    shape = (int(batch.layout.row_counts[ranks.rank]), hidden_size)
    check_tensor("hidden", hidden, shape, like=hidden, layout=batch.layout)
    return ranks


class LinearLayer(Layer):
    """A linear layer, around which hidden states are moved to the layout of its plan where that redistributes them."""

    slot: LinearSpec

    def forward(self, hidden: Tensor, batch: LocalBatch | BatchPlan, group: Group | None = None) -> Tensor:
        return redistributed([self], self._mixed, hidden, batch, group)

    def _mixed(self, hidden: Tensor, batch: LocalBatch | BatchPlan, ranks: RankGroup) -> Tensor:
        """Computes the layer of hidden states that are in the layout of its plan."""
        raise NotImplementedError


def redistributed(
    layers: Sequence[LinearLayer], compute: Callable[[Tensor, LocalBatch | BatchPlan, RankGroup], Tensor],
    hidden: Tensor, batch: LocalBatch | BatchPlan, group: Group | None,
) -> Tensor:  # fmt: skip
    """Computes a run of linear layers in the layout of their plans: moves hidden states there, and the result back."""
    ranks = checked_rows(hidden, layers[0].hidden_size, batch, group)
    inside, slot = _plans_inside(batch, layers), layers[0].slot
    hidden = _moved(hidden, batch, inside, ranks, slot)
    return _moved(compute(hidden, inside, ranks), inside, batch, ranks, slot)


@no_compile
def _plans_inside(batch: LocalBatch | BatchPlan, layers: Sequence[LinearLayer]) -> LocalBatch | BatchPlan:
    """Returns the plans of a run of linear layers in the layout to which it is redistributed; else the batch itself."""
    plans = batch.plans if isinstance(batch, LocalBatch) else batch
    redistributed = [inside for layer in layers if (inside := plans.inside(layer.slot)) is not plans]
    return redistributed[0] if redistributed else batch


@no_compile
def _moved(
    hidden: Tensor, source: LocalBatch | BatchPlan, target: LocalBatch | BatchPlan, ranks: RankGroup, slot: LinearSpec
) -> Tensor:
    """Moves hidden states between the layouts of two batches, by the transport of `slot`."""
    if source is target:
        return hidden
    return relayout(hidden, source.layout, target.layout, ranks, transport=source.plan(slot).transport)


@no_compile
def positions_of(batch: LocalBatch | BatchPlan, rank: int, device: torch.device) -> Tensor:
    """Returns `[t]` int64 the position of each of a rank's rows in its document, on the device."""
    return batch.position_ids if isinstance(batch, LocalBatch) else local_positions(batch.layout, rank, device)


def checked_factory(device: object, dtype: object) -> dict[str, Any]:
    """Returns device and type of parameters as keyword arguments of torch's modules."""
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError("dtype", dtype, "float64, float32, bfloat16 or float16, or None for torch's default")
    if device is not None:
        if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
            raise ArgumentError("device", device, "a device of torch, or None for torch's default")
        try:
            torch.device(device)
        except RuntimeError as error:
            raise ArgumentError("device", device, "a device of torch, or None for torch's default") from error
    return {"device": device, "dtype": dtype}
