"""Megatron's `PackedSeqParams` with the plans of a microbatch, and plans for those that Megatron's pipeline made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, TypeVar

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
from megatron_cp.torch_private import version_of

T = TypeVar("T")

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_SHARD_BATCH = "megatron_cp.megatron.batch.shard_batch"


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """Megatron's `PackedSeqParams` with the plans of the microbatch, which every layer reads.

    `cu_seqlens_*` are those of the whole batch, as in Megatron; `max_seqlen_*` are rounded up to a power of two.

    Attributes:
        positions: `[t]`, the position of each of this rank's rows in its document, on the device.
        seed: seed of dropout in attention, the same on every rank, and another one in every batch and step. None for
            Megatron's own batches, whose layers draw one.
        stream: the whole batch on the host, for multi-token prediction; None for Megatron's own batches.
        ranks: the batch's group if it is not the model's context-parallel group. Megatron's `cp_group` and
            `local_cp_size` are not set, since its latent attention refuses batches that have them.
        has_axes: True if the batch's positions have several axes. `cp_group` then has one rank, so that Megatron's
            rotary embedding computes phases for all positions that it is given.
        has_global_mean: True if the batch's loss is divided by the tokens of all ranks where Megatron takes means, as
            `loss_of` does. Without `--calculate-per-token-loss` the layers refuse other batches on several ranks.
        run_layout: the layout of the hidden states inside a redistributed run of linear layers; None outside of one.
    """

    plans: BatchPlan | None = None
    positions: Tensor | None = None
    seed: int | None = None
    stream: Stream | None = field(default=None, repr=False)
    ranks: RankGroup | None = None
    has_axes: bool = False
    has_global_mean: bool = False
    run_layout: Layout | None = None
    _remembered: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def layout(self) -> Layout:
        """The layout of the rows that a layer with these parameters is given."""
        assert self.plans is not None
        return self.plans.layout if self.run_layout is None else self.run_layout

    def within(self, layout: Layout) -> PlannedSeqParams:
        """Returns the parameters for layers inside a run, whose rows have the run's layout.

        They have the same plans. What belongs to the batch's own rows is left out, so that nothing can read it there.
        """
        inner = copy.copy(self)
        inner.run_layout, inner.positions, inner.stream, inner.tokens_per_sample = layout, None, None, None
        return inner

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of `make`, which is called once a microbatch and `key`, also under recomputation."""
        if key not in self._remembered:
            self._remembered[key] = make()
        found: T = self._remembered[key]
        return found

    def ahead(self, places: int) -> RowsAhead:
        """Returns the tokens, labels and so on `places` ahead of this rank's rows, `[1, t]` each; made once."""
        remedy = "In a tree a token may have several next tokens: train without multi-token prediction."
        if self.plans is not None:
            self.plans.layout.packing.refuse_branches("mtp_num_layers", places, "no layers", remedy)
        assert self.stream is not None
        stream = self.stream
        return self.remember(("ahead", places), lambda: stream.ahead(places).as_sequence())

    def has_rows_ahead(self, places: int) -> bool:
        """True if `ahead(places)` has been called."""
        return ("ahead", places) in self._remembered

    def rotary_phases(self, table: Tensor) -> Tensor:
        """Gathers the rows `[t, 1, 1, d]` of a table of rotary angles `[max_length, 1, 1, d]` at this rank's positions.

        They are gathered once a microbatch and table, for all layers, also under recomputation.
        """
        assert self.positions is not None  # it is None only where Megatron copies the base class's fields
        # The key is the memory and not the tensor, since a layer that is recomputed is given a detached one.
        memory = (table.data_ptr(), table.shape, table.stride(), table.dtype)
        positions = self.positions
        # The table is kept alive too, so that its memory is not used for another one.
        return self.remember(memory, lambda: (table, table.index_select(0, positions)))[1]


class OneRank:
    """A substitute for a process group of one rank, where Megatron would otherwise divide by the number of ranks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def is_packed(params: PackedSeqParams | None, batch: int) -> bool:
    """True if rows are packed documents, False if they are `batch` sequences side by side."""
    if params is None or params.qkv_format == "thd":
        return params is not None
    offsets = params.cu_seqlens_q
    # Megatron has offsets in "sbhd" for multimodal models, with one sequence for each entry of the batch.
    if offsets is not None and not (params.qkv_format == "sbhd" and offsets.numel() == batch + 1):
        given = f"qkv_format {params.qkv_format!r} with {offsets.numel() - 1} documents in a batch of {batch}"
        _refuse(
            given, "qkv_format='thd' for packed documents", "With another format, attention would see one sequence."
        )
    return False


def unpacked_form(packed: PlannedSeqParams) -> PlannedSeqParams:
    """Returns a batch's parameters in the format in which Megatron takes a row's angles as they are given."""
    unpacked = copy.copy(packed)
    unpacked.qkv_format = "sbhd"
    return unpacked


def planned_params(
    plans: BatchPlan, rank: int, device: torch.device, own_group: TorchGroup | None = None
) -> PlannedSeqParams:
    """Returns the plans as `PackedSeqParams`, with all tables that a layer needs on the device."""
    prepare_plans(plans, rank, device)
    return build_params(plans, local_positions(plans.layout, rank, device), None, own_group=own_group)


def build_params(
    plans: BatchPlan,
    positions: Tensor,
    seed: int | None,
    stream: Stream | None = None,
    own_group: TorchGroup | None = None,
    *,
    has_axes: bool = False,
) -> PlannedSeqParams:
    """Returns the plans together with the fields that Megatron's own layers read; `positions` are this rank's."""
    packing = plans.layout.packing
    cu_seqlens = on_device(packing.cu_seqlens, positions.device)
    # Megatron caches tables of rotary angles for the last 32 lengths. Rounded up, packs have few different lengths.
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
    """Returns `params` with plans: unchanged if `shard_batch` made them, else planned for Megatron's own sharding.

    The lengths in Megatron's own `params` are on the device. They are read once a microbatch, by the first layer.

    Args:
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
    cut = getattr(params, "cp_partition_mode", "zigzag")
    if cut != "zigzag" and group.size > 1:
        _refuse(f"cp_partition_mode {cut!r}", f"zigzag, or a batch of {_SHARD_BATCH}, which takes any layout")
    documents = Documents.of(params)
    plans = BatchPlan(documents.layout(group.size, order), lengths=documents.lengths)
    offsets = params.cu_seqlens_q if params.cu_seqlens_q is not None else params.cu_seqlens_q_padded
    found = planned_params(plans, group.rank, offsets.device, own)
    for name in (f.name for f in fields(PackedSeqParams)):
        setattr(found, name, getattr(params, name))
    assert found.positions is not None
    # Only pads have larger positions, for which a table of rotary angles as long as the longest document has no row.
    found.positions = found.positions.clamp(max=max(documents.max_length - 1, 0))
    params.__dict__["_megatron_cp"] = key, found
    return found


@dataclass(frozen=True)
class Documents:
    """The documents of a packed batch.

    Attributes:
        packing: the documents' rows, of which the last ones may be pads.
        lengths: `[num_documents]`, the documents' numbers of tokens without pads; None if there are no pads.
    """

    packing: Packing
    lengths: NDArray[np.int64] | None = None

    @property
    def max_length(self) -> int:
        """The number of tokens of the longest document."""
        return int((self.packing.lengths if self.lengths is None else self.lengths).max())

    @classmethod
    def of(cls, params: PackedSeqParams) -> Documents:
        """Reads the documents of the queries, which must be those of the keys. The host waits for the device.

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
        """Returns the layout of Megatron's own sharding.

        Args:
            order: the unit that is cut into `2 * cp_size` chunks, of which rank r gets chunks r and
                `2 * cp_size - 1 - r`: each "document" or the whole "pack". `PackedSeqParams` does not have it.

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
                "They do not contain whether Megatron cut each document (--sft) or the whole pack "
                "(--dataloader-inter-document-masking) into chunks. "
                "megatron_cp.megatron.config.TransformerConfig derives this from these flags; in another "
                f"configuration set cp_packed_order, or shard the batch with {_SHARD_BATCH}.",
            )
        order = require("packed_order", order, name="--cp-packed-order")  # the attribute may have been set to any value
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
    """Returns the group of Megatron's own batch; None if it has none, or the model's."""
    own = None if params.cp_group is None else TorchGroup(params.cp_group)
    size = models.size if own is None else own.size
    if params.local_cp_size not in (None, size):
        _refuse(f"local_cp_size {params.local_cp_size}", f"{size}, the ranks of its cp_group or of the model's group")
    return None if own is None or is_same_group(own, models) else own


def is_same_group(one: TorchGroup, other: RankGroup) -> bool:
    """True if both groups have the same ranks of the job in the same order."""
    return isinstance(other, TorchGroup) and (
        one.group is other.group or dist.get_process_group_ranks(one.group) == dist.get_process_group_ranks(other.group)
    )


def _version_of(params: PackedSeqParams) -> tuple[tuple[int, int], ...]:
    """Returns a key that changes with the tensors of offsets and with their values."""
    offsets = (getattr(params, name) for name in _OFFSETS)
    return tuple((id(t), 0 if t is None or t.is_inference() else version_of(t)) for t in offsets)


def _read(params: PackedSeqParams) -> list[tuple[Packing, Packing]]:
    """Returns tokens and rows of the documents, for queries and for keys. A tensor that is given twice is read once."""
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
    """Refuses other fields that contradict the documents."""
    total, longest = documents.packing.total, documents.max_length
    if params.total_tokens not in (None, total):
        remedy = "Rows behind the last document are a document too: add their end to cu_seqlens."
        _refuse(f"total_tokens {params.total_tokens} for cu_seqlens up to {total}", str(total), remedy)
    if params.seq_idx is not None and params.total_tokens is None:  # with total_tokens, Megatron has made seq_idx
        numbers = params.seq_idx.flatten().cpu().numpy()
        starts = np.unique(documents.packing.cu_seqlens[1:-1])
        inner = starts[(starts > 0) & (starts < total)]
        if numbers.size != total or not np.array_equal(np.flatnonzero(np.diff(numbers)) + 1, inner):
            _refuse("seq_idx of other documents than cu_seqlens", "the same documents", "Leave seq_idx out.")
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        given = getattr(params, name)
        if given is not None and int(given) < longest:  # tables of rotary angles have this length
            _refuse(f"{name} {int(given)} for a document of {longest} tokens", f"at least {longest}")


def _refuse(given: str, allowed: str, remedy: str = "") -> NoReturn:
    raise ArgumentError("packed_seq_params", given, allowed, remedy)
