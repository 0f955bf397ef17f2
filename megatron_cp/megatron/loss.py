"""Megatron's loss over ranks with different numbers of tokens: that of one rank, under both of its normalisations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_cp.batch.loss import weighted_sum
from megatron_cp.megatron.batch import ShardedBatch


def forward_step(batches: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """What Megatron's schedules call for each microbatch, over an iterator of `ShardedBatch`.

    With `calculate_per_token_loss` gradients are summed over data- and context-parallel ranks and divided by the global
    number of tokens, whatever each rank's share of them. Without it they are means over replicas and microbatches of
    each microbatch's mean, as on one rank; see `loss_of`.
    """
    batch: ShardedBatch = next(batches)
    loss = loss_of(batch, get_model_config(model))
    losses = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,  # of multi-token prediction
        packed_seq_params=batch.packed_seq_params,
    )
    return losses, loss


def loss_of(batch: ShardedBatch, config: Any) -> Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """The loss function of a batch, for a forward step of your own. Call it before the model.

    Without `calculate_per_token_loss` Megatron divides what a loss function returns by the number of tokens that it
    returns, and takes the mean over all ranks. So this returns the rank's sum times the context-parallel ranks of the
    batch, and the tokens of all of them, which every rank knows: the mean over the ranks is then the microbatch's.

    Args:
        batch: as `shard_batch` made it. One of Megatron's own is left as it is, and layers on several ranks refuse it.
        config: the model's.

    Returns:
        a function of the model's `[b, t]` losses; see `token_loss`.
    """
    params: Any = batch.packed_seq_params
    plans = getattr(params, "plans", None)
    if config.calculate_per_token_loss or plans is None:  # Megatron's own batch does not know its tokens on all ranks
        return partial(token_loss, batch.loss_mask)
    params.mean_is_of_all_ranks = True
    return partial(_share_of_the_mean, batch.loss_mask, plans.layout.cp_size, batch.num_tokens)


def _share_of_the_mean(
    loss_mask: Tensor, cp_size: int, num_tokens: int, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, tokens, logged = token_loss(loss_mask, losses)
    return total * cp_size, torch.full_like(tokens, num_tokens), logged


def token_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sums of one rank's losses and tokens, as Megatron's schedules take them with `calculate_per_token_loss`.

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
