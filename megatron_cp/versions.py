"""The versions of Python and of other packages that the tests have run with, and a warning outside of them.

`versions.json` is written by `make versions`. Nothing is refused for its version: what a feature needs and does not
find is refused by that feature. No torch in here.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("python", "torch", "transformers", "megatron-core", "numpy")  # the columns of the table
# The version of each framework with which its adapter was tested (docs/hosts.md); those of the table have a range.
ADAPTERS: dict[str, str | None] = {
    "transformers": None, "diffusers": "0.42.1", "trl": "1.16.0", "axolotl": "0.21.0", "verl": "0.9.1",
    "torchtitan": "0.3.0", "llamafactory": "0.9.5", "ms-swift": "4.6.0", "nemo-automodel": "0.7.0",
}  # fmt: skip
_warned: set[tuple[str, str]] = set()


@cache
def tested() -> dict[str, Any]:
    """Returns the table: `rows`, one for each environment, with its versions, counts of tests, failures and date."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("versions.json").read_text())
    return found


def tested_range(package: str) -> tuple[str, str] | None:
    """Returns the oldest and the newest version of a package, or of "python", in the table; None if it has none."""
    found = sorted({row[package] for row in tested()["rows"] if row[package]}, key=_release)
    return (found[0], found[-1]) if found else None


def outside(versions: Mapping[str, str | None]) -> list[str]:
    """Returns a phrase for each version outside the tested range; the last number of a version does not count."""
    phrases = []
    for package, version in versions.items():
        bounds = tested_range(package)
        if version is not None and bounds is not None:
            oldest, newest = bounds
            if not _release(oldest) <= _release(version) <= _release(newest):
                phrases.append(f"{package} {version}, tested from {oldest} to {newest}")
    return phrases


def adapter_tested(package: str, version: str) -> str:
    """Returns "tested" if an adapter was tested with this version of its framework, or what it was tested with.

    The last number of a version does not count.
    """
    known = ADAPTERS[package]
    oldest, newest = tested_range(package) or ("", "") if known is None else (known, known)
    if _release(oldest) <= _release(version) <= _release(newest):
        return "tested"
    return f"untested: only {oldest}" + (f" to {newest}" if oldest != newest else "")


def warn_if_framework_untested(package: str) -> None:
    """Warns if a framework is installed in another version than its adapter was tested with.

    Adapters override methods that a framework may rename, and that none of its versions promises.
    """
    with contextlib.suppress(metadata.PackageNotFoundError):
        found = metadata.version(package)
        if adapter_tested(package, found) != "tested":
            text = f"megatron_cp was tested with {package} {ADAPTERS[package]}, and {found} is installed"
            warnings.warn(f"{text}: compare a step with one rank before you train; see docs/hosts.md", stacklevel=3)


def warn_if_untested(**packages: str) -> None:
    """Warns, once for each version in a process, of versions of Python and the packages outside the tested range."""
    versions = {"python": ".".join(map(str, sys.version_info[:3])), **packages}
    new = {name: version for name, version in versions.items() if (name, version) not in _warned}
    _warned.update(new.items())
    phrases = outside(new)
    if phrases:
        text = "; ".join(phrases)
        warnings.warn(f"megatron_cp has not been tested with {text}:\n{table()}", stacklevel=3)


def table() -> str:
    """Returns the table as lines of text."""
    rows = cells()
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def cells() -> list[tuple[str, ...]]:
    """Returns the table's heads and its rows, from the oldest versions to the newest, as texts."""
    heads = (*PACKAGES, "passed", "failed", "skipped", "date")
    rows = sorted(tested()["rows"], key=lambda row: [_release(row[name]) for name in ("torch", "python")])
    return [heads, *(tuple("-" if row[head] is None else str(row[head]) for head in heads) for row in rows)]


def _release(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return (*numbers, 0, 0)[:2]
