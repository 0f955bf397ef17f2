"""Backends of torch.distributed on the emulated device: gloo stands in for NCCL, which knows real devices alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def gloo_for_nccl(distributed: ModuleType) -> None:
    """Makes groups of gloo where those of NCCL are asked for, for as long as the process lives."""
    join, make = distributed.init_process_group, distributed.new_group

    def joined(backend: str | None = None, *args: Any, **options: Any) -> Any:
        options.pop("device_id", None)  # for NCCL
        return join(_without_nccl(backend), *args, **options)

    def made(*args: Any, backend: str | None = None, **options: Any) -> Any:
        return make(*args, backend=_without_nccl(backend), **options)

    # Where it is defined, too: torch's own modules take them from there.
    for module in (distributed, distributed.distributed_c10d):
        module.init_process_group, module.new_group = joined, made


def _without_nccl(backend: str | None) -> str | None:
    return "gloo" if backend and "nccl" in backend else backend
