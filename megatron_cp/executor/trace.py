"""Profiler ranges for the steps of a plan, with names that are the same on every rank.

    with comm.traced("to_heads", "q,k,v", forward=True) if profiling() else NO_RANGE:
        ...

Without a profiler this costs one call: no name is built, and no range is made. docs/profiling.md lists the names.

A profiler is on or off for each thread: where ranks are threads, for those that started it themselves. Autograd's own
threads, which run the backward on CUDA, inherit it from the thread that calls `backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.torch_private import profiler_enabled

# True under torch.profiler.profile, and under torch.autograd.profiler.emit_nvtx, which turns our ranges into NVTX's.
profiling: Callable[[], bool] = profiler_enabled

_LAYER: ContextVar[int | None] = ContextVar("the layer whose steps run", default=None)
current_layer = _LAYER.get


class _NoRange:
    """A context that does nothing.

    Both methods are a built-in function that takes any arguments and returns a false value. Every step enters and
    leaves this context, and methods written in Python would be two more Python calls a step.
    """

    __enter__ = __exit__ = "".format


NO_RANGE = _NoRange()


@contextmanager
def layer_scope(number: int | None) -> Iterator[None]:
    """Sets the number of the layer in which operations are called: their ranges end in "layer 12", also in backward.

    Our Megatron layers use it. It is not one of the package's public names, but a model in plain PyTorch may import it
    from here. A range of its own around a layer would show the forward only.
    """
    token = _LAYER.set(number)
    try:
        yield
    finally:
        _LAYER.reset(token)


def layer_operation(number: int | None, operation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operation of a layer that is called in `layer_scope` while a profiler is on.

    Where torch.compile traces it, it returns the operation itself, since code after a context would not be compiled.
    """
    if torch.compiler.is_compiling() or not profiling():
        return operation

    def called(*args: Any, **options: Any) -> Any:
        with layer_scope(number):
            return operation(*args, **options)

    return called


def range_name(
    scheme: str, step: str, what: str, *, chunk: tuple[int, int], stage: tuple[int, int], forward: bool,
    layer: int | None,
) -> str:  # fmt: skip
    """Returns the name of a step's range, such as "cp a2a to_heads q,k,v layer 12".

    `what` names the step's tensors; `chunk` and `stage` are a number, from 0, and a count, left out if the count is 1.
    """
    numbers = (
        f"{word} {number + 1}/{count}" for word, (number, count) in (("chunk", chunk), ("stage", stage)) if count > 1
    )
    direction, place = "" if forward else "backward", "" if layer is None else f"layer {layer}"
    return " ".join(word for word in ("cp", scheme, step, what, *numbers, direction, place) if word)


def traced_work(
    work: Callable[..., list[Tensor]], tensors: Sequence[Tensor], range_of: Callable[[bool], record_function]
) -> list[Tensor]:
    """Runs local work in a range, and its backward, which consists of many autograd functions, in another.

    While a profiler is on, identity functions are added before and after the work. Autograd runs the newest function
    that is ready first, so that no function of another step runs between them, and the order of steps is unchanged.
    """
    span = _BackwardRange(range_of)
    with range_of(True):
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return work(*tensors)
        return span.edge(work(*span.edge(tensors, begins=False)), begins=True)


class _BackwardRange:
    """The range of the backward of local work."""

    def __init__(self, range_of: Callable[[bool], record_function]) -> None:
        self._range_of = range_of
        self._open: record_function | None = None

    def edge(self, tensors: Sequence[Tensor], *, begins: bool) -> list[Tensor]:
        """Returns the tensors; the range begins, or ends, when backward has computed their gradients."""
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        passed = iter(_Edge.apply(self, begins, *wanted) if wanted else ())
        return [next(passed) if tensor.requires_grad else tensor for tensor in tensors]

    def begin(self) -> None:
        self.end()  # it is still open after a backward that needed no gradients of the work's inputs
        if profiling():
            self._open = self._range_of(False)
            self._open.__enter__()

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, span: _BackwardRange, begins: bool, *tensors: Tensor) -> Any:
        ctx.reached = span.begin if begins else span.end
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # views could not be written to in place

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.reached()
        return None, None, *gradients
