"""`torch.autocast`: which inputs of an operation are cast under it, and that nothing is within an operation.

An operation asks once, before it checks its tensors, by the list of torch's autocast that its family is in. A cast is
differentiable: a gradient arrives in the type of the tensor that was given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from megatron_cp.executor.trace import NO_RANGE


def lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns inputs of softmax attention or of a convolution, which under autocast are in its type.

    torch has `scaled_dot_product_attention` and `conv1d` in its list of operations in lower precision.
    """
    if not _is_any_autocast_enabled():  # one question of the host's time, where it is off
        return tensors
    return tuple(
        tensor.to(torch.get_autocast_dtype(tensor.device.type)) if _is_cast(tensor) else tensor for tensor in tensors
    )


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns inputs of a recurrence, which under autocast are in the widest type among them.

    fla, mamba_ssm and transformers compute recurrences in the type of what they are given, with states in fp32; and
    torch promotes the inputs of what it does not lower, as of `cat`, and on CUDA of `tensordot`.
    """
    if not _is_any_autocast_enabled() or not all(map(_is_cast, tensors)):
        return tensors
    first, *others = tensors
    widest = first.dtype
    for tensor in others:
        widest = torch.promote_types(widest, tensor.dtype)
    return tuple(tensor.to(widest) for tensor in tensors)


def _is_cast(tensor: object) -> bool:
    """True if autocast is on for the tensor's device and casts its type; other tensors stay, to be taken or refused."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.device.type != "meta"  # on which autocast has no answer
        and torch.is_autocast_enabled(tensor.device.type)
    )


def without_autocast(device: torch.device) -> Any:
    """Kernels compute in the types that they are given: autocast would change them behind their backs."""
    # torch's context takes the host as long as some launches do, and most of the time there is nothing to switch off.
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else NO_RANGE
