"""A rank's batch: its rows, and the plans of every layer as one argument of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_cp.batch.branched import LabelRows
from megatron_cp.batch.layer_runs import LayerRuns
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.groups import RankGroup
from megatron_cp.layout import Layout, Mask
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.batch import AttentionSpec, BatchPlan, Slot

_EMBEDS = (functional.embedding, torch.embedding)
_INDEXES = (Tensor.__getitem__, Tensor.index_select, torch.index_select)
_NOT_ENABLED = (
    "Call enable_context_parallel on every model that you call with a sharded batch (also on a teacher, and again on "
    "one that was loaded or built anew), or give it the whole batch, within parallel.disabled() if it is enabled. "
    "Instead of prompt tuning use adapters that act on each token, such as LoRA; to embed a rank's tokens by hand: "
    "input_ids.as_subclass(torch.Tensor)."
)


class RankTokens(Tensor):
    """The token ids of a rank's rows. A stock model cannot embed them; a model that runs over the ranks can.

    Stock models ignore arguments that they do not know, so they would compute a rank's rows as if these were a whole
    batch. A wrapper that embeds tokens itself, such as PEFT's prompt tuning, cannot embed them either. `plain` returns
    an ordinary tensor of the same memory, which any model embeds.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tables = [x for x in args if isinstance(x, Tensor) and not isinstance(x, cls) and x.ndim > 1]
        if func in _EMBEDS or (func in _INDEXES and any(x.is_floating_point() for x in tables)):
            given = (
                "a model that does not run over the ranks, or a wrapper that embeds tokens itself, called with a batch "
                "of ContextParallel.shard"
            )
            allowed = "one after enable_context_parallel(model, ...), which embeds tokens in its forward"
            raise ArgumentError("model", given, allowed, _NOT_ENABLED)
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, cls) and (found.dtype == torch.bool or found.is_floating_point()):
            return cls.plain(found)  # a mask, or numbers that were chosen by tokens
        return found

    def __deepcopy__(self, memo: Any) -> RankTokens:
        return copy.deepcopy(self.plain(self), memo).as_subclass(RankTokens)

    @staticmethod
    def plain(value: Any) -> Any:
        """Returns token ids as an ordinary tensor, and any other value as it is."""
        return value.as_subclass(Tensor) if isinstance(value, RankTokens) else value


class PlannedBatch:
    """The keyword argument `cp_batch`, from which every layer of the model reads its plan.

    It is no dataclass, since functions that move arguments to a device take dataclasses apart.

    Attributes:
        seed: the seed of attention dropout; None where `shard` was given none.
        kernel: the kernel for attention and linear layers; "auto" for the best one that is installed.
        num_items: number of labels that are not ignored, on all ranks of the group; in documents that branch, each as
            often as documents hold it.
        label_rows: in documents that branch, the row of each label; else None.
        labels: `[p]` the labels of `label_rows`, -100 where nothing is predicted; None without labels.
        dealt: names of other tensors of the batch, which have numbers for each token.
        tower_rows: the rows of vision towers, by the method of the model that calls the tower.
        masks: the masks of this batch's images, by the name of the mask that a layer has in text.
        runs: counts of the layers that ran by this batch's plans.
    """

    def __init__(
        self, plans: BatchPlan, group: RankGroup, seed: int | None, kernel: str, num_items: int,
        label_rows: LabelRows | None = None, labels: Tensor | None = None, dealt: Iterable[str] = (),
        tower_rows: Mapping[str, Any] | None = None, masks: Mapping[str, Mask] | None = None,
    ) -> None:  # fmt: skip
        self.plans, self.group, self.seed, self.kernel, self.num_items = plans, group, seed, kernel, num_items
        self.label_rows, self.labels, self.dealt, self.runs = label_rows, labels, frozenset(dealt), LayerRuns()
        self.tower_rows, self.masks = tower_rows or {}, masks or {}

    def plan(self, layer: object, slot: Slot) -> Plan:
        """Returns the plan by which a layer runs now, and counts the run."""
        self.runs.add(layer)
        return self.plans.plan(slot_under(slot, self.masks))

    def __repr__(self) -> str:
        return f"PlannedBatch({self.plans.layout!r}, {len(self.plans.kinds)} kinds of layers)"


def slot_under(slot: Slot, masks: Mapping[str, Mask]) -> Slot:
    """Returns a layer's spec with the mask that a batch puts in the place of its own."""
    if not masks or not isinstance(slot, AttentionSpec):
        return slot
    return replace(slot, mask=masks.get(str(slot.mask), slot.mask))


class ShardedBatch(dict[str, Any]):
    """A rank's batch: `model(**batch)`.

    Its tensors are `[1, t]`, this rank's tokens in the layout's order and then its pad rows: `input_ids`,
    `position_ids`, and if there were labels `labels` and `shift_labels`, which both hold the token that each token
    predicts. `input_ids` are `RankTokens`, which a model that is not enabled refuses.

    Where documents branch, the model is not given labels, since a token may predict several: see `label_rows` and
    `token_log_probs`.

    It has no attributes beside its items, since functions that move a batch to a device build a new one from them.
    """

    @property
    def plans(self) -> BatchPlan:
        """The plans of every kind of layer."""
        return self._planned.plans

    @property
    def layout(self) -> Layout:
        """The layout: the tokens that each rank holds."""
        return self.plans.layout

    @property
    def num_items(self) -> int:
        """The number of labels on all ranks of the group: `num_items_in_batch`, if there are no other replicas."""
        return self._planned.num_items

    @property
    def label_rows(self) -> LabelRows | None:
        """The row of each label in documents that branch; None else, where each row has one label."""
        return self._planned.label_rows

    @property
    def _planned(self) -> PlannedBatch:
        planned: PlannedBatch = self["cp_batch"]
        return planned
