"""`Transport`: by which road the messages of a plan go. Pure data; `wire.py` goes it. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.errors import ArgumentError

TRANSPORTS = ("collective", "pairwise", "hierarchical")


@dataclass(frozen=True)
class Transport:
    """One way to do an all-to-all or an all-gather. All give the same bits.

        collective      the backend's own
        pairwise        disjoint pairs of ranks, round by round, a few rounds at a time
        hierarchical    one message to each other host, and from there to the rank that it is for

    Attributes:
        name: one of these.
        hosts: for hierarchical, the host of each rank, numbered from 0; empty otherwise.
    """

    name: str = "collective"
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in TRANSPORTS:
            raise ArgumentError("transport", self.name, " or ".join(TRANSPORTS))
        if bool(self.hosts) != (self.name == "hierarchical"):
            raise ArgumentError("hosts", self.hosts, "the host of each rank for hierarchical, and nothing otherwise")
        if self.hosts and set(self.hosts) != set(range(max(self.hosts) + 1)):
            raise ArgumentError("hosts", self.hosts, "hosts numbered from 0, none left out")

    @classmethod
    def of_nodes(cls, name: str, cp_size: int, nodes: int) -> Transport:
        """Over `cp_size` ranks of which neighbours share one of `nodes` hosts, as evenly as they can."""
        if name != "hierarchical":
            return cls(name)
        if not 1 <= nodes <= cp_size:
            raise ArgumentError("nodes", nodes, f"1 to the {cp_size} ranks")
        return cls(name, tuple(rank * nodes // cp_size for rank in range(cp_size)))

    def part(self, ranks: range) -> Transport:
        """The same among some of the ranks."""
        if not self.hosts:
            return self
        hosts = [self.hosts[rank] for rank in ranks]
        numbers = {host: number for number, host in enumerate(sorted(set(hosts)))}
        return Transport(self.name, tuple(numbers[host] for host in hosts))

    def describe(self) -> str:
        return self.name + (f" over hosts {self.hosts}" if self.hosts else "")


COLLECTIVE = Transport()


def partner(rank: int, size: int, number: int) -> int | None:
    """Whom a rank meets in round `number` of a tournament in which all meet once; None if it has a bye.

    The circle method: in a round, the places of two that meet add up to one number modulo the rounds, and who would
    meet itself meets the last, or nobody where the ranks are odd. `size - 1` rounds, or `size` where that is odd.
    """
    rounds = num_rounds(size)
    if rank == rounds:  # the last of an even number: it meets the one of whom twice the place is the number
        return number * ((rounds + 1) // 2) % rounds
    other = (number - rank) % rounds
    if other != rank:
        return other
    return rounds if rounds < size else None


def num_rounds(size: int) -> int:
    """Rounds of that tournament."""
    return size - 1 if size % 2 == 0 else size
