"""`shard_batch`: turns a pack into each rank's tokens, labels, weights and positions, and the plans of every layer."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.batch.ahead import RowsAhead, Stream
from megatron_cp.batch.branched import Targets, targets_of
from megatron_cp.batch.graph_tables import GraphTables, documents_of, is_padded_to_capacity, pad_to_capacity
from megatron_cp.errors import ArgumentError, checked_flag, checked_integer
from megatron_cp.exchange.device import indexed, moved, on_device
from megatron_cp.executor.agreement import agree_on_batch
from megatron_cp.executor.groups import Group, as_rank_group
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.executor.run import prepare
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.arrays import check_array
from megatron_cp.layout.layout import IGNORE_INDEX
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.batch import BatchPlan, Slot
from megatron_cp.softmax.on_rank import prepare_attention


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """The rows of one rank of a packed batch: its `t` tokens and pad rows in the layout's order.

    Attributes:
        tokens: `[t]` int64 token ids; 0 in pad rows.
        labels: `[t]` int64 target of each token; `ignore_index` where the weight is 0. `[0]` if documents branch: see
            `targets`.
        loss_weights: `[t]` float32 weight of each token's loss; 0 where there is no label, and in pad rows. `[0]` if
            documents branch.
        position_ids: `[t]` int64 position of each row in its document, for rotary phases; 0 in pad rows.
        plans: the plans of every kind of layer.
        seed: seed of dropout in attention: the same on every rank, different in every batch and step.
        num_tokens: tokens of the whole batch, on all its ranks, whose weight is not 0; shared ones as often as
            documents hold them.
        pad_rows: pad rows of all ranks.
        stream: the whole batch, on the host; None if it was sharded into `GraphTables`, or documents branch.
        targets: where documents branch, the labels and their rows; None else, where each row has one label.
    """

    tokens: Tensor
    labels: Tensor
    loss_weights: Tensor
    position_ids: Tensor
    plans: BatchPlan
    seed: int
    num_tokens: int
    pad_rows: int
    stream: Stream | None = field(default=None, repr=False)
    targets: Targets | None = field(default=None, repr=False)

    @property
    def layout(self) -> Layout:
        """The ranks that hold each token."""
        return self.plans.layout

    def plan(self, slot: Slot) -> Plan:
        """Returns the plan of every layer of a kind, made now if `shard_batch` was not given the kind."""
        return self.plans.plan(slot)

    @no_compile
    def ahead(self, places: int) -> RowsAhead:
        """Returns values `places` ahead of each row in its document, for multi-token prediction, without communication.

        Raises:
            ArgumentError: a negative number of places, documents that branch, or a batch in `GraphTables`.
        """
        self.layout.packing.refuse_branches(
            "places", places, "none ahead", "In a tree a token may have several next tokens."
        )
        if self.stream is None:
            raise ArgumentError("into", "GraphTables", "None for a batch from which you need tokens ahead")
        return self.stream.ahead(places)


@no_compile
@torch.inference_mode(False)  # a batch of an evaluation may be trained on later: autograd saves no inference tensor
def shard_batch(
    tokens: NDArray[np.integer] | Tensor,
    layout: Layout,
    group: Group | None = None,
    *,
    slots: Iterable[Slot] = (),
    labels: NDArray[np.integer] | Tensor | None = None,
    labels_may_be_tokens: bool = False,
    loss_mask: NDArray | Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    device: torch.device | str = "cpu",
    seed: int = 0,
    agree: bool = True,
    into: GraphTables | None = None,
) -> LocalBatch:
    """Returns this rank's rows of a packed batch, with the plans of every layer: host work, once a batch.

    Every rank is given the whole batch and keeps its own rows. A rank may have none: its tensors are `[0]`, and it runs
    its model on them like every other rank. `layout.padded(min_rows=1)` is for models that cannot.

    Args:
        tokens: `[total]` integers, the token ids of the packed stream, on the host.
        layout: the ranks that hold each token, over the documents of the batch.
        group: the context-parallel ranks, as many as the layout has; None for one rank.
        slots: the kinds of layers in the model, planned here; see `AttentionSpec` and `LinearSpec`.
        labels: `[total]` integers, the target of each token, already shifted, and negative where there is none; None
            for the next token of its document, which the last one does not have. None if documents branch.
        labels_may_be_tokens: True for models that learn the token at its own place, such as encoders and those that
            fill in masked tokens. Else labels are refused that equal the tokens wherever they count, as do labels
            that nobody shifted, unless the next tokens are the same too. Fewer than 4 such labels may be chance.
        loss_mask: `[total]` finite weight of each token's loss, such as 1 for answers and 0 for questions; None for all
            ones. Tokens without a label have weight 0 in any case.
        ignore_index: the label of rows whose weight is 0; torch's cross entropy skips -100.
        device: the device of the model.
        seed: at least 0, for dropout in attention together with the batch's tokens: the number of the step, so that a
            batch that is repeated drops other weights. The same on every rank.
        agree: compare all ranks' plans, tokens, labels, weights and seed (16 bytes on the host).
        into: for CUDA graphs, the memory of the batch's tables and rows, the same for every batch. `tokens`, `labels`
            and `loss_mask` are those of the documents alone, and `layout` is `into.layout(lengths)`.

    Raises:
        ArgumentError: tensors that do not fit the layout, a group of other ranks, or a slot that cannot be planned.
        PlanMismatchError: another rank of the group has another batch or other layers.

    Example:
        >>> layout = Layout.contiguous(Packing([3, 1, 2]), cp_size=1)
        >>> batch = shard_batch(np.array([10, 11, 12, 20, 30, 31]), layout)
        >>> batch.labels.tolist(), batch.loss_weights.tolist(), batch.position_ids.tolist()
        ([11, 12, -100, -100, 31, -100], [1.0, 1.0, 0.0, 0.0, 1.0, 0.0], [0, 1, 2, 0, 0, 1])
        >>> batch.num_tokens
        3
    """
    if not isinstance(layout, Layout):
        raise ArgumentError("layout", layout, "a layout, such as Layout.zigzag(packing, cp_size)")
    ranks, device = as_rank_group(group, layout.cp_size), _checked_device(device)
    if into is not None and not isinstance(into, GraphTables):
        raise ArgumentError("into", into, "GraphTables, or None")
    if into is None and is_padded_to_capacity(layout):
        remedy = "Otherwise training would use the pads of the pack as tokens."
        raise ArgumentError("into", None, "the GraphTables that made the layout", remedy)
    packing = layout.packing if into is None else documents_of(into, layout)
    seed, ignore_index = checked_integer("seed", seed, 0), checked_integer("ignore_index", ignore_index, -(2**63))
    checked_flag("agree", agree)
    ids = _integers("tokens", tokens, packing)
    targets, weights, counts = _labels_and_weights(ids, labels, loss_mask, packing, labels_may_be_tokens)
    targets = targets.masked_fill(weights == 0, ignore_index)
    plans, mixed = BatchPlan(layout, slots), batch_seed(ids, seed)
    if agree and layout.cp_size > 1:
        given = [("labels", labels, targets), ("loss_weights", loss_mask, weights)]
        compared = {name: stream for name, said, stream in given if said is not None}
        agree_on_batch(ranks, plans, ids, seed, mixed, compared)
    streams = {"tokens": (ids, 0), "labels": (targets, ignore_index), "loss_weights": (weights, 0)}
    tree_targets = targets_of(layout, ranks.rank, device, targets, weights, counts)
    if into is None:
        prepare_plans(plans, ranks.rank, device)
        rows = {
            name: moved(layout.shard(stream, ranks.rank, pad_value=fill), device)
            for name, (stream, fill) in streams.items()
        }
        rows["position_ids"] = local_positions(layout, ranks.rank, device)
        if tree_targets is not None:  # so that no loss takes them for labels of rows
            rows |= {name: rows[name][:0] for name in ("labels", "loss_weights")}
    else:
        host_rows = {
            name: layout.shard(pad_to_capacity(stream, into, layout, fill), ranks.rank).numpy()
            for name, (stream, fill) in streams.items()
        }
        rows = into.load(plans, ranks.rank, device, host_rows | {"position_ids": layout.positions(ranks.rank)})
    return LocalBatch(
        **rows,
        plans=plans,
        seed=mixed,
        num_tokens=int(counts.sum()),
        pad_rows=int(layout.pad_rows.sum()),
        stream=Stream(ids, targets, weights, layout, ranks.rank, device) if into is None and not tree_targets else None,
        targets=tree_targets,
    )


def prepare_plans(plans: BatchPlan, rank: int, device: torch.device) -> None:
    """Makes all tables that a rank's layers derive from the plans of a batch, on the device, before any layer runs."""
    for plan in plans.plans:
        prepare(plan, rank, device)
        if plan.attend is not None:
            prepare_attention(plan, rank, device)


def local_positions(layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Returns `[t]` int64 the position of each of a rank's rows in its document, on the device; 0 in pad rows."""
    return on_device(layout.positions(rank), device, torch.int64)


def _labels_and_weights(
    ids: Tensor, labels: NDArray[np.integer] | Tensor | None, loss_mask: NDArray | Tensor | None, packing: Packing,
    labels_may_be_tokens: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns `[total]` each: labels, weights of their losses, and how often each counts.

    Where documents branch they are at the label's own place, else at that of the token before it.
    """
    given = None if loss_mask is None else _numbers("loss_mask", loss_mask, packing)
    checked_flag("labels_may_be_tokens", labels_may_be_tokens)
    if packing.branches is not None:
        if labels is not None:
            raise ArgumentError("labels", "labels", "None where documents branch: they are each path's next tokens")
        before = torch.from_numpy(packing.branches.predecessors.copy())
        targets, counts = ids, torch.from_numpy(packing.copies()) * (before >= 0)
        weights = counts.float()
        given = None if given is None else given[before.clamp(min=0)]
    else:
        if labels is not None:
            targets = _integers("labels", labels, packing)
            weights = (targets >= 0).float()
            if not labels_may_be_tokens:
                _refuse_tokens(ids, targets, weights if given is None else weights * given, packing)
        else:
            targets, weights = ids.roll(-1), torch.ones(packing.total, dtype=torch.float32, device="cpu")
            weights[torch.from_numpy(packing.cu_seqlens[1:][packing.lengths > 0] - 1)] = 0  # documents' last tokens
        counts = (weights != 0).long()
    return (targets, weights, counts) if given is None else (targets, weights * given, counts * (given != 0))


def _refuse_tokens(ids: Tensor, labels: Tensor, weights: Tensor, packing: Packing) -> None:
    """Refuses labels that are the tokens and not the next ones: a model would learn to repeat its input."""
    counted = weights != 0
    follows = torch.ones(packing.total, dtype=torch.bool, device="cpu")  # a token of the same document
    follows[torch.from_numpy(packing.cu_seqlens[1:][packing.lengths > 0] - 1)] = False
    wrong = counted & follows & (labels != ids.roll(-1))
    if bool((labels == ids)[counted].all()) and int(wrong.sum()) >= _NO_CHANCE:
        given, allowed = "the tokens, wherever they count", "the token after each one"
        remedy = (
            "Shift the labels within each document, or leave them out to train on the next tokens. For a model "
            "that learns the token at its own place, pass labels_may_be_tokens=True."
        )
        raise ArgumentError("labels", given, allowed, remedy)


_NO_CHANCE = 4  # labels that equal their own token and not the next one


def batch_seed(ids: Tensor, seed: int) -> int:
    """Returns a number that all ranks derive equally from a batch and a step, without communication."""
    digest = hashlib.blake2b(f"{seed}:".encode() + ids.numpy().tobytes(), digest_size=4)
    return int.from_bytes(digest.digest(), "little")


def _integers(argument: str, values: NDArray | Tensor, packing: Packing) -> Tensor:
    """Returns `[total]` int64, a copy: a loader may refill its buffer while the batch lives."""
    _check_stream(argument, values, packing, integral=True)
    if isinstance(values, Tensor):
        return values.to(torch.int64, copy=True)
    return torch.from_numpy(np.array(values, np.int64, order="C"))  # a memory-mapped file may be read-only, or unsigned


def _numbers(argument: str, values: NDArray | Tensor, packing: Packing) -> Tensor:
    """Returns `[total]` float32 of weights or booleans."""
    _check_stream(argument, values, packing)
    is_real = not values.is_complex() if isinstance(values, Tensor) else values.dtype.kind in "biuf"
    if not is_real:
        raise ArgumentError(argument, f"{values.dtype}", "real numbers, or truth values")
    if isinstance(values, Tensor):
        weights = values.detach().float()
    else:
        weights = torch.from_numpy(np.array(values, np.float64, order="C")).float()
    if not weights.isfinite().all():
        raise ArgumentError(argument, f"{values.dtype} with {weights[~weights.isfinite()][0].item()}", "finite weights")
    return weights


def _check_stream(argument: str, values: NDArray | Tensor, packing: Packing, *, integral: bool = False) -> None:
    allowed = f"the [{packing.total}] tokens of the batch, on the host"
    check_array(argument, values, packing.total, allowed, integral=integral, packing=packing)
    on_host = isinstance(values, np.ndarray) or values.device.type == "cpu"
    if values.ndim != 1 or not on_host:
        given = f"{list(values.shape)}" if on_host else f"{list(values.shape)} on {values.device}"
        raise ArgumentError(argument, given, allowed)


def _checked_device(device: object) -> torch.device:
    if isinstance(device, torch.device | str | int) and not isinstance(device, bool):
        with contextlib.suppress(RuntimeError):
            return indexed(torch.device(device))
    raise ArgumentError("device", device, "a device of torch, such as 'cpu' or 'cuda'")
