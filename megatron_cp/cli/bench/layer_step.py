"""One layer of a case on one rank, which may be run again and again."""

from __future__ import annotations

import torch

from megatron_cp.executor.groups import RankGroup
from megatron_cp.softmax.attention import attention
from megatron_cp.testing.parity import Case, draw, run_linear


class LayerStep:
    """A forward, or a forward and a backward, of a case's layer.

    Args:
        case: of the layer and the batch.
        group: the ranks.
    """

    def __init__(self, case: Case, group: RankGroup) -> None:
        self.case, self.group, self.plan = case, group, case.plan()
        problem, layout = draw(case), self.plan.hidden_layout or self.plan.layout
        self.inputs = {
            name: layout.shard(tensor, group.rank).detach().clone().requires_grad_()
            for name, tensor in problem.inputs.items()
        }
        self.parameters = {name: tensor.clone().requires_grad_() for name, tensor in problem.parameters.items()}
        self.gradient = layout.shard(problem.output_gradient, group.rank).detach().clone()

    def forward(self) -> torch.Tensor:
        """The output."""
        if self.case.layer == "attention":
            q, k, v = self.inputs.values()
            return attention(q, k, v, self.plan, self.group, kernel=self.case.kernel, **self.case.softmax_options)
        return run_linear(self.group, self.case, self.plan, self.inputs, self.parameters)

    def both(self) -> None:
        """Forward and backward."""
        out = self.forward()
        tensors = [*self.inputs.values(), *self.parameters.values()]
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(out, tensors, self.gradient)
