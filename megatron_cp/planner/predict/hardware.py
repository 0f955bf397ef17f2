"""`Hardware` and `Topology`: what predictions know of machines. Presets are files, with the source of every number.

No torch in here.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout.memo import frozen
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.kinds import KINDS

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
        rule: for each kind of linear layer and some head sizes the multiply-adds a second of its chunked kernels,
            forward and backward, and the seconds that the host takes in a direction beside them: 0 where a device works
            behind its host. In between and beyond, the nearest size.
        rule_floor: seconds that such a kernel takes at least.
        convolution: elements a second of a causal convolution with its activation, forward and backward.
        copy: bytes a second that a copy writes.
        call: seconds that a call of attention's kernel takes beside its work.
        launch: seconds that any other operation takes beside its work.
        memory: bytes of a rank's memory.
        cores: ranks of a host that compute at a time; 0 where each has a device of its own. Rates are those of a rank
            that has one of the cores.
        band: seconds for each band of a mask, forward and backward: kernels of the CPU are called for each.
        row: seconds for each query and head beside its pairs, forward and backward.
        collective: seconds that the host takes to start a transfer and to wait for it, behind which nothing hides.
        transfer: bytes a second that a rank's core takes in or sends out; 0 where a device does so by itself.
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
    rule: tuple[tuple[str, int, float, float, float], ...]
    rule_floor: float
    convolution: tuple[float, float]
    copy: float
    call: float
    launch: float
    memory: float
    cores: int = 0
    band: tuple[float, float] = (0.0, 0.0)
    row: tuple[float, float] = (0.0, 0.0)
    collective: float = 0.0
    transfer: float = 0.0
    wider: tuple[float, float] = (2.0, 4.0)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False, repr=False)

    def __post_init__(self) -> None:
        zero = ("matrix_rows", "units", "rule_floor", "call", "launch", "cores", "collective", "transfer")
        _check_numbers(self, at_least_zero=zero)
        rows = [row for row in self.attention if len(row) == 3 and all(_is_number(x) and x > 0 for x in row)]
        if not rows or len(rows) != len(self.attention):
            raise ArgumentError("attention", self.attention, "rows of a head size and two rates")
        self._check_rule()
        for name in ("convolution", "wider", "band", "row"):
            pair, zero_too = getattr(self, name), name in ("band", "row")
            is_pair = isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_number, pair))
            if not is_pair or min(pair) < 0 or (min(pair) == 0 and not zero_too):
                raise ArgumentError(name, pair, f"two numbers {'of at least' if zero_too else 'above'} 0")
        for name, least in (("tile", 1), ("cores", 0)):
            checked_integer(name, getattr(self, name), least)
        for name in ("name", "about"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(name, getattr(self, name), "a text")

    def _check_rule(self) -> None:
        """Refuses what has not a row of each kind, or two of one kind and head size."""
        kinds = sorted({kind.rule for kind in KINDS.values() if kind.has_state})
        for row in self.rule:
            is_row = isinstance(row, tuple) and len(row) == 5 and all(map(_is_number, row[1:]))
            if not is_row or min(row[1:4]) <= 0 or row[4] < 0:
                raise ArgumentError("rule", row, "a kind, a head size, two rates above 0, and seconds of at least 0")
        given = sorted((str(row[0]), row[1]) for row in self.rule)
        if len(set(given)) != len(given) or sorted({name for name, _ in given}) != kinds:
            remedy = "A kind whose rate is not known takes that of another one, which its source should say."
            wanted = f"one row or more of each of {', '.join(kinds)}, of different head sizes"
            raise ArgumentError("rule", [row[:2] for row in self.rule], wanted, remedy)

    def rule_rate(self, kind: str, head_dim: int, *, forward: bool) -> float:
        """Multiply-adds a second of a kind's chunked kernels, by the name that kernels know its recurrence by."""
        _, _, ahead, back, _ = self._rule_row(kind, head_dim)
        return ahead if forward else back

    def beside_rule(self, kind: str, head_dim: int) -> float:
        """Seconds that the host takes in a direction of such a layer."""
        return self._rule_row(kind, head_dim)[4]

    def _rule_row(self, kind: str, head_dim: int) -> tuple[str, int, float, float, float]:
        """That of the nearest head size."""
        return min((row for row in self.rule if row[0] == kind), key=lambda row: abs(math.log(row[1] / head_dim)))

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
        shares_cores: the hosts are emulated on one computer, whose cores all ranks share.
    """

    hosts: tuple[int, ...]
    within: Link
    between: Link
    rails: int = 1
    shares_cores: bool = False

    def __post_init__(self) -> None:
        if not self.hosts or set(self.hosts) != set(range(max(self.hosts) + 1)):
            raise ArgumentError("hosts", self.hosts, "the host of each rank, numbered from 0, none left out")
        checked_integer("rails", self.rails, 1)
        if not isinstance(self.shares_cores, bool):
            raise ArgumentError("shares_cores", self.shares_cores, "true or false")

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
        within, between, rails, shares_cores: see `Topology`.
    """

    hardware: Hardware
    ranks_per_host: int
    within: Link
    between: Link
    rails: int
    shares_cores: bool = False

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
        return Topology(tuple(numbers), self.within, self.between, self.rails, self.shares_cores)

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
    wanted = {x.name for x in fields(Hardware) if x.default is MISSING and x.default_factory is MISSING}
    wanted -= {"name", "about"}
    lacking = [f"hardware.{name}" for name in sorted(wanted - set(of_rank))]
    lacking += [f"topology.{name}" for name in ("ranks_per_host", "within", "between", "rails") if name not in links]
    unknown = sorted(set(of_rank) - {x.name for x in fields(Hardware)})
    if lacking or unknown:
        remedy = [f"It lacks {', '.join(lacking)}."] * bool(lacking) + [f"It has {', '.join(unknown)}."] * bool(unknown)
        raise ArgumentError(argument, str(path), "the numbers that the presets have", " ".join(remedy))
    try:
        pairs = ("convolution", "wider", "band", "row")
        tuples: dict[str, Any] = {name: tuple(of_rank[name]) for name in pairs if name in of_rank}
        tuples |= {name: tuple(tuple(row) for row in of_rank[name]) for name in ("attention", "rule")}
        about = {"name": given.get("name", path.stem), "about": given.get("about", "")}
        hardware = Hardware(**{**of_rank, **tuples, **about}, sources=dict(sources))
        ends = {name: Link(**links[name]) for name in ("within", "between")}
    except (TypeError, ValueError) as error:
        raise ArgumentError(argument, str(path), "numbers as the presets have them", str(error)) from error
    ranks, rails = (checked_integer(f"topology.{name}", links[name], 1) for name in ("ranks_per_host", "rails"))
    shares_cores = links.get("shares_cores", False)
    if not isinstance(shares_cores, bool):
        raise ArgumentError("topology.shares_cores", shares_cores, "true or false")
    return Machine(hardware, ranks, **ends, rails=rails, shares_cores=shares_cores)


def written(found: Machine) -> str:
    """A machine as the text of a preset's file."""
    hardware, sources = found.hardware, found.hardware.sources
    lines = [f'name = "{hardware.name}"', f'about = "{hardware.about}"', "", "[hardware]"]
    rates = (each.name for each in fields(Hardware) if each.name not in ("name", "about", "sources"))
    lines += [f"{rate} = {_toml(getattr(hardware, rate))}" for rate in rates]
    lines += ["", "[topology]", f"ranks_per_host = {found.ranks_per_host}", f"rails = {found.rails}"]
    lines += [f"shares_cores = {_toml(found.shares_cores)}"]
    for name in ("within", "between"):
        link = getattr(found, name)
        inside = ", ".join(f"{each.name} = {_toml(getattr(link, each.name))}" for each in fields(Link))
        lines.append(f"{name} = {{ {inside} }}")
    lines += ["", "[sources]", *(f'{name} = "{text}"' for name, text in sources.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
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
