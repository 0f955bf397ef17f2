"""`attention`: softmax attention of a packed batch, exact for any mask, document lengths, heads and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

from torch import Tensor

from megatron_cp.errors import ArgumentError, checked_flag
from megatron_cp.executor.arguments import check_plan
from megatron_cp.executor.autocast import lowered
from megatron_cp.executor.groups import Group
from megatron_cp.executor.opaque import opaque
from megatron_cp.plan.plan import Plan
from megatron_cp.softmax.kernels import AttentionKernel
from megatron_cp.softmax.on_rank import AttentionOnRank


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group | None = None, *,
    softmax_scale: float | None = None, softcap: float = 0.0, sink: Tensor | None = None, dropout: float = 0.0,
    seed: int | None = None, kernel: str | AttentionKernel = "auto", return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group | None = None, *,
    softmax_scale: float | None = None, softcap: float = 0.0, sink: Tensor | None = None, dropout: float = 0.0,
    seed: int | None = None, kernel: str | AttentionKernel = "auto", return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@opaque
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention within each document, over the ranks of `group`; differentiable.

    Args:
        q: `[t, heads, head_dim]` this rank's rows of the plan's layout, or `[t, b, heads, head_dim]`.
        k: `[s, kv_heads, head_dim]`, likewise; s is t, or in cross-attention this rank's rows of the keys' layout.
        v: `[s, kv_heads, value_head_dim]`, likewise.
        plan: from `plan_attention`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        softmax_scale: what scores are multiplied by; `head_dim ** -0.5` if None.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv 2408.00118); 0 for none.
        sink: `[heads]` a learned score without a value, one a head, that takes part in every softmax (gpt-oss; all
            zero is the off-by-one softmax). The same on every rank; its gradient is this rank's share, to be summed.
            Several sinks a head, `[n, heads]`, are one: `sinks.logsumexp(0)`.
        dropout: the share of weights that become zero after the softmax, the others growing by `1 / (1 - dropout)`.
        seed: of the dropout, at least 0: with the entry of the batch, the head and the places of query and key in the
            packed stream it decides which weights, whatever the number of ranks. The same on every rank; give every
            layer and step another one, such as `step * num_layers + layer`. None only without dropout.
        kernel: "auto", a kernel that `megatron-cp doctor` lists, or one of the caller's.
        return_lse: whether to return the log-sum-exp too. Where heads change places it is one small collective more.

    Returns:
        `[t, heads, value_head_dim]` (or with `b`), zero in pad rows and for queries that see no key; and if asked for,
        `[t, heads]` (or with `b`) in at least fp32 the natural logarithm of each softmax's denominator: of the scores
        after scale and soft cap, the sink among them, before dropout; -inf in pad rows, and without a sink for
        queries that see no key. No gradient flows through it.

    Raises:
        ArgumentError: tensors, group or kernel that do not fit the plan, or dropout without a seed. Raised before
            anything is sent.

    Example:
        >>> packing = Packing([3, 1])
        >>> plan = plan_attention(packing, Layout.contiguous(packing, cp_size=1), heads=2, head_dim=4)
        >>> q = k = v = torch.ones(4, 2, 4)
        >>> attention(q, k, v, plan).shape
        torch.Size([4, 2, 4])
    """
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "dropout": dropout, "seed": seed}
    q, k, v = lowered(q, k, v)
    layer = AttentionOnRank(plan, group, q, sink, kernel, options)
    inputs, with_lse = layer.checked(q, k, v), checked_flag("return_lse", return_lse)
    layer.agree("attention", q, k, v, return_lse=with_lse)
    return layer.run_with_lse(inputs) if with_lse else layer.run(inputs)


@opaque
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
    """`attention` of queries, keys and values that are made chunk by chunk, while the chunks before travel.

    So the projections hide behind the exchange, and in backward theirs do. Without chunks of heads it is one call.

    Args:
        project: takes the numbers of a chunk's query heads and of its key/value heads, each rising, and returns q, k
            and v of those heads alone, else as `attention` takes them. Called once a chunk, in order, on every rank
            with the same numbers. A key/value head may come in several chunks.
        plan, group, softmax_scale, softcap, sink, dropout, seed, kernel: as of `attention`.

    Returns:
        What `attention` does.

    Raises:
        ArgumentError: as `attention` does, and for a `project` that returns anything else; of later chunks' tensors
            when the first has been sent.

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
    check_plan(plan, "attention", "plan_attention")
    if not callable(project):
        raise ArgumentError("project", project, "a function that returns q, k and v")

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
    layer.agree("projected_attention", *first)

    def inputs(chunk: int) -> list[Tensor]:
        return layer.checked(*projected(chunk), chunk=chunk) if chunk else made

    return layer.run(inputs)
