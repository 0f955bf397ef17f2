"""`OneThreadMode`: the base of dispatch modes that follow a step, which ranks that are threads enter at one moment."""

from __future__ import annotations

import contextlib
import threading
from functools import cache
from typing import Any

import torch
from typing_extensions import Self

from megatron_cp.torch_private import DispatchMode, below_autograd, operators

_lock = threading.Lock()


class OneThreadMode(DispatchMode):
    """A mode that sees forward and backward of this thread; autograd would run CUDA's backward in another one."""

    def __init__(self) -> None:
        super().__init__()
        self._one_thread = contextlib.ExitStack()

    def __enter__(self) -> Self:
        register_operators()
        self._one_thread.enter_context(torch.autograd.set_multithreading_enabled(False))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._one_thread.close()


class _RegisteredError(Exception):
    """An operator has its entry; nothing is computed."""


class _Register(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _RegisteredError


def register_operators() -> None:
    """Registers all operators with torch's dispatch modes; call it before entering a mode.

    For an operator that no mode has seen, torch 2.11 makes an entry without a lock; two threads that do so at once fail
    (`PyHandleCache.h`) or crash. So one thread registers all of torch's operators here: it takes half a second, and a
    rank that is a process skips it.
    """
    if threading.current_thread() is not threading.main_thread():
        with _lock:
            _register_operators()


@cache
def _register_operators() -> None:
    tensor = torch.empty(0)
    with below_autograd(), _Register():
        for operator, arguments in operators("aten"):
            required = [each for each in arguments if not each.has_default_value()]
            given = {each.name: _any_value(str(each.type), tensor) for each in required}
            # A few take arguments unknown here: storages, devices, lists of one length. Our kernels do not call them.
            with contextlib.suppress(_RegisteredError, RuntimeError):
                operator(**given)


def _any_value(kind: str, tensor: torch.Tensor) -> Any:
    if kind.startswith("Optional"):
        return None
    if kind.startswith("List"):
        return [tensor] if "Tensor" in kind else []
    return {"Tensor": tensor, "str": "", "bool": False}.get(kind, 0)
