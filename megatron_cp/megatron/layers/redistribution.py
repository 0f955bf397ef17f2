"""Redistributes hidden states around runs of linear layers.

A run is a sequence of a stack's layers that mix tokens by linear layers only: linear layers and the MLPs between them.
If the plan requires it, hidden states are moved to contiguous ranges before a run and back after it, and all layers of
the run are given the batch's parameters with the layout that their rows have. A stack belongs to one pipeline stage, so
runs do not cross stages.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.relayout import relayout
from megatron_cp.executor.trace import layer_operation
from megatron_cp.layout import Layout
from megatron_cp.megatron.layers.base import ContextParallelModule, LinearModule
from megatron_cp.megatron.rules import refuse
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.schemes import REDISTRIBUTE
from megatron_cp.planner.batch import LinearSpec


def arrange_runs(layers: Iterable[nn.Module], config: Any) -> None:
    """Tells the linear layers of a built stack their runs, and adds the hooks that redistribute hidden states."""
    for has_linear, run in itertools.groupby(layers, key=lambda layer: not _attends(layer)):
        if has_linear:
            members = list(run)
            linear = [place for place, layer in enumerate(members) if _linear_of(layer)]
            if linear:
                own = [module for layer in members for module in _linear_of(layer)]
                inside = members[linear[0] : linear[-1] + 1]
                arrange_run(inside, own, [module.slot for module in own], config)


def arrange_run(
    layers: Sequence[nn.Module],
    linear: Sequence[LinearModule],
    slots: Sequence[LinearSpec],
    config: Any,
    *,
    is_first: bool = True,
    is_last: bool = True,
) -> None:
    """Arranges one run, or the part of it that is built so far.

    Args:
        layers: the run's layers in order, or a part of them.
        linear: the linear layers of these.
        slots: the specs of all linear layers of the run.
        config: Megatron's configuration.
        is_first, is_last: True if `layers` begin with the run's first layer, and end with its last.
    """
    if config.sequence_parallel and config.tensor_model_parallel_size > 1:
        if config.context_parallel_size > 1 and any(slot.mode == REDISTRIBUTE.name for slot in slots):
            allowed = "headwise, chunkwise or auto with --sequence-parallel"
            refuse("linear_cp_mode", "redistribute", allowed, "Between layers a rank has only a part of its rows.")
        return
    for module in linear:
        module.slot = replace(module.slot, hidden_size=config.hidden_size, run=tuple(slots))
    hooks = _RunHooks(linear[0])
    for layer in layers:
        moves = is_first and layer is layers[0]
        layer.register_forward_pre_hook(partial(hooks.enter, moves=moves), with_kwargs=True)
    if is_last:
        layers[-1].register_forward_hook(hooks.restore, with_kwargs=True)


class _RunHooks:
    """The hooks of a run's layers."""

    def __init__(self, linear: LinearModule) -> None:
        self.linear = linear

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, moves: bool) -> Any:
        """Gives a layer the parameters that have the run's layout; moves the hidden states before the first layer."""
        hidden = args[0] if args else kwargs["hidden_states"]
        plan = self._plan(kwargs, hidden)
        if plan is None or plan.hidden_layout is None:
            return None
        if kwargs.get("padding_mask") is not None:
            refuse(
                "linear_cp_mode",
                "redistribute",
                "headwise or chunkwise with a padding mask",
                "Its rows are those outside.",
            )
        params = self.linear.planned(kwargs["packed_seq_params"])
        kwargs = {**kwargs, "packed_seq_params": params.within(plan.layout)}
        if not moves:
            return args, kwargs
        ranks = self.linear.ranks_of(params)
        self.linear.check_rows(len(hidden), plan.hidden_layout, ranks)
        hidden = self._moved(layer, hidden, plan, plan.hidden_layout, plan.layout, ranks)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def restore(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Moves the hidden states back to the layout outside of the run."""
        hidden, *rest = (out,) if isinstance(out, Tensor) else out
        plan = self._plan(kwargs, hidden)
        if plan is None or plan.hidden_layout is None:
            return None
        ranks = self.linear.ranks_of(kwargs.get("packed_seq_params"))
        hidden = self._moved(layer, hidden, plan, plan.layout, plan.hidden_layout, ranks)
        return hidden if isinstance(out, Tensor) else (hidden, *rest)

    def _moved(
        self, layer: nn.Module, hidden: Tensor, plan: Plan, source: Layout, target: Layout, ranks: RankGroup
    ) -> Tensor:
        move = layer_operation(getattr(layer, "layer_number", None), relayout)
        moved: Tensor = move(hidden, source, target, ranks, transport=plan.transport)
        return moved

    def _plan(self, kwargs: dict[str, Any], hidden: Tensor) -> Plan | None:
        """Returns the plan of the run's linear layers; None for unpacked batches, which are never redistributed."""
        return self.linear.packed_plan(kwargs.get("packed_seq_params"), hidden.shape[1])


def _attends(layer: nn.Module) -> bool:
    """True if the layer mixes tokens by other modules than our linear layers.

    These are our other layers, and any module that is told the documents, such as Megatron's own attention.
    """
    return any(
        isinstance(module, ContextParallelModule) or "packed_seq_params" in inspect.signature(module.forward).parameters
        for module in layer.modules()
        if module is not layer and not isinstance(module, LinearModule)
    )


def _linear_of(layer: nn.Module) -> list[LinearModule]:
    return [module for module in layer.modules() if isinstance(module, LinearModule)]
