"""Whether Megatron-Core is installed here, and how to install it."""

from __future__ import annotations

from importlib.util import find_spec

from megatron_cp.extras import install

INSTALL_MEGATRON = install("megatron")


def megatron_is_installed() -> bool:
    """Whether Megatron-Core can be imported here. Another package that is called megatron is not it."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None
