"""A rank of a job: a few steps of some layers, forward, backward and the sum of what every rank has found."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import megatron_cp as cp
from megatron_cp.executor.groups import RankGroup, as_rank_group
from megatron_cp.testing.parity import draw
from tools.faults import operations, saves
from tools.faults.cases import CALL, Case, Layer, deviated, deviated_lengths
from tools.faults.faulty import Faulty


class Job:
    """A rank's layers and its steps.

    Args:
        group: the ranks: a process group, or ranks that are threads.
        sums: over which the ranks' numbers are summed.
        folder: of checkpoints, and of what the fault leaves; None for the job to compare with: without the fault,
            but for gradients that a rank does not ask for, which are computed and left out; it saves nothing.
    """

    def __init__(self, case: Case, group: RankGroup | dist.ProcessGroup, sums: Any, folder: Path | None) -> None:
        self.case, self.group, self.folder = case, group, folder
        self.ranks, self.sums = as_rank_group(group, case.cp_size), as_rank_group(sums, case.cp_size)
        self.faulty = Faulty(case, self.ranks.rank, folder)
        self.step = 0

    def run(self) -> list[list[float]]:
        """Returns numbers of each step, which are the same in every run without a fault."""
        numbers = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of ranks without heads
            for number in range(self.case.steps):
                self.step = number
                if number == 0 or self.case.replan:
                    self._plan()
                numbers.append(self._step())
                if self.case.save != "none" and self.folder is not None:
                    self._save(numbers[-1])
        return numbers

    def _plan(self) -> None:
        case, lengths = self.case, self.case.lengths
        if case.replan:
            lengths = (lengths[0] + self.step, *lengths[1:])
        if self.faulty.differs("lengths", self.step):
            lengths = deviated_lengths(lengths, case.fault.variant)
        self.lengths = lengths
        self.plans: dict[int, cp.Plan] = {}
        for number, layer in enumerate(case.layers):
            self.faulty.at("plan", self.step, number)
            if layer.plan not in self.plans:
                self.plans[layer.plan] = operations.parity_case(self._as_planned(layer), case, lengths).plan()
        for plan in self.plans.values() if case.agree else ():
            cp.check_agreement(plan, self.group)

    def _as_planned(self, layer: Layer) -> Layer:
        fault = self.case.fault
        if self.case.layers[fault.layer].plan != layer.plan:
            return layer
        if fault.kind in ("scheme", "transport", "chunks", "codec") and self.faulty.differs(fault.kind, self.step):
            return deviated(layer, fault, self.case.cp_size)
        return layer

    def _step(self) -> list[float]:
        """Runs the layers side by side, and their backward as one."""
        drawn = [self._drawn(number) for number in range(len(self.case.layers))]
        loss = torch.zeros((), dtype=torch.float64)
        for number in self._order():
            self.faulty.at("before", self.step, number)
            if not self.faulty.differs("skip_layer", self.step, number):
                inputs, parameters, output_gradient = drawn[number]
                loss = loss + (self._layer(number, inputs, parameters).double() * output_gradient).sum()
        if not self.faulty.differs("skip_backward", self.step):
            with self.faulty.during("backward", self.step):
                loss.backward()
        self.faulty.at("reduce", self.step)
        leaves = [leaf for inputs, parameters, _ in drawn for leaf in (*inputs, *parameters.values())]
        own = torch.stack([loss.detach(), *(_number(leaf.grad) for leaf in leaves)])
        everyone = own.new_empty(self.case.cp_size * own.numel())
        self.sums.all_gather(everyone, own)
        return [*own.tolist(), *everyone.view(self.case.cp_size, -1).sum(0).tolist()]

    def _drawn(self, number: int) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
        """Draws this rank's inputs, the parameters, and this rank's gradient of the output."""
        layer = self.case.layers[number]
        case = operations.parity_case(layer, self.case, self.lengths)
        problem = draw(replace(case, seed=1000 * self.case.seed + 10 * self.step + number))
        plan, rank = self.plans[layer.plan], self.ranks.rank
        layout = plan.hidden_layout or plan.layout
        inputs = [layout.shard(x, rank).requires_grad_() for x in problem.inputs.values()]
        parameters = {name: x.requires_grad_() for name, x in problem.parameters.items()}
        return inputs, parameters, layout.shard(problem.output_gradient, rank)

    def _order(self) -> list[int]:
        order = list(range(len(self.case.layers)))
        if self.faulty.differs("order", self.step):
            plans = [layer.plan for layer in self.case.layers]
            here = next(n for n in order[1:] if plans[n] != plans[n - 1])
            order[here - 1], order[here] = order[here], order[here - 1]
        return order

    def _layer(self, number: int, inputs: list[Tensor], parameters: dict[str, Tensor]) -> Tensor:
        wants_checkpoint = self.case.layers[number].checkpoint != self.faulty.differs("checkpoint", self.step, number)

        def body(*tensors: Tensor) -> Tensor:
            return self._operation(number, tensors, parameters)

        with self.faulty.during("forward", self.step, number):
            return checkpoint(body, *inputs, use_reentrant=False) if wants_checkpoint else body(*inputs)

    def _operation(self, number: int, inputs: tuple[Tensor, ...], parameters: dict[str, Tensor]) -> Tensor:
        """Runs a layer's operation as this rank calls it."""
        layer, step = self.case.layers[number], self.step
        plan, variant = self.plans[layer.plan], self.faulty.variant(3)
        with contextlib.ExitStack() as modes:
            for kind, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
                if self.faulty.differs(kind, step, number):
                    modes.enter_context(mode())
            if plan.hidden_layout is not None:
                inputs = tuple(self._moved(x, plan.hidden_layout, plan.layout, plan) for x in inputs)
            call = operations.call(layer, inputs, parameters, 100 * step + number)
            for change in CALL.keys() - {"no_grad", "inference_mode"}:
                if self.faulty.differs(change, step, number):
                    call = operations.changed(call, change, layer, variant)
            if self.faulty.drops(("requires_grad",), step, number):
                call = operations.changed(call, "dropped", layer, variant)
            out = call.run(*call.inputs, plan.inside, self.group, **call.named)
            out = out[:, 0] if out.ndim > 3 else out
            if plan.hidden_layout is not None:
                out = self._moved(out, plan.layout, plan.hidden_layout, plan)
        if self.faulty.drops(("no_grad", "inference_mode"), step, number):
            out = operations.without_gradient(out)
        return out.clone()  # which inference mode demands

    def _moved(self, x: Tensor, source: cp.Layout, target: cp.Layout, plan: cp.Plan) -> Tensor:
        return cp.relayout(x, source, target, self.group, transport=plan.transport)

    def _save(self, numbers: list[float]) -> None:
        assert self.folder is not None
        self.faulty.start_of_save(self.step)
        saves.save(self.folder, {"numbers": torch.tensor(numbers[len(numbers) // 2 :])}, self.step + 1)
        if self.ranks.rank == 0:
            saves.note(self.folder, self.step + 1)
        self.ranks.barrier()


def _number(tensor: Tensor | None) -> Tensor:
    """Returns a number that changes with any element."""
    if tensor is None:
        return torch.zeros((), dtype=torch.float64)
    flat = tensor.detach().double().flatten()
    return flat @ torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64)
