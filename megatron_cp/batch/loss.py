"""`token_loss`: the mean over the tokens of all ranks, with each rank's own share of its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.batch.ranks import ranks_of
from megatron_cp.batch.shard import LocalBatch
from megatron_cp.errors import ArgumentError, checked_flag, checked_integer
from megatron_cp.executor.agreement import agree_on_call
from megatron_cp.executor.arguments import DTYPES, check_dense
from megatron_cp.executor.groups import Group, RankGroup
from megatron_cp.executor.no_compile import no_compile, no_compile_backward


@no_compile
def token_loss(
    losses: Tensor,
    weights: LocalBatch | Tensor,
    group: Group | None = None,
    *,
    num_tokens: int | None = None,
    averaged_gradients: bool = False,
) -> Tensor:
    """Returns the sum of all ranks' weighted losses, divided once by the number of tokens that count.

    A token counts if its weight is not 0. That number is summed over ranks like the losses, so that the number of
    tokens of each rank does not matter: a mean of the ranks' own means would be another loss. The value is the same on
    every rank. Its gradient is each rank's own share: that of the weighted sum of *its* losses, over the number of
    tokens of all ranks. The sum of all ranks' gradients of a parameter is what one process would compute.

        loss = (sum over ranks, tokens of weight * loss) / max(number of tokens with weight != 0, 1)

    Losses without a token that counts are therefore 0, with gradients of 0. The loss of a token of weight 0 is ignored,
    and may be anything, including NaN. Every rank calls this, in each microbatch, also a rank without rows.

    Args:
        losses: `[t]` loss of each of this rank's rows, not reduced: `cross_entropy(..., reduction="none")`. With a
            tensor of weights they may have any shape that the weights have too. Where documents branch `[p]`, the loss
            of each label, from the logits of `targets.rows`; tokens count as often as documents hold them.
        weights: the result of `shard_batch`, its `loss_weights`, or other constants. Where documents branch give the
            batch, or `num_tokens=batch.num_tokens` too: constants do not say how many documents hold a label.
        group: the ranks that gradients are summed (or averaged) over: the context-parallel group or, with data
            parallelism too, the group of all ranks of both. None for one rank, which is refused in a world of several.
        num_tokens: the divisor, the same on every rank, instead of the number of tokens that count here. For a step of
            several microbatches: the sum of their `LocalBatch.num_tokens`, over all replicas if there are any.
        averaged_gradients: the gradients of parameters are averaged over the ranks of `group`, as by
            DistributedDataParallel and FSDP, and not summed, as by `reduce_gradients`. The gradient of this loss, not
            its value, is then multiplied by the number of ranks.

    Returns:
        a scalar, in at least float32.

    Raises:
        ArgumentError: losses and weights of other shapes or places, weights that need a gradient, or a group that has
            no multiple of the ranks that the batch was sharded over.
        CallMismatchError: another rank calls with other types or options.

    Example:
        >>> losses = torch.tensor([3.0, 1.0, 5.0, 2.0], requires_grad=True)
        >>> loss = token_loss(losses, torch.tensor([1.0, 0.5, 0.0, 0.0]))
        >>> loss.backward()
        >>> loss.item(), losses.grad.tolist()
        (1.75, [0.5, 0.25, 0.0, 0.0])
    """
    ranks = ranks_of(group)
    targets = weights.targets if isinstance(weights, LocalBatch) else None
    copies = None if targets is None else targets.copies
    weights = _checked_weights(losses, weights, ranks)
    if num_tokens is not None:
        num_tokens = checked_integer("num_tokens", num_tokens, 0)
        if losses.is_cuda and torch.cuda.is_current_stream_capturing():
            remedy = (
                "A graph would divide the losses of every pack by this number. With None, the graph counts the tokens."
            )
            raise ArgumentError("num_tokens", num_tokens, "None in a stream that is being captured", remedy)
    checked_flag("averaged_gradients", averaged_gradients)
    options = {"num_tokens": "given" if num_tokens is not None else None, "averaged_gradients": averaged_gradients}
    mark = agree_on_call(
        ranks, [], "token_loss", {"losses": losses.flatten()}, options,
        lambda: {"value of num_tokens": num_tokens},
    )  # fmt: skip
    if num_tokens is not None:
        # In the name of the message, so that groups which compare names refuse another rank's number.
        mark = f"{mark}, num_tokens {num_tokens}"
    factor = ranks.size if averaged_gradients else 1
    loss: Tensor = _GlobalMean.apply(*weighted_sum(losses, weights, copies), ranks, num_tokens, factor, mark)
    return loss


def weighted_sum(losses: Tensor, weights: Tensor, copies: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the sum of one rank's weighted losses, in at least float32 and differentiable, and how many count, int64.

    Each counts once if its weight is not 0, or as often as `copies` says.
    """
    acc_dtype = torch.promote_types(losses.dtype, torch.float32)
    # Masked, since 0 times an infinite loss is not 0.
    counted = losses.to(acc_dtype).masked_fill(weights == 0, 0)
    return (counted * weights).sum(), torch.count_nonzero(weights) if copies is None else copies.sum()


class _GlobalMean(torch.autograd.Function):
    """Computes the mean from every rank's sum and count; backward returns this rank's share of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, own_sum: Tensor, own_count: Tensor, ranks: RankGroup, num_tokens: int | None, factor: int, mark: str
    ) -> Tensor:
        own = torch.stack([own_sum.double(), own_count.double()])
        gathered = own.new_empty(2 * ranks.size)
        ranks.activity = f"{mark}, forward"
        ranks.all_gather(gathered, own)
        total, count = gathered.view(ranks.size, 2).sum(0)
        divisor = (count if num_tokens is None else torch.full_like(count, num_tokens)).clamp(min=1)
        ctx.share = factor / divisor
        return (total / divisor).to(own_sum.dtype)

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return (gradient * ctx.share).to(gradient.dtype), None, None, None, None, None


def _checked_weights(losses: Tensor, weights: LocalBatch | Tensor, ranks: RankGroup) -> Tensor:
    """Returns the weights of these losses, from the batch if one is given, after checking both."""
    check_dense("losses", losses)
    if losses.dtype not in DTYPES or losses.ndim == 0:
        given = f"{losses.dtype} {list(losses.shape)}"
        remedy = "Do not reduce them: cross_entropy(..., reduction='none')."
        raise ArgumentError("losses", given, "one number of a floating type for each row", remedy)
    if isinstance(weights, LocalBatch):
        row_weights = weights.loss_weights if weights.targets is None else weights.targets.weights
        cp_size, weights = weights.layout.cp_size, row_weights
        if ranks.size % cp_size:
            remedy = "With data parallelism too, pass the group of all ranks of both."
            raise ArgumentError("group", f"{ranks.size} ranks", f"the {cp_size} that the batch is for", remedy)
        if losses.shape != weights.shape or losses.device != weights.device:
            given, allowed = f"{list(losses.shape)} on {losses.device}", f"{list(weights.shape)} on {weights.device}"
            raise ArgumentError(
                "losses", given, f"{allowed}, the rows of the batch", "Flatten them if they have more axes."
            )
        return weights
    if not isinstance(weights, Tensor):
        raise ArgumentError("weights", weights, "what shard_batch returned, or a tensor")
    check_dense("weights", weights)
    if losses.shape != weights.shape or losses.device != weights.device or weights.is_complex():
        given = f"{weights.dtype} {list(weights.shape)} on {weights.device}"
        raise ArgumentError("weights", given, f"real numbers {list(losses.shape)} on {losses.device}, as losses are")
    if weights.requires_grad:
        raise ArgumentError("weights", "a tensor that needs a gradient", "constants", "Use weights.detach().")
    return weights
