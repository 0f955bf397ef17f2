"""Starts the applications in `megatron_cp.apps`: nothing else of the library names them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def application(name: str) -> Any:
    """Imports and returns an application's package, such as `estimate`, or a module of it, such as `train.command`."""
    return import_module(f"megatron_cp.apps.{name}")
