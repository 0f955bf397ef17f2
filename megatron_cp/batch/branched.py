"""Labels of documents that branch: a token may be followed by several, each of which is a label of its row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.device import moved, on_device
from megatron_cp.layout import Layout
from megatron_cp.layout.packing import IntArray


@dataclass(frozen=True, eq=False)
class LabelRows:
    """The labels that the rows of one rank predict, in documents that branch.

    There is a label for every token of the batch, on the rank that holds the token before it in its path; a first token
    of a path is on its own rank, with weight 0. Their order is that of the rows.

    Attributes:
        rows: `[p]` int64 the row of this rank that predicts each label: index hidden states with it before the head,
            or logits.
        layout: the labels of each rank, as tokens of the stream: `gather(losses, layout, group)` returns `[total]`
            values in the order of the tokens that are predicted.
    """

    rows: Tensor
    layout: Layout


@dataclass(frozen=True, eq=False)
class Targets(LabelRows):
    """The labels of one rank in documents that branch, in place of one label for each row.

    Attributes:
        labels: `[p]` int64; `ignore_index` where the weight is 0.
        weights: `[p]` float32 weight of each label's loss, times the number of documents that hold it.
        copies: `[p]` int64 the number of documents that hold each label whose weight is not 0.
    """

    labels: Tensor
    weights: Tensor
    copies: Tensor


def label_rows(layout: Layout, rank: int, device: torch.device) -> LabelRows | None:
    """Returns the labels of one rank; None if no document branches, where each row has one label."""
    if layout.packing.branches is None:
        return None
    labels = label_layout(layout)
    _, rows = layout.located(sources(layout)[labels.tokens(rank)])
    return LabelRows(on_device(rows, device, torch.int64), labels)


def targets_of(
    layout: Layout, rank: int, device: torch.device, labels: Tensor, weights: Tensor, copies: Tensor
) -> Targets | None:
    """Returns the labels of one rank, from `[total]` each at a label's own place; None if no document branches."""
    at = label_rows(layout, rank, device)
    if at is None:
        return None
    own = (moved(at.layout.shard(stream, rank), device) for stream in (labels, weights, copies))
    return Targets(at.rows, at.layout, *own)


def sources(layout: Layout) -> IntArray:
    """Returns `[total]` the token that predicts each one; a first token of a path itself."""
    assert layout.packing.branches is not None
    before = layout.packing.branches.predecessors
    return np.where(before >= 0, before, np.arange(before.size))


def label_layout(layout: Layout) -> Layout:
    """Returns the layout in which each token is where the token before it in its path is, in the order of rows."""

    def make() -> Layout:
        ranks, rows = layout.located(sources(layout))
        order = np.lexsort((np.arange(rows.size), rows, ranks))
        offsets = np.searchsorted(ranks[order], np.arange(layout.cp_size + 1))
        return Layout(layout.packing, order, order + 1, offsets)

    found: Layout = layout.memo(("labels",), make)
    return found
