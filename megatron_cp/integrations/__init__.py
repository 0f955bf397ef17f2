"""Adapters for other people's frameworks, which are imported only where they are used. `docs/hosts.md` lists them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from megatron_cp.extras import warn_if_untested


def require(module: str, requirement: str) -> None:
    """Raises `ModuleNotFoundError` with a remedy if a framework is not installed, and warns of an untested version.

    An adapter overrides methods that its framework may rename, and that no version promises. The last number of a
    version does not count.

    Args:
        module: the framework's module.
        requirement: what to install, in the version with which the adapter was tested, such as "verl==0.9.1".
    """
    if module not in sys.modules and find_spec(module) is None:
        said = f"{module} is not installed; pip install {requirement}: see docs/hosts.md"
        raise ModuleNotFoundError(said, name=module)
    warn_if_untested(requirement)
