"""What `torch.compile` calls and does not look into.

An operation talks to other ranks, works in a pool of buffers, and reads numbers and numpy tables from a plan that is
another one for every batch. A compiler could only take all that for constants. So it breaks its graph at the call,
once, and compiles what stands before and after.

`torch.compiler.disable` says the same, but imports torch._dynamo, which takes 0.7 s and 79 MB of every process that
only evaluates or checks. So functions are marked as it marks them: the attributes are what a compiler that traces a
call reads, and the strategy is what the interpreter asks when the call is made, for all frames under it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.function import once_differentiable

_REASON = "megatron_cp's operations exchange tensors between ranks, by a plan that each batch has anew"
_NOT_TRACED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the frame, and those that it calls


def opaque[Function: Callable[..., Any]](function: Function) -> Function:
    """A function that `torch.compile` calls as it is, by one break of the graph.

    Whoever asks for `fullgraph=True` gets torch's error that there is a break, with the reason.
    """
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _REASON
    set_code_exec_strategy(marked.__code__, _NOT_TRACED)
    return function


def opaque_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the backward of an autograd function: differentiable once, and opaque to who compiles its call.

    It runs outside of autocast, as its forward does, also where `backward()` is called under it. Forward needs no mark:
    an opaque operation calls it.
    """
    once = once_differentiable(opaque(function))

    @opaque
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # Asked of all devices at once, and without torch's context where no gradient is differentiated: host time.
        if _is_any_autocast_enabled():
            kinds = {gradient.device.type for gradient in gradients if gradient is not None}
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                return once(ctx, *gradients)
        return once(ctx, *gradients) if torch.is_grad_enabled() else function(ctx, *gradients)

    return backward
