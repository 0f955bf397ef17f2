"""What the modes in here have in common: ranks that are threads enter them at the same moment."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_lock = threading.Lock()


class _Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def meet_operators() -> None:
    """Call it before entering a mode.

    Of an operator that no mode has seen, torch 2.11 makes an entry without a lock, and fails where two threads meet. So
    it goes with the one that all ranks call at once, when they take a buffer.
    """
    with _lock:
        _meet()


@cache
def _meet() -> None:
    with _Plain():
        torch.empty(1).resize_(1)
