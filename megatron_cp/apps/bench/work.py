"""A layer, or a part of one, whose forward and backward `megatron-cp bench linear` times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp.apps.bench.timing import Measure, Watch, WatchedGroup
from megatron_cp.executor import RankGroup
from megatron_cp.plan import Plan
from megatron_cp.testing import Case, Problem, run_linear


@dataclass
class Work:
    """A differentiable computation that may be run repeatedly."""

    forward: Callable[[RankGroup], Tensor]
    inputs: list[Tensor]
    gradient: Tensor
    group: RankGroup

    def step(self, measure: Measure, watch: Watch) -> None:
        """Runs forward and backward, both through `measure(direction, call)`."""
        group = WatchedGroup(self.group, watch)
        out = measure("forward", lambda: self.forward(group))
        # Engine threads of its own would not be on this thread's clock.
        with torch.autograd.set_multithreading_enabled(False):
            measure("backward", lambda: torch.autograd.grad(out, self.inputs, self.gradient))


def mixer(case: Case, problem: Problem, group: RankGroup) -> Work:
    """Returns a case's layer on one rank; the parameters are the last inputs."""
    plan = case.plan()
    inputs, parameters, gradient = own_tensors(plan, problem, group.rank)
    leaves = [*inputs.values(), *parameters.values()]
    return Work(lambda ranks: run_linear(ranks, case, plan, inputs, parameters), leaves, gradient, group)


def own_tensors(plan: Plan, problem: Problem, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Returns a rank's inputs and the parameters, as leaves, and the gradient of its output."""

    def own(stream: Tensor) -> Tensor:
        return plan.layout.shard(stream, rank).detach().clone()

    inputs = {name: own(x).requires_grad_() for name, x in problem.inputs.items()}
    parameters = {name: x.detach().clone().requires_grad_() for name, x in problem.parameters.items()}
    return inputs, parameters, own(problem.output_gradient)
