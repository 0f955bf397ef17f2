"""`sparse_attention`: softmax attention of queries that choose a few of the keys, or blocks of keys, that they see.

DeepSeek-V3.2 has a small indexer that scores all keys before a query, and attends to the best 2,048. Which these are is
known in the middle of a layer, on the device. So no plan can say which keys a rank needs beyond what its queries see:
these travel, as rows of latents or of few key heads and the indexer's key, and queries choose where they arrive.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_cp.errors import ArgumentError, checked_flag
from megatron_cp.executor.agreement import agree_on_call
from megatron_cp.executor.arguments import accumulation_dtype, check_dense, check_plan, check_stream, check_tensor
from megatron_cp.executor.attend import attend, attend_backward
from megatron_cp.executor.autocast import lowered, without_autocast
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import Group, as_rank_group
from megatron_cp.executor.no_compile import no_compile, no_compile_backward
from megatron_cp.executor.transfers import AttendOnRank
from megatron_cp.plan.plan import Plan
from megatron_cp.softmax.options import checked_options
from megatron_cp.softmax.selection_work import SelectionCall, SelectionWork


class SparseOutput(NamedTuple):
    """The results of `sparse_attention` for this rank's rows.

    Attributes:
        out: `[t, heads, value_head_dim]`, zero in pad rows and for queries that attend to no key.
        chosen: `[t, topk]` int32, the places in the packed stream of the keys that each query attends to, -1 for none:
            for layers that share a choice. With blocks `[t, heads, topk]`, the places of their first keys. It is the
            same for every layout and number of ranks.
        index_loss: `[t]` in at least fp32, the divergence of each query, zero in pad rows; None unless asked for.
        lse: `[t, heads]` in at least fp32, the natural logarithm of each softmax's denominator over the chosen keys:
            -inf in pad rows and for queries that attend to no key. It is differentiable; `merge` takes it.
    """

    out: Tensor
    chosen: Tensor
    index_loss: Tensor | None
    lse: Tensor


@no_compile
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    group: Group | None = None,
    *,
    index_q: Tensor | None = None,
    index_k: Tensor | None = None,
    index_weights: Tensor | None = None,
    chosen: Tensor | None = None,
    up: Tensor | None = None,
    softmax_scale: float | None = None,
    index_relu: bool = True,
    index_loss: Literal["sparse", "dense"] | None = None,
) -> SparseOutput:
    """Computes attention of each query to `topk` of the keys that it sees, over the ranks of `group`; differentiable.

    A query chooses the keys of the largest index scores, `sum over heads of index_weights * relu(index_q . index_k)`,
    and the earlier of equal ones; all keys if it sees no more than `topk`. Scores are computed in at least fp32, for a
    block of queries at a time, and in products of one shape, so that every layout and number of ranks chooses alike.
    The choice has no gradient: the indexer learns from `index_loss` alone, as in DeepSeek-V3.2. It runs in torch on
    every device, without kernels of its own.

    With a plan that has a `block`, each query head attends to its own block up to itself, and to the `topk - 1` earlier
    blocks of its document whose mean keys have the largest products with it, the earlier of equal ones, as in mixture
    of block attention (MoBA, arXiv 2502.13189); to all keys up to itself if there are no more blocks than `topk`. That
    choice has no gradient either.

    Args:
        q: `[t, heads, head_dim]`, this rank's rows in the plan's layout.
        k, v: `[s, kv_heads, head_dim]` and `[s, kv_heads, value_head_dim]`, this rank's keys and values. With a plan of
            latents, the shared keys `[s, shared]` and the latents `[s, r]`, which are not expanded: `up` is multiplied
            into queries and outputs.
        plan: from `plan_attention(..., topk=..., indexer=...)`.
        group: see `attention`.
        index_q, index_k, index_weights: with a plan that has an `indexer`, its queries `[t, H, D]` and keys `[s, D]`,
            of the type of q, and the weights of its heads `[t, H]`, of any floating type, into which any scale of the
            scores is multiplied.
        chosen: with a plan that has none, `[t, topk]` integers: the places in the packed stream of the keys of each
            query, in any order, -1 for none. Places that the mask hides from the query, that no token has, and
            repeated ones are left out. With a `block`, `[t, heads, topk]` places of the first keys of blocks, in place
            of the choice by means; the query's own block is then one like any other, and other places are left out too.
        up: `[heads, head_dim - shared + value_head_dim, r]` with a plan of latents; see `latent_attention`. None if the
            caller multiplies it: q is then `[t, heads, r + shared]`, in the space of latents, and so is the output.
        softmax_scale: see `attention`.
        index_relu: False for index scores without relu.
        index_loss: "sparse" to return the divergence `KL(T || softmax of the index scores)` over the chosen keys, and
            "dense" over all keys that a query sees, where T is the mean over heads of the attention's weights, as a
            constant. Its gradient reaches the three tensors of the indexer and no others.

    Raises:
        ArgumentError: tensors, group or plan that do not fit one another. Raised before anything is sent.

    Example:
        >>> packing = Packing([3, 1])
        >>> layout = Layout.contiguous(packing, cp_size=1)
        >>> plan = plan_attention(packing, layout, heads=2, kv_heads=1, head_dim=4, topk=2, indexer=(1, 3))
        >>> q, kv, index = torch.ones(4, 2, 4), torch.ones(4, 1, 4), torch.ones(4, 3)
        >>> indexer = {"index_q": index[:, None], "index_k": index, "index_weights": torch.ones(4, 1)}
        >>> sparse_attention(q, kv, kv, plan, **indexer).chosen.tolist()
        [[0, -1], [0, 1], [0, 1], [3, -1]]
    """
    check_plan(plan, "attention", "plan_attention")
    step = plan.attend
    if step is None or step.selection is None:
        raise ArgumentError("plan", "a plan without topk", "one with", "Plan with topk=, and with indexer=.")
    ranks, relu = as_rank_group(group, plan.cp_size), checked_flag("index_relu", index_relu)
    q, k, v, index_q, index_k, up = _lowered(q, k, v, index_q, index_k, up)
    given: dict[str, Tensor | None] = {"index_q": index_q, "index_k": index_k, "index_weights": index_weights}
    given |= {"chosen": chosen, "up": up}
    _check(plan, ranks.rank, q, {"k": k, "v": v, **given})
    if index_loss is not None and not (isinstance(index_loss, str) and index_loss in ("sparse", "dense")):
        raise ArgumentError("index_loss", index_loss, "sparse, dense or None")
    if index_loss and not step.selection.heads:
        raise ArgumentError("index_loss", index_loss, "None without an indexer", "Plan with indexer=.")
    call = SelectionCall(step, checked_options(step.head_dim, softmax_scale=softmax_scale).scale, relu, index_loss)
    check_stream("q", q.device, plan)
    mark = agree_on_call(
        ranks, [plan], "sparse_attention", {"q": q, "k": k, "v": v, **given},
        {"softmax_scale": call.scale, "index_relu": relu, "index_loss": index_loss},
    )  # fmt: skip
    at = AttendOnRank(step, ranks.rank, 0, Communicator(ranks, plan.transport, mark, plan.scheme))
    if step.latent is None:
        k, v = k.flatten(1), v.flatten(1)
    if index_k is not None:
        v = torch.cat([v, index_k], -1)
    tokens, rows = int(plan.layout.token_counts[ranks.rank]), len(q)
    if up is not None:
        assert step.latent is not None
        own = step.head_dim - step.latent.shared
        q = q[:tokens]  # pad rows, and their gradients, may hold anything
        q = _fill_up(torch.cat([torch.einsum("thn,hnr->thr", q[..., :own], up[:, :own]), q[..., own:]], -1), rows)
    out, found, loss, lse = _Sparse.apply(call, at, q, k.unsqueeze(1), v.unsqueeze(1), index_q, index_weights, chosen)
    if up is not None:
        out = _fill_up(torch.einsum("thr,hvr->thv", out[:tokens], up[:, own:]), rows)
    return SparseOutput(out, found, loss if index_loss else None, lse.T)


def _check(plan: Plan, rank: int, q: Tensor, given: dict[str, Tensor | None]) -> None:
    """Refuses tensors that do not fit the plan, and those that it has no use for."""
    step = plan.attend
    assert step is not None
    assert step.selection is not None
    kv_heads, heads, size = step.selection.kv_heads, step.selection.heads, step.selection.head_dim
    rows, key_rows = (int(each.row_counts[rank]) for each in (plan.layout, plan.kv_layout))
    query_heads = plan.sections.blocks[0].num_heads
    wanted: dict[str, tuple[int, ...]] = {"q": (rows, query_heads, step.head_dim)}
    if step.latent is None:
        wanted |= {"k": (key_rows, kv_heads, step.head_dim), "v": (key_rows, kv_heads, step.value_head_dim)}
    else:
        shared, latent = step.latent[:2]
        wanted |= {"k": (key_rows, shared), "v": (key_rows, latent)}
        if given["up"] is None:
            wanted["q"] = rows, query_heads, latent + shared
        else:
            wanted["up"] = query_heads, step.head_dim - shared + step.value_head_dim, latent
    if heads:
        wanted |= {"index_q": (rows, heads, size), "index_k": (key_rows, size), "index_weights": (rows, heads)}
    check_dense("q", q)
    tensors: dict[str, Any] = {"q": q, **given}
    in_latents = step.latent is not None and given["up"] is None
    for name, shape in wanted.items():
        remedy = "Without up, queries are in the space of latents." if name == "q" and in_latents else ""
        layout = None if name == "up" else plan.layout
        check_tensor(
            name, tensors[name], shape, like=q, same_dtype=name != "index_weights", remedy=remedy, layout=layout
        )  # fmt: skip
    if not heads and (given["chosen"] is not None or not step.selection.block):
        _check_chosen(given["chosen"], step.selection.shape(rows, query_heads), q)
    for name, tensor in given.items():
        if tensor is not None and name not in wanted and (heads or name != "chosen"):
            remedy = _UNUSED.get(name, "Plan with indexer=.")
            raise ArgumentError(name, "a tensor", f"None with {step.selection.describe()}", remedy)


_UNUSED = {"chosen": "The plan's indexer chooses: plan without indexer=.", "up": "Plan with latent=."}


def _fill_up(x: Tensor, rows: int) -> Tensor:
    """Appends pad rows of zeros."""
    return x if len(x) == rows else pad(x, (0, 0, 0, 0, 0, rows - len(x)))


def _lowered(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Casts inputs as autocast says, and leaves None."""
    return tuple(None if tensor is None else lowered(tensor)[0] for tensor in tensors)


def _check_chosen(chosen: object, shape: tuple[int, ...], like: Tensor) -> None:
    check_dense("chosen", chosen)
    assert isinstance(chosen, Tensor)
    if chosen.shape != shape or chosen.dtype not in (torch.int32, torch.int64) or chosen.device != like.device:
        given = f"{chosen.dtype} {list(chosen.shape)} on {chosen.device}"
        raise ArgumentError("chosen", given, f"int32 or int64 {list(shape)} on {like.device}", "-1 is no key.")


class _Sparse(torch.autograd.Function):
    """Attention of a rank's queries to chosen keys. It saves inputs, choice, output and log-sum-exp for backward."""

    @staticmethod
    def forward(
        ctx: Any, call: SelectionCall, at: AttendOnRank, q: Tensor, k: Tensor, v: Tensor,
        index_q: Tensor | None, weights: Tensor | None, chosen: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.call = call, at
        assert call.step.selection is not None
        loss = q.new_zeros(len(q), dtype=accumulation_dtype(q.dtype))
        found = torch.full(call.step.selection.shape(*q.shape[:2]), -1, dtype=torch.int32, device=q.device)
        with without_autocast(q.device):
            work = SelectionWork(call, index_q, weights, chosen, chosen=found, divergence=loss)
            out, lse = attend(at, work, q, k, v)
        ctx.save_for_backward(q, k, v, index_q, weights, found, out, lse)
        ctx.mark_non_differentiable(found)
        ctx.set_materialize_grads(False)
        return out, found, loss, lse

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, dout: Tensor | None, _: None, dloss: Tensor | None, dlse: Tensor | None) -> Any:
        call, at = ctx.call
        q, k, v, index_q, weights, chosen, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = dlse if dlse is None else dlse.masked_fill(lse == -torch.inf, 0)
        work = SelectionWork(call, index_q, weights, chosen, divergence_gradient=dloss if call.loss else None)
        dq, dk, dv = attend_backward(at, work, dout, q, k, v, out, lse, dlse)
        found = work.index_gradients
        if found is None and call.loss:  # no query of this rank sees a key, or its loss was not used
            assert index_q is not None
            found = torch.zeros_like(index_q), torch.zeros_like(weights)
        return None, None, dq, dk, dv, *(found or (None, None)), None
