"""A microbatch on its way to the ranks: each rank's tokens, labels and positions, and the plans of every layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.batch.shard import local_positions, prepare_plans
from megatron_cp.batch.shard import shard_batch as local_batch
from megatron_cp.exchange.device import on_device
from megatron_cp.executor.groups import RankGroup
from megatron_cp.layout import Layout
from megatron_cp.megatron.documents import Documents, version_of
from megatron_cp.planner.batch import BatchPlan, Slot


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """Megatron's `PackedSeqParams` with the plans of the microbatch: what every layer reads, and none makes.

    `cu_seqlens_*` are those of the whole batch, as Megatron has them; `max_seqlen_*` the next power of two.

    Attributes:
        plans: for every kind of layer.
        positions: `[t]` place of each of this rank's rows in its document, on the device.
        seed: of dropout in attention: the same on every rank, another one in every batch and step. None for Megatron's
            own batches, whose layers draw one.
    """

    plans: BatchPlan | None = None
    positions: Tensor | None = None
    seed: int | None = None
    _remembered: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def remember[T](self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made for the first layer of the microbatch that asks for `key`, recomputed or not."""
        if key not in self._remembered:
            self._remembered[key] = make()
        found: T = self._remembered[key]
        return found

    def rotary_phases(self, table: Tensor) -> Tensor:
        """`[t, 1, 1, d]`: the rows of a `[max_length, 1, 1, d]` table of rotary angles at this rank's positions.

        Gathered once a microbatch and table, whatever the number of layers, recomputed or not.
        """
        assert self.positions is not None  # only where Megatron copies the base class's fields alone
        # Not by the object: each layer that is recomputed is given a detached one.
        memory = (table.data_ptr(), table.shape, table.stride(), table.dtype)
        positions = self.positions
        # The table is kept too, so that its memory is not given to another one.
        return self.remember(memory, lambda: (table, table.index_select(0, positions)))[1]


@dataclass(frozen=True)
class ShardedBatch:
    """One rank's share of a packed microbatch, as GPTModel and HybridModel take it.

    Attributes:
        tokens: `[1, t]` int64 token ids; 0 in pad rows.
        labels: `[1, t]` int64; 0 where the loss mask is 0.
        loss_mask: `[1, t]` float32.
        position_ids: `[1, t]` int64 place of each row in its document.
        packed_seq_params: the plans and Megatron's own fields.
        num_tokens: tokens of the whole batch that have a label with a nonzero loss mask.
        pad_rows: rows on all ranks that are no token.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    packed_seq_params: PlannedSeqParams
    num_tokens: int
    pad_rows: int


def shard_batch(
    tokens: NDArray[np.int64] | Tensor,
    layout: Layout,
    group: RankGroup | dist.ProcessGroup | None = None,
    *,
    slots: Iterable[Slot] = (),
    labels: NDArray[np.int64] | Tensor | None = None,
    loss_mask: NDArray[np.float32] | Tensor | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    agree: bool = True,
) -> ShardedBatch:
    """This rank's share of a packed microbatch, with the plans of every layer: host work, once a microbatch.

    `megatron_cp.shard_batch` in Megatron's shapes: with a leading axis of one sequence, at least one row on every rank,
    and the plans on `packed_seq_params`.

    Args:
        tokens: `[total]` token ids of the packed stream, on the host.
        layout: who holds which tokens, over the documents of the batch.
        group: the context-parallel group; None for one rank.
        slots: the kinds of layers, from `slots_of(model)`.
        labels: `[total]` what each token is to predict, already shifted, and negative where nothing is; None for the
            next token of its document, which the last one does not have.
        loss_mask: `[total]` weight of each token's loss, such as 1 for the answers of SFT and 0 for the questions.
        device: where the model is.
        seed: of dropout in attention, beside the batch's tokens: the number of the step, so that a batch that comes
            again has other weights dropped. The same on every rank.
        agree: compare the plans, the tokens and the seed of all ranks (16 bytes on the host).

    Raises:
        ArgumentError: tensors that do not fit the layout, or a slot that cannot be planned.
        PlanMismatchError: another rank of the group has another batch or other layers.
    """
    layout = layout.padded(align=layout.align, min_rows=1)  # Megatron's reshapes cannot do without a row
    batch = local_batch(
        tokens, layout, group, slots=slots, labels=labels, loss_mask=loss_mask, device=device, seed=seed, agree=agree,
        ignore_index=0,  # a label where nothing is to be learnt must still be in the vocabulary
    )  # fmt: skip
    return ShardedBatch(
        tokens=batch.tokens.unsqueeze(0),
        labels=batch.labels.unsqueeze(0),
        loss_mask=batch.loss_weights.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        packed_seq_params=_with_plans(batch.plans, batch.position_ids, batch.seed),
        num_tokens=batch.num_tokens,
        pad_rows=batch.pad_rows,
    )


def planned_params(plans: BatchPlan, rank: int, device: torch.device, seed: int | None = None) -> PlannedSeqParams:
    """The plans as what Megatron's layers are given, with everything a layer needs on the device already."""
    prepare_plans(plans, rank, device)
    return _with_plans(plans, local_positions(plans.layout, rank, device), seed)


def _with_plans(plans: BatchPlan, positions: Tensor, seed: int | None) -> PlannedSeqParams:
    packing = plans.layout.packing
    cu_seqlens = on_device(packing.cu_seqlens, positions.device)
    # Megatron keeps a table of rotary angles for each of the last 32 of these. Rounded up, packs share a few.
    max_length = 1 << (max(packing.max_length, 1) - 1).bit_length()
    return PlannedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_length,
        max_seqlen_kv=max_length,
        plans=plans,
        positions=positions,
        seed=seed,
    )


def planned(params: PackedSeqParams, group: RankGroup, order: str | None = None) -> PlannedSeqParams:
    """`params` with plans: as they are if `shard_batch` made them, else of the rows that Megatron's sharding left.

    The lengths in Megatron's own are on the device, so this reads them once a microbatch; every later layer finds the
    result.

    Args:
        params: of a packed batch.
        group: the context-parallel ranks.
        order: how Megatron's own pipeline cut packs: each "document" or the whole "pack"; see `Documents.layout`.

    Raises:
        ArgumentError: several ranks and no order, lengths that Megatron's sharding cannot cut, or fields that
            contradict one another.
    """
    if isinstance(params, PlannedSeqParams) and params.plans is not None:
        return params
    key = (group.size, group.rank, order, version_of(params))
    known: tuple[Hashable, PlannedSeqParams] | None = params.__dict__.get("_megatron_cp")
    if known is not None and known[0] == key:
        return known[1]
    documents = Documents.of(params)
    plans = BatchPlan(documents.layout(group.size, order), lengths=documents.lengths)
    offsets = params.cu_seqlens_q if params.cu_seqlens_q is not None else params.cu_seqlens_q_padded
    found = planned_params(plans, group.rank, offsets.device)
    for name in (f.name for f in fields(PackedSeqParams)):
        setattr(found, name, getattr(params, name))
    assert found.positions is not None
    # Only pads lie further on, where a table of rotary angles that is as long as the longest document has no row.
    found.positions = found.positions.clamp(max=max(documents.max_length - 1, 0))
    params.__dict__["_megatron_cp"] = key, found
    return found
