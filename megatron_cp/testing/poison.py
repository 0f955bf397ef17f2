"""`poisoned`: makes uninitialised memory read as NaN, so that an unwritten result cannot be right by chance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cp.testing.modes import OneThreadMode

_aten = torch.ops.aten
_UNINITIALISED = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_permuted,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.resize_,  # used by a group's buffers
}


class poisoned(OneThreadMode):  # noqa: N801 - used as `with poisoned():`
    """Fills every tensor that this thread allocates without a value with NaN.

    Bytes are filled with 0xFF, which is NaN in every floating-point type that a view may read them as; other integers
    with their largest value.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNINITIALISED:
            poison(result)
        return result


def poison(tensor: Tensor) -> Tensor:
    """Fills a tensor with NaN, or with its largest value if its type has no NaN."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)
