"""Checks that Megatron-Core is installed here, and says how to install it."""

from __future__ import annotations

from importlib.util import find_spec

from megatron_cp.extras import install

INSTALL_MEGATRON = install("megatron")


def megatron_is_installed() -> bool:
    """Returns True if Megatron-Core can be imported here; another package that is called megatron does not count."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None
