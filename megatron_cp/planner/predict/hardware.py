"""`Machine`: the numbers of a machine for predictions; `Setting`: the machine and the ranks that one is for.

No torch in here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.memo import frozen
from megatron_cp.plan.kinds import KINDS

_SHARED_MEMORY = 2e-5, 5e-6  # seconds of a transfer and of a message beyond its copy: estimates


@dataclass(frozen=True)
class Link:
    """A connection between two ranks, in one direction.

    Attributes:
        latency: seconds from the start of a transfer to its first byte.
        message: seconds of each message in addition to its bytes.
        bandwidth: bytes a second.
        ramp: seconds for the square root of a transfer's bytes. A backend moves a transfer in pieces, more and larger
            ones the more bytes there are, and the first one overlaps with nothing.
    """

    latency: float
    message: float
    bandwidth: float
    ramp: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, at_least_zero=("latency", "message", "ramp"))


@dataclass(frozen=True)
class Hardware:
    """The rates of one rank, in bf16 and for kernels with enough work.

    Attributes:
        name: the name of the preset.
        about: a description of the machine.
        matrix: floating-point operations a second of large matrix products.
        matrix_rows: rows of a product at which half of `matrix` is reached.
        attention: for some head sizes the operations a second of softmax attention's kernel, forward and backward;
            for other sizes, the nearest row counts.
        tile: queries and keys of one tile of the kernel, which is computed as a whole.
        units: pairs of a head and a tile of queries at which a call takes twice the time of its work.
        rule: for each kind of linear layer and some head sizes the multiply-adds a second of its chunked kernels,
            forward and backward, and the additional seconds of the host in a direction: 0 where a device works behind
            its host. For other sizes, the nearest row counts.
        rule_floor: the fewest seconds of such a kernel.
        chain: for each kind and some head sizes the seconds of a token of the longest document, forward and backward,
            in addition to its multiply-adds: its chunks wait for each other. Kinds that have no row take none.
        convolution: elements a second of a causal convolution with its activation, forward and backward.
        copy: bytes a second that a copy writes.
        call: seconds of a call of attention's kernel in addition to its work.
        launch: seconds of any other operation in addition to its work.
        memory: bytes of a rank's memory.
        cores: ranks of a host that compute at the same time; 0 where each has a device of its own. Rates are those of a
            rank that has one of the cores.
        band: seconds for each band of a mask, forward and backward: kernels of the CPU are called for each.
        row: for some head sizes the seconds for each query and head in addition to its pairs, forward and backward.
        collective: seconds of the host to start a transfer and to wait for it; no work overlaps with them.
        transfer: bytes a second that a rank's core receives or sends; 0 where a device does so by itself.
        host: seconds of a device's host to issue an operation, a hop of a ring, and a linear layer's rule (forward;
            twice backward). The device computes meanwhile, so they count where their sum is longer.
        ring: the part of a hop's time that kernels hide, forward and backward; the rest is added to theirs.
        wider: the time of an element of 4 and of 8 bytes, in that of one of 2 bytes.
        sources: the source of each number.
    """

    name: str
    about: str
    matrix: float
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
    row: tuple[tuple[int, float, float], ...] = ()
    chain: tuple[tuple[str, int, float, float], ...] = ()
    collective: float = 0.0
    transfer: float = 0.0
    host: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ring: tuple[float, float] = (1.0, 1.0)
    wider: tuple[float, float] = (2.0, 4.0)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False, repr=False)

    def __post_init__(self) -> None:
        zero = ("matrix_rows", "units", "rule_floor", "call", "launch", "cores", "collective", "transfer")
        _check_numbers(self, at_least_zero=zero)
        whole = [row for row in self.attention if len(row) == 3 and all(_is_number(x) and x > 0 for x in row)]
        if not whole or len(whole) != len(self.attention):
            raise ArgumentError("attention", self.attention, "rows of a head size and two rates")
        self._check_rule()
        for name, width in (("row", 3), ("chain", 4)):
            rows = getattr(self, name)
            if any(len(row) != width or not all(_is_number(x) and x >= 0 for x in row[width - 3 :]) for row in rows):
                wanted = f"rows of {'a kind, ' * (width == 4)}a head size and two numbers of at least 0"
                raise ArgumentError(name, rows, wanted)
        for name in ("convolution", "wider", "band", "ring"):
            pair, zero_too = getattr(self, name), name in ("band", "ring")
            is_pair = isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_number, pair))
            if not is_pair or min(pair) < 0 or (min(pair) == 0 and not zero_too):
                raise ArgumentError(name, pair, f"two numbers {'of at least' if zero_too else 'above'} 0")
        if len(self.host) != 3 or not all(_is_number(each) and each >= 0 for each in self.host):
            raise ArgumentError("host", self.host, "three numbers of at least 0")
        if max(self.ring) > 1:
            raise ArgumentError("ring", self.ring, "two numbers of at least 0 and at most 1")
        for name, least in (("tile", 1), ("cores", 0)):
            checked_integer(name, getattr(self, name), least)
        for name in ("name", "about"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(name, getattr(self, name), "a text")

    def _check_rule(self) -> None:
        """Refuses rules without a row of each kind, or with two rows of one kind and head size."""
        kinds = sorted({kind.measured_rule for kind in KINDS.values() if kind.has_state})
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
        """Returns the multiply-adds a second of chunked kernels; `kind` is the kernels' name of the recurrence."""
        _, _, ahead, back, _ = self._rule_row(kind, head_dim)
        return ahead if forward else back

    def rule_host_seconds(self, kind: str, head_dim: int) -> float:
        """Returns the additional seconds of the host in a direction of such a layer."""
        return self._rule_row(kind, head_dim)[4]

    def _rule_row(self, kind: str, head_dim: int) -> tuple[str, int, float, float, float]:
        return min((row for row in self.rule if row[0] == kind), key=lambda row: abs(math.log(row[1] / head_dim)))

    def attention_rate(self, head_dim: int, *, forward: bool) -> float:
        """Returns the operations a second of attention's kernel for heads of this size."""
        nearest = min(self.attention, key=lambda row: abs(math.log(row[0] / head_dim)))
        return nearest[1 if forward else 2]

    def row_seconds(self, head_dim: int, *, forward: bool) -> float:
        """Returns the seconds of attention's kernel for each query and head of this size, in addition to its pairs."""
        nearest = min(self.row, key=lambda row: abs(math.log(row[0] / head_dim)), default=(1, 0.0, 0.0))
        return nearest[1 if forward else 2]

    def chain_seconds(self, kind: str, head_dim: int, *, forward: bool) -> float:
        """Returns the seconds of a linear layer's kernels for each token of the longest document."""
        rows = (row for row in self.chain if row[0] == kind)
        _, _, ahead, back = min(rows, key=lambda row: abs(math.log(row[1] / head_dim)), default=("", 1, 0.0, 0.0))
        return ahead if forward else back

    def slower(self, item_size: int) -> float:
        """Returns the factor by which elements of so many bytes take longer than bf16."""
        return {1: 1.0, 2: 1.0, 4: self.wider[0], 8: self.wider[1]}.get(item_size, self.wider[1])


@dataclass(frozen=True)
class Topology:
    """The hosts of ranks and the links between them.

    Attributes:
        hosts: the host of each rank, numbered from 0.
        within: the link between two ranks of a host, for each rank and direction.
        between: the link between hosts, for each network card and direction.
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
            members = np.flatnonzero(hosts == host)
            place[members] = np.arange(members.size) * min(self.rails, members.size) // members.size
        return frozen(hosts * self.rails + place)


@dataclass(frozen=True)
class Machine:
    """A preset: the hardware of a rank, and the connections for any number of ranks.

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
        """Places ranks on hosts: by default on full hosts, except for the last one.

        Args:
            ranks: the number of ranks.
            hosts: the number of hosts, which neighbouring ranks share evenly, or the host of each rank.

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

    def sharing_memory(self, topology: Topology) -> tuple[Machine, Topology]:
        """Returns the machine and ranks of one host with the prices of transport `shared_memory`; devices' unchanged.

        A message is one copy by its receiver, after two calls of the system.
        """
        if not self.hardware.cores or topology.num_hosts > 1:
            return self, topology
        link = Link(*_SHARED_MEMORY, bandwidth=self.hardware.copy)
        at_each_end = 2 * self.hardware.copy  # though only the receiver copies
        hardware = replace(self.hardware, collective=_SHARED_MEMORY[0], transfer=at_each_end)
        return replace(self, hardware=hardware, within=link), replace(topology, within=link)

    def describe(self) -> str:
        """Returns the name and the description of the preset."""
        return f"{self.hardware.name}: {self.hardware.about}"


class Rates(NamedTuple):
    """The rates of a rank in one direction, for elements of one size.

    Attributes:
        hardware: the rates of both directions, in bf16.
        item_size: bytes of an element.
        forward: the direction.
    """

    hardware: Hardware
    item_size: int
    forward: bool

    @property
    def slower(self) -> float:
        """The factor by which these elements take longer than bf16."""
        return self.hardware.slower(self.item_size)

    def pick(self, both: tuple[float, float]) -> float:
        """Returns the number of this direction, of those of forward and backward."""
        return both[0 if self.forward else 1]


class Setting(NamedTuple):
    """The machine, the ranks and the elements for which plans are priced.

    Attributes:
        machine: the machine.
        topology: the hosts of the ranks.
        item_size: bytes of an activation.
    """

    machine: Machine
    topology: Topology
    item_size: int

    def rates(self, *, forward: bool) -> Rates:
        """Returns the rates of a rank in one direction."""
        return Rates(self.machine.hardware, self.item_size, forward)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_numbers(record: Any, *, at_least_zero: Sequence[str]) -> None:
    """Refuses fields that are not finite numbers above zero; those in `at_least_zero` may be zero."""
    for each in fields(record):
        if each.type not in ("float", "int"):
            continue
        value = getattr(record, each.name)
        if not _is_number(value) or value < 0 or (value == 0 and each.name not in at_least_zero):
            least = "at least 0" if each.name in at_least_zero else "above 0"
            raise ArgumentError(each.name, value, f"a number {least}")
