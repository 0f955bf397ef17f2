"""Checks of an optional package before one of its kernels is called."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_version(package: str) -> tuple[int, ...] | None:
    """Returns the major and the minor version of a package, or None if it is not installed."""
    try:
        return tuple(int(part) for part in version(package).split(".")[:2])
    except PackageNotFoundError:
        return None


@cache
def import_failure(*modules: str) -> str | None:
    """Returns the error of importing modules, or None if there is none.

    An installed package may fail because a dependency is missing or its CUDA extension was built for another torch.
    """
    try:
        for module in modules:
            import_module(module)
    except Exception as failure:  # a module can raise anything
        return f"{type(failure).__name__}: {failure}"
    return None
