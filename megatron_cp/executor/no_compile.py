"""Marks functions that `torch.compile` calls without tracing them.

An operation exchanges tensors with other ranks, works in a pool of buffers, and reads numbers and numpy tables from a
plan that differs from batch to batch. A compiler would treat all of these as constants. With the mark it breaks its
graph at the call, once, and compiles the code before and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.torch_private import is_any_autocast_enabled, skip_when_compiling

Function = TypeVar("Function", bound=Callable[..., Any])

_REASON = "megatron_cp's operations exchange tensors between ranks, by a plan that each batch has anew"


def no_compile(function: Function) -> Function:
    """Marks a function that `torch.compile` calls without tracing it, at the cost of one graph break. A decorator.

    With `fullgraph=True` the compiler raises torch's error for a graph break, with the reason.
    """
    return skip_when_compiling(function, _REASON)


def no_compile_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the backward of an autograd function, differentiable once and never compiled. A decorator.

    The backward runs without autocast, as its forward does, even if `backward()` is called under autocast. The forward
    needs no mark, because a marked operation calls it.

    Raises:
        ArgumentError: a backward that builds a graph of the gradients, which autograd does with grad mode on.
    """

    @no_compile
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # `once_differentiable` raises only where a gradient of the output requires grad. Elsewhere, as for a loss that
        # is linear in the output, the second derivative by the inputs would be left out without an error.
        if torch.is_grad_enabled():
            raise ArgumentError("create_graph", True, _ALLOWED, _REMEDY)
        # To save host time, all devices are checked at once.
        if is_any_autocast_enabled():
            kinds = {gradient.device.type for gradient in gradients if gradient is not None}
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                return function(ctx, *gradients)
        return function(ctx, *gradients)

    return backward


_ALLOWED = "False where an operation of megatron_cp is differentiated, since it is differentiable once"
_REMEDY = "A gradient penalty needs a part of the model without these operations, or finite differences."
