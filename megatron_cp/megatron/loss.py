"""Megatron's loss over ranks with different numbers of tokens, equal to one rank's under both normalisations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_cp.batch.loss import weighted_sum
from megatron_cp.megatron.batch import ShardedBatch
from megatron_cp.megatron.logits import ChunksLogits, chunk_logits


def forward_step(batches: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Runs the model on the next `ShardedBatch`; the forward step for Megatron's schedules.

    With `calculate_per_token_loss` gradients are summed over data- and context-parallel ranks and divided by the global
    number of tokens. Without it they are means over replicas and microbatches of each microbatch's mean, as on one
    rank; see `loss_of`.
    """
    batch: ShardedBatch = next(batches)
    chunk_logits(unwrap_model(model))
    loss = loss_of(batch, get_model_config(model))
    targets = getattr(batch, "targets", None)
    in_chunks = isinstance(unwrap_model(model), ChunksLogits)
    losses = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels if targets is None else targets if in_chunks else None,
        loss_mask=batch.loss_mask,  # for multi-token prediction
        packed_seq_params=batch.packed_seq_params,
    )
    if targets is not None and not in_chunks and unwrap_model(model).post_process:  # logits [1, t, vocabulary]
        logits = losses[0].index_select(0, targets.rows)
        losses = unwrap_model(model).compute_language_model_loss(targets.labels[None], logits[:, None])
    return losses, loss


def loss_of(batch: ShardedBatch, config: Any) -> Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Returns the loss function of a batch, for a forward step of your own. Call it before the model.

    Without `calculate_per_token_loss` Megatron divides the loss by the number of tokens that the loss function returns,
    and takes the mean over all ranks. So the function then returns the rank's sum times the number of ranks of the
    batch, and the number of tokens on all of them. The mean over the ranks is then the microbatch's mean.

    Args:
        batch: from `shard_batch`. One of Megatron's own is not changed, and layers on several ranks refuse it.

    Returns:
        A function of the model's losses `[b, t]`; see `token_loss`. It logs the rank's sum, and the number of tokens on
        all ranks of the batch, divided by the number of these ranks. So sums of both are those of the batch, and
        Megatron's evaluation with `--sft`, which is the mean of the ranks' quotients, is the batch's mean too.
    """
    params: Any = batch.packed_seq_params
    plans = getattr(params, "plans", None)
    if plans is None:  # Megatron's own batch does not have the number of tokens on all ranks
        return partial(token_loss, batch.loss_mask)
    params.has_global_mean = not config.calculate_per_token_loss
    return partial(_loss_of_all_ranks, batch, config.calculate_per_token_loss)


def _loss_of_all_ranks(
    batch: ShardedBatch, is_per_token: bool, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    params: Any = batch.packed_seq_params
    if batch.targets is None:
        total, tokens, logged = token_loss(batch.loss_mask, losses)
    else:
        total, tokens, logged = token_loss(batch.targets.weights[None], losses, batch.targets.copies[None])
    whole, everyones = total * params.plans.layout.cp_size, torch.full_like(tokens, batch.num_tokens)
    # Megatron logs the quotient of the ranks' sums, and evaluates with --sft by the mean of their quotients.
    share = everyones / params.plans.layout.cp_size
    logged = {name: torch.stack([total.detach(), share]) for name in logged}
    return (total, tokens, logged) if is_per_token else (whole, everyones, logged)


def token_loss(
    loss_mask: Tensor, losses: Tensor, copies: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sums one rank's losses and tokens, for Megatron's schedules with `calculate_per_token_loss`.

    Args:
        loss_mask: `[b, t]`, weight of each token's loss.
        losses: `[b, t]`, the model's output.
        copies: how often each loss counts, where documents branch: `ShardedBatch.targets.copies`; None for once.

    Returns:
        The sum of weighted losses; the number of tokens whose weight is not 0; and both, detached, `[2]` in float32,
        under the name of the loss in Megatron's logs. Sum these over microbatches and over data- and context-parallel
        ranks, and divide.
    """
    total, tokens = weighted_sum(losses, loss_mask, copies)
    return total, tokens.int(), {"lm loss": torch.stack([total.detach(), tokens.float()])}
