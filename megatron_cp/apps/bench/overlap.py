"""The overlap of `megatron-cp bench wire`: times a layer, its transfers alone, and its kernels alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_cp import attention
from megatron_cp.apps.bench.timing import Measure
from megatron_cp.apps.bench.work import own_tensors
from megatron_cp.errors import checked_scale
from megatron_cp.exchange import Exchange
from megatron_cp.executor import Communicator, LocalWork, RankGroup, ToHeadsInParts, run
from megatron_cp.linear import LinearOnRank, mixer_stages
from megatron_cp.plan import Compute, Plan, ToHeads
from megatron_cp.softmax import AttentionOnRank
from megatron_cp.testing import Case, Problem, run_linear


def inbound(plan: Plan) -> Exchange:
    """Returns the exchange with which a plan begins."""
    return next(step.exchange for step in plan.steps if isinstance(step, ToHeads))


class Overlapped:
    """A layer on one rank, in the chunks of its plan: the whole layer, its transfers alone and its kernels alone."""

    def __init__(self, case: Case, problem: Problem, plan: Plan, group: RankGroup) -> None:
        self._plan = plan
        self._case, self._group, self._comm = case, group, Communicator(group, plan.transport)
        self._inputs, self._parameters, self._gradient = own_tensors(plan, problem, group.rank)
        tensors, self._work = _local_work(case, plan, group, self._inputs, self._parameters)
        self._sent = [x.detach().requires_grad_() for x in tensors]
        self._names = ["attend"] if plan.attend else [step.name for step in plan.steps if isinstance(step, Compute)]
        with torch.no_grad():
            move = ToHeadsInParts(inbound(plan), self._comm)
            move.start(*self._sent)
            self._arrived = [[x.requires_grad_() for x in move.finish(part)] for part in range(move.num_parts)]
        # Exchanges send these when nothing is computed: one output a chunk, and gradients where kernels leave them.
        self._outputs = self._computed()
        self._input_gradients = [
            _gradients([out], arrived, [torch.ones_like(out)])
            for arrived, out in zip(self._arrived, self._outputs, strict=True)
        ]
        self._outputs = [out.detach() for out in self._outputs]

    def together(self, measure: Measure) -> None:
        """Runs the whole layer."""
        inputs = [*self._inputs.values(), *self._parameters.values()]
        out = measure("forward", self._forward)
        measure("backward", lambda: _gradients([out], inputs, [self._gradient]))

    def compute(self, measure: Measure) -> None:
        """Runs the layer's kernels, chunk after chunk, on tensors that have arrived before."""
        inputs = [x for arrived in self._arrived for x in arrived] + list(self._parameters.values())
        out = measure("forward", self._computed)
        measure("backward", lambda: _gradients(out, inputs, self._outputs))  # any gradients serve

    def transfer(self, measure: Measure) -> None:
        """Runs the layer's exchanges, with nothing computed in between."""
        (out,) = measure("forward", lambda: run.run(self._plan, self._comm, self._sent, self._nothing))
        measure("backward", lambda: _gradients([out], self._sent, [self._gradient.view(out.shape)]))

    def _forward(self) -> Tensor:
        if self._case.layer == "attention":
            q, k, v = self._inputs.values()
            options = self._case.softmax_options
            return attention(q, k, v, self._plan, self._group, kernel=self._case.kernel, **options)
        return run_linear(self._group, self._case, self._plan, self._inputs, self._parameters)

    def _computed(self) -> list[Tensor]:
        outputs = []
        for chunk, at_hand in enumerate(self._arrived):
            work = self._work(chunk)
            for name in self._names:
                at_hand = work[name](*at_hand)
            outputs += at_hand
        return outputs

    def _nothing(self, chunk: int) -> dict[str, LocalWork]:
        """Returns functions that replace a chunk's work by results that were computed before."""
        first, *others = self._names

        def made(*tensors: Tensor) -> list[Tensor]:
            return [_Instead.apply(self._outputs[chunk], self._input_gradients[chunk], *tensors)]

        return {first: made} | dict.fromkeys(others, lambda *tensors: list(tensors))


class _Instead(torch.autograd.Function):
    """Returns results that were computed before, forward and backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gradients: tuple[Tensor, ...], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> Any:
        return None, None, *(gradient.detach() for gradient in ctx.gradients)


def _gradients(outputs: list[Tensor], inputs: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
    with torch.autograd.set_multithreading_enabled(False):  # a device has one engine thread, and ranks may be threads
        return torch.autograd.grad(outputs, inputs, gradients)


def _local_work(
    case: Case, plan: Plan, group: RankGroup, inputs: dict[str, Tensor], parameters: dict[str, Tensor]
) -> tuple[list[Tensor], Callable[[int], dict[str, LocalWork]]]:
    """Returns the tensors that a layer's first step takes, and this rank's computation for each chunk of heads."""
    if case.layer == "attention":
        q, k, v = inputs.values()
        layer = AttentionOnRank(plan, group, q, None, case.kernel, case.softmax_options)
        tensors = layer.checked(q, k, v)
        layer.agree("attention", q, k, v)
        return tensors, layer.work()
    own_heads = LinearOnRank(plan, group, case.kernel, "qkv", inputs["qkv"])
    conv, rate, dt_bias = (parameters[name] for name in ("conv", "A_log", "dt_bias"))
    scale = checked_scale("softmax_scale", case.softmax_scale, case.head_dim)
    return list(inputs.values()), own_heads.work(**mixer_stages(conv, None, rate, dt_bias, scale))
