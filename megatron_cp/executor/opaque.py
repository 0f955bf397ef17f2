"""What `torch.compile` calls and does not look into.

An operation talks to other ranks, works in a pool of buffers, and reads numbers and numpy tables from a plan that is
another one for every batch. A compiler could only take all that for constants. So it breaks its graph at the call,
once, and compiles what stands before and after.

`torch.compiler.disable` says the same, but imports torch._dynamo, which takes 0.7 s and 79 MB of every process that
only evaluates or checks. So functions are marked as it marks them: the attributes are what a compiler that traces a
call reads, and the strategy is what the interpreter asks when the call is made, for all frames under it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
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
    """The backward of an autograd function, differentiable once; opaque to who compiles a step with its `backward()`.

    It runs outside of autocast, as its forward does, also where `backward()` is called under it. Forward needs no mark:
    an opaque operation calls it.
    """

    @opaque
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        device = next((gradient.device.type for gradient in gradients if gradient is not None), None)
        if device is None or not torch.is_autocast_enabled(device):
            return function(ctx, *gradients)
        with torch.autocast(device, enabled=False):
            return function(ctx, *gradients)

    once: Callable[..., Any] = once_differentiable(backward)
    return once
