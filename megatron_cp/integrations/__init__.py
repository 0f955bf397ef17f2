"""Adapters for other people's frameworks, which are imported only where they are used. `docs/hosts.md` lists them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from megatron_cp.versions import ADAPTERS


def require(module: str, package: str) -> None:
    """Raises `ModuleNotFoundError` with a remedy if a framework is not installed.

    Args:
        module: the framework's module.
        package: the framework's name for pip, one of `versions.ADAPTERS`.
    """
    if module not in sys.modules and find_spec(module) is None:
        said = f"{module} is not installed; pip install {package}=={ADAPTERS[package]}: see docs/hosts.md"
        raise ModuleNotFoundError(said, name=module)
