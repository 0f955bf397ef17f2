"""Kernels and functions whose calls a watch records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_cp.apps.bench.timing import Watch
from megatron_cp.linear import Inputs, LinearCall, LinearKernel, ScanWork, choose_conv, choose_rule
from megatron_cp.softmax import AttentionCall, AttentionKernel, Tiles
from megatron_cp.torch_private import leaves, map_leaves, no_modes


class WatchedAttentionKernel(AttentionKernel):
    """A kernel whose calls a watch records; `hides_tensors` hides from modes those that it makes for itself."""

    def __init__(self, kernel: AttentionKernel, watch: Watch, *, hides_tensors: bool = False) -> None:
        self._kernel, self._watch, self._hides_tensors = kernel, watch, hides_tensors
        self.name, self.package, self.devices = kernel.name, kernel.package, kernel.devices
        self.unrounded_partials = kernel.unrounded_partials

    def refusal(self, call: AttentionCall) -> str | None:
        return self._kernel.refusal(call)

    def prepare(self, tiles: Tiles, device: torch.device) -> None:
        self._kernel.prepare(tiles, device)

    def forward(self, *args: Any) -> None:
        self._run(self._kernel.forward, *args)

    def backward(self, *args: Any) -> None:
        self._run(self._kernel.backward, *args)

    def _run(self, call: Callable[..., None], *args: Any) -> None:
        hidden = no_modes() if self._hides_tensors else contextlib.nullcontext()
        with hidden, self._watch.span("kernel"):
            call(*args)


class WatchedLinearKernel(LinearKernel):
    """The fastest kernels of a linear layer, whose forward and backward a watch records."""

    name = "auto"

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def refusal(self, call: LinearCall) -> str | None:
        return None

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, **options: Any) -> Tensor:
        result: Tensor = watched(self._watch, choose_conv("auto", call).conv)(x, weight, bias, call, **options)
        return result

    def rule(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> Tensor:
        result: Tensor = watched(self._watch, choose_rule("auto", call).rule)(inputs, groups, scale, call)
        return result

    def work(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> ScanWork:
        return choose_rule("auto", call).work(inputs, groups, scale, call)


def watched(watch: Watch, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a differentiable function whose time, forward and backward, counts as a kernel's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        timer = _Timer(watch)
        args, kwargs = _marked((args, kwargs), timer.stop)  # backward runs the other way round
        with watch.span("kernel"):
            result = function(*args, **kwargs)
        return _marked(result, timer.start)

    return call


class _Timer:
    """Times a function's backward, from its start to its stop."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._span = watch, contextlib.ExitStack()

    def start(self) -> None:
        self._span.enter_context(self._watch.span("kernel"))

    def stop(self) -> None:
        self._span.close()


def _marked(values: Any, passed: Callable[[], None]) -> Any:
    """Returns the same values; backward calls `passed` once the gradients of all of them are computed."""
    marked = [leaf for leaf in leaves(values) if _is_marked(leaf)]
    if not marked:
        return values
    tensors = iter(_Mark.apply(passed, *marked))
    return map_leaves(lambda leaf: next(tensors) if _is_marked(leaf) else leaf, values)


def _is_marked(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passed: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.passed = passed
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.passed()
        return None, *gradients
