"""Megatron's per-token loss: sums over all ranks, divided once by the number of tokens that count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_cp.batch.loss import weighted_sum
from megatron_cp.megatron.batch import ShardedBatch


def forward_step(batches: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """What Megatron's schedules call for each microbatch, over an iterator of `ShardedBatch`.

    Needs `calculate_per_token_loss=True`: then gradients are summed over data- and context-parallel ranks and divided
    by the global number of tokens, whatever each rank's share of them. Megatron's other mode divides by each rank's own
    number, which trains something else where shards are uneven.
    """
    batch: ShardedBatch = next(batches)
    losses = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,  # of multi-token prediction
        packed_seq_params=batch.packed_seq_params,
    )
    return losses, partial(token_loss, batch.loss_mask)


def token_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sums of one rank's losses and tokens, as Megatron's schedules take them.

    Args:
        loss_mask: `[b, t]` weight of each token's loss.
        losses: `[b, t]` from the model.

    Returns:
        the sum of weighted losses; the number of tokens whose weight is not 0; and both, detached, `[2]` in float32,
        under the name of the loss in Megatron's logs. Sum these over microbatches and over data- and context-parallel
        ranks, and divide.
    """
    total, tokens = weighted_sum(losses, loss_mask)
    return total, tokens.int(), {"lm loss": torch.stack([total.detach(), tokens.float()])}
