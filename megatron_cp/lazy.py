"""Names that a package imports when they are first used, for the `__init__` of a package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package whose public names are imported when they are used.

    Args:
        package: its `__name__`.
        homes: the module that has each name.
        modules: names that are modules of the package.
    """

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in homes:
            # With its name, so that Python adds no hint of its own to this one.
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_hint(name, public)}", name=name)
        value = vars(sys.modules[package])[name] = getattr(import_module(homes[name]), name)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    public = [*homes, *modules]
    return get, list_names


def _hint(name: str, known: Collection[str]) -> str:
    if name.startswith("__"):  # asked by inspection, not misspelt
        return ""
    from difflib import get_close_matches

    plain = {_plain(each): each for each in known}
    near = get_close_matches(_plain(name), plain, n=1, cutoff=0.75)
    return f". Did you mean {plain[near[0]]}?" if near else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
