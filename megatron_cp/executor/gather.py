"""`gather`: gives every rank all tokens, for per-token losses, log-probabilities and evaluation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError, checked_flag
from megatron_cp.exchange.device import on_device
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.agreement import agree_on_call
from megatron_cp.executor.arguments import accumulation_dtype, check_rows, check_stream
from megatron_cp.executor.communicator import Communicator, direction
from megatron_cp.executor.groups import Group, as_rank_group
from megatron_cp.executor.no_compile import no_compile, no_compile_backward
from megatron_cp.executor.trace import NO_RANGE, profiling
from megatron_cp.layout import Layout
from megatron_cp.layout.memo import remembered
from megatron_cp.plan.transport import COLLECTIVE, Transport, checked_transport


@no_compile
def gather(
    local: Tensor, layout: Layout, group: Group | None, *, same_loss: bool = False,
    transport: Transport | str = COLLECTIVE,
) -> Tensor:  # fmt: skip
    """Returns the packed stream from every rank's rows; differentiable.

    Args:
        local: `[row_counts[rank], ...]` this rank's rows; pad rows are dropped.
        layout: the tokens of each rank.
        group: the ranks of the layout.
        same_loss: the meaning of the gradient. False: the loss is the sum of the losses that ranks compute from their
            copies, and the gradients of all copies are summed (as many bytes as a reduce-scatter). True: every rank
            computes the same loss from its copy, and the gradient is this rank's slice, without communication.
        transport: the algorithm that carries messages; see `plan_attention`.

    Returns:
        `[total, ...]` in stream order, on every rank.

    Raises:
        ArgumentError: rows, layout, group or transport that do not belong together.
    """
    if not isinstance(layout, Layout):
        raise ArgumentError("layout", layout, "a layout, such as Layout.zigzag(packing, cp_size)")
    ranks = as_rank_group(group, layout.cp_size)
    check_rows("local", local, layout, ranks.rank)
    check_stream("local", local.device, layout)
    checked_flag("same_loss", same_loss)
    transport = checked_transport(transport, layout.cp_size)
    options = {"same_loss": same_loss, "transport": transport.describe()}
    mark = agree_on_call(ranks, [layout], "gather", {"local": local}, options)
    return _Gather.apply(local, layout, Communicator(ranks, transport, mark), same_loss)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, comm: Communicator, same_loss: bool) -> Tensor:
        ctx.layout, ctx.comm, ctx.same_loss = layout, comm, same_loss
        ctx.rows = local.shape[0]
        with comm.traced("gather", forward=True) if profiling() else NO_RANGE:
            return _gathered(local, layout, comm)

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with ctx.comm.traced("gather", forward=False) if profiling() else NO_RANGE:
            local = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
            _return_gradient(gradient, local, ctx.layout, ctx.comm, same_loss=ctx.same_loss)
        return local, None, None, None


def _gathered(local: Tensor, layout: Layout, comm: Communicator) -> Tensor:
    # Backends gather equal shares only, so each share is padded to the longest; `_places` skips the padding.
    longest = int(layout.token_counts.max())
    share = comm.buffers.acquire_like(local, longest, *local.shape[1:])
    shares = comm.acquire_like(local, comm.size * longest, *local.shape[1:])
    num_tokens = int(layout.token_counts[comm.rank])
    share[:num_tokens], share[num_tokens:] = local[:num_tokens], 0
    pending = comm.start_all_gather(shares.view(-1), share.view(-1), direction(forward=True))
    with comm.traced("gather wait", forward=True) if profiling() else NO_RANGE:
        pending.wait()
    stream = shares.index_select(0, _places(layout, longest, local.device))
    comm.release(share, shares)
    return stream


def _return_gradient(gradient: Tensor, local: Tensor, layout: Layout, comm: Communicator, *, same_loss: bool) -> None:
    """Writes the gradient of this rank's rows into `local`, which must be zero."""
    num_tokens = int(layout.token_counts[comm.rank])
    order = layout.memo(("order", gradient.device), lambda: on_device(layout.order, gradient.device))
    if same_loss:
        start = int(layout.token_counts[: comm.rank].sum())
        local[:num_tokens] = gradient.index_select(0, order[start : start + num_tokens])
        return
    sent = comm.buffers.acquire_like(gradient, *gradient.shape)
    torch.index_select(gradient, 0, order, out=sent)
    received = comm.acquire_like(gradient, comm.size, num_tokens, *gradient.shape[1:])
    split_counts = _to_owners(layout, math.prod(gradient.shape[1:]))
    pending = comm.start_all_to_all(received.view(-1), sent.view(-1), split_counts, direction(forward=False))
    with comm.traced("gather wait", forward=False) if profiling() else NO_RANGE:
        pending.wait()
    # In rank order and at least fp32, so that the sum is the same on every run and no worse than one rank's.
    acc_dtype = accumulation_dtype(gradient.dtype)
    local[:num_tokens] = received.sum(0, dtype=acc_dtype).to(gradient.dtype)
    comm.release(sent, received)


@remembered
def _to_owners(layout: Layout, features: int) -> SplitCounts:
    """Returns the counts by which every rank sends each rank the gradients of that rank's tokens."""
    return SplitCounts(np.tile(layout.token_counts * features, (layout.cp_size, 1)))


@remembered
def _places(layout: Layout, longest: int, device: torch.device) -> Tensor:
    """Returns `[total]`, the place of each token of the stream among the padded shares."""
    counts = layout.token_counts
    shift = np.repeat(np.arange(layout.cp_size) * longest - (np.cumsum(counts) - counts), counts)
    return on_device((np.arange(layout.packing.total) + shift)[layout.inverse_order], device)
