"""Adapters for other people's frameworks, which are imported only where they are used. `docs/hosts.md` lists them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from megatron_cp.errors import ArgumentError
from megatron_cp.versions import ADAPTERS, warn_if_framework_untested


def require(module: str, package: str) -> None:
    """Raises `ModuleNotFoundError` with a remedy if a framework is not installed, and warns of an untested version.

    An adapter overrides methods that its framework may rename, and that no version promises. The last number of a
    version does not count.

    Args:
        package: its name for pip, one of `versions.ADAPTERS`.
    """
    if module not in sys.modules and find_spec(module) is None:
        said = f"{module} is not installed; pip install {package}=={ADAPTERS[package]}: see docs/hosts.md"
        raise ModuleNotFoundError(said, name=module)
    warn_if_framework_untested(package)


def check_whole_logits(cp_options: Mapping[str, Any], framework: str) -> None:
    """Refuses `logit_rows` for a framework that computes its losses from all logits itself."""
    if (rows := cp_options.get("logit_rows")) is not None:
        remedy = f"{framework} computes its losses from all logits: leave it out, or train with ContextParallelTrainer."
        raise ArgumentError("cp_options.logit_rows", rows, "None", remedy)
