"""Optional packages: the commands that install them (the extras of `pyproject.toml`), and what of them is here."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from shlex import quote

# Their sources compile against the torch that is installed, which pip's isolated builds do not have.
_COMPILED = ("flash", "mamba", "te")


@cache
def install(extra: str) -> str:
    """Returns the command that installs what an extra of this package pins.

    It names the packages themselves, from the metadata of what is installed: `pip install 'megatron_cp[...]'` finds
    nothing outside of a clone. Where the package is imported without having been installed, or was installed before it
    had the extra, the command installs from a clone.
    """
    try:
        lines = requires("megatron_cp") or []
    except PackageNotFoundError:
        lines = []
    pins = [line.partition(";")[0].strip() for line in lines if line.endswith(f'extra == "{extra}"')]
    if not pins:
        return f"pip install '.[{extra}]' in a clone of megatron_cp"
    options = "--no-build-isolation " if extra in _COMPILED else ""
    return f"pip install {options}{' '.join(map(quote, pins))}"


@cache
def installed_version(package: str) -> tuple[int, ...] | None:
    """Returns the major and the minor version of a package, or None if it is not installed."""
    try:
        return tuple(map(int, re.findall(r"\d+", version(package))[:2]))  # 1.17rc1 is 1.17
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
