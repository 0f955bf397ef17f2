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
        num_items: labels that count, on all ranks of the group.
    """

    def __init__(self, plans: BatchPlan, group: RankGroup, seed: int | None, kernel: str, num_items: int) -> None:
        self.plans, self.group, self.seed, self.kernel, self.num_items = plans, group, seed, kernel, num_items

    def __repr__(self) -> str:
        return f"PlannedBatch({self.plans.layout!r}, {len(self.plans.kinds)} kinds of layers)"


class ShardedBatch(dict[str, Any]):
    """A rank's batch: `model(**batch)`.

    Its tensors are `[1, t]`, this rank's tokens in the layout's order and then its pad rows: `input_ids`,
    `position_ids`, and if there were labels `labels` and `shift_labels`, both what each token is to predict.

    It holds no more than its arguments: who moves a batch to a device makes another one of them.
    """

    @property
    def plans(self) -> BatchPlan:
        """The plans of every kind of layer."""
        return self._planned.plans

    @property
    def layout(self) -> Layout:
        """Who holds which tokens."""
        return self.plans.layout

    @property
    def num_items(self) -> int:
        """Labels that count, on all ranks of the group: `num_items_in_batch`, if other replicas have none."""
        return self._planned.num_items

    @property
    def _planned(self) -> PlannedBatch:
        planned: PlannedBatch = self["cp_batch"]
        return planned
