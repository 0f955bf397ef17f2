"""Ranges: the steps of a plan as a profiler shows them, by names that are the same on every rank.

    with comm.traced("to_heads", "q,k,v", forward=True) if profiling() else NO_RANGE:
        ...

While no profiler is on that is one question: no name is built, and nothing is made. docs/profiling.md lists the names.

Whether a profiler is on is known by thread: where ranks are threads, of those that started it themselves. Autograd's
own threads, which run the backward on CUDA, take it over from the thread that calls `backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from megatron_cp.executor.opaque import opaque_backward

# Under torch.profiler.profile, and under torch.autograd.profiler.emit_nvtx, which makes NVTX ranges of ours.
profiling: Callable[[], bool] = torch.autograd._profiler_enabled

_LAYER: ContextVar[int | None] = ContextVar("the layer whose steps run", default=None)
current_layer = _LAYER.get


class _NoRange:
    """A context of nothing. One of Python's own functions enters and leaves it: a frame of ours would take longer."""

    __enter__ = __exit__ = "".format  # takes anything, and returns what is not true


NO_RANGE = _NoRange()


@contextmanager
def in_layer(number: int | None) -> Iterator[None]:
    """Says in which layer operations are called: their ranges end in "layer 12", also in backward.

    Our Megatron layers do this. It is none of the package's public names; a model in plain PyTorch may use it
    from here, or put a range of its own around a layer, which shows the forward alone.

    Args:
        number: of the layer, the same on every rank; None for no number.
    """
    token = _LAYER.set(number)
    try:
        yield
    finally:
        _LAYER.reset(token)


def of_layer(number: int | None, operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of a layer: as it is, or, while a profiler is on, called in `in_layer`.

    Where torch.compile traces it, it is the operation: a context around it would leave all after it uncompiled.
    """
    if torch.compiler.is_compiling() or not profiling():
        return operation

    def called(*args: Any, **options: Any) -> Any:
        with in_layer(number):
            return operation(*args, **options)

    return called


def range_name(
    scheme: str, step: str, what: str, *, chunk: tuple[int, int], stage: tuple[int, int], forward: bool,
    layer: int | None,
) -> str:  # fmt: skip
    """The name of a step's range, such as "cp a2a to_heads q,k,v layer 12".

    Args:
        scheme: of the plan; empty for what has none.
        step: what is done.
        what: with which tensors.
        chunk, stage: number, from 0, and count; left out where there is one.
        forward: the direction.
        layer: None if it is not known.
    """
    numbers = (
        f"{word} {number + 1}/{count}" for word, (number, count) in (("chunk", chunk), ("stage", stage)) if count > 1
    )
    way, place = "" if forward else "backward", "" if layer is None else f"layer {layer}"
    return " ".join(word for word in ("cp", scheme, step, what, *numbers, way, place) if word)


def traced_work(
    work: Callable[..., list[Tensor]], tensors: Sequence[Tensor], range_of: Callable[[bool], record_function]
) -> list[Tensor]:
    """Local work in a range, whose backward, which is that of many functions, is in one too.

    For that, functions that change nothing stand at both ends of the work while a profiler is on. Autograd runs the
    newest function first that is ready, so none of another step comes between them, and the order of steps is as ever.

    Args:
        work: takes and returns tensors.
        tensors: what it takes.
        range_of: makes the range, forward or not.
    """
    span = _Backward(range_of)
    with range_of(True):
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return work(*tensors)
        return span.edge(work(*span.edge(tensors, begins=False)), begins=True)


class _Backward:
    """The range of one piece of work in backward: begun behind the work, ended before it."""

    def __init__(self, range_of: Callable[[bool], record_function]) -> None:
        self._range_of = range_of
        self._open: record_function | None = None

    def edge(self, tensors: Sequence[Tensor], *, begins: bool) -> list[Tensor]:
        """The tensors, behind whose gradients the range begins, or ends."""
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        passed = iter(_Edge.apply(self, begins, *wanted) if wanted else ())
        return [next(passed) if tensor.requires_grad else tensor for tensor in tensors]

    def begin(self) -> None:
        self.end()  # of another backward, which had no use for the gradients of the work's inputs
        if profiling():
            self._open = self._range_of(False)
            self._open.__enter__()

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, span: _Backward, begins: bool, *tensors: Tensor) -> Any:
        ctx.reached = span.begin if begins else span.end
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # no views, which users could not write to

    @staticmethod
    @opaque_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.reached()
        return None, None, *gradients
