"""Shards a microbatch for Megatron: a rank's tokens, labels and positions, and the plans of every layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.batch.branched import Targets
from megatron_cp.batch.shard import shard_batch as local_batch
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.device import moved
from megatron_cp.executor.groups import Group, TorchGroup, as_rank_group, rank_group
from megatron_cp.layout import Layout
from megatron_cp.megatron.layers.refusals import alignment_of
from megatron_cp.megatron.packed_seq_params import PlannedSeqParams, build_params, is_same_group
from megatron_cp.planner.batch import Slot


@dataclass(frozen=True)
class ShardedBatch:
    """A rank's share of a packed microbatch, in the shapes of GPTModel and HybridModel.

    Attributes:
        tokens: `[1, t]` int64 token ids; 0 in pad rows.
        labels: `[1, t]` int64; 0 where the loss mask is 0.
        loss_mask: `[1, t]` float32.
        position_ids: `[1, t]` int64, each row's position in its document, or `[axes, 1, t]` if several axes were given.
        packed_seq_params: the plans and Megatron's own fields.
        num_tokens: number of tokens of the whole batch with a label and a nonzero loss mask.
        pad_rows: number of rows on all ranks that are not tokens.
        targets: where documents branch, the labels and their rows, and `labels` and `loss_mask` are `[1, 0]`: see
            `LocalBatch`, and `forward_step`. None else.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    packed_seq_params: PlannedSeqParams
    num_tokens: int
    pad_rows: int
    targets: Targets | None = None


def layout_options(config: Any) -> dict[str, Any]:
    """Returns the keywords of `layout_by_name` and `choose_layout` that a job's flags require.

    Args:
        config: the model's configuration, or Megatron's parsed arguments.

    Returns:
        `align`, of which every rank's number of rows must be a multiple: the number of tensor-parallel ranks with
        `--sequence-parallel`, times the alignment of matrix products in `--fp8-format` or `--fp4-format` by Megatron's
        own table; and `min_rows`, which is 1, as in `shard_batch`.
    """
    return {"align": alignment_of(config), "min_rows": 1}


def shard_batch(
    tokens: NDArray[np.int64] | Tensor,
    layout: Layout,
    group: Group | None = None,
    *,
    slots: Iterable[Slot] = (),
    labels: NDArray[np.int64] | Tensor | None = None,
    labels_may_be_tokens: bool = False,
    loss_mask: NDArray[np.float32] | Tensor | None = None,
    position_ids: NDArray[np.int64] | Tensor | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    agree: bool = True,
) -> ShardedBatch:
    """Returns this rank's share of a packed microbatch, with the plans of every layer. Call it once a microbatch.

    It is `megatron_cp.shard_batch` in Megatron's shapes: with a leading axis of one sequence, at least one row on every
    rank, and the plans on `packed_seq_params`. It works on the host.

    Args:
        tokens: `[total]`, token ids of the packed stream, on the host.
        layout: the layout of the batch's documents over the ranks.
        group: the context-parallel group, or another group with this rank, over which the layers then run this batch;
            that needs `--calculate-per-token-loss`. None for one rank.
        slots: the kinds of layers, from `slots_of(model)`.
        labels: `[total]`, the token that each token predicts, already shifted, and negative where there is none; None
            for the next token of the document, which the last token does not have.
        labels_may_be_tokens: see `megatron_cp.shard_batch`.
        loss_mask: `[total]`, weight of each token's loss, such as 1 for the answers of SFT and 0 for the questions.
        position_ids: `[axes, total]` integers, positions of several axes, such as the three of `--mrope-section`; None
            for each token's position in its document.
        device: the model's device.
        seed: seed of dropout in attention, combined with the batch's tokens, such as the number of the step, so that a
            repeated batch drops other weights. It is the same on every rank.
        agree: True to compare the plans, the tokens and the seed of all ranks (16 bytes on the host).

    Raises:
        ArgumentError: tensors that do not fit the layout, or a slot that cannot be planned.
        PlanMismatchError: another rank of the group has another batch or other layers.
    """
    layout = layout.padded(align=layout.align, min_rows=1)  # Megatron's reshapes need at least one row
    batch = local_batch(
        tokens, layout, group, slots=slots, labels=labels, labels_may_be_tokens=labels_may_be_tokens,
        loss_mask=loss_mask, device=device, seed=seed, agree=agree,
        ignore_index=0,  # an ignored label must still be in the vocabulary
    )  # fmt: skip
    ranks = as_rank_group(group, layout.cp_size)
    axes = None if position_ids is None else _axes(position_ids, layout, ranks.rank, batch.tokens.device)
    params = build_params(
        batch.plans, batch.position_ids, batch.seed, batch.stream, _own_group(group), has_axes=axes is not None
    )
    return ShardedBatch(
        tokens=batch.tokens.unsqueeze(0),
        labels=batch.labels.unsqueeze(0),
        loss_mask=batch.loss_weights.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0) if axes is None else axes,
        packed_seq_params=params,
        num_tokens=batch.num_tokens,
        pad_rows=batch.pad_rows,
        targets=batch.targets,
    )


def _axes(given: NDArray[np.int64] | Tensor, layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Returns this rank's positions, int64 `[axes, 1, t]`; 0 in pad rows."""
    total = layout.packing.total
    values = torch.from_numpy(np.ascontiguousarray(given)) if isinstance(given, np.ndarray) else given
    is_integral = isinstance(values, Tensor) and not values.is_floating_point() and values.dtype is not torch.bool
    if not is_integral or values.ndim != 2 or values.shape[1] != total or values.device != _HOST:
        shown = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else given
        raise ArgumentError("position_ids", shown, f"integers [axes, {total}], on the host")
    return moved(layout.shard(values.long().T.contiguous(), rank).T[:, None].contiguous(), device)


_HOST = torch.device("cpu")


def _own_group(group: Group | None) -> TorchGroup | None:
    """Returns the batch's group, or None if it is the model's context-parallel group."""
    ranks = None if group is None else rank_group(group)
    if not isinstance(ranks, TorchGroup) or not parallel_state.model_parallel_is_initialized():
        return None
    models = TorchGroup(parallel_state.get_context_parallel_group())
    return None if is_same_group(ranks, models) else ranks
