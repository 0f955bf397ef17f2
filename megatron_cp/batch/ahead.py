"""Rows that lie ahead of each token in its document, for models that predict several tokens at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_cp.errors import checked_integer
from megatron_cp.exchange.device import moved
from megatron_cp.layout import Layout


@dataclass(frozen=True, eq=False)
class RowsAhead:
    """Values of one rank's rows some places ahead in the document; 0 past its end, and in pad rows.

    Attributes:
        tokens: `[t]` int64 token ids.
        labels: `[t]` int64 labels.
        loss_weights: `[t]` float32 weights of the labels.
        position_ids: `[t]` int64 position in the document.
        total_weight: the sum of the weights of all ranks.
    """

    tokens: Tensor
    labels: Tensor
    loss_weights: Tensor
    position_ids: Tensor
    total_weight: float

    def as_sequence(self) -> RowsAhead:
        """Adds a leading axis of one sequence: `[1, t]`."""
        tokens, labels, weights, positions = self.tokens, self.labels, self.loss_weights, self.position_ids
        return RowsAhead(tokens[None], labels[None], weights[None], positions[None], self.total_weight)


@dataclass(frozen=True, eq=False)
class Stream:
    """A whole packed batch on the host, with its layout.

    Attributes:
        tokens: `[total]` int64.
        labels: `[total]` int64, already shifted.
        loss_weights: `[total]` float32.
        rank: the rank whose rows `ahead` returns.
    """

    tokens: Tensor
    labels: Tensor
    loss_weights: Tensor
    layout: Layout
    rank: int
    device: torch.device

    def ahead(self, places: int) -> RowsAhead:
        """Returns this rank's rows `places` ahead of each token, within its document, without communication.

        Raises:
            ArgumentError: a negative number of places.
        """
        places = checked_integer("places", places, 0)
        packing = self.layout.packing
        ends = torch.from_numpy(np.repeat(packing.cu_seqlens[1:], packing.lengths))
        index = torch.arange(packing.total, device="cpu") + places
        inside = index < ends
        index = index.where(inside, 0)
        starts = torch.from_numpy(np.repeat(packing.cu_seqlens[:-1], packing.lengths))
        positions = torch.arange(packing.total, device="cpu") - starts + places
        labels, weights = self.labels[index] * inside, self.loss_weights[index] * inside
        streams = {"tokens": self.tokens[index] * inside, "labels": labels, "loss_weights": weights}
        streams["position_ids"] = positions * inside
        rows = {
            name: moved(self.layout.shard(stream, self.rank, pad_value=0), self.device)
            for name, stream in streams.items()
        }
        return RowsAhead(**rows, total_weight=float(weights.sum(dtype=torch.float64)))
