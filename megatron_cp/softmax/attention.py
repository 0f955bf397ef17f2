"""Softmax attention of a packed batch, exact for any mask, document lengths, heads and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError, checked_flag
from megatron_cp.executor.arguments import check_plan
from megatron_cp.executor.autocast import lowered
from megatron_cp.executor.cache import LayerCache
from megatron_cp.executor.groups import Group
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.plan.plan import Plan
from megatron_cp.softmax.kernels import AttentionKernel
from megatron_cp.softmax.on_rank import AttentionOnRank


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group | None = None, *,
    softmax_scale: float | None = None, softcap: float = 0.0, sink: Tensor | None = None, dropout: float = 0.0,
    seed: int | None = None, kernel: str | AttentionKernel = "auto", return_lse: Literal[False] = False,
    cache: LayerCache | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group | None = None, *,
    softmax_scale: float | None = None, softcap: float = 0.0, sink: Tensor | None = None, dropout: float = 0.0,
    seed: int | None = None, kernel: str | AttentionKernel = "auto", return_lse: Literal[True],
    cache: LayerCache | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@no_compile
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    group: Group | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    kernel: str | AttentionKernel = "auto",
    return_lse: bool = False,
    cache: LayerCache | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes softmax attention within each document, over the ranks of `group`; differentiable.

    Args:
        q: `[t, heads, head_dim]`, or `[t, b, heads, head_dim]`: this rank's rows in the plan's layout.
        k: `[s, kv_heads, head_dim]`, or with `b` as q: this rank's keys. s is t; in cross-attention it is the number
            of this rank's rows in the keys' layout.
        v: `[s, kv_heads, value_head_dim]`, or with `b`: the values of the keys.
        plan: from `plan_attention`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        softmax_scale: scores are multiplied by it; `head_dim ** -0.5` if None.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv 2408.00118); 0 for none.
        sink: `[heads]`, a learned score without a value for every head that takes part in every softmax (gpt-oss; all
            zero is the off-by-one softmax). It is the same on every rank; its gradient is this rank's share, to be
            summed. Several sinks a head, `[n, heads]`, equal one sink of `sinks.logsumexp(0)`.
        dropout: the share of weights that are zeroed after the softmax; the others are multiplied by
            `1 / (1 - dropout)`.
        seed: seed of the dropout, at least 0 and the same on every rank. Together with the entry of the batch, the
            head, and the positions of query and key in the packed stream it decides which weights are dropped,
            independently of the number of ranks. Use another one in every layer and step, such as
            `step * num_layers + layer`. None is allowed without dropout only.
        kernel: "auto", a kernel that `megatron-cp doctor` lists, or an `AttentionKernel`.
        return_lse: True to return the log-sum-exp too. In a plan with a head exchange this takes one more small
            collective in each direction.
        cache: the layer's part of a `Cache`, such as `cache.layer(0)`. k and v are then those of the new tokens, in the
            layout of q: they are stored behind the keys of earlier calls, and the queries attend to all of them.

    Returns:
        The output `[t, heads, value_head_dim]` (or with `b`), zero in pad rows and for queries that see no key. With
        `return_lse` also `[t, heads]` (or with `b`), in at least fp32: the natural logarithm of each softmax's
        denominator, whose scores are scaled, capped, and include the sink; dropout has no effect on it. It is -inf in
        pad rows, and without a sink for queries that see no key. It is differentiable; `merge` merges such results.

    Raises:
        ArgumentError: tensors, group, kernel or cache that do not fit the plan, or dropout without a seed. Raised
            before anything is sent.

    Example:
        >>> packing = Packing([3, 1])
        >>> plan = plan_attention(packing, Layout.contiguous(packing, cp_size=1), heads=2, head_dim=4)
        >>> q = k = v = torch.ones(4, 2, 4)
        >>> attention(q, k, v, plan).shape
        torch.Size([4, 2, 4])
    """
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "dropout": dropout, "seed": seed}
    _check_keys(plan)
    q, k, v = lowered(q, k, v)
    lse_gradient = checked_flag("return_lse", return_lse) and torch.is_grad_enabled()
    layer = AttentionOnRank(plan, group, q, sink, kernel, options, lse_gradient=lse_gradient)
    inputs = layer.checked(q, k, v, cache=cache)
    comm = layer.agree("attention", q, k, v, None, return_lse=return_lse, **({} if cache is None else {"cache": True}))
    if cache is not None:
        inputs[1:] = layer.first_shapes(cache.append(layer.ranks.rank, k, v))
    return layer.run_with_lse(comm, inputs) if return_lse else layer.run(comm, inputs)


@no_compile
def projected_attention(
    project: Callable[[list[int], list[int]], tuple[Tensor, Tensor, Tensor]],
    plan: Plan,
    group: Group | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    kernel: str | AttentionKernel = "auto",
) -> Tensor:
    """Computes `attention` and calls `project` for each chunk of heads while the previous chunks are exchanged.

    The projections, and in backward their gradients, overlap with the exchange. A plan without chunks of heads calls
    `project` once.

    Args:
        project: takes the numbers of a chunk's query heads and of its key/value heads, both ascending, and returns q,
            k and v of those heads only, shaped as for `attention`. It is called once for each chunk, in order, with
            the same numbers on every rank. A key/value head may be in several chunks.
        plan, group, softmax_scale, softcap, sink, dropout, seed, kernel: as in `attention`.

    Returns:
        The output of `attention`.

    Raises:
        ArgumentError: as for `attention`, and for a `project` that returns anything but three tensors. Tensors of
            later chunks are checked after the first chunk has been sent.

    Example:
        >>> packing = Packing([3, 1])
        >>> plan = plan_attention(packing, Layout.contiguous(packing, cp_size=1), heads=2, head_dim=4)
        >>> x, weight = torch.ones(4, 8), torch.ones(3, 2, 4, 8)
        >>> def project(heads, kv_heads):
        ...     rows = (weight[0, heads], weight[1, kv_heads], weight[2, kv_heads])
        ...     return tuple((x @ w.flatten(0, 1).T).unflatten(-1, (-1, 4)) for w in rows)
        >>> projected_attention(project, plan).shape
        torch.Size([4, 2, 4])
    """
    _check_keys(plan)

    def projected(chunk: int) -> tuple[Tensor, ...]:
        made = project(*plan.chunk_heads(chunk))
        if not isinstance(made, tuple | list) or len(made) != 3:
            found = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
            raise ArgumentError("project", f"a function that returned {found}", "one that returns q, k and v")
        return lowered(*made)

    first = projected(0)
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "dropout": dropout, "seed": seed}
    layer = AttentionOnRank(plan, group, first[0], sink, kernel, options)
    made = layer.checked(*first, chunk=0)
    comm = layer.agree("projected_attention", *first)

    def inputs(chunk: int) -> list[Tensor]:
        return layer.checked(*projected(chunk), chunk=chunk) if chunk else made

    return layer.run(comm, inputs)


def refuse_selection(plan: Plan) -> None:
    """Raises an error for a plan whose queries choose among the keys that they see."""
    if plan.attend is not None and plan.attend.selection is not None:
        raise ArgumentError("plan", "a plan with topk", "one without", "Call sparse_attention.")


def _check_keys(plan: Plan) -> None:
    check_plan(plan, "attention", "plan_attention")
    refuse_selection(plan)
    if plan.attend is not None and plan.attend.latent is not None:
        raise ArgumentError("plan", "a plan of latents", "one of keys and values", "Call latent_attention.")
