"""A layer of a case on one rank, which may be run repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_cp import attention, relayout
from megatron_cp.executor import RankGroup
from megatron_cp.testing import Case, draw, run_mixer


class LayerStep:
    """Runs forward and backward of a case's layer.

    If hidden states are redistributed, `[t, hidden_size]` of them move to the layer's layout before it and back after
    it, beside the layer's own inputs, which its projections would make from them. The layer's output has their size.
    """

    def __init__(self, case: Case, group: RankGroup) -> None:
        self.case, self.group, self.plan, self.kernel = case, group, case.plan(), case.kernel
        problem, plan, rank = draw(case), self.plan, group.rank

        def own(stream: Tensor) -> Tensor:
            return plan.layout.shard(stream, rank).detach().clone()

        self.inputs = {name: own(x).requires_grad_() for name, x in problem.inputs.items()}
        self.parameters = {name: x.detach().clone().requires_grad_() for name, x in problem.parameters.items()}
        self.gradients, self.hidden = [own(problem.output_gradient)], list[Tensor]()
        if plan.hidden_layout is not None:
            self.gradients = [plan.hidden_layout.shard(problem.output_gradient, rank).detach().clone()]
            width = case.hidden_size or 0
            assert problem.output_gradient[0].numel() == width, "hidden states and outputs of one size"
            sizes = [int(layout.row_counts[rank]) for layout in (plan.hidden_layout, plan.layout)]
            self.hidden = [torch.zeros(sizes[0], width, dtype=case.dtype, device=case.device, requires_grad=True)]
            self.gradients.append(torch.zeros(sizes[1], width, dtype=case.dtype, device=case.device))

    def forward(self) -> list[Tensor]:
        """Returns the output, and the hidden states that were moved."""
        plan, group = self.plan, self.group
        if self.case.layer == "attention":
            q, k, v = self.inputs.values()
            options = self.case.softmax_options
            sink = self.parameters.get("sink")
            return [attention(q, k, v, plan, group, sink=sink, kernel=self.kernel, **options)]
        outer = plan.hidden_layout
        arrived = [relayout(x, outer, plan.layout, group, transport=plan.transport) for x in self.hidden if outer]
        out = run_mixer(
            self.case.layer, list(self.inputs.values()), self.parameters, plan.inside, group, self.case.softmax_scale,
            self.kernel,
        )  # fmt: skip
        if outer is not None:
            out = relayout(out, plan.layout, outer, group, transport=plan.transport)
        return [out, *arrived]

    def backward(self, results: Sequence[Tensor]) -> None:
        """Computes all gradients of the tensors that `forward` returned."""
        tensors = [*self.inputs.values(), *self.parameters.values(), *self.hidden]
        # Engine threads of its own would share the core.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(results, tensors, self.gradients)

    def timed(self, group: RankGroup, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        """Returns the seconds of a forward and of a backward by a clock; all ranks begin both together."""
        group.barrier()
        began = clock()
        results = self.forward()
        middle = clock()
        group.barrier()
        again = clock()
        self.backward(results)
        return middle - began, clock() - again
