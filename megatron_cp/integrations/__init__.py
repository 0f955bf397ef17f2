"""Adapters for other people's frameworks, which are imported only where they are used. `docs/hosts.md` lists them."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def require(module: str, requirement: str) -> None:
    """Raises `ModuleNotFoundError` with a remedy if a framework is not installed.

    Args:
        module: the framework's module.
        requirement: what to install, in the version with which the adapter was tested.
    """
    if module not in sys.modules and find_spec(module) is None:
        said = f"{module} is not installed; pip install {requirement}: see docs/hosts.md"
        raise ModuleNotFoundError(said, name=module)
