"""Marks functions that `torch.compile` calls without tracing them.

An operation exchanges tensors with other ranks, works in a pool of buffers, and reads numbers and numpy tables from a
plan that differs from batch to batch. A compiler would treat all of these as constants. With the mark it breaks its
graph at the call, once, and compiles the code before and after.

`torch.compiler.disable` does the same, but imports torch._dynamo, which adds 0.7 s and 79 MB to every process that only
evaluates or checks. The marks here are the ones that it sets: a compiler that traces a call reads the attributes, and
the interpreter applies the strategy to the call and to all frames under it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.function import once_differentiable

Function = TypeVar("Function", bound=Callable[..., Any])

_REASON = "megatron_cp's operations exchange tensors between ranks, by a plan that each batch has anew"
_NOT_TRACED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the frame, and those that it calls


def no_compile(function: Function) -> Function:
    """Marks a function that `torch.compile` calls without tracing it, at the cost of one graph break. A decorator.

    With `fullgraph=True` the compiler raises torch's error for a graph break, with the reason.
    """
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _REASON
    set_code_exec_strategy(marked.__code__, _NOT_TRACED)
    return function


def no_compile_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the backward of an autograd function, differentiable once and never compiled. A decorator.

    The backward runs without autocast, as its forward does, even if `backward()` is called under autocast. The forward
    needs no mark, because a marked operation calls it.
    """
    once = once_differentiable(no_compile(function))

    @no_compile
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # To save host time, all devices are checked at once, and torch's context is skipped if grad mode is off.
        if _is_any_autocast_enabled():
            kinds = {gradient.device.type for gradient in gradients if gradient is not None}
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                return once(ctx, *gradients)
        return once(ctx, *gradients) if torch.is_grad_enabled() else function(ctx, *gradients)

    return backward
