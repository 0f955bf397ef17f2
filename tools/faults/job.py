"""A rank of a job: a few steps of a small model, whose layers are the library's operations."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import megatron_cp as cp
from megatron_cp.executor.groups import RankGroup, as_rank_group
from megatron_cp.planner.layouts import layout_by_name
from tools.faults import operations, saves
from tools.faults.cases import Case, Layer, deviated, deviated_lengths
from tools.faults.faulty import Faulty

HIDDEN = 8
_RATE = 0.05


class Job:
    """A rank's model and its steps.

    Args:
        group: the ranks: a process group, or ranks that are threads.
        sums: over which gradients are summed.
        folder: of checkpoints, and of what the fault leaves; None for the job to compare with: without the fault,
            but for gradients that a rank does not ask for, which are computed and left out; it saves nothing.
    """

    def __init__(self, case: Case, group: RankGroup | dist.ProcessGroup, sums: Any, folder: Path | None) -> None:
        self.case, self.group, self.folder = case, group, folder
        self.ranks, self.sums = as_rank_group(group, case.cp_size), as_rank_group(sums, case.cp_size)
        self.faulty = Faulty(case, self.ranks.rank, folder)
        self.dtype = getattr(torch, case.dtype)
        random = torch.Generator().manual_seed(case.seed)
        self.weights: list[dict[str, Tensor]] = [
            {
                name: (0.3 * torch.randn(shape, generator=random, dtype=torch.float64)).to(self.dtype).requires_grad_()
                for name, shape in operations.weights(layer, HIDDEN).items()
            }
            for layer in case.layers
        ]
        self.step = 0

    def run(self) -> list[list[float]]:
        """Trains. Returns some numbers of each step, which are the same in every run without a fault."""
        numbers = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of ranks without heads
            for number in range(self.case.steps):
                self.step = number
                if number == 0 or self.case.replan:
                    self._plan()
                numbers.append(self._step())
                if self.case.save != "none" and self.folder is not None:
                    self._save()
        return numbers

    def _plan(self) -> None:
        case, lengths = self.case, self.case.lengths
        if case.replan:
            lengths = (lengths[0] + self.step, *lengths[1:])
        if self.faulty.differs("lengths", self.step):
            lengths = deviated_lengths(lengths, case.fault.variant)
        packing = cp.Packing(lengths)
        self.layout = layout_by_name(case.layout, packing, case.cp_size, seed=case.seed)
        self.plans: dict[int, Any] = {}
        for number, layer in enumerate(case.layers):
            self.faulty.at("plan", self.step, number)
            if layer.plan not in self.plans:
                self.plans[layer.plan] = operations.plan(self._as_planned(layer), packing, self.layout, HIDDEN)
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
        random = torch.Generator().manual_seed(1000 * self.case.seed + self.step)
        total = self.layout.packing.total

        def rows() -> Tensor:
            whole = torch.randn((80, HIDDEN), generator=random, dtype=torch.float64)[:total]
            return self.layout.shard(whole, self.ranks.rank).to(self.dtype)

        first, target = rows().requires_grad_(), rows()
        hidden = first
        for number in self._order():
            self.faulty.at("before", self.step, number)
            if not self.faulty.differs("skip_layer", self.step, number):
                hidden = self._layer(number, hidden)
        loss = (hidden * target).sum()
        if not self.faulty.differs("skip_backward", self.step):
            with self.faulty.during("backward", self.step):
                loss.backward()
        self.faulty.at("reduce", self.step)
        gradients = self._reduced()
        with torch.no_grad():
            for weight, gradient in zip(self._all_weights(), gradients, strict=True):
                weight -= _RATE * gradient / (1 + gradient.norm())
                weight.grad = None
        return [float(loss), _number(hidden), _number(first.grad), *(_number(gradient) for gradient in gradients)]

    def _order(self) -> list[int]:
        order = list(range(len(self.case.layers)))
        if self.faulty.differs("order", self.step):
            plans = [layer.plan for layer in self.case.layers]
            here = next(n for n in order[1:] if plans[n] != plans[n - 1])
            order[here - 1], order[here] = order[here], order[here - 1]
        return order

    def _layer(self, number: int, hidden: Tensor) -> Tensor:
        layer, differs = self.case.layers[number], self.faulty.differs
        wants_checkpoint = layer.checkpoint != differs("checkpoint", self.step, number)

        def body(x: Tensor) -> Tensor:
            return self._operation(number, layer, x)

        with self.faulty.during("forward", self.step, number):
            added: Tensor = checkpoint(body, hidden, use_reentrant=False) if wants_checkpoint else body(hidden)
        return hidden + torch.tanh(added)

    def _operation(self, number: int, layer: Layer, hidden: Tensor) -> Tensor:
        """Runs a layer's operation between its projections, as this rank calls it."""
        plan, step = self.plans[layer.plan], self.step
        with contextlib.ExitStack() as modes:
            if self.faulty.differs("no_grad", step, number):
                modes.enter_context(torch.no_grad())
            if self.faulty.differs("inference_mode", step, number):
                modes.enter_context(torch.inference_mode())
            if plan.hidden_layout is not None:
                hidden = cp.relayout(hidden, plan.hidden_layout, plan.layout, self.group, transport=plan.transport)
            weights = self.weights[number]
            call = operations.call(layer, weights, hidden, self._options(number, layer))
            for change in ("dtype", "batch", "requires_grad"):
                if self.faulty.differs(change, step, number):
                    call = operations.changed(call, change, self.faulty.variant(3))
            if self.faulty.drops(("requires_grad",), step, number):
                call = operations.changed(call, "dropped", self.faulty.variant(3))
            out = operations.run(call, plan.inside, self.group, weights["out"])
            if plan.hidden_layout is not None:
                out = cp.relayout(out, plan.layout, plan.hidden_layout, self.group, transport=plan.transport)
        if self.faulty.drops(("no_grad", "inference_mode"), step, number):
            out = operations.without_gradient(out)
        return out.clone()  # which inference mode demands

    def _options(self, number: int, layer: Layer) -> dict[str, Any]:
        """Returns the call's options, except those that the layer defines."""
        options: dict[str, Any] = {}
        seed = 100 * self.step + number
        for change in ("scale", "softcap", "sink_given", "sink_values", "dropout", "seed", "kernel"):
            if self.faulty.differs(change, self.step, number):
                options |= operations.option(layer, change, seed, self.dtype)
        return {"seed": seed, **options} if layer.kind == "attention" else options

    def _all_weights(self) -> list[Tensor]:
        return [weight for weights in self.weights for weight in weights.values()]

    def _reduced(self) -> list[Tensor]:
        """The gradients of all ranks, summed in the order of ranks."""
        weights = self._all_weights()
        own = torch.cat([
            (torch.zeros_like(weight) if weight.grad is None else weight.grad).flatten() for weight in weights
        ])  # fmt: skip
        everyone = own.new_empty(self.case.cp_size * own.numel())
        self.sums.all_gather(everyone, own)
        total = everyone.view(self.case.cp_size, -1).sum(0)
        pieces = total.split([weight.numel() for weight in weights])
        return [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)]

    def _save(self) -> None:
        assert self.folder is not None
        state = {str(number): weight.detach() for number, weight in enumerate(self._all_weights())}
        self.faulty.start_of_save(self.step)
        saves.save(self.folder, state, self.step + 1)
        if self.ranks.rank == 0:
            saves.note(self.folder, self.step + 1)
        self.ranks.barrier()


def _number(tensor: Tensor | None) -> float:
    """Returns a number that changes with any element."""
    if tensor is None:
        return 0.0
    flat = tensor.detach().double().flatten()
    return float(flat @ torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64))
