"""`Kernel`, the base of all kernels, and `choose_kernel`, which chooses one for a call."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from megatron_cp.errors import ArgumentError

K = TypeVar("K", bound="Kernel")


class Kernel(ABC):
    """A backend of one operation.

    Attributes:
        name: the name by which users choose it.
        package: the package that contains it, for `doctor`.
        devices: the types of device that it supports.
        serves_graphs: True if it reads all values that depend on a pack from the tables of `GraphTables`, so that a
            CUDA graph of it serves every pack.
    """

    name: str
    package: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    serves_graphs: bool = False

    @abstractmethod
    def refusal(self, call: Any) -> str | None:
        """Returns why this kernel cannot run the call, with a remedy; None if it can."""


def kernel_name(kernel: object) -> object:
    """Returns the name of a kernel; returns other objects, such as a name, as they are."""
    return kernel.name if isinstance(kernel, Kernel) else kernel


def choose_kernel(kernels: Sequence[K], name: str | K, call: Any) -> K:
    """Returns the kernel called `name`, or for "auto" the first of `kernels` that can run `call`; fastest come first.

    A kernel that is passed instead of a name is the only choice. On CUDA, "auto" warns if it skips a faster kernel,
    with that kernel's reason; if the call is for graphs, kernels that serve no graph are skipped without a warning.

    Raises:
        ArgumentError: no kernel has this name, or it cannot run the call, with its reason.
    """
    if isinstance(name, Kernel):
        kernels, name = [name], name.name
    if not isinstance(name, str):
        raise ArgumentError("kernel", name, " or ".join(["auto", *(kernel.name for kernel in kernels)]))
    if name == "auto":
        here = [kernel for kernel in kernels if call.device.type in kernel.devices]
        here = [kernel for kernel in here if kernel.serves_graphs] if call.for_graphs else here
        passed_over = []
        for chosen in here:  # a kernel's answer may import its package, so those after the first that can are not asked
            refusal = chosen.refusal(call)
            if refusal is None:
                break
            passed_over.append(f"{chosen.name} ({refusal})")
        else:
            devices = sorted({device for kernel in kernels for device in kernel.devices})
            raise ArgumentError("device", str(call.device), f"tensors on {' or '.join(devices)}")
        if call.device.type == "cuda" and passed_over:
            warnings.warn(f"running on kernel {chosen.name}, not on {', '.join(passed_over)}", stacklevel=3)
        return chosen
    for kernel in kernels:
        if kernel.name == name:
            refusal = kernel.refusal(call)
            if refusal is not None:
                others = [other.name for other in kernels if other.refusal(call) is None]
                allowed = " or ".join(["auto", *others]) if others else "a kernel that can run this call"
                raise ArgumentError("kernel", name, allowed, f"{name}: {refusal}.")
            return kernel
    raise ArgumentError("kernel", name, " or ".join(["auto", *(kernel.name for kernel in kernels)]))
