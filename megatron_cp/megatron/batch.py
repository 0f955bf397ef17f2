"""A microbatch on its way to the ranks: each rank's tokens, labels and positions, and the plans of every layer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.device import on_device
from megatron_cp.executor.agreement import check_agreement
from megatron_cp.executor.groups import RankGroup, as_rank_group
from megatron_cp.executor.run import prepare
from megatron_cp.layout import Layout, Packing
from megatron_cp.megatron.documents import Documents, version_of
from megatron_cp.planner.batch import BatchPlan, Slot
from megatron_cp.softmax.attention import prepare_attention


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
    ranks, packing = as_rank_group(group, layout.cp_size), layout.packing
    layout = layout.padded(align=layout.align, min_rows=1)  # Megatron's reshapes cannot do without a row
    device = torch.device(device)
    ids = _stream("tokens", tokens, packing).long()
    targets, weights = _labels(ids, packing) if labels is None else _given_labels(labels, packing)
    if loss_mask is not None:
        weights = weights * _stream("loss_mask", loss_mask, packing).float()
    plans, batch_seed = BatchPlan(layout, slots), _hash(ids, seed)
    if agree and layout.cp_size > 1:
        check_agreement(plans, ranks, seed=batch_seed)
    params = planned_params(plans, ranks.rank, device, batch_seed)
    assert params.positions is not None
    # A label where nothing is to be learnt must still be in the vocabulary: 0.
    streams = (ids, targets * (weights != 0), weights)
    local_ids, local_targets, local_weights = (
        _moved(layout.shard(stream, ranks.rank), device).unsqueeze(0) for stream in streams
    )
    return ShardedBatch(
        tokens=local_ids,
        labels=local_targets,
        loss_mask=local_weights,
        position_ids=params.positions.unsqueeze(0),
        packed_seq_params=params,
        num_tokens=int(torch.count_nonzero(weights)),
        pad_rows=int(layout.pad_rows.sum()),
    )


def _labels(ids: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """The next token of each token's document, and 0 for the weight of a document's last token."""
    weights = torch.ones(packing.total)
    weights[torch.from_numpy(packing.cu_seqlens[1:][packing.lengths > 0] - 1)] = 0
    return ids.roll(-1), weights


def _given_labels(labels: NDArray[np.int64] | Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    targets = _stream("labels", labels, packing).long()
    return targets, (targets >= 0).float()


def _hash(ids: Tensor, seed: int) -> int:
    """A number that all ranks make of a batch and a step alike, without asking one another."""
    digest = hashlib.blake2b(f"{seed}:".encode() + ids.numpy().tobytes(), digest_size=4)
    return int.from_bytes(digest.digest(), "little")


def planned_params(plans: BatchPlan, rank: int, device: torch.device, seed: int | None = None) -> PlannedSeqParams:
    """The plans as what Megatron's layers are given, with everything a layer needs on the device already."""
    layout, packing = plans.layout, plans.layout.packing
    for plan in plans.plans:
        prepare(plan, rank, device)
        if plan.attend is not None:
            prepare_attention(plan, rank, device)
    cu_seqlens = on_device(packing.cu_seqlens, device)
    # Megatron keeps a table of rotary angles for each of the last 32 of these. Rounded up, packs share a few.
    max_length = 1 << (max(packing.max_length, 1) - 1).bit_length()
    return PlannedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_length,
        max_seqlen_kv=max_length,
        plans=plans,
        positions=on_device(layout.positions(rank), device, torch.int64),
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


def _stream(name: str, values: NDArray | Tensor, packing: Packing) -> Tensor:
    if isinstance(values, np.ndarray):  # copied where it is read-only, such as a file: torch warns of those
        tensor = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    else:
        tensor = values
    if tensor.device.type != "cpu" or tensor.shape != (packing.total,):
        raise ArgumentError(
            name, f"{list(tensor.shape)} on {tensor.device}", f"the [{packing.total}] tokens of the batch, on the host"
        )
    return tensor


def _moved(host: Tensor, device: torch.device) -> Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
