"""Refusals that the kernels of other packages share."""

from __future__ import annotations

import torch

from megatron_cp.extras import import_failure, install, installed_version
from megatron_cp.linear.kernels.base import LinearCall


def package_refusal(
    call: LinearCall, package: str, extra: str, oldest: tuple[int, int], *modules: str, only: bool = False
) -> str | None:
    """Returns why no kernel of a package on CUDA computes a call; None if it may.

    `extra` installs the package, whose `modules` must be importable; with `only`, no version but `oldest` will do.
    """
    installed = installed_version(package)
    if installed is None or (installed != oldest if only else installed < oldest):
        wrong = f"{'not of' if only else 'older than'} version {oldest[0]}.{oldest[1]}"
        return f"{package} is {'not installed' if installed is None else wrong}; {install(extra)}"
    if call.device.type != "cuda":
        return f"runs on CUDA, the tensors are on {call.device.type}; use chunked or reference"
    if call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"has no {call.dtype}; use chunked or reference"
    failure = import_failure(*modules)
    return None if failure is None else f"{package} cannot be imported ({failure}); {install(extra)}"
