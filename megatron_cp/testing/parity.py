"""Parity: one layer over N ranks against the same layer on one, outputs and every gradient.

A case is data. `compare` runs it and says, per tensor, how far the two are apart and whether they are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.arguments import checked_scale
from megatron_cp.executor.groups import RankGroup, ThreadGroup
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.relayout import relayout
from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.mask import Mask
from megatron_cp.linear.on_rank import LinearOnRank
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import DEFAULT, HEADWISE
from megatron_cp.plan.transport import Transport, knows_hosts
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.planner.linear import LinearShape, linear_shape, plan_linear
from megatron_cp.softmax import kernels as softmax_kernels
from megatron_cp.softmax.attention import attention
from megatron_cp.softmax.on_rank import attention_call
from megatron_cp.testing.layers import LAYERS, run_mixer
from megatron_cp.testing.tolerances import CODEC_TOLERANCES

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# A true value below this share of the inputs' scale is rounding noise: a 1-token document's dq is exactly zero.
FLOOR_SHARE = 1e-3


@dataclass(frozen=True)
class Case:
    """One layer on one batch over some ranks.

    Attributes:
        layer: "attention", or the whole mixer of a kind of linear layer, one of `kinds.KINDS`.
        cp: the number of ranks.
        lengths: of the documents.
        layout: a name that `layout_by_name` knows.
        heads: query or value heads; of mamba heads of x.
        groups: key/value or key heads; of mamba groups of B and C.
        head_dim, value_head_dim: features of a key and of a value head; of mamba of B and C, and of a head of x. conv1d
            has `heads * value_head_dim` channels.
        conv_width: taps of a linear layer's convolution.
        mask: of attention, as `Mask.named` spells it, or the name of a method that makes one, with its arguments:
            `("from_slices", slices)`.
        kv_lengths, kv_layout: of cross-attention, the documents of the keys and their layout; None for those of the
            queries.
        scheme: of attention, or the mode of a linear layer.
        ulysses_degree: of attention; see `plan_attention`.
        head_chunks: of attention and of headwise linear layers.
        transport: how messages travel.
        num_hosts: hosts of a hierarchical transport, of neighbouring ranks, unless `hosts` says better.
        hosts: the host of each rank.
        codec: how heads that change places are coded.
        hidden_size: of the model, where hidden states may be redistributed around a linear layer; None where not.
        softmax_scale: None for `head_dim ** -0.5`.
        softcap, dropout, learned_sink: of attention; see `attention`.
        align: of the layout.
        kernel: the backend, or "auto".
        seed: of the inputs and of a random layout.
    """

    layer: str
    cp: int
    lengths: tuple[int, ...]
    layout: str = "zigzag"
    heads: int = 6
    groups: int = 2
    head_dim: int = 16
    value_head_dim: int = 16
    conv_width: int = 4
    mask: str | tuple[Any, ...] = "causal"
    kv_lengths: tuple[int, ...] | None = None
    kv_layout: str = "contiguous"
    scheme: str = "auto"
    ulysses_degree: int | None = None
    head_chunks: int | None = None
    transport: str = "collective"
    num_hosts: int = 2
    hosts: tuple[int, ...] = ()
    codec: str = "none"
    hidden_size: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    learned_sink: bool = False
    align: int = 1
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    kernel: str = "auto"
    seed: int = 0

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.lengths[:6])) + (",..." if len(self.lengths) > 6 else "")
        extras = [
            *([self.mask if isinstance(self.mask, str) else self.mask[0]] if self.layer == "attention" else []),
            *([f"keys {self.kv_layout} {list(self.kv_lengths)}"] if self.kv_lengths else []),
            *(["sink"] if self.learned_sink else []),
            *([f"softcap {self.softcap:g}"] if self.softcap else []),
            *([f"dropout {self.dropout:g}"] if self.dropout else []),
            *([f"{self.head_chunks} chunks"] if self.head_chunks else []),
            *([self._transport_words()] if self.transport != "collective" else []),
            *([self.codec if self.codes else f"{self.codec} (nothing is coded)"] if self.codec != "none" else []),
        ]
        sizes = f" of {self.head_dim}/{self.value_head_dim}" if self.head_dim != self.value_head_dim else ""
        return (
            f"{self.layer} {self.scheme} cp={self.cp} {self.layout} [{lengths}] heads {self.heads}/{self.groups}{sizes}"
            f" {' '.join([*extras, str(self.dtype).removeprefix('torch.')])}"
        )

    @property
    def packing(self) -> Packing:
        return Packing(self.lengths)

    @property
    def kv_packing(self) -> Packing:
        return Packing(self.kv_lengths) if self.kv_lengths else self.packing

    def made_mask(self) -> Mask:
        """The mask of attention."""
        if isinstance(self.mask, str):
            return Mask.named(self.packing, self.mask, self.kv_packing if self.kv_lengths else None)
        name, *arguments = self.mask
        made: Mask = getattr(Mask, name)(self.packing, *arguments)
        return made

    def plan(self) -> Plan:
        mask = self.made_mask() if self.layer == "attention" else None
        wire: dict[str, Any] = {
            "head_chunks": self.head_chunks, "transport": self._transport(), "codec": self.codec,
        }  # fmt: skip
        layout = layout_by_name(self.layout, self.packing, self.cp, align=self.align, seed=self.seed, mask=mask)
        if self.layer == "attention":
            cross: dict[str, Any] = {}
            if self.kv_lengths:
                kv_layout = layout_by_name(self.kv_layout, self.kv_packing, self.cp, seed=self.seed + 1)
                cross = {"kv_packing": self.kv_packing, "kv_layout": kv_layout}
            return plan_attention(
                self.packing, layout, heads=self.heads, kv_heads=self.groups, head_dim=self.head_dim,
                value_head_dim=self.value_head_dim, mask=mask, scheme=self.scheme,
                ulysses_degree=self.ulysses_degree, **wire, **cross,
            )  # fmt: skip
        return plan_linear(
            self.packing, layout, require("kind", self.layer), conv_width=self.conv_width, mode=self.scheme,
            hidden_size=self.hidden_size, item_size=self.dtype.itemsize, **self._linear_sizes(), **wire,
        )  # fmt: skip

    def _linear_sizes(self) -> dict[str, Any]:
        """The sizes of a linear layer, as `plan_linear` calls them; conv1d has the channels of all heads."""
        kind = KINDS[self.layer]
        heads = self.heads if kind.has_state else self.heads * self.value_head_dim
        sizes = {"heads": heads, "groups": self.groups, "key_dim": self.head_dim, "value_dim": self.value_head_dim}
        return {argument.name: sizes[argument.field] for argument in kind.arguments}

    @property
    def linear_shape(self) -> LinearShape:
        """The sizes of a linear layer, in one vocabulary."""
        return linear_shape(self.layer, self.conv_width, **self._linear_sizes())

    def _transport(self) -> Transport:
        require("transport", self.transport)
        if knows_hosts(self.transport) and self.hosts:
            return Transport(self.transport, self.hosts)
        return Transport.of_even_hosts(self.transport, self.cp, min(self.num_hosts, self.cp))

    def _transport_words(self) -> str:
        hosts = self._transport().hosts
        ranks = "+".join(str(hosts.count(host)) for host in range(len(set(hosts))))
        return f"{self.transport} over {ranks} ranks" if hosts else self.transport

    @property
    def codes(self) -> bool:
        """Whether anything is coded on its way."""
        exchanges = [exchange for exchange, _ in self.plan().exchanges(forward=True)]
        return any(any(each.coded([self.dtype.itemsize] * len(each.sections.blocks))) for each in exchanges)

    @property
    def softmax_options(self) -> dict[str, Any]:
        return {
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "dropout": self.dropout,
            "seed": self.seed,
        }

    def refuse_early(self) -> None:
        """Raises what running the case would raise, before any rank starts."""
        plan, device = self.plan(), torch.device(self.device)
        if plan.mask is not None:
            call = attention_call(plan, self.dtype, device, **self.softmax_options)
            choose_kernel(softmax_kernels.KERNELS, self.kernel, call)
        else:
            checked_scale("softmax_scale", self.softmax_scale, self.head_dim)
            group = ThreadGroup.create(self.cp)[0]
            values = torch.empty(0, dtype=self.dtype, device=device)
            LinearOnRank(plan, group, self.kernel, "values", values).check_kernels()


@dataclass(frozen=True)
class Problem:
    """The inputs of a case over the whole stream: tensors that are sharded, parameters that every rank has whole."""

    inputs: dict[str, Tensor]
    parameters: dict[str, Tensor]
    output_gradient: Tensor


@dataclass(frozen=True)
class Parity:
    """What a comparison found.

    Attributes:
        errors: for `out` and each gradient `d_<input>`, `max|a - b| / max(max|b|, floor)`.
        bitwise_forward: the outputs are the same bits.
        bitwise_backward: all gradients are.
        tolerance: what every error must not exceed.
        kernel_errors: those of one rank against float64 arithmetic, beside which to read `errors`; empty in float64.
    """

    case: Case
    errors: dict[str, float]
    bitwise_forward: bool
    bitwise_backward: bool
    tolerance: float
    kernel_errors: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(error <= self.tolerance for error in self.errors.values())  # False for NaN too


def draw(case: Case) -> Problem:
    """Well-conditioned inputs: unit-scale activations, small convolution taps, decays between 0.5 and 1 a token."""
    random = torch.Generator().manual_seed(case.seed)
    total = case.packing.total

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random, dtype=torch.float64) * scale).to(case.dtype).to(case.device)

    if case.layer == "attention":
        inputs = {
            "q": normal(total, case.heads, case.head_dim),
            "k": normal(case.kv_packing.total, case.groups, case.head_dim),
            "v": normal(case.kv_packing.total, case.groups, case.value_head_dim),
        }
        parameters = {"sink": normal(case.heads)} if case.learned_sink else {}
        return Problem(inputs, parameters, normal(total, case.heads, case.value_head_dim))
    inputs, parameters = LAYERS[case.layer].draw(case.linear_shape, total, normal)
    out = (case.heads, case.value_head_dim) if KINDS[case.layer].has_state else (case.linear_shape.heads,)
    return Problem(inputs, parameters, normal(total, *out))


def run_layer(group: RankGroup, case: Case, problem: Problem | None = None) -> dict[str, Tensor]:
    """One rank's output and gradients, by name, its rows of each. Parameters' gradients are this rank's share."""
    problem = draw(case) if problem is None else problem
    plan = case.plan()
    hidden_layout = plan.hidden_layout or plan.layout
    inputs = {
        name: _layout_of(name, plan).shard(tensor, group.rank).requires_grad_()
        for name, tensor in problem.inputs.items()
    }
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in problem.parameters.items()}
    if case.layer == "attention":
        q, k, v = inputs.values()
        out = attention(
            q, k, v, plan, group, sink=parameters.get("sink"), kernel=case.kernel, **case.softmax_options
        )  # fmt: skip
    else:
        out = run_linear(group, case, plan, inputs, parameters)
    out.backward(hidden_layout.shard(problem.output_gradient, group.rank))
    gradients = {f"d_{name}": tensor.grad for name, tensor in (inputs | parameters).items()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, f"no gradient reached {missing} on rank {group.rank}"
    return {"out": out.detach(), **{name: gradient for name, gradient in gradients.items() if gradient is not None}}


def _layout_of(name: str, plan: Plan) -> Layout:
    """Who holds the rows of a tensor, or of its gradient: those of k and v are the keys' in cross-attention."""
    of_keys = plan.attend is not None and name.removeprefix("d_") in ("k", "v")
    return plan.kv_layout if of_keys else plan.hidden_layout or plan.layout


def run_linear(
    group: RankGroup, case: Case, plan: Plan, inputs: dict[str, Tensor], parameters: dict[str, Tensor]
) -> Tensor:
    """The layer's output. The layer's inputs stand for a model's hidden states, and are redistributed if so planned."""
    tensors, moved = list(inputs.values()), partial(relayout, group=group, transport=plan.transport)
    if plan.hidden_layout is not None:
        tensors = [moved(tensor, plan.hidden_layout, plan.layout) for tensor in tensors]
    out = run_mixer(case.layer, tensors, parameters, plan, group, case.softmax_scale, case.kernel)
    return out if plan.hidden_layout is None else moved(out, plan.layout, plan.hidden_layout)


def whole(case: Case, ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the ranks of a case hold together: tokens in stream order, parameters' gradients summed.

    Raises:
        AssertionError: a pad row that is not zero.
    """
    plan, together = case.plan(), {}
    parameters = {f"d_{name}" for name in draw(replace(case, lengths=(1,), kv_lengths=None)).parameters}
    for name in ranks[0]:
        shards = [rank[name] for rank in ranks]
        if name in parameters:
            together[name] = sum(shards[1:]) + shards[0]
            continue
        layout = _layout_of(name, plan)
        for rank, (shard, count) in enumerate(zip(shards, layout.token_counts.tolist(), strict=True)):
            assert not shard[count:].any(), f"{name} on rank {rank}: pad rows are not zero"  # NaN is not zero either
        together[name] = layout.unshard(shards)
    return together


def one_rank(case: Case) -> dict[str, Tensor]:
    """The case on one rank that holds the packed stream in order."""
    return run_layer(ThreadGroup.create(1)[0], _alone(case))


def _alone(case: Case) -> Case:
    scheme = DEFAULT.name if case.layer == "attention" else HEADWISE.name
    return replace(
        case, cp=1, layout="contiguous", align=1, scheme=scheme, ulysses_degree=None, head_chunks=None, codec="none",
        transport="collective", hosts=(),
    )  # fmt: skip


def kernel_errors(case: Case, own: dict[str, Tensor]) -> dict[str, float]:
    """How far one rank's kernel is from float64 arithmetic on the same inputs: what no scheme is to blame for."""
    problem = draw(case)
    inputs, parameters = (
        {name: x.double() for name, x in tensors.items()} for tensors in (problem.inputs, problem.parameters)
    )
    exact = run_layer(
        ThreadGroup.create(1)[0],
        replace(_alone(case), dtype=torch.float64, kernel="reference"),
        Problem(inputs, parameters, problem.output_gradient.double()),
    )
    return _errors(case, own, exact)


def compare(
    case: Case,
    *,
    kind: str = "threads",
    timeout: float = 120.0,
    expected: dict[str, Tensor] | None = None,
    run: Callable[[RankGroup, Case], dict[str, Tensor]] = run_layer,
) -> Parity:
    """Runs a case on local ranks and compares it with one rank.

    Args:
        case: what to run.
        kind: "threads" or "processes".
        timeout: seconds until the ranks' stacks are dumped and the call fails.
        expected: `one_rank(case)`, where the caller has it already.
        run: what each rank does.
    """
    ranks = run_ranks(run, case.cp, case, kind=kind, timeout=timeout)
    return judge(case, whole(case, ranks), one_rank(case) if expected is None else expected)


def judge(case: Case, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> Parity:
    """How far two results of a case are apart."""
    errors = _errors(case, actual, expected)
    same = {name: torch.equal(actual[name], value) for name, value in expected.items()}
    own = {} if case.dtype == torch.float64 or case.layer != "attention" else kernel_errors(case, expected)
    tolerance = CODEC_TOLERANCES[case.codec] if case.codes else TOLERANCES[case.dtype]
    return Parity(case, errors, same.pop("out"), all(same.values()), tolerance, own)


def _errors(case: Case, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    problem = draw(case)
    scales = {"out": max(float(tensor.abs().max()) for tensor in problem.inputs.values())}
    gradient_scale = float(problem.output_gradient.abs().max())
    return {
        name: relative_error(actual[name], value, FLOOR_SHARE * scales.get(name, gradient_scale))
        for name, value in expected.items()
    }


def relative_error(actual: Tensor, expected: Tensor, floor: float) -> float:
    """`max|a - b| / max(max|b|, floor)`; NaN if either holds one, 0 for empty tensors."""
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=floor))
