"""What is known of an optional package before one of its kernels is called."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_version(package: str) -> tuple[int, ...] | None:
    """Major and minor, or None where it is not installed."""
    try:
        return tuple(int(part) for part in version(package).split(".")[:2])
    except PackageNotFoundError:
        return None


@cache
def import_failure(*modules: str) -> str | None:
    """What importing them says, or None if nothing.

    A package may be there and fail: without what it needs, or with a CUDA extension that was built for another torch.
    """
    try:
        for module in modules:
            import_module(module)
    except Exception as failure:  # a module can raise anything
        return f"{type(failure).__name__}: {failure}"
    return None
