"""`torch.autocast`: casts an operation's inputs as torch's rules say, and turns autocast off inside operations.

An operation casts once, before it checks its tensors, by the list of torch's autocast that its family is in. A cast is
differentiable: the gradient has the type of the tensor before the cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.executor.trace import NO_RANGE
from megatron_cp.torch_private import is_any_autocast_enabled


def lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts inputs of softmax attention or of a convolution to the type of autocast, if it is on.

    torch has `scaled_dot_product_attention` and `conv1d` in its list of operations in lower precision.
    """
    if not is_any_autocast_enabled():  # a single check, to save host time where autocast is off
        return tensors
    return tuple(
        tensor.to(torch.get_autocast_dtype(tensor.device.type)) if _is_cast(tensor) else tensor for tensor in tensors
    )


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts inputs of a recurrence to the widest type among them, if autocast is on.

    fla, mamba_ssm and transformers compute recurrences in the type of their inputs, with states in fp32; and torch
    promotes the inputs of operations that it does not lower, such as `cat` and, on CUDA, `tensordot`.
    """
    if not is_any_autocast_enabled() or not all(map(_is_cast, tensors)):
        return tensors
    first, *others = tensors
    widest = first.dtype
    for tensor in others:
        widest = torch.promote_types(widest, tensor.dtype)
    return tuple(tensor.to(widest) for tensor in tensors)


def _is_cast(tensor: object) -> bool:
    """Returns True if autocast is on for the tensor's device and casts its type."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.device.type != "meta"  # on which autocast has no answer
        and torch.is_autocast_enabled(tensor.device.type)
    )


def without_autocast(device: torch.device) -> Any:
    """Returns a context without autocast, since kernels compute in the types of their tensors."""
    # torch's context takes as much host time as some launches, and autocast is rarely on.
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else NO_RANGE
