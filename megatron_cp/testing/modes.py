"""What the modes in here have in common: ranks that are threads enter them at the same moment."""

from __future__ import annotations

import contextlib
import threading
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_lock = threading.Lock()
_COMPOSITE = "CompositeImplicitAutograd"  # operators that no mode sees, but those that they are made of


class _MetError(Exception):
    """An operator has its entry; nothing is computed."""


class _Meet(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _MetError


def meet_operators() -> None:
    """Call it before entering a mode.

    Of an operator that no mode has seen, torch 2.11 makes an entry without a lock, and where two threads meet it fails
    (`PyHandleCache.h`) or crashes. So all of torch's operators are entered here, by one thread: half a second, which a
    rank that is a process does without.
    """
    if threading.current_thread() is not threading.main_thread():
        with _lock:
            _meet()


@cache
def _meet() -> None:
    tensor = torch.empty(0)
    with torch._C._AutoDispatchBelowAutograd(), _Meet():
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            if namespace != "aten" or torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE):
                continue
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            required = [each for each in operator._schema.arguments if not each.has_default_value()]
            given = {each.name: _any_value(str(each.type), tensor) for each in required}
            # A few take what this does not know: storages, devices, lists of one length. No kernel of ours calls these.
            with contextlib.suppress(_MetError, RuntimeError):
                operator(**given)


def _any_value(kind: str, tensor: torch.Tensor) -> Any:
    if kind.startswith("Optional"):
        return None
    if kind.startswith("List"):
        return [tensor] if "Tensor" in kind else []
    return {"Tensor": tensor, "str": "", "bool": False}.get(kind, 0)
