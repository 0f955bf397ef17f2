"""`LinearOnRank`: one rank's share of a linear layer, in every mode.

    layer = LinearOnRank(plan, group, kernel, "v", v)     checks the type and the device, and chooses the kernels
    comm = layer.agree("gated_delta_net", tensors)        compares the call with that of other ranks
    out = layer.run(comm, tensors, conv=, gates=, rule=)  exchanges, computes the local work, exchanges back

The operation checks its own tensors between the first two.

Headwise a rank has all tokens and its own heads, and pieces are whole documents. Chunkwise it has its own tokens and
all heads, and pieces are segments, whose convolution and state continue from rank to rank. The local work of a layer
(its convolution, its gates, its rule) is written once, with a `LinearChunk`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.device import on_device
from megatron_cp.exchange.sections import Section
from megatron_cp.executor.agreement import agree_on_call
from megatron_cp.executor.arguments import accumulation_dtype, check_dense, check_stream, check_tensor
from megatron_cp.executor.cache import LayerCache, StateShape, checked_cache, refuse_gradients
from megatron_cp.executor.communicator import Communicator, over
from megatron_cp.executor.groups import Group, as_rank_group
from megatron_cp.executor.halo import start_halo
from megatron_cp.executor.kernels import kernel_name
from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.executor.run import LocalWork, run
from megatron_cp.executor.scan import LocalScan, continued_scan, scan
from megatron_cp.layout import Layout
from megatron_cp.layout.segments import LocalSegments, Segments
from megatron_cp.linear.kernels import (
    ConvKernel,
    Inputs,
    LinearCall,
    LinearKernel,
    RuleKernel,
    ScanWork,
    choose_conv,
    choose_rule,
)
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan

_STATE = "state"  # the name of the recurrence's state in a cache, beside those of sections


class ChosenKernels(NamedTuple):
    """The kernels of one chunk of heads, None for work that the kind does not have, and the calls that they are for."""

    call: LinearCall
    rule_call: LinearCall
    conv: ConvKernel | None
    rule: RuleKernel | None


class LinearOnRank:
    """A linear layer on one rank. Nothing in it changes after it is made.

    Args:
        plan: from `plan_linear`.
        group: the plan's ranks.
        kernel: the kernel of the recurrence, and of the convolution if one has the same name.
        name, values: name and tensor of the argument that sets the type and the device of the layer's values.
        cache: the states of earlier calls, which the layer continues and replaces; None to begin with zero.
        convolves: True if the layer has a convolution, whose last inputs belong to the cached states.

    Attributes:
        ranks: the plan's ranks.
        rows, tokens: numbers of rows of this rank's local tensors, with and without pad rows.
        is_chunkwise: True if the plan keeps tokens where they are, and exchanges states.
        steps: the plan's, or for CUDA graphs the same over the stream as one document.
        kernels: those of each chunk of heads.

    Raises:
        ArgumentError: values, group, kernel or cache that do not fit the plan.
    """

    def __init__(
        self, plan: Plan, group: Group | None, kernel: str | LinearKernel, name: str,
        values: Tensor, cache: LayerCache | None = None, *, convolves: bool = False,
    ) -> None:  # fmt: skip
        check_dense(name, values)
        self.plan, self.ranks, self.cache = plan, as_rank_group(group, plan.cp_size), cache
        self.rank, self.kernel_name = self.ranks.rank, kernel_name(kernel)
        self.rows, self.tokens = int(plan.layout.row_counts[self.rank]), int(plan.layout.token_counts[self.rank])
        self.is_chunkwise = bool(plan.recurrent_steps)
        tables = None if plan.tables is None else plan.tables.linear
        self.steps: tuple[Any, ...] = plan.steps if tables is None else tables.get("steps", plan.steps)
        self.states: Mapping[str, StateShape] = {}
        if cache is not None:
            if self.is_chunkwise and tables is not None:
                remedy = "Plan the layer headwise, or shard the batch without into."
                raise ArgumentError("cache", "a cache", "None for a chunkwise layer over GraphTables", remedy)
            self.states = _state_shapes(plan, values.dtype, convolves=convolves)
            checked_cache(cache).check_states(plan, self.states, values)
        self.kernels = [self._chosen_kernels(chunk, kernel, values) for chunk in range(plan.head_chunks)]
        chosen = [each for of_chunk in self.kernels for each in (of_chunk.conv, of_chunk.rule) if each is not None]
        for each in chosen:
            if self.kernels[0].call.streams and not each.serves_graphs:
                remedy = "It reads each document's own segments: leave the choice to kernel='auto'."
                raise ArgumentError("kernel", each.name, "one that serves graphs, chunkwise over GraphTables", remedy)
        check_stream(name, values.device, plan, *chosen)

    def _chosen_kernels(self, chunk: int, kernel: str | LinearKernel, values: Tensor) -> ChosenKernels:
        kind, continued = KINDS[self.plan.kind], self.cache is not None
        call = linear_call(self.plan, self._blocks(chunk), self.rank, values.dtype, values.device, continued=continued)
        rule = choose_rule(kernel, call) if kind.has_state else None
        conv = choose_conv(kernel, call) if kind.convolved else None
        return ChosenKernels(call, call.with_steps(self.plan.steps_a_token), conv, rule)

    def _blocks(self, chunk: int) -> tuple[Section, ...]:
        """Returns the sections, with the ranges of heads of a chunk."""
        return self.plan.sections.chunk(self.plan.partition, chunk, self.plan.head_chunks).blocks

    def agree(self, operation: str, tensors: Mapping[str, Tensor | None], **options: Any) -> Communicator:
        """Returns the ranks of the call; raises on every rank if another one calls differently."""
        options["kernel"] = self.kernel_name
        if self.cache is not None:
            refuse_gradients(tensors.values())
            options["cache"] = True
        mark = agree_on_call(self.ranks, [self.plan], operation, tensors, options)
        comm = Communicator(self.ranks, self.plan.transport, mark, self.plan.scheme, self.plan.tables)  # may refuse
        if self.cache is not None:
            self.cache.begin_states(self.rank, self.states, next(x for x in tensors.values() if x is not None))
        return comm

    def run(
        self, comm: Communicator, tensors: list[Tensor], *, conv: LocalWork | None = None,
        gates: LocalWork | None = None, rule: LocalWork | None = None,
    ) -> Tensor:  # fmt: skip
        """Runs the plan's steps, and this rank's work between them.

        The first argument of the work is the `LinearChunk` that it is for.

        Args:
            comm: what `agree` returned.
            tensors: `[rows, f]` each; their features end to end are the plan's sections.
            conv: takes the tensors that arrived and returns `[T, h, d]` for each section. None for a kind without a
                convolution, whose gates take the tensors that arrived.
            gates: takes the result of `conv` and returns the arguments of `rule`.
            rule: returns a list of one `[T, h, dv]`.

        Returns:
            `[rows, h, dv]`, zero in pad rows.
        """
        named = {"conv": conv, "gates": gates, "rule": rule}

        def work(chunk: int) -> dict[str, LocalWork]:
            own = self.chunk(comm, chunk)
            return {name: partial(each, own) for name, each in named.items() if each}

        (out,) = run(self.plan, comm, tensors, work)
        if self.cache is not None:
            self.cache.end_step()
        if self.is_chunkwise and self.rows > self.tokens:
            out = F.pad(out, (0, 0) * (out.ndim - 1) + (0, self.rows - self.tokens))
        last = self.plan.out
        return out if out.ndim == 3 else out.unflatten(-1, (last.num_heads, last.head_dim))

    def chunk(self, comm: Communicator, number: int) -> LinearChunk:
        """Returns a chunk of heads."""
        partition, head_rank = self.plan.chunk_partition(number), self.rank % self.plan.ulysses_degree
        (first, last), key_heads = partition.heads[head_rank], slice(*partition.groups[head_rank])
        groups = [head // partition.heads_per_group - key_heads.start for head in range(first, last)]
        heads = slice(first, last)
        return LinearChunk(self, comm, self._blocks(number), heads, key_heads, groups, *self.kernels[number])


class LinearChunk(NamedTuple):
    """A chunk of a layer's heads on one rank, with what the local work needs.

    Attributes:
        layer: the layer.
        comm: the ranks, and the transport between them.
        blocks: the sections, with the ranges of heads of this chunk.
        heads, key_heads: slices of the heads that this rank computes, and of the key heads that it has.
        groups: for each head of this rank, the number of its key head among those of this rank.
        call, rule_call: the arguments that all calls of the convolution's kernel share, and of the recurrence's.
        conv, rule: the kernels.
    """

    layer: LinearOnRank
    comm: Communicator
    blocks: tuple[Section, ...]
    heads: slice
    key_heads: slice
    groups: list[int]
    call: LinearCall
    rule_call: LinearCall
    conv: ConvKernel | None
    rule: RuleKernel | None

    def sections(self, *arrived: Tensor) -> list[Tensor]:
        """Returns the tensors that arrived as one `[T, h, d]` for each section."""
        return self._split(arrived, self.blocks) if self.layer.is_chunkwise else list(arrived)

    def of_heads(self, x: Tensor) -> Tensor:
        """Expands `[T, g, d]` of key heads to `[T, h, d]` of the heads that share them."""
        if self.groups == list(range(x.shape[1])):
            return x
        # The gradient of indexing would be a zero-filled copy of all heads for each index; that of unbind is not.
        by_key_head = x.unbind(1)
        return torch.stack([by_key_head[group] for group in self.groups], 1) if self.groups else x[:, :0]

    def convolved(
        self, arrived: Sequence[Tensor], weight: Tensor, bias: Tensor | None, *, count: int, silu: bool = True
    ) -> list[Tensor]:
        """Returns `sections` with the first `count`, which were one tensor, convolved with taps `[c, width]`."""
        blocks, plan = self.blocks[:count], self.layer.plan
        assert self.conv is not None
        if self.layer.is_chunkwise:
            x, *rest = arrived
            y = self._convolved_segments(x[: self.layer.tokens], weight, bias, blocks, silu=silu)
            return [*self._split([y], blocks, cut=False), *self._split(rest, self.blocks[count:])]
        weights = self.local_channels(weight, blocks)
        biases: Sequence[Tensor | None] = [None] * count if bias is None else self.local_channels(bias, blocks)
        done = []
        for x, block, local_weight, local_bias in zip(arrived[:count], blocks, weights, biases, strict=True):
            if not x.numel():
                done.append(connected(x, local_weight, *([] if local_bias is None else [local_bias])))
                continue
            flat, history = x.flatten(1), None
            if self.call.segments is not None and plan.conv_width > 1:
                continued = self.layer.cache is not None
                halo = Halo(_on_one_rank(plan), plan.conv_width, flat.shape[1], continued)
                flat, history = start_halo(halo, as_rank_group(None, 1), flat)
                history = self._continued_history(halo, 0, history, [block]) if continued else history
            y = self.conv.conv(flat, local_weight, local_bias, self.call, silu=silu, history=history)
            done.append(y.to(x.dtype).view(x.shape))
        return [*done, *arrived[count:]]

    def _convolved_segments(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: Sequence[Section], *, silu: bool
    ) -> Tensor:
        assert self.conv is not None
        halo = next(step for step in self.layer.steps if isinstance(step, Halo))
        history, cache = None, self.layer.cache
        if halo.reach:
            halo = halo if cache is None else replace(halo, continued=True)
            x, history = start_halo(halo, self.comm, x)
            history = history if cache is None else self._continued_history(halo, self.layer.rank, history, blocks)
        if not len(x):
            others = [weight, *([] if bias is None else [bias]), *([] if history is None else [history()])]
            return connected(x, *others)
        return self.conv.conv(x, weight, bias, self.call, silu=silu, history=history).to(x.dtype)

    def _continued_history(
        self, halo: Halo, rank: int, wait: Callable[[], Tensor], blocks: Sequence[Section]
    ) -> Callable[[], Tensor]:
        """Returns a function that adds the cached inputs of the convolution to those that arrive, and replaces them.

        Args:
            halo: the halo, which is `continued`, of the channels of `blocks`.
            rank: this rank's number in the halo's layout.
            wait: the second result of `start_halo`.
            blocks: the sections that are convolved together.
        """
        cache, num_documents = self.layer.cache, self.layer.plan.packing.num_documents
        assert cache is not None
        held = [cache.state(block.name, *self._channels(block)) for block in blocks]  # [documents, c, reach]

        def history() -> Tensor:
            found, before = wait(), torch.cat(held, 1).transpose(1, 2).flatten(0, 1)
            places, rows = (on_device(table, found.device, torch.int64) for table in halo.earlier(rank))
            found.flatten(0, 1).index_copy_(0, places, before.index_select(0, rows))
            segments = len(found) - num_documents
            last = found[segments:].transpose(1, 2)
            for state, part in zip(held, last.split([state.shape[1] for state in held], 1), strict=True):
                state.copy_(part)
            return found[:segments]

        return history

    def _channels(self, block: Section) -> tuple[int, int]:
        """Returns the first of this rank's channels of a section, and one past the last."""
        lo, hi = block.ranges[self.layer.rank % self.layer.plan.ulysses_degree]
        return lo * block.head_dim, hi * block.head_dim

    def _split(self, tensors: Sequence[Tensor], blocks: Sequence[Section], *, cut: bool = True) -> list[Tensor]:
        """Splits tensors `[rows, f]` into views `[T, h, d]`, one for each section."""
        found, left = [], iter(blocks)
        for tensor in tensors:
            members, width = [], 0
            while width < tensor.shape[1]:
                members.append(next(left))
                width += members[-1].width
            rows = tensor[: self.layer.tokens] if cut else tensor
            columns = rows.split([block.width for block in members], 1) if len(members) > 1 else [rows]
            found += [x.unflatten(1, (b.num_heads, b.head_dim)) for x, b in zip(columns, members, strict=True)]
        return found

    def recurrence(self, inputs: Inputs, scale: float) -> Tensor:
        """Computes the rule over this rank's pieces, `[T, h, dv]`, of which a token has `plan.steps_a_token` rows."""
        values, comm, layer = inputs.values, self.comm, self.layer
        assert self.rule is not None
        if not layer.is_chunkwise and not values.numel():
            return connected(values, *inputs)
        if self.rule_call.segments is None:
            return self.rule.rule(inputs, self.groups, scale, self.rule_call)
        if layer.is_chunkwise:
            step = next(step for step in layer.steps if isinstance(step, Scan))
        else:  # documents that branch, all of them here: states go from segment to segment without travelling
            _, heads, value_dim = values.shape
            dense = KINDS[layer.plan.kind].is_dense
            step = Scan(_on_one_rank(layer.plan), heads, inputs.keys.shape[2], value_dim, dense)
            comm = over(as_rank_group(None, 1))
        if values.numel():
            work = self.rule.work(inputs, self.groups, scale, self.rule_call)
        else:
            work = ScanWork(list(inputs), _NoTokens(step, values), lambda out: out)
        if layer.cache is None:
            return work.finish(scan(step, comm, work.local, *work.tensors))
        state = layer.cache.state(_STATE, self.heads.start, self.heads.stop)
        step = step.memo("continued", lambda: replace(step, continued=True))
        out, final = continued_scan(step, comm, work.local, state, *work.tensors)
        state.copy_(final)
        return work.finish(out)

    def local_channels(self, parameter: Tensor, blocks: Sequence[Section]) -> list[Tensor]:
        """Selects the channels of this rank's heads in each block of a parameter `[channels, ...]`."""
        local, start = [], 0
        for block in blocks:
            first, last = self._channels(block)
            local.append(parameter[start + first : start + last])
            start += block.width
        return local


def linear_call(
    plan: Plan, blocks: Sequence[Section], rank: int, dtype: torch.dtype, device: torch.device, *,
    continued: bool = False,
) -> LinearCall:  # fmt: skip
    """Returns the arguments that all kernel calls of a layer on one rank share, given the sections of its heads.

    With `continued`, documents continue the states of earlier calls.
    """
    names = [block.name for block in blocks]
    kind = KINDS[plan.kind]
    keys, convolved = blocks[names.index(kind.keys)], blocks[: kind.num_convolved(len(blocks))]
    segments: LocalSegments | None = None
    tables = None if plan.tables is None else plan.tables.linear
    steps = None if tables is None else tables.get("steps")
    if plan.recurrent_steps:
        layout = plan.layout if steps is None else steps[0].layout
        segments = Segments.from_layout(layout, continued=continued).local(rank)
    elif continued or plan.packing.branches is not None:
        segments = Segments.from_layout(_on_one_rank(plan), continued=continued).local(0)
    channels: tuple[int, ...] = (sum(block.width for block in convolved),)
    if not plan.recurrent_steps:
        head_ranks = range(plan.ulysses_degree)
        channels = tuple(
            {block.heads_on(head_rank) * block.head_dim for block in convolved for head_rank in head_ranks}
        )
    packing = plan.packing if segments is None else segments.packing
    return LinearCall(
        kind.rule, packing, dtype, device, keys.head_dim, plan.conv_width, channels, segments=segments,
        for_graphs=steps is not None or (device.type == "cuda" and tables is not None), tables=tables,
        streams=steps is not None,
    )  # fmt: skip


def _state_shapes(plan: Plan, dtype: torch.dtype, *, convolves: bool) -> dict[str, StateShape]:
    """Returns the states of a plan's layer: that of the recurrence, and the last inputs of each convolved section."""
    kind, blocks, ranks = KINDS[plan.kind], {block.name: block for block in plan.sections.blocks}, plan.cp_size
    found = {}
    if kind.has_state:
        ranges = plan.partition.heads * (ranks // len(plan.partition.heads))
        sizes = (blocks[kind.keys].head_dim, blocks[kind.values].head_dim)
        found[_STATE] = StateShape(ranges, sizes, accumulation_dtype(dtype))
    convolved = plan.sections.blocks[: kind.num_convolved(len(plan.sections.blocks))]
    for block in convolved if convolves and plan.conv_width > 1 else ():
        ranges = tuple((lo * block.head_dim, hi * block.head_dim) for lo, hi in block.ranges)
        found[block.name] = StateShape(ranges * (ranks // len(ranges)), (plan.conv_width - 1,), dtype)
    return found


def _on_one_rank(plan: Plan) -> Layout:
    """Returns the layout in which one rank holds all tokens."""
    # The plan's layout remembers it, not the packing: a cycle would keep a batch's tables until garbage collection.
    found: Layout = plan.layout.memo(("whole",), lambda: Layout.contiguous(plan.packing, 1))
    return found


class _NoTokens(LocalScan):
    """The scan of a rank without tokens."""

    def __init__(self, step: Scan, values: Tensor) -> None:
        acc_dtype = accumulation_dtype(values.dtype)
        self.none = values.new_empty(0, step.heads, step.key_dim, step.value_dim, dtype=acc_dtype)
        self.out = values.detach()

    def leave(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
        return self.none, self.none, None

    def finish(self, tensors: Sequence[Tensor], begun: Any, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        return torch.empty_like(self.out), []

    def leave_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], gradient: Tensor) -> tuple[Tensor, Any]:
        return self.none, None

    def finish_backward(
        self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor, states: Tensor
    ) -> list[Tensor]:
        return [torch.zeros_like(tensor) for tensor in tensors]


def check_conv(
    plan: Plan,
    weight: Tensor,
    bias: Tensor | None,
    channels: int,
    like: Tensor,
    *,
    name: str = "conv",
    bias_name: str = "conv_bias",
) -> Tensor:
    """Checks the parameters of a convolution and returns its taps as `[channels, width]`."""
    check_dense(name, weight)
    if weight.ndim not in (2, 3) or weight.shape[-1] < 1:
        raise ArgumentError(name, list(weight.shape), f"[{channels}, width] or [{channels}, 1, width], at least 1 wide")
    middle = (1,) if weight.ndim == 3 else ()
    width = weight.shape[-1] if weight.shape[0] == channels else plan.conv_width
    check_tensor(name, weight, (channels, *middle, width), like=like)
    if weight.shape[-1] != plan.conv_width:
        raise ArgumentError(
            name, list(weight.shape), f"the plan's {plan.conv_width} taps", "Plan with conv_width=the taps."
        )
    if bias is not None:
        check_tensor(bias_name, bias, (channels,), like=like)
    return weight.squeeze(1) if weight.ndim == 3 else weight


class MixerParameters(NamedTuple):
    """The parameters that every mixer has, whole on every rank."""

    conv: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor


def check_mixer(
    plan: Plan, group: Group | None, kernel: str | LinearKernel, cache: LayerCache | None,
    inputs: Mapping[str, Tensor], parameters: MixerParameters, decay: str,
) -> tuple[LinearOnRank, Tensor]:  # fmt: skip
    """Checks the tensors of a mixer: a layer between its projections, with its convolution, gates and rule.

    Args:
        inputs: by name, in the order of the kind's sections: the sections that are convolved as one tensor, then each
            other section.
        decay: the name of the input to which `dt_bias` is added.

    Returns:
        The layer, and the taps of its convolution, `[channels, width]`.
    """
    name, values = next(iter(inputs.items()))
    layer = LinearOnRank(plan, group, kernel, name, values, cache, convolves=True)
    kind, blocks = KINDS[plan.kind], {block.name: block for block in plan.sections.blocks}
    left = iter(blocks.values())
    sections = [sum(block.width for block in itertools.islice(left, count)) for count in kind.counts(len(blocks))]
    widths = sum(sections[: kind.convolved]), *sections[kind.convolved :]
    for (name, tensor), width in zip(inputs.items(), widths, strict=True):
        check_tensor(name, tensor, (layer.rows, width), like=values, layout=plan.layout)
    taps = check_conv(plan, parameters.conv, parameters.conv_bias, widths[0], values)
    check_tensor("A_log", parameters.A_log, (blocks[decay].num_heads,), like=values)
    check_tensor("dt_bias", parameters.dt_bias, (blocks[decay].width,), like=values)
    return layer, taps


def connected(empty: Tensor, *others: Tensor) -> Tensor:
    """Returns `empty` with a dependency on all other tensors, so that a rank without work joins every backward."""
    return _Connected.apply(empty, *others)


class _Connected(torch.autograd.Function):
    """Saves a tensor, as every layer with work does.

    A checkpoint recomputes a layer only if the layer saved a tensor. Without one, this rank would not join the
    collectives of the ranks that recompute.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(tensors[0])
        ctx.others = [(other.shape, other.dtype) for other in tensors[1:]]
        return torch.empty_like(tensors[0])

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (empty,) = ctx.saved_tensors
        return torch.empty_like(empty), *(empty.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.others)


def saved_for_backward(result: Tensor) -> Tensor:
    """Saves a tensor for the result of a layer whose gradients may need none, such as that of a bias only.

    Every rank then saves a tensor at the end of the layer, as `connected` does where there is no work, so that under a
    checkpoint all ranks recompute the whole layer.
    """
    return _SavedForBackward.apply(result)


class _SavedForBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        ctx.save_for_backward(result.new_empty(0))
        return result.detach()  # a view could not be written to in place

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        return gradients[0]
