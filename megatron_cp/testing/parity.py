"""Parity: a layer over N ranks against the same layer on one, outputs and every gradient.

A case is data. `compare` runs it and returns, for each tensor, the difference between the two and whether they are the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_cp.errors import checked_scale
from megatron_cp.executor.groups import RankGroup, ThreadGroup
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.relayout import relayout
from megatron_cp.layout import Layout
from megatron_cp.linear.on_rank import LinearOnRank
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import DEFAULT, HEADWISE
from megatron_cp.softmax import kernels as softmax_kernels
from megatron_cp.softmax.attention import attention
from megatron_cp.softmax.latent_attention import latent_attention
from megatron_cp.softmax.on_rank import attention_call
from megatron_cp.testing.case import LayerCase
from megatron_cp.testing.layers import LAYERS, run_mixer
from megatron_cp.testing.tolerances import CODEC_TOLERANCES

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# A true value below this share of the inputs' scale is rounding noise: a 1-token document's dq is exactly zero.
FLOOR_SHARE = 1e-3


@dataclass(frozen=True)
class Case(LayerCase):
    """A `LayerCase` with functions that draw its tensors and run its layer.

    Attributes:
        dtype: torch's type of all tensors.
    """

    dtype: torch.dtype = torch.float64

    def refuse_early(self) -> None:
        """Raises the errors that running the case would raise, before any rank starts."""
        plan, device = self.plan(), torch.device(self.device)
        if plan.mask is not None:
            call = attention_call(plan, self.dtype, device, **self.softmax_options)
            choose_kernel(softmax_kernels.KERNELS, self.kernel, call)
        else:
            checked_scale("softmax_scale", self.softmax_scale, self.head_dim)
            group = ThreadGroup.create(self.cp)[0]
            values = torch.empty(0, dtype=self.dtype, device=device)
            LinearOnRank(plan, group, self.kernel, "values", values)


@dataclass(frozen=True)
class Problem:
    """The inputs of a case over the whole stream: tensors that are sharded, and parameters that every rank has
    whole.
    """

    inputs: dict[str, Tensor]
    parameters: dict[str, Tensor]
    output_gradient: Tensor


@dataclass(frozen=True)
class Parity:
    """The result of a comparison.

    Attributes:
        errors: for `out` and each gradient `d_<input>`, `max|a - b| / max(max|b|, floor)`.
        kernel_errors: errors of one rank against float64 arithmetic, for comparison with `errors`; empty in float64.
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
    """Draws well-conditioned inputs: unit-scale activations, small convolution taps, decays between 0.5 and 1 a
    token.
    """
    random = torch.Generator().manual_seed(case.seed)
    total = case.packing.total

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random, dtype=torch.float64) * scale).to(case.dtype).to(case.device)

    if case.layer == "attention":
        inputs, tokens = {"q": normal(total, case.heads, case.head_dim)}, case.kv_packing.total
        if case.latent is None:
            inputs |= {"k": normal(tokens, case.groups, case.head_dim)}
            inputs |= {"v": normal(tokens, case.groups, case.value_head_dim)}
        else:
            shared, rank = case.latent
            inputs |= {"latent": normal(total, rank), "shared_key": normal(total, shared)}
        parameters = {"sink": normal(case.heads)} if case.learned_sink else {}
        if case.latent is not None:
            made = case.head_dim - shared + case.value_head_dim
            parameters["up"] = normal(case.heads, made, rank, scale=rank**-0.5)
        return Problem(inputs, parameters, normal(total, case.heads, case.value_head_dim))
    inputs, parameters = LAYERS[case.layer].draw(case.linear_shape, total, normal)
    out = (case.heads, case.value_head_dim) if KINDS[case.layer].has_state else (case.linear_shape.heads,)
    return Problem(inputs, parameters, normal(total, *out))


def run_layer(group: RankGroup, case: Case, problem: Problem | None = None) -> dict[str, Tensor]:
    """Returns one rank's rows of the output and gradients, by name. Parameters' gradients are this rank's share."""
    problem = draw(case) if problem is None else problem
    plan = case.plan()
    hidden_layout = plan.hidden_layout or plan.layout
    inputs = {
        name: _layout_of(name, plan).shard(tensor, group.rank).requires_grad_()
        for name, tensor in problem.inputs.items()
    }
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in problem.parameters.items()}
    if case.layer == "attention":
        options: dict[str, Any] = {"sink": parameters.get("sink"), "kernel": case.kernel, **case.softmax_options}
        if case.latent is not None:
            q, latent, shared_key = inputs.values()
            out = latent_attention(q, latent, shared_key, parameters["up"], plan, group, **options)
        else:
            q, k, v = inputs.values()
            out = attention(q, k, v, plan, group, **options)
    else:
        out = run_linear(group, case, plan, inputs, parameters)
    out.backward(hidden_layout.shard(problem.output_gradient, group.rank))
    gradients = {f"d_{name}": tensor.grad for name, tensor in (inputs | parameters).items()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, f"no gradient reached {missing} on rank {group.rank}"
    return {"out": out.detach(), **{name: gradient for name, gradient in gradients.items() if gradient is not None}}


def _layout_of(name: str, plan: Plan) -> Layout:
    """Returns the layout of a tensor or its gradient: in cross-attention k and v have the keys' layout."""
    is_key = plan.attend is not None and name.removeprefix("d_") in ("k", "v")
    return plan.kv_layout if is_key else plan.hidden_layout or plan.layout


def run_linear(
    group: RankGroup, case: Case, plan: Plan, inputs: dict[str, Tensor], parameters: dict[str, Tensor]
) -> Tensor:
    """Returns the layer's output. Its inputs stand for a model's hidden states, and are redistributed if so planned."""
    tensors, moved = list(inputs.values()), partial(relayout, group=group, transport=plan.transport)
    if plan.hidden_layout is not None:
        tensors = [moved(tensor, plan.hidden_layout, plan.layout) for tensor in tensors]
    out = run_mixer(case.layer, tensors, parameters, plan.inside, group, case.softmax_scale, case.kernel)
    return out if plan.hidden_layout is None else moved(out, plan.layout, plan.hidden_layout)


def whole(case: Case, ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Combines the results of all ranks: tokens in stream order, parameters' gradients summed.

    Raises:
        AssertionError: a pad row that is not zero.
    """
    plan, joined = case.plan(), {}
    parameters = {f"d_{name}" for name in draw(replace(case, lengths=(1,), parents=None, kv_lengths=None)).parameters}
    for name in ranks[0]:
        shards = [rank[name] for rank in ranks]
        if name in parameters:
            joined[name] = sum(shards[1:]) + shards[0]
            continue
        layout = _layout_of(name, plan)
        for rank, (shard, count) in enumerate(zip(shards, layout.token_counts.tolist(), strict=True)):
            assert not shard[count:].any(), f"{name} on rank {rank}: pad rows are not zero"  # NaN fails too
        joined[name] = layout.unshard(shards)
    return joined


def one_rank(case: Case) -> dict[str, Tensor]:
    """Runs the case on one rank that holds the packed stream in order."""
    return run_layer(ThreadGroup.create(1)[0], _one_rank_case(case))


def _one_rank_case(case: Case) -> Case:
    scheme = DEFAULT.name if case.layer == "attention" else HEADWISE.name
    return replace(
        case, cp=1, layout="contiguous", align=1, scheme=scheme, ulysses_degree=None, head_chunks=None, codec="none",
        transport="collective", hosts=(), latent_mode=None if case.latent is None else "heads",
    )  # fmt: skip


def kernel_errors(case: Case, own: dict[str, Tensor]) -> dict[str, float]:
    """Returns the errors of one rank's kernel against float64 arithmetic on the same inputs, which no scheme causes."""
    problem = draw(case)
    inputs, parameters = (
        {name: x.double() for name, x in tensors.items()} for tensors in (problem.inputs, problem.parameters)
    )
    exact = run_layer(
        ThreadGroup.create(1)[0],
        replace(_one_rank_case(case), dtype=torch.float64, kernel="reference"),
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
        kind: "threads" or "processes".
        timeout: seconds until the ranks' stacks are dumped and the call fails.
        expected: `one_rank(case)`, if the caller has it already.
        run: the function that each rank runs.
    """
    ranks = run_ranks(run, case.cp, case, kind=kind, timeout=timeout)
    return judge(case, whole(case, ranks), one_rank(case) if expected is None else expected)


def judge(case: Case, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> Parity:
    """Compares two results of a case."""
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
