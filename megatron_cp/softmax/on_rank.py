"""`AttentionOnRank`: one rank's share of a softmax attention, in any scheme.

    layer = AttentionOnRank(plan, group, q, ...)      checks the options, and chooses the kernel
    inputs = layer.checked(q, k, v)                   checks the tensors
    comm = layer.agree("attention", q, k, v)          compares the call with that of other ranks
    out = layer.run(comm, inputs)                     exchanges heads, computes, exchanges heads back

All errors are raised in the first three, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.device import indexed
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import Sections
from megatron_cp.executor.agreement import agree_on_call
from megatron_cp.executor.arguments import check_dense, check_stream, check_tensor, rows_first
from megatron_cp.executor.attend import TileWork, attend, attend_backward
from megatron_cp.executor.cache import LayerCache, checked_cache, refuse_gradients
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import Group, as_rank_group
from megatron_cp.executor.head_exchange import ToTokensInParts
from megatron_cp.executor.kernels import choose_kernel, kernel_name
from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.executor.partials import row_padded_copy
from megatron_cp.executor.run import LayerInputs, LocalWork, run
from megatron_cp.executor.trace import profiling
from megatron_cp.executor.transfers import AttendOnRank, coded_keys, decoded_keys
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.steps import ToTokens
from megatron_cp.softmax.expansion import Absorption, Expansion, absorbed, of_tokens
from megatron_cp.softmax.kernel_work import KernelWork, one_more_feature
from megatron_cp.softmax.kernels import KERNELS, AttentionCall, AttentionKernel
from megatron_cp.softmax.options import checked_options


class AttentionOnRank:
    """A softmax attention on one rank, whose options have been checked. Nothing in it changes after it is made.

    Args:
        plan: from `plan_attention`.
        group: the plan's ranks.
        q: the rank's queries, or some of their heads; other tensors must have the same type, device and batch size.
        sink: `[heads]` or None.
        kernel, options: see `attention`.
        lse_gradient: True if the log-sum-exp has a gradient.

    Attributes:
        ranks: the plan's ranks.
        kv_rank, head_rank: this rank's coordinates: the rank is `kv_rank * ulysses_degree + head_rank`.
        batch: the batch axis of q, if it has one.
        work: the kernel, and the arguments that all its calls share.
        exchanges_heads: True if the plan exchanges heads, so that tensors travel as `[t, (b,) features]`.
    """

    def __init__(
        self, plan: Plan, group: Group | None, q: Tensor, sink: Tensor | None,
        kernel: str | AttentionKernel, options: dict[str, Any], *, lse_gradient: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self.ranks, self.sink = plan, as_rank_group(group, plan.cp_size), sink
        check_dense("q", q)
        rank, heads = self.ranks.rank, plan.sections.blocks[0].num_heads
        self.batch, _ = rows_first(q, int(plan.layout.row_counts[rank]), heads)
        self.like, self.lse_gradient = q, lse_gradient
        call = attention_call(plan, q.dtype, q.device, **options)
        if sink is not None:
            check_tensor("sink", sink, (heads,), like=q)
        chosen = choose_kernel(KERNELS, kernel, call)
        if lse_gradient:
            chosen = _kernel_with_lse_gradient(kernel, call)
        check_stream("q", q.device, plan, chosen)
        self.kernel_name, self.work = kernel_name(kernel), KernelWork(chosen, call)
        self.kv_rank, self.head_rank = divmod(rank, plan.ulysses_degree)
        self.exchanges_heads = isinstance(plan.steps[-1], ToTokens)

    def checked(self, *tensors: Tensor, chunk: int | None = None, cache: LayerCache | None = None) -> list[Tensor]:
        """Checks q, k and v, of all heads or of a chunk's, and returns them shaped for the plan's first step.

        With a cache, k and v are those of the new tokens, in the layout of q.
        """
        rank, blocks = self.ranks.rank, self.plan.sections.blocks
        of_keys = self.plan.kv_layout if cache is None else self.plan.layout
        layouts = (self.plan.layout, of_keys, of_keys)
        heads, groups = (blocks[0].num_heads, blocks[1].num_heads) if chunk is None else (
            len(numbers) for numbers in self.plan.chunk_heads(chunk)
        )  # fmt: skip
        for block, tensor, layout, count in zip(blocks, tensors, layouts, (heads, groups, groups), strict=True):
            check_dense(block.name, tensor)
            rows = int(layout.row_counts[rank])
            shape, remedy = (rows, *self.batch, count, block.head_dim), rows_first(tensor, rows, count)[1]
            check_tensor(block.name, tensor, shape, like=self.like, same_dtype=True, remedy=remedy, layout=layout)
        if cache is not None:
            checked_cache(cache).check_rows(self.plan, tensors[1:])
            refuse_gradients((*tensors, self.sink))
        return self.first_shapes(tensors)

    def first_shapes(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns `[t, (b,) heads, d]` as the plan's first step takes it."""
        return [tensor.flatten(-2) if self.exchanges_heads else tensor for tensor in tensors]

    def agree(
        self, operation: str, q: Tensor, k: Tensor, v: Tensor, up: Tensor | None = None, **more: bool
    ) -> Communicator:
        """Returns the ranks of the call; raises on every rank if another one calls differently."""
        call, sink = self.work.call, self.sink
        numbers = {"softmax_scale": call.scale, "softcap": call.softcap, "dropout": call.dropout}

        def once() -> dict[str, Any]:
            values = {} if sink is None else {"values of sink": sink.detach().cpu().double().tolist()}
            return {**values, **({"seed": call.seed} if call.dropout else {})}

        mark = agree_on_call(
            self.ranks, [self.plan], operation, {"q": q, "k": k, "v": v, "sink": sink, "up": up},
            {**numbers, "kernel": self.kernel_name, **more}, once,
        )  # fmt: skip
        name = f"{mark}, seed {call.seed}" if call.dropout else mark
        return Communicator(self.ranks, self.plan.transport, name, self.plan.scheme, self.plan.tables)

    def run(
        self, comm: Communicator, inputs: LayerInputs, *, up: Tensor | None = None, lses: list[Tensor] | None = None
    ) -> Tensor:
        """Runs the plan's steps. Returns `[t, (b,) heads, value_head_dim]`.

        Args:
            comm: what `agree` returned.
            inputs: tensors shaped for the first step, or a function that returns those of a chunk of heads.
            up: the up-projection of latents, if these travel in place of keys and values.
            lses: the log-sum-exp of each chunk of heads is appended to it.
        """
        of_head_rank = range(self.head_rank, self.ranks.size, self.plan.ulysses_degree)
        key_comm = comm.part(of_head_rank) if len(of_head_rank) > 1 else comm  # one rank sends no rows

        def work(chunk: int) -> dict[str, LocalWork]:
            return {"attend": partial(self._attend, chunk, key_comm, up, lses)}

        (out,) = run(self.plan, comm, inputs, work)
        of_heads = self.plan.out
        return out.unflatten(-1, (of_heads.num_heads, of_heads.head_dim)) if self.exchanges_heads else out

    def run_with_lse(self, comm: Communicator, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """Returns the result of `run`, and the log-sum-exp of its queries, `[t, (b,) heads]`."""
        parts: list[Tensor] = []
        out = self.run(comm, inputs, lses=parts)
        # As [T, (b,) h, 1] it is exchanged like the output, one chunk of heads after another.
        parts = [lse.movedim(-1, 0).unsqueeze(-1).clone(memory_format=torch.contiguous_format) for lse in parts]
        num_tokens = int(self.plan.layout.token_counts[self.ranks.rank])
        if not self.exchanges_heads:
            lse = parts[0].squeeze(-1)
            lse[num_tokens:] = -torch.inf
            return out, lse
        back = ToTokensInParts(_lse_exchange(self.plan), comm)
        for number, part in enumerate(parts):
            back.start(number, part)
        return _BothOrNeither.apply(out, *back.finish(), num_tokens)

    def _attend(
        self, chunk: int, comm: Communicator, up: Tensor | None, lses: list[Tensor] | None,
        q: Tensor, k: Tensor, v: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """Computes a chunk of heads of the queries of this `kv_rank`, over the ranks of this `head_rank`."""
        step = self.plan.chunk_attend(chunk)
        heads = slice(*step.partition.heads[self.head_rank])
        if profiling():
            comm = comm.chunk_comm(chunk, self.plan.head_chunks)
        at = AttendOnRank(step, self.kv_rank, self.head_rank, comm)
        sink = self.sink if self.sink is None else self.sink[heads]
        if step.latent_mode != "absorb":
            out, lse = _Attention.apply(at, self.work, self.lse_gradient, sink, up, q, k, v)
        else:
            assert up is not None
            of_keys, of_values = up[heads].split([up.shape[1] - self.plan.out.head_dim, self.plan.out.head_dim], 1)
            tokens = int(step.queries.token_counts[self.kv_rank])
            q = of_tokens(lambda x: absorbed(x, of_keys), q, tokens)
            out, lse = _Attention.apply(at, self.work, self.lse_gradient, sink, None, q, k, v)
            out = of_tokens(lambda x: torch.einsum("...hr,hvr->...hv", x, of_values), out, tokens)
        if lses is not None:
            lses.append(lse)
        return [out]


def _lse_exchange(plan: Plan) -> Exchange:
    """Returns the plan's exchange from heads to tokens, for one number a head."""
    back = plan.steps[-1]
    assert isinstance(back, ToTokens)
    (out,) = back.exchange.sections.blocks
    sections, chunks = Sections((replace(out, name="lse", head_dim=1),)), len(back.exchange.chunks)
    parts = tuple(sections.chunk(plan.partition, number, chunks) for number in range(chunks))
    return replace(back.exchange, sections=sections, chunks=parts, codec=None)


def _kernel_with_lse_gradient(kernel: str | AttentionKernel, call: AttentionCall) -> AttentionKernel:
    try:
        return choose_kernel(KERNELS, kernel, one_more_feature(call))
    except ArgumentError as error:
        why = "The gradient of the log-sum-exp takes one more value feature."
        raise ArgumentError(error.argument, error.given, error.allowed, f"{error.remedy} {why}") from None


class _BothOrNeither(torch.autograd.Function):
    """Returns the output and the log-sum-exp of this rank's rows, -inf in pad rows.

    Both came by exchanges of their own. Their backward runs on every rank, also where a loss reads only one of them.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        lse = lse.clone()
        lse[num_tokens:] = -torch.inf
        return out, lse

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *gradients, None


def _tile_work(work: KernelWork, step: Attend, up: Tensor | None) -> TileWork:
    """Returns what computes tiles of keys and values, or of latents, by `up` if it is to expand them."""
    if step.latent is None or not step.latent.travels:
        return work
    return Absorption(work) if up is None else Expansion(work, up, step.value_head_dim)


class _Attention(torch.autograd.Function):
    """Attention for this rank's heads and the queries of its `kv_rank`.

    It saves the inputs, the output and its log-sum-exp for backward.

    A sink is one more key with score `sink` and a value of zero, so that it adds to the denominator only. It is
    applied once, to the merged result, and its backward is that of any other key.

        lse' = log(exp(lse) + exp(sink))        O' = O exp(lse - lse')
        dsink = sum over queries of exp(sink - lse') (dlse' - rowsum(dO' * O'))
    """

    @staticmethod
    def forward(
        ctx: Any, at: AttendOnRank, work: KernelWork, lse_gradient: bool, sink: Tensor | None, up: Tensor | None,
        q: Tensor, k: Tensor, v: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.call, step = (at, work, lse_gradient), at.step
        q, k, v = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]  # kernels require it
        codes = coded_keys(step, k, v)
        k, v = (k, v) if codes is None else decoded_keys(step, codes, k.dtype)
        out, lse = attend(at, _tile_work(work, step, up), q, k, v, codes)
        if sink is not None:
            before = row_padded_copy(lse)
            lse = torch.logaddexp(before, sink.to(lse.dtype).unsqueeze(-1), out=row_padded_copy(lse))
            # Both are -inf where a query sees no key and the sink has no weight either.
            out.mul_(_per_query(before.sub_(lse).exp_().nan_to_num_(0.0)).to(out.dtype))
        kept = (k, v) if codes is None else (codes, None)
        ctx.save_for_backward(sink, up, q, *kept, out, lse)
        if not lse_gradient:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # avoids a gradient of zeros for the log-sum-exp
        return out, lse

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        at, kernel_work, lse_gradient = ctx.call
        step = at.step
        sink, up, q, k, v, out, lse = ctx.saved_tensors
        codes = k if step.coded_bytes(q.element_size()) else None
        k, v = (k, v) if codes is None else decoded_keys(step, codes, q.dtype)
        dout, dsink, dup = torch.zeros_like(out) if dout is None else dout, None, None
        if lse_gradient and (dlse is not None or step.tiled is not None):  # ranks agree where tiles are assigned
            dlse = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(lse == -torch.inf, 0)
        if sink is not None:
            num_tokens = int(step.queries.token_counts[at.kv_rank])  # a gradient's pad rows may hold anything
            share = torch.exp(sink.to(lse.dtype).unsqueeze(-1) - lse[..., :num_tokens]).nan_to_num_(0.0)
            terms = _per_query(share) * (dout[:num_tokens].to(lse.dtype) * out[:num_tokens])
            dsink = -terms.sum((*range(terms.ndim - 2), -1))
            if dlse is not None:
                dsink += (share * dlse[..., :num_tokens]).sum((*range(share.ndim - 2), -1))
            dsink = dsink.to(sink.dtype)
        work = _tile_work(kernel_work, step, up)
        dq, dk, dv = attend_backward(at, work, dout, q, k, v, out, lse, dlse, codes)
        if isinstance(work, Expansion):
            dup = torch.zeros_like(work.up) if work.gradient is None else work.gradient.to(work.up.dtype)
        return None, None, None, dsink, dup, dq, dk, dv


def _per_query(x: Tensor) -> Tensor:
    """Returns `[(b,) h, t]` as `[t, (b,) h, 1]`."""
    return x.movedim(-1, 0).unsqueeze(-1)


def prepare_attention(plan: Plan, rank: int, device: torch.device) -> None:
    """Builds the tables that the device's default kernel derives from a plan's tiles, so that no layer has to.

    Call it where the batch is sharded, after `executor.run.prepare`. Another kernel builds its tables in the first
    layer that uses it.
    """
    step = plan.attend
    assert step is not None
    if step.selection is not None:  # computed without these kernels
        return
    device = indexed(device)
    kernel = next(kernel for kernel in KERNELS if device.type in kernel.devices)
    kv_rank = rank // step.num_head_ranks
    for stage in step.all_stages:
        if len(step.tiles(kv_rank, stage).bands):
            kernel.prepare(step.call_tiles(kv_rank, stage), device)
        if stage.remote_queries is not None and len(step.remote_tiles(kv_rank, stage).bands):
            kernel.prepare(step.remote_tiles(kv_rank, stage).cropped_keys, device)


def attention_call(
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: int | None = None,
) -> AttentionCall:
    """Checks the options of an attention and returns the arguments that all its kernel calls share.

    Raises:
        ArgumentError: an invalid scale, soft cap or dropout, or dropout without a seed.
    """
    assert plan.mask is not None
    assert plan.attend is not None
    options = checked_options(
        plan.sections.blocks[0].head_dim, softmax_scale=softmax_scale, softcap=softcap, dropout=dropout, seed=seed
    )
    for_graphs = device.type == "cuda" and plan.tables is not None
    return AttentionCall(
        options.scale, plan.attend.head_dim, plan.attend.value_head_dim, dtype, device, options.softcap,
        options.dropout, options.seed, for_graphs,
    )  # fmt: skip
