"""Backends that compute softmax attention over bands of visible pairs, for one rank's heads.

`reference` reads like the equations and supports every call on every device. `cpu` is torch's flash kernel for CPUs.
On CUDA, `varlen` is torch's variable-length flash attention, `flash_attn`, `flash_attn_3` and `flash_attn_4` are
flash-attn's, and `flex` is torch's FlexAttention, for types, head sizes and a soft cap that the others lack. `base`
defines a kernel's interface. In `common/`, `varlen_calls` and `varlen_kernel` turn bands into variable-length calls,
`sums` adds results that are computed in parts, and `dropout` chooses the weights that are kept.
"""

from __future__ import annotations

from megatron_cp.errors import ArgumentError
from megatron_cp.softmax.kernels.base import AttentionCall, AttentionKernel, Tiles
from megatron_cp.softmax.kernels.cpu import CpuFlashAttention
from megatron_cp.softmax.kernels.flash_attn import FlashAttention2, FlashAttention3
from megatron_cp.softmax.kernels.flash_attn_4 import FlashAttention4
from megatron_cp.softmax.kernels.flex import FlexAttention
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.softmax.kernels.varlen import VarlenAttention

__all__ = ["KERNELS", "AttentionCall", "AttentionKernel", "Tiles", "register_kernel"]

# In the order in which "auto" tries them, fastest first, with two exceptions: torch's own is before flash-attn 2, which
# is the same code in another package, and flash-attn 3 and 4, the fastest on Hopper and Blackwell, are after both,
# because "auto" would warn that it skipped them wherever they are not installed.
KERNELS: list[AttentionKernel] = [
    VarlenAttention(),
    FlashAttention2(),
    FlashAttention3(),
    FlashAttention4(),
    FlexAttention(),
    CpuFlashAttention(),
    ReferenceAttention(),
]
_OURS = len(KERNELS)


def register_kernel(kernel: AttentionKernel) -> None:
    """Adds a kernel of the caller's, which every operation of this process then knows by its name: `kernel="name"`.

    "auto" takes it only where no kernel of the library can run a call. Every rank registers it, before the first layer
    is made. `megatron_cp.testing.check_kernel` says whether it is right.

    Args:
        kernel: an object of a subclass of `megatron_cp.softmax.AttentionKernel`. An object of the same class as an
            earlier one of this name takes its place.

    Raises:
        ArgumentError: something else, a kernel without `name`, `package` or `unrounded_partials`, or a name that is
            taken.
    """
    if not isinstance(kernel, AttentionKernel):
        raise ArgumentError("kernel", kernel, "an object of a subclass of megatron_cp.softmax.AttentionKernel")
    kinds = {"name": str, "package": str, "unrounded_partials": bool}
    wrong = [name for name, kind in kinds.items() if not isinstance(getattr(kernel, name, None), kind)]
    if wrong:
        needed = ", ".join(f"{name} ({kinds[name].__name__})" for name in wrong)
        raise ArgumentError("kernel", kernel, f"a kernel with the attributes {needed}")
    known = {other.name: number for number, other in enumerate(KERNELS)}
    number = known.get(kernel.name, len(KERNELS))
    if kernel.name == "auto" or number < _OURS or (number < len(KERNELS) and _class(KERNELS[number]) != _class(kernel)):
        taken = " or ".join(["auto", *known])
        raise ArgumentError("kernel", f"a kernel called {kernel.name!r}", f"one with another name than {taken}")
    KERNELS[number : number + 1] = [kernel]


def _class(kernel: AttentionKernel) -> tuple[str, str]:
    """Returns the name of a kernel's class, which stays the same where its module is loaded again."""
    return type(kernel).__module__, type(kernel).__qualname__
