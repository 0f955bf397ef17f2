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
        a function of the model's `[b, t]` losses; see `token_loss`. What it logs is each rank's sum times the batch's
        ranks and the tokens of all of them, so that Megatron's evaluation with `--sft`, which is the mean of the ranks'
        own quotients, is the batch's mean too; a batch with a group of its own logs as `token_loss`.
    """
    params: Any = batch.packed_seq_params
    plans = getattr(params, "plans", None)
    if plans is None:  # Megatron's own batch does not know its tokens on all ranks
        return partial(token_loss, batch.loss_mask)
    params.mean_is_of_all_ranks = not config.calculate_per_token_loss
    return partial(_loss_of_all_ranks, batch, config.calculate_per_token_loss)


def _loss_of_all_ranks(
    batch: ShardedBatch, is_per_token: bool, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    params: Any = batch.packed_seq_params
    total, tokens, logged = token_loss(batch.loss_mask, losses)
    whole, everyones = total * params.plans.layout.cp_size, torch.full_like(tokens, batch.num_tokens)
    if params.ranks is None:
        # Megatron's evaluation takes the mean of the ranks' quotients with --sft, else the quotient of their sums: the
        # batch's own, either way. For groups of several sizes no numbers are right for both.
        logged = {name: torch.stack([whole.detach(), everyones.float()]) for name in logged}
    return (total, tokens, logged) if is_per_token else (whole, everyones, logged)


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
