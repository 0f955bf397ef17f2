"""`machine`: reads a machine's numbers from a preset or a file, in which each has its source. No torch in here."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.planner.predict.hardware import Hardware, Link, Machine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PRESETS = Path(__file__).parent / "presets"
SAFE = "h100"  # the default where no machine is named


def presets() -> list[str]:
    """Returns the names of the presets in the package."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def machine(name: Machine | str | Path | None = None, *, argument: str = "hardware") -> Machine:
    """Loads a preset by its name or its file.

    Args:
        name: one of `presets()`, a file of the same form, a `Machine`, which is returned, or None for `SAFE`.
        argument: the name of the argument in errors.

    Raises:
        ArgumentError: an unknown name, or a file that is missing or incomplete.

    Example:
        >>> machine("h100").topology(16).num_hosts
        2
    """
    if isinstance(name, Machine):
        return name
    if name is None:
        name = SAFE
    if not isinstance(name, str | Path):
        raise ArgumentError(argument, name, f"{', '.join(presets())} or a file")
    path = Path(name)
    if str(name).lower() in presets() and not path.is_file():
        return _preset(str(name).lower())
    if not path.is_file():
        near = difflib.get_close_matches(str(name).lower(), presets(), 1)
        written = "In a clone, `python -m benchmarks planner --calibrate FILE` writes such a file."
        remedy = f"Did you mean {near[0]}?" if near else written
        raise ArgumentError(argument, str(name), f"{', '.join(presets())} or a file", remedy)
    return _read(path, argument)


@cache
def _preset(name: str) -> Machine:
    return _read(_PRESETS / f"{name}.toml", "hardware")


_TABLES, _LINKS = ("hardware", "topology", "sources"), ("within", "between")


def _tables(path: Path, argument: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what a file has, and its tables; the preset that it names as its `base` fills what they leave out.

    A number that the file changes has no source but the file's own.
    """
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ArgumentError(argument, str(path), "a file in TOML, as the presets are", str(error)) from error
    tables = [given.get(name, {}) for name in _TABLES]
    if not all(isinstance(table, dict) for table in tables):
        raise ArgumentError(
            argument, str(path), "tables [hardware], [topology] and [sources], as the presets have them"
        )
    base = given.get("base")
    if base is None:
        return given, tables
    if base not in presets() or _PRESETS / f"{base}.toml" == path:
        raise ArgumentError(f"base of {path}", base, ", ".join(presets()))
    _, below = _tables(_PRESETS / f"{base}.toml", argument)
    changed = {*tables[0], *tables[1]}
    below[2] = {name: source for name, source in below[2].items() if name not in changed}
    for name in _LINKS:  # of which a file may change a part
        if isinstance(tables[1].get(name), dict):
            tables[1] = tables[1] | {name: below[1][name] | tables[1][name]}
    return given, [under | over for under, over in zip(below, tables, strict=True)]


def _read(path: Path, argument: str) -> Machine:
    given, tables = _tables(path, argument)
    rates, links, sources = tables
    wanted = {x.name for x in fields(Hardware) if x.default is MISSING and x.default_factory is MISSING}
    wanted -= {"name", "about"}
    lacking = [f"hardware.{name}" for name in sorted(wanted - set(rates))]
    lacking += [f"topology.{name}" for name in ("ranks_per_host", "rails", *_LINKS) if name not in links]
    of_hardware, outside = {x.name for x in fields(Hardware)}, {"name", "about", "base", *_TABLES}
    unknown = [_unknown(name, wanted - {*rates}, of_hardware) for name in sorted({*rates} - of_hardware)]
    unknown += [_unknown(name, outside, where=" outside of its table") for name in sorted({*given} - outside)]
    parts = [(name, each.name) for name in _LINKS for each in fields(Link)]
    known = {"ranks_per_host", "rails", "shares_cores", *_LINKS, *map(".".join, parts)}
    given_parts = [(name, part) for name in _LINKS if isinstance(links.get(name), dict) for part in links[name]]
    of_links = [*links, *map(".".join, given_parts)]
    unknown += [_unknown(name, known, of="topology.") for name in of_links if name not in known]
    if lacking or unknown:
        remedy = [f"It lacks {', '.join(lacking)}."] * bool(lacking) + [f"It has {', '.join(unknown)}."] * bool(unknown)
        raise ArgumentError(argument, str(path), "the numbers that the presets have", " ".join(remedy))
    try:
        numbers, rows = ("convolution", "wider", "band", "ring", "host"), ("attention", "rule", "row", "chain")
        tuples: dict[str, Any] = {name: tuple(rates[name]) for name in numbers if name in rates}
        tuples |= {name: tuple(tuple(row) for row in rates[name]) for name in rows if name in rates}
        about = {"name": given.get("name", path.stem), "about": given.get("about", "")}
        hardware = Hardware(**{**rates, **tuples, **about}, sources=dict(sources))
        ends = {name: Link(**links[name]) for name in _LINKS}
    except (TypeError, ValueError) as error:
        raise ArgumentError(argument, str(path), "numbers as the presets have them", str(error)) from error
    ranks, rails = (checked_integer(f"topology.{name}", links[name], 1) for name in ("ranks_per_host", "rails"))
    shares_cores = links.get("shares_cores", False)
    if not isinstance(shares_cores, bool):
        raise ArgumentError("topology.shares_cores", shares_cores, "true or false")
    return Machine(hardware, ranks, **ends, rails=rails, shares_cores=shares_cores)


def _unknown(name: str, *known: Iterable[str], where: str = "", of: str = "") -> str:
    """Describes a name that a file should not have, with the one that it resembles of the first names that do."""
    if name in ("matrix_peak", "products"):
        return f"{name} (whole steps are no longer predicted: leave it out)"
    near = [match for names in known for match in difflib.get_close_matches(name, names, 1)]
    return f"{of}{name}{where}" + (f" (did you mean {of}{near[0]}?)" if near else "")


def written(found: Machine, base: str | None = None) -> str:
    """Formats a machine as the text of a preset's file, which has the numbers that differ from those of its `base`."""
    hardware, sources = found.hardware, found.hardware.sources
    lines = [f'name = "{hardware.name}"', f'about = "{hardware.about}"']
    lines += [f'base = "{base}"'] if base else []
    names = [each.name for each in fields(Hardware) if each.name not in ("name", "about", "sources")]
    rates = {name: getattr(hardware, name) for name in names}
    links = {name: getattr(found, name) for name in ("ranks_per_host", "rails", "shares_cores", *_LINKS)}
    if base:
        below = machine(base)
        rates = {name: rate for name, rate in rates.items() if rate != getattr(below.hardware, name)}
        links = {name: link for name, link in links.items() if link != getattr(below, name)}
        same = below.hardware.sources.items()
        sources = {name: text for name, text in sources.items() if name in {*rates, *links} or (name, text) not in same}
    for table, values in zip(_TABLES, (rates, links, sources), strict=True):
        if values:
            lines += ["", f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Link):
        return f"{{ {', '.join(f'{each.name} = {_toml(getattr(value, each.name))}' for each in fields(Link))} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.6g}" if isinstance(value, float) else str(value)
