"""`Transport`: the algorithm that carries a plan's messages; `executor/transports` sends them. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout.fragments import MAX_CP_SIZE

TRANSPORTS = ("collective", "pairwise", "hierarchical", "shared_memory", "symmetric_memory")
_OVER_HOSTS = ("hierarchical",)


def knows_hosts(name: str) -> bool:
    """Returns True if a transport of this name takes the ranks' hosts."""
    return name in _OVER_HOSTS


@dataclass(frozen=True)
class Transport:
    """An algorithm for an all-to-all or an all-gather. All give the same bits.

        collective      the backend's own
        pairwise        disjoint pairs of ranks, round by round, a few rounds at a time
        hierarchical    one message to each other host, and from there to the rank that it is for
        shared_memory   ranks of one Linux host copy from each other's memory; on the CPU
        symmetric_memory  likewise from each other's devices; on CUDA

    Attributes:
        name: one of the above.
        hosts: for hierarchical, the host of each rank, numbered from 0; empty otherwise. `hosts_of(group)` asks the
            ranks, `even_hosts` numbers neighbours.

    Raises:
        ArgumentError: another name, or hosts that are not numbered so.
    """

    name: str = "collective"
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _checked_name(self.name)
        hosts = _checked_hosts(self.hosts)
        object.__setattr__(self, "hosts", hosts)
        if bool(hosts) != (self.name in _OVER_HOSTS):
            allowed = f"the host of each rank for {' and '.join(_OVER_HOSTS)}, and nothing otherwise"
            raise ArgumentError("hosts", hosts, allowed, _HOW_TO_SAY_HOSTS if not hosts else "")

    @classmethod
    def named(cls, transport: Transport | str) -> Transport:
        """Returns a transport as it is, or the one of that name, if the name alone defines it.

        Raises:
            ArgumentError: neither, or a name that takes the ranks' hosts besides, such as "hierarchical".
        """
        if isinstance(transport, cls):
            return transport
        if not isinstance(transport, str) or transport not in TRANSPORTS:
            plain = ", ".join(repr(name) for name in TRANSPORTS if name not in _OVER_HOSTS)
            raise ArgumentError("transport", transport, f"{plain} or a Transport")
        if transport in _OVER_HOSTS:
            raise ArgumentError("transport", transport, "a Transport with the ranks' hosts", _HOW_TO_SAY_HOSTS)
        return cls(transport)

    @classmethod
    def even_hosts(cls, name: str, cp_size: int, hosts: int) -> Transport:
        """Makes a transport over `cp_size` ranks, with neighbouring ranks spread over `hosts` hosts as evenly as
        possible.

        Raises:
            ArgumentError: another name, or no or more hosts than ranks.

        Example:
            >>> Transport.even_hosts("hierarchical", cp_size=5, hosts=2).hosts
            (0, 0, 0, 1, 1)
        """
        cp_size = checked_integer("cp_size", cp_size, 1, MAX_CP_SIZE)
        if checked_integer("hosts", hosts, 1) > cp_size:
            raise ArgumentError("hosts", hosts, f"1 to the {cp_size} ranks")
        if _checked_name(name) not in _OVER_HOSTS:
            return cls(name)
        return cls(name, tuple(rank * hosts // cp_size for rank in range(cp_size)))

    def part(self, ranks: range) -> Transport:
        """Returns the same transport among a subset of the ranks."""
        if not self.hosts:
            return self
        hosts = [self.hosts[rank] for rank in ranks]
        numbers = {host: number for number, host in enumerate(sorted(set(hosts)))}
        return Transport(self.name, tuple(numbers[host] for host in hosts))

    def describe(self) -> str:
        return self.name + (f" over hosts {self.hosts}" if self.hosts else "")


_HOW_TO_SAY_HOSTS = (
    'Use Transport.even_hosts("hierarchical", cp_size, hosts), or Transport("hierarchical", hosts_of(group)), which '
    "asks the ranks."
)


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or name not in TRANSPORTS:
        raise ArgumentError("transport", name, " or ".join(TRANSPORTS))
    return name


def _checked_hosts(hosts: Any) -> tuple[int, ...]:
    """Returns the hosts as a tuple, if they are integers from 0 without gaps."""
    given = hosts.tolist() if hasattr(hosts, "tolist") and not hasattr(hosts, "mask") else hosts  # arrays and tensors
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)
    if not is_list or not all(isinstance(n, Integral) and not isinstance(n, bool) for n in given):
        raise ArgumentError("hosts", hosts, "integers, the number of each rank's host")
    if set(given) != set(range(len(set(given)))):
        raise ArgumentError("hosts", hosts, "hosts numbered from 0, none left out")
    return tuple(int(host) for host in given)


COLLECTIVE = Transport()


def checked_transport(transport: Transport | str, cp_size: int) -> Transport:
    """Returns the transport between `cp_size` ranks, from its name or as it is."""
    transport = Transport.named(transport)
    if transport.hosts and len(transport.hosts) != cp_size:
        raise ArgumentError("transport", transport, f"the host of each of the {cp_size} ranks", _HOW_TO_SAY_HOSTS)
    return transport


def round_robin_peer(rank: int, size: int, number: int) -> int | None:
    """Returns the peer of a rank in round `number` of a round robin, in which all pairs meet once; None if it is idle.

    This is the circle method: in a round, the numbers of two peers add up to one value modulo the rounds; a rank that
    would be its own peer meets the last rank, or is idle if the number of ranks is odd. There are `size - 1` rounds, or
    `size` if that is odd.
    """
    rounds = num_rounds(size)
    if rank == rounds:  # the last of an even number meets the rank that would meet itself
        return number * ((rounds + 1) // 2) % rounds
    other = (number - rank) % rounds
    if other != rank:
        return other
    return rounds if rounds < size else None


def num_rounds(size: int) -> int:
    """Returns the number of rounds of `round_robin_peer`."""
    return size - 1 if size % 2 == 0 else size
