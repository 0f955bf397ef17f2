"""Megatron's `PackedSeqParams`: with the plans of a microbatch, and what those without plans say of their batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.batch.ahead import RowsAhead, Stream
from megatron_cp.batch.shard import local_positions, prepare_plans
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.device import on_device
from megatron_cp.executor.groups import RankGroup, TorchGroup
from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.batch import BatchPlan
from megatron_cp.planner.capabilities import require

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_SHARD_BATCH = "megatron_cp.megatron.batch.shard_batch"


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """Megatron's `PackedSeqParams` with the plans of the microbatch: what every layer reads, and none makes.

    `cu_seqlens_*` are those of the whole batch, as Megatron has them; `max_seqlen_*` the next power of two.

    Attributes:
        plans: for every kind of layer.
        positions: `[t]` place of each of this rank's rows in its document, on the device.
        seed: of dropout in attention: the same on every rank, another one in every batch and step. None for Megatron's
            own batches, whose layers draw one.
        stream: the whole batch on the host, for multi-token prediction; None for Megatron's own batches.
        ranks: that hold the batch, where these are not the model's context-parallel group. Megatron's `cp_group` and
            `local_cp_size` stay unset: its latent attention refuses batches that have them.
        has_axes: whether the batch's positions have several axes. `cp_group` is then of one rank, so that Megatron's
            rotary embedding makes phases of the positions that it is given and cuts no part out of them.
        mean_is_of_all_ranks: whether the batch's loss is divided by the tokens of all ranks where Megatron takes means,
            as `loss_of` does; without `--calculate-per-token-loss` the layers refuse other batches on several ranks.
    """

    plans: BatchPlan | None = None
    positions: Tensor | None = None
    seed: int | None = None
    stream: Stream | None = field(default=None, repr=False)
    ranks: RankGroup | None = None
    has_axes: bool = False
    mean_is_of_all_ranks: bool = False
    _remembered: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def remember[T](self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made for the first layer of the microbatch that asks for `key`, recomputed or not."""
        if key not in self._remembered:
            self._remembered[key] = make()
        found: T = self._remembered[key]
        return found

    def ahead(self, places: int) -> RowsAhead:
        """What lies so many places ahead of this rank's rows, made for the first that asks; each `[1, t]`."""
        assert self.stream is not None
        stream = self.stream
        return self.remember(("ahead", places), lambda: stream.ahead(places).as_sequence())

    def has_looked(self, places: int) -> bool:
        """Whether anyone has asked for that already."""
        return ("ahead", places) in self._remembered

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


class OneRank:
    """A process group of one rank, as far as Megatron asks it where it would else divide something by the ranks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def is_packed(params: PackedSeqParams | None, batch: int) -> bool:
    """Whether rows are packed documents, and not `batch` sequences side by side.

    Raises:
        ArgumentError: lengths of documents in a format that says neither.
    """
    if params is None or params.qkv_format == "thd":
        return params is not None
    offsets = params.cu_seqlens_q
    # As Megatron has them for multimodal models: one sequence to each of the batch.
    if offsets is not None and not (params.qkv_format == "sbhd" and offsets.numel() == batch + 1):
        given = f"qkv_format {params.qkv_format!r} with {offsets.numel() - 1} documents in a batch of {batch}"
        _refuse(given, "qkv_format='thd' for packed documents", "Another format would be attended to as one sequence.")
    return False


def planned_params(
    plans: BatchPlan, rank: int, device: torch.device, own_group: TorchGroup | None = None
) -> PlannedSeqParams:
    """The plans as what Megatron's layers are given, with everything a layer needs on the device already."""
    prepare_plans(plans, rank, device)
    return with_plans(plans, local_positions(plans.layout, rank, device), None, own_group=own_group)


def with_plans(
    plans: BatchPlan,
    positions: Tensor,
    seed: int | None,
    stream: Stream | None = None,
    own_group: TorchGroup | None = None,
    *,
    has_axes: bool = False,
) -> PlannedSeqParams:
    """The plans beside what Megatron's own layers read of a packed batch; `positions` are this rank's."""
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
        stream=stream,
        ranks=own_group,
        has_axes=has_axes,
        cp_group=OneRank() if has_axes else None,
    )


def planned(params: PackedSeqParams, group: RankGroup, order: str | None = None) -> PlannedSeqParams:
    """`params` with plans: as they are if `shard_batch` made them, else of the rows that Megatron's sharding left.

    The lengths in Megatron's own are on the device, so this reads them once a microbatch; every later layer finds the
    result.

    Args:
        params: of a packed batch.
        group: the context-parallel ranks, if the batch has no `cp_group` of its own.
        order: how Megatron's own pipeline cut packs: each "document" or the whole "pack"; see `Documents.layout`.

    Raises:
        ArgumentError: several ranks and no order, lengths that Megatron's sharding cannot cut, or fields that
            contradict one another.
    """
    if isinstance(params, PlannedSeqParams) and params.plans is not None:
        return params
    own = _own_group(params, group)
    group = group if own is None else own
    key = (group.size, group.rank, order, _version_of(params))
    known: tuple[Hashable, PlannedSeqParams] | None = params.__dict__.get("_megatron_cp")
    if known is not None and known[0] == key:
        return known[1]
    documents = Documents.of(params)
    plans = BatchPlan(documents.layout(group.size, order), lengths=documents.lengths)
    offsets = params.cu_seqlens_q if params.cu_seqlens_q is not None else params.cu_seqlens_q_padded
    found = planned_params(plans, group.rank, offsets.device, own)
    for name in (f.name for f in fields(PackedSeqParams)):
        setattr(found, name, getattr(params, name))
    assert found.positions is not None
    # Only pads lie further on, where a table of rotary angles that is as long as the longest document has no row.
    found.positions = found.positions.clamp(max=max(documents.max_length - 1, 0))
    params.__dict__["_megatron_cp"] = key, found
    return found


@dataclass(frozen=True)
class Documents:
    """The documents of a packed batch.

    Attributes:
        packing: their rows, of which the last ones of a document may be pads.
        lengths: `[num_documents]` their tokens, which come before the pads; None where there are no pads.
    """

    packing: Packing
    lengths: NDArray[np.int64] | None = None

    @property
    def max_length(self) -> int:
        """Tokens of the longest document."""
        return int((self.packing.lengths if self.lengths is None else self.lengths).max())

    @classmethod
    def of(cls, params: PackedSeqParams) -> Documents:
        """Those of the queries, which must be those of the keys. The host waits for the device.

        Raises:
            ArgumentError: fields that are missing, or that contradict one another.
        """
        queries, keys = _read(params)
        if queries != keys:
            _refuse("keys in other documents than queries", "self-attention")
        tokens, rows = queries
        if tokens.num_documents != rows.num_documents or (tokens.lengths > rows.lengths).any():
            given = f"cu_seqlens_q of {tokens} in cu_seqlens_q_padded of {rows}"
            _refuse(given, "documents that are no longer than with their pads")
        documents = cls(rows, None if tokens == rows else tokens.lengths)
        _check_the_rest(params, documents)
        return documents

    def layout(self, cp_size: int, order: str | None) -> Layout:
        """Who holds which rows after Megatron's own sharding.

        Args:
            cp_size: the number of ranks.
            order: what is cut into `2 * cp_size` chunks, of which rank r gets chunks r and `2 * cp_size - 1 - r`: each
                "document" or the whole "pack". Nothing in `PackedSeqParams` tells.

        Raises:
            ArgumentError: several ranks and no order, or lengths that cannot be cut so.
        """
        if cp_size == 1:
            return Layout.zigzag(self.packing, 1)
        if order is None:
            raise ArgumentError(
                "--cp-packed-order",
                None,
                "document or pack for Megatron's own packed_seq_params on several ranks",
                "They do not tell whether each document (--sft) or the whole pack (--dataloader-inter-document-masking)"
                " was cut into chunks. megatron_cp.megatron.config.TransformerConfig takes it from these flags; in"
                f" another configuration set cp_packed_order, or shard the batch with {_SHARD_BATCH}.",
            )
        require("packed_order", order, name="--cp-packed-order")  # an attribute may have been set to anything
        whole = self.packing if order == "document" else Packing([self.packing.total])
        bad = whole.lengths[whole.lengths % (2 * cp_size) != 0]
        if bad.size:
            raise ArgumentError(
                "packed_seq_params",
                f"{order}s of {bad[:8].tolist()} tokens, without a plan",
                f"multiples of {2 * cp_size} from Megatron's own sharding",
                f"Shard the batch with {_SHARD_BATCH}, which takes any lengths.",
            )
        cut = Layout.zigzag(whole, cp_size)
        if order == "document":
            return cut
        return Layout.from_fragments(self.packing, [cut.fragments_of(rank) for rank in range(cp_size)])


def _own_group(params: PackedSeqParams, models: RankGroup) -> TorchGroup | None:
    """The group that Megatron's own batch brings; None where it brings none, or the model's.

    Raises:
        ArgumentError: a number of ranks without their group, or of another group.
    """
    own = None if params.cp_group is None else TorchGroup(params.cp_group)
    size = models.size if own is None else own.size
    if params.local_cp_size not in (None, size):
        _refuse(f"local_cp_size {params.local_cp_size}", f"{size}, the ranks of its cp_group or of the model's group")
    return None if own is None or is_same_group(own, models) else own


def is_same_group(one: TorchGroup, other: RankGroup) -> bool:
    """Whether both are of the same ranks of the job, in the same order."""
    return isinstance(other, TorchGroup) and (
        one.group is other.group or dist.get_process_group_ranks(one.group) == dist.get_process_group_ranks(other.group)
    )


def _version_of(params: PackedSeqParams) -> tuple[tuple[int, int], ...]:
    """What another tensor of offsets, or another value in one of them, changes."""
    offsets = (getattr(params, name) for name in _OFFSETS)
    return tuple((id(t), 0 if t is None or t.is_inference() else t._version) for t in offsets)


def _read(params: PackedSeqParams) -> list[tuple[Packing, Packing]]:
    """Tokens and rows of the documents, of queries and of keys. A tensor that is given twice is read once."""
    read: dict[int, Packing] = {}

    def packing(*names: str) -> Packing:
        offsets: Tensor | None = next((t for t in (getattr(params, name) for name in names) if t is not None), None)
        if offsets is None:
            _refuse("no cu_seqlens_q", "the documents of the batch")
        if id(offsets) not in read:
            read[id(offsets)] = Packing.from_cu_seqlens(offsets.cpu())
        return read[id(offsets)]

    queries, padded = "cu_seqlens_q", "cu_seqlens_q_padded"
    return [
        (packing(queries, padded), packing(padded, queries)),
        (
            packing("cu_seqlens_kv", "cu_seqlens_kv_padded", queries, padded),
            packing("cu_seqlens_kv_padded", "cu_seqlens_kv", padded, queries),
        ),
    ]


def _check_the_rest(params: PackedSeqParams, documents: Documents) -> None:
    """Refuses what other fields say against the documents."""
    total, longest = documents.packing.total, documents.max_length
    if params.total_tokens not in (None, total):
        remedy = "Rows behind the last document are a document too: add their end to cu_seqlens."
        _refuse(f"total_tokens {params.total_tokens} for cu_seqlens up to {total}", str(total), remedy)
    if params.seq_idx is not None and params.total_tokens is None:  # else Megatron has just made it
        numbers = params.seq_idx.flatten().cpu().numpy()
        starts = np.unique(documents.packing.cu_seqlens[1:-1])
        inner = starts[(starts > 0) & (starts < total)]
        if numbers.size != total or not np.array_equal(np.flatnonzero(np.diff(numbers)) + 1, inner):
            _refuse("seq_idx of other documents than cu_seqlens", "the same documents", "Leave seq_idx out.")
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        given = getattr(params, name)
        if given is not None and int(given) < longest:  # tables of rotary angles are as long as it says
            _refuse(f"{name} {int(given)} for a document of {longest} tokens", f"at least {longest}")


def _refuse(given: str, allowed: str, remedy: str = "") -> NoReturn:
    raise ArgumentError("packed_seq_params", given, allowed, remedy)
