"""What a rank's model is called with: its rows of a batch, and the plans of every layer as one argument."""

from __future__ import annotations

from typing import Any

from megatron_cp.executor.groups import RankGroup
from megatron_cp.layout import Layout
from megatron_cp.planner.batch import BatchPlan


class PlannedBatch:
    """The keyword argument `cp_batch`: which every layer of the model is handed, and reads its plan from.

    It is no dataclass: those are taken apart by who moves arguments to a device.

    Attributes:
        plans: of every kind of layer.
        group: the context-parallel ranks.
        seed: of dropout; None where `shard` was given none.
        kernel: for attention and linear layers; "auto" for the best one that is installed.
    """

    def __init__(self, plans: BatchPlan, group: RankGroup, seed: int | None, kernel: str) -> None:
        self.plans, self.group, self.seed, self.kernel = plans, group, seed, kernel

    def __repr__(self) -> str:
        return f"PlannedBatch({self.plans.layout!r}, {len(self.plans.kinds)} kinds of layers)"


class ShardedBatch(dict[str, Any]):
    """A rank's batch: `model(**batch)`.

    Its tensors are `[1, t]`, this rank's tokens in the layout's order and then its pad rows: `input_ids`,
    `position_ids`, and if there were labels `labels` and `shift_labels`, both what each token is to predict.

    Attributes:
        layout: who holds which tokens.
        num_items: labels that count, on all ranks of the group: what `num_items_in_batch` is, if no other data-parallel
            rank has a batch too.
    """

    def __init__(self, values: dict[str, Any], layout: Layout, num_items: int) -> None:
        super().__init__(values)
        self.layout, self.num_items = layout, num_items

    @property
    def plans(self) -> BatchPlan:
        """The plans of every kind of layer."""
        planned: PlannedBatch = self["cp_batch"]
        return planned.plans
