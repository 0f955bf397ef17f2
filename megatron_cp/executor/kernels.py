"""What every kernel has in common, and how one is chosen."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from megatron_cp.errors import ArgumentError


class Kernel(ABC):
    """A backend of one operation.

    Attributes:
        name: as the user asks for it.
        package: what it comes from, for `doctor`.
        devices: the types of device that it is for.
        serves_graphs: whether it reads what depends on a pack from the tables of `GraphTables` alone,
            so that a CUDA graph of it serves every pack.
    """

    name: str
    package: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    serves_graphs: bool = False

    @abstractmethod
    def refusal(self, call: Any) -> str | None:
        """Why this kernel cannot run the call, with what would help; None if it can."""


def kernel_name(kernel: object) -> object:
    """The name of a kernel, or the name that was given instead of one."""
    return kernel.name if isinstance(kernel, Kernel) else kernel


def choose_kernel[K: Kernel](kernels: Sequence[K], name: str | K, call: Any) -> K:
    """The kernel called `name`, or for "auto" the first of `kernels`, which are fastest first, that can run `call`.

    A kernel that is given instead of a name is the only choice. On CUDA, "auto" warns when it passes a faster kernel
    over, with that kernel's reason; of kernels that serve no graph it says nothing where the call is for graphs.

    Raises:
        ArgumentError: no such kernel, or it cannot run the call, with its reason.
    """
    if isinstance(name, Kernel):
        kernels, name = [name], name.name
    if not isinstance(name, str):
        raise ArgumentError("kernel", name, " or ".join(["auto", *(kernel.name for kernel in kernels)]))
    if name == "auto":
        here = [kernel for kernel in kernels if call.device.type in kernel.devices]
        here = [kernel for kernel in here if kernel.serves_graphs] if call.for_graphs else here
        refusals = {kernel.name: kernel.refusal(call) for kernel in here}
        chosen = next((kernel for kernel in here if refusals[kernel.name] is None), None)
        if chosen is None:
            devices = sorted({device for kernel in kernels for device in kernel.devices})
            raise ArgumentError("device", str(call.device), f"tensors on {' or '.join(devices)}")
        passed_over = [f"{name} ({refusals[name]})" for name in list(refusals)[: here.index(chosen)]]
        if call.device.type == "cuda" and passed_over:
            warnings.warn(f"running on kernel {chosen.name}, not on {', '.join(passed_over)}", stacklevel=3)
        return chosen
    for kernel in kernels:
        if kernel.name == name:
            refusal = kernel.refusal(call)
            if refusal is not None:
                raise ArgumentError("kernel", name, "a kernel that can run this call", f"{name}: {refusal}.")
            return kernel
    raise ArgumentError("kernel", name, " or ".join(["auto", *(kernel.name for kernel in kernels)]))
