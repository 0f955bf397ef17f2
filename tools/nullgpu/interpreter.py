"""Triton's interpreter on the emulated device: kernels run on the memory itself, since its addresses are the host's.

As it comes, it copies tensors to the host and back, which waits, and takes one thread.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from tools.nullgpu import ordering
from tools.nullgpu.clocks import runs


def _watched(access: Any, mask_at: int, name: str) -> Any:
    """Checks an access of a kernel, which must come after the transfers of its memory."""

    def checked(self: Any, pointers: Any, *rest: Any) -> Any:
        if ordering.active is not None:
            addresses = pointers.data[rest[mask_at].data]
            ordering.active.access(
                f"a {name} of a kernel", runs(addresses), writes=name == "store", stream=ordering.stream()
            )
        return access(self, pointers, *rest)

    return checked


def interpret_in_place() -> None:
    """Changes Triton's interpreter for good."""
    from triton.runtime import interpreter

    from tools.nullgpu.emulation import of_host
    from tools.triton_interpreter import interpret_triton, round_as_hardware_does

    interpret_triton()
    round_as_hardware_does()
    one_at_a_time, run = threading.RLock(), interpreter.GridExecutor.__call__

    def arguments(_: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(of_host, args), tree_map(of_host, kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with one_at_a_time, _disable_current_modes():
            return run(self, *args, **kwargs)

    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = _watched(builder.create_masked_load, 0, "load")
    builder.create_masked_store = _watched(builder.create_masked_store, 1, "store")
    interpreter.GridExecutor._init_args_hst = arguments
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    interpreter.GridExecutor.__call__ = call
