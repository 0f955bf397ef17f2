"""`Hardware` and `Topology`: what predictions know of machines. Presets are files, with the source of every number.

No torch in here.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout.memo import frozen
from megatron_cp.layout.packing import IntArray

_PRESETS = Path(__file__).parent / "presets"
SAFE = "h100"  # what is taken where nobody says on which machine a plan will run


@dataclass(frozen=True)
class Link:
    """One direction of a connection.

    Attributes:
        latency: seconds from the start of a transfer to its first byte.
        message: seconds that each message takes beside its bytes.
        bandwidth: bytes a second.
    """

    latency: float
    message: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_numbers(self, at_least_zero=("latency", "message"))


@dataclass(frozen=True)
class Hardware:
    """Rates of one rank, in bf16 and for kernels with enough to do.

    Attributes:
        name: the preset's.
        about: what machine that is.
        matrix: floating-point operations a second of large matrix products.
        matrix_peak: of which the data sheet speaks; what utilisation is measured by.
        matrix_rows: rows of a product at which half of that rate is reached.
        attention: for each head size the operations a second of softmax attention's kernel, forward and backward;
            in between and beyond, the nearest.
        tile: queries and keys that the kernel takes at once: a tile that a mask cuts is computed as a whole.
        units: pieces of work, of one head and one tile of queries, at which half of that rate is reached.
        rule: multiply-adds a second of a linear layer's chunked kernels, forward and backward.
        rule_floor: seconds that such a kernel takes at least.
        copy: bytes a second that a copy writes.
        call: seconds that a call of attention's kernel takes beside its work.
        launch: seconds that any other operation takes beside its work.
        memory: bytes of a rank's memory.
        cores: ranks of a host that compute at a time; 0 where each has a device of its own.
        band: seconds for each band of a mask: kernels of the CPU are called for each.
        wider: how many times longer an element of 4 and of 8 bytes takes than one of 2.
        sources: where each number comes from.
    """

    name: str
    about: str
    matrix: float
    matrix_peak: float
    matrix_rows: float
    attention: tuple[tuple[int, float, float], ...]
    tile: int
    units: float
    rule: tuple[float, float]
    rule_floor: float
    copy: float
    call: float
    launch: float
    memory: float
    cores: int = 0
    band: float = 0.0
    wider: tuple[float, float] = (2.0, 4.0)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False, repr=False)

    def __post_init__(self) -> None:
        _check_numbers(self, at_least_zero=("matrix_rows", "units", "rule_floor", "call", "launch", "cores", "band"))
        rows = [row for row in self.attention if len(row) == 3 and all(_is_number(x) and x > 0 for x in row)]
        if not rows or len(rows) != len(self.attention):
            raise ArgumentError("attention", self.attention, "rows of a head size and two rates")
        for name in ("rule", "wider"):
            pair = getattr(self, name)
            if len(pair) != 2 or not all(_is_number(x) and x > 0 for x in pair):
                raise ArgumentError(name, pair, "two numbers above 0")
        for name, least in (("tile", 1), ("cores", 0)):
            checked_integer(name, getattr(self, name), least)
        for name in ("name", "about"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(name, getattr(self, name), "a text")

    def attention_rate(self, head_dim: int, *, forward: bool) -> float:
        """Operations a second of heads of this size."""
        nearest = min(self.attention, key=lambda row: abs(math.log(row[0] / head_dim)))
        return nearest[1 if forward else 2]

    def slower(self, item_size: int) -> float:
        """How many times longer than in bf16 everything takes with elements of so many bytes."""
        return {1: 1.0, 2: 1.0, 4: self.wider[0], 8: self.wider[1]}.get(item_size, self.wider[1])


@dataclass(frozen=True)
class Topology:
    """Where ranks are, and the links between them.

    Attributes:
        hosts: the host of each rank, numbered from 0.
        within: between two ranks of a host, for each rank and direction.
        between: between hosts, for each network card and direction.
        rails: network cards of a host, which its ranks share evenly.
    """

    hosts: tuple[int, ...]
    within: Link
    between: Link
    rails: int = 1

    def __post_init__(self) -> None:
        if not self.hosts or set(self.hosts) != set(range(max(self.hosts) + 1)):
            raise ArgumentError("hosts", self.hosts, "the host of each rank, numbered from 0, none left out")
        checked_integer("rails", self.rails, 1)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return max(self.hosts) + 1

    @cached_property
    def rail(self) -> IntArray:
        """`[ranks]` the network card of each rank, numbered over all hosts."""
        hosts = np.array(self.hosts)
        place = np.zeros_like(hosts)
        for host in range(self.num_hosts):
            of_host = np.flatnonzero(hosts == host)
            place[of_host] = np.arange(of_host.size) * min(self.rails, of_host.size) // of_host.size
        return frozen(hosts * self.rails + place)


@dataclass(frozen=True)
class Machine:
    """A preset: the hardware of a rank, and how as many ranks as one wants would be connected.

    Attributes:
        hardware: rates of a rank.
        ranks_per_host: ranks of one host.
        within, between, rails: see `Topology`.
    """

    hardware: Hardware
    ranks_per_host: int
    within: Link
    between: Link
    rails: int

    def topology(self, ranks: int, hosts: int | Sequence[int] | None = None) -> Topology:
        """So many ranks on hosts that are full but for the last one.

        Args:
            ranks: how many.
            hosts: the number of hosts, of which neighbours share one evenly, or the host of each rank.

        Raises:
            ArgumentError: no rank, more hosts than ranks, or the hosts of another number of ranks.
        """
        ranks = checked_integer("ranks", ranks, 1)
        if hosts is None:
            numbers: Sequence[int] = [rank // self.ranks_per_host for rank in range(ranks)]
        elif isinstance(hosts, int):
            if not 1 <= hosts <= ranks:
                raise ArgumentError("hosts", hosts, f"1 to the {ranks} ranks")
            numbers = [rank * hosts // ranks for rank in range(ranks)]
        else:
            numbers = list(hosts)
            if len(numbers) != ranks:
                raise ArgumentError("hosts", hosts, f"the host of each of the {ranks} ranks")
        return Topology(tuple(numbers), self.within, self.between, self.rails)

    def describe(self) -> str:
        """The preset in words."""
        return f"{self.hardware.name}: {self.hardware.about}"


def presets() -> list[str]:
    """The names of the presets that come with the package."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def machine(name: Machine | str | Path | None = None, *, argument: str = "hardware") -> Machine:
    """A preset by its name or its file.

    Args:
        name: one of `presets()`, a file of such a form, a machine as it is, or None for `SAFE`.
        argument: what errors call it.

    Raises:
        ArgumentError: another name, or a file that is none or lacks something.

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
    if str(name) in presets():
        return _preset(str(name))
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(str(name).lower(), presets(), 1)
        remedy = f"Did you mean {near[0]}?" if near else "`megatron-cp bench planner --calibrate` writes such a file."
        raise ArgumentError(argument, str(name), f"{', '.join(presets())} or a file", remedy)
    return _read(path, argument)


@cache
def _preset(name: str) -> Machine:
    return _read(_PRESETS / f"{name}.toml", "hardware")


def _read(path: Path, argument: str) -> Machine:
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ArgumentError(argument, str(path), "a file in TOML, as the presets are", str(error)) from error
    tables = [given.get(name, {}) for name in ("hardware", "topology", "sources")]
    if not all(isinstance(table, dict) for table in tables):
        raise ArgumentError(
            argument, str(path), "tables [hardware], [topology] and [sources], as the presets have them"
        )
    of_rank, links, sources = tables
    wanted = {x.name for x in fields(Hardware)} - {"name", "about", "sources", "cores", "band", "wider"}
    lacking = [f"hardware.{name}" for name in sorted(wanted - set(of_rank))]
    lacking += [f"topology.{name}" for name in ("ranks_per_host", "within", "between", "rails") if name not in links]
    unknown = sorted(set(of_rank) - {x.name for x in fields(Hardware)})
    if lacking or unknown:
        remedy = [f"It lacks {', '.join(lacking)}."] * bool(lacking) + [f"It has {', '.join(unknown)}."] * bool(unknown)
        raise ArgumentError(argument, str(path), "the numbers that the presets have", " ".join(remedy))
    try:
        tuples: dict[str, Any] = {name: tuple(of_rank[name]) for name in ("rule", "wider") if name in of_rank}
        tuples["attention"] = tuple(tuple(row) for row in of_rank["attention"])
        about = {"name": given.get("name", path.stem), "about": given.get("about", "")}
        hardware = Hardware(**{**of_rank, **tuples, **about}, sources=dict(sources))
        ends = {name: Link(**links[name]) for name in ("within", "between")}
    except (TypeError, ValueError) as error:
        raise ArgumentError(argument, str(path), "numbers as the presets have them", str(error)) from error
    ranks, rails = (checked_integer(f"topology.{name}", links[name], 1) for name in ("ranks_per_host", "rails"))
    return Machine(hardware, ranks, **ends, rails=rails)


def written(found: Machine) -> str:
    """A machine as the text of a preset's file."""
    hardware, sources = found.hardware, found.hardware.sources
    lines = [f'name = "{hardware.name}"', f'about = "{hardware.about}"', "", "[hardware]"]
    rates = (each.name for each in fields(Hardware) if each.name not in ("name", "about", "sources"))
    lines += [f"{rate} = {_toml(getattr(hardware, rate))}" for rate in rates]
    lines += ["", "[topology]", f"ranks_per_host = {found.ranks_per_host}", f"rails = {found.rails}"]
    for name in ("within", "between"):
        link = getattr(found, name)
        inside = ", ".join(f"{each.name} = {_toml(getattr(link, each.name))}" for each in fields(Link))
        lines.append(f"{name} = {{ {inside} }}")
    lines += ["", "[sources]", *(f'{name} = "{text}"' for name, text in sources.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_numbers(record: Any, *, at_least_zero: Sequence[str]) -> None:
    """Refuses numbers that are none, or not above zero, or below it where zero is allowed."""
    for each in fields(record):
        if each.type not in ("float", "int"):
            continue
        value = getattr(record, each.name)
        if not _is_number(value) or value < 0 or (value == 0 and each.name not in at_least_zero):
            least = "at least 0" if each.name in at_least_zero else "above 0"
            raise ArgumentError(each.name, value, f"a number {least}")
