"""`AttentionOnRank` computes one rank's share of a softmax attention, for any scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.device import indexed
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import Sections
from megatron_cp.executor.agreement import agree_on_call
from megatron_cp.executor.arguments import check_dense, check_plan, check_stream, check_tensor, narrow, rows_first
from megatron_cp.executor.attend import TileWork, attend, attend_backward
from megatron_cp.executor.cache import LayerCache, checked_cache, refuse_gradients
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import Group, as_rank_group
from megatron_cp.executor.head_exchange import ToTokensInParts
from megatron_cp.executor.kernels import choose_kernel, kernel_name
from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.executor.partials import row_padded_copy
from megatron_cp.executor.run import Inputs, LocalWork, run
from megatron_cp.executor.trace import profiling
from megatron_cp.executor.transfers import coded_keys, decoded_keys
from megatron_cp.layout.tiles import Tiles
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.head_chunks import HeadChunk
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.steps import ToHeads, ToTokens
from megatron_cp.softmax.expansion import Absorption, Expansion, absorbed, of_tokens
from megatron_cp.softmax.kernels import KERNELS, AttentionCall, AttentionKernel
from megatron_cp.softmax.options import checked_options

_ENTRY_STEP = 2**31 - 1  # between the seeds of a batch's entries: more than callers have layers and steps


class AttentionOnRank:
    """A softmax attention on one rank.

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
        call: the arguments that all kernel calls share.
        up: the up-projection of latents, if these travel in place of keys and values.
    """

    def __init__(
        self, plan: Plan, group: Group | None, q: Tensor, sink: Tensor | None,
        kernel: str | AttentionKernel, options: dict[str, Any], *, lse_gradient: bool = False,
    ) -> None:  # fmt: skip
        check_plan(plan, "attention", "plan_attention")
        self.plan, self.ranks, self.sink = plan, as_rank_group(group, plan.cp_size), sink
        self.kernel_name = kernel_name(kernel)
        check_dense("q", q)
        self.batch, _ = rows_first(q, int(plan.layout.row_counts[self.ranks.rank]), plan.sections.blocks[0].num_heads)
        self.like = q.new_empty(0)  # q's type and device without q, since autograd's graph keeps this object
        self.call = attention_call(plan, q.dtype, q.device, **options)
        if sink is not None:
            check_tensor("sink", sink, (plan.sections.blocks[0].num_heads,), like=q)
        self.kernel, self.lse_gradient = choose_kernel(KERNELS, kernel, self.call), lse_gradient
        if lse_gradient:
            self.kernel = _kernel_with_lse_gradient(kernel, self.call)
        check_stream("q", q.device, plan, self.kernel)
        self.kv_rank, self.head_rank = divmod(self.ranks.rank, plan.ulysses_degree)
        self.exchanged = any(isinstance(step, ToHeads) for step in plan.steps)
        self.up: Tensor | None = None

    def agree(self, operation: str, q: Tensor, k: Tensor, v: Tensor, up: Tensor | None = None, **more: bool) -> None:
        """Raises on every rank if another one calls differently."""
        call, sink = self.call, self.sink
        numbers = {"softmax_scale": call.scale, "softcap": call.softcap, "dropout": call.dropout}

        def once() -> dict[str, Any]:
            values = {} if sink is None else {"values of sink": sink.detach().cpu().double().tolist()}
            return {**values, **({"seed": call.seed} if call.dropout else {})}

        mark = agree_on_call(
            self.ranks, [self.plan], operation, {"q": q, "k": k, "v": v, "sink": sink, "up": up},
            {**numbers, "kernel": self.kernel_name, **more}, once,
        )  # fmt: skip
        name = f"{mark}, seed {call.seed}" if call.dropout else mark
        self.comm = Communicator(self.ranks, self.plan.transport, name, self.plan.scheme, self.plan.tables)

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
        return [tensor.flatten(-2) if self.exchanged else tensor for tensor in tensors]

    def run_with_lse(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Returns the result of `run`, and the log-sum-exp of its queries, `[t, (b,) heads]`."""
        parts: list[Tensor] = []
        out = self.run(inputs, parts)
        # As [T, (b,) h, 1] it is exchanged like the output, one chunk of heads after another.
        parts = [lse.movedim(-1, 0).unsqueeze(-1).clone(memory_format=torch.contiguous_format) for lse in parts]
        num_tokens = int(self.plan.layout.token_counts[self.ranks.rank])
        if not self.exchanged:
            lse = parts[0].squeeze(-1)
            lse[num_tokens:] = -torch.inf
            return out, lse
        back = ToTokensInParts(_lse_exchange(self.plan), self.comm)
        for number, part in enumerate(parts):
            back.start(number, part)
        return _BothOrNeither.apply(out, *back.finish(), num_tokens)

    def run(self, inputs: Inputs, lses: list[Tensor] | None = None) -> Tensor:
        """Runs the plan's steps. Returns `[t, (b,) heads, value_head_dim]`.

        Args:
            inputs: tensors shaped for the first step, or a function that returns those of a chunk of heads.
            lses: the log-sum-exp of each chunk of heads is appended to it.
        """
        (out,) = run(self.plan, self.comm, inputs, self.work(lses))
        of_heads = self.plan.out
        return out.unflatten(-1, (of_heads.num_heads, of_heads.head_dim)) if self.exchanged else out

    def work(self, lses: list[Tensor] | None = None) -> Callable[[int], dict[str, LocalWork]]:
        """Returns a function that maps a chunk of heads to the work between its exchanges, for the executor's `run`."""

        def chunk_work(chunk: int) -> dict[str, LocalWork]:
            step = self.plan.chunk_attend(chunk)
            sink = self.sink if self.sink is None else self.sink[slice(*step.partition.heads[self.head_rank])]
            comm = self.key_comm
            if profiling():
                comm = comm.chunk_comm(chunk, self.plan.head_chunks)

            def computed(*tensors: Tensor) -> list[Tensor]:
                up = self.up if step.latent_mode == "expand" else None
                out, lse = _Attention.apply(self, comm, step, sink, up, *tensors)
                if lses is not None:
                    lses.append(lse)
                return [out]

            def absorbing(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
                assert self.up is not None
                own_queries = step.queries.token_counts
                up, tokens = self.up[slice(*step.partition.heads[self.head_rank])], int(own_queries[self.kv_rank])
                of_keys, of_values = up.split([up.shape[1] - self.plan.out.head_dim, self.plan.out.head_dim], 1)
                (out,) = computed(of_tokens(lambda x: absorbed(x, of_keys), q, tokens), k, v)
                return [of_tokens(lambda x: torch.einsum("...hr,hvr->...hv", x, of_values), out, tokens)]

            return {"attend": absorbing if step.latent_mode == "absorb" else computed}

        return chunk_work

    def tile_work(self, step: Attend, up: Tensor | None) -> TileWork:
        """Returns the object that computes tiles of keys and values, or of latents, by `up` if it is to expand them."""
        if step.latent is None or not step.latent.travels:
            return self
        return Absorption(self) if up is None else Expansion(self, up, step.value_head_dim)

    @cached_property
    def key_comm(self) -> Communicator:
        """The communicator of the ranks with this `head_rank`, which exchange keys and values."""
        return self.comm.part(range(self.head_rank, self.ranks.size, self.plan.ulysses_degree))

    @property
    def unrounded_partials(self) -> bool:
        """True if the kernel writes results, and reads outputs, in a wider type than that of the queries."""
        return self.kernel.unrounded_partials

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, chunk: HeadChunk
    ) -> None:
        """Computes the tiles for a chunk's heads; see `TileWork`."""
        if q.ndim == 3 and len(chunk.runs) == 1:  # the kernel takes all heads at once, and needs no views of them
            self.kernel.forward(out, lse, q, k, v, tiles, self.call, chunk.first_head)
            return
        for entry, heads, groups, call in self._kernel_calls(chunk, q):
            self.kernel.forward(
                _heads_of(out, entry, heads), _lse_of(lse, entry, heads),
                _heads_of(q, entry, heads), _heads_of(k, entry, groups), _heads_of(v, entry, groups),
                tiles, call, chunk.first_head + heads.start,
            )  # fmt: skip

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, dlse: Tensor | None, tiles: Tiles, chunk: HeadChunk,
    ) -> None:  # fmt: skip
        """Computes the gradients of the tiles for a chunk's heads; see `TileWork`."""
        if q.ndim == 3 and len(chunk.runs) == 1:
            self._backward(dq, dk, dv, dout, q, k, v, out, lse, dlse, tiles, self.call, chunk.first_head)
            return
        for entry, heads, groups, call in self._kernel_calls(chunk, q):
            own_dk, own_dv, own_k, own_v = [_heads_of(x, entry, groups) for x in (dk, dv, k, v)]
            own_dq, own_dout, own_q, own_out = [_heads_of(x, entry, heads) for x in (dq, dout, q, out)]
            own_dlse = dlse if dlse is None else _lse_of(dlse, entry, heads)
            self._backward(
                own_dq, own_dk, own_dv, own_dout, own_q, own_k, own_v, own_out, _lse_of(lse, entry, heads), own_dlse,
                tiles, call, chunk.first_head + heads.start,
            )  # fmt: skip

    def _backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, dlse: Tensor | None, tiles: Tiles, call: AttentionCall, first_head: int,
    ) -> None:  # fmt: skip
        """Calls the kernel's backward, which knows no `dlse` `[h, t]`.

        The gradient of a score is `P (dP - rowsum(dout * out) + dlse)`. So one more value feature is added, which is 0
        in v, 1 in dout and `-dlse` in out: it changes nothing but the row sums, also where dout is zero.
        """
        if dlse is None:
            self.kernel.backward(dq, dk, dv, dout, q, k, v, out, lse, tiles, call, first_head)
            return
        if self.unrounded_partials:
            out = out.to(dlse.dtype)
        v, dout = pad(v, (0, 1)), pad(dout, (0, 1), value=1.0)
        out = torch.cat([out, -dlse.T.unsqueeze(-1).to(out.dtype)], -1)
        wide_dv = dv.new_empty(*dv.shape[:-1], v.shape[-1])
        self.kernel.backward(dq, dk, wide_dv, dout, q, k, v, out, lse, tiles, _one_more_feature(call), first_head)
        dv.copy_(wide_dv[..., :-1])

    def _kernel_calls(self, chunk: HeadChunk, q: Tensor) -> Iterator[tuple[int | None, slice, slice, AttentionCall]]:
        """Yields the kernel calls of one stage: one for each run of heads of each entry of the batch.

        Entries differ in the seed of their dropout.
        """
        for heads, groups in chunk.runs:
            if q.ndim == 3:
                yield None, heads, groups, self.call
                continue
            for entry in range(q.shape[1]):
                call = replace(self.call, seed=self.call.seed + entry * _ENTRY_STEP) if self.call.dropout else self.call
                yield entry, heads, groups, call


def _heads_of(x: Tensor, entry: int | None, heads: slice) -> Tensor:
    """Selects heads of one entry of the batch from `[t, (b,) h, d]`."""
    return narrow(x if entry is None else x[:, entry], 1, heads)


def _lse_of(lse: Tensor, entry: int | None, heads: slice) -> Tensor:
    """Selects heads of one entry of the batch from `[(b,) h, t]`."""
    return narrow(lse if entry is None else lse[entry], 0, heads)


def _lse_exchange(plan: Plan) -> Exchange:
    """Returns the plan's exchange from heads to tokens, for one number a head."""
    back = plan.steps[-1]
    assert isinstance(back, ToTokens)
    (out,) = back.exchange.sections.blocks
    sections, chunks = Sections((replace(out, name="lse", head_dim=1),)), len(back.exchange.chunks)
    parts = tuple(sections.chunk(plan.partition, number, chunks) for number in range(chunks))
    return replace(back.exchange, sections=sections, chunks=parts, codec=None)


def _one_more_feature(call: AttentionCall) -> AttentionCall:
    return replace(call, value_head_dim=call.value_head_dim + 1)


def _kernel_with_lse_gradient(kernel: str | AttentionKernel, call: AttentionCall) -> AttentionKernel:
    try:
        return choose_kernel(KERNELS, kernel, _one_more_feature(call))
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
        ctx: Any, layer: AttentionOnRank, comm: Communicator, step: Attend, sink: Tensor | None, up: Tensor | None,
        q: Tensor, k: Tensor, v: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.call = layer, comm, step
        q, k, v = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]  # kernels require it
        codes = coded_keys(step, k, v)
        k, v = (k, v) if codes is None else decoded_keys(step, codes, k.dtype)
        out, lse = attend(step, layer.kv_rank, layer.head_rank, comm, layer.tile_work(step, up), q, k, v, codes)
        if sink is not None:
            before = row_padded_copy(lse)
            lse = torch.logaddexp(before, sink.to(lse.dtype).unsqueeze(-1), out=row_padded_copy(lse))
            # Both are -inf where a query sees no key and the sink has no weight either.
            out.mul_(_per_query(before.sub_(lse).exp_().nan_to_num_(0.0)).to(out.dtype))
        kept = (k, v) if codes is None else (codes, None)
        ctx.save_for_backward(sink, up, q, *kept, out, lse)
        if not layer.lse_gradient:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # avoids a gradient of zeros for the log-sum-exp
        return out, lse

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        layer, comm, step = ctx.call
        sink, up, q, k, v, out, lse = ctx.saved_tensors
        codes = k if step.coded_bytes(q.element_size()) else None
        k, v = (k, v) if codes is None else decoded_keys(step, codes, q.dtype)
        dout, dsink, dup = torch.zeros_like(out) if dout is None else dout, None, None
        if layer.lse_gradient and (dlse is not None or step.tiled is not None):  # ranks agree where tiles are assigned
            dlse = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(lse == -torch.inf, 0)
        if sink is not None:
            num_tokens = int(step.queries.token_counts[layer.kv_rank])  # a gradient's pad rows may hold anything
            share = torch.exp(sink.to(lse.dtype).unsqueeze(-1) - lse[..., :num_tokens]).nan_to_num_(0.0)
            terms = _per_query(share) * (dout[:num_tokens].to(lse.dtype) * out[:num_tokens])
            dsink = -terms.sum((*range(terms.ndim - 2), -1))
            if dlse is not None:
                dsink += (share * dlse[..., :num_tokens]).sum((*range(share.ndim - 2), -1))
            dsink = dsink.to(sink.dtype)
        work = layer.tile_work(step, up)
        dq, dk, dv = attend_backward(
            step, layer.kv_rank, layer.head_rank, comm, work, dout, q, k, v, out, lse, dlse, codes
        )
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
