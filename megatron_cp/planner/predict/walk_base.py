"""`WalkBase`: adds the operations that all steps share: starts of transfers, waits for them, and copies.

No torch in here.
"""

from __future__ import annotations

import numpy as np

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.transport import num_rounds
from megatron_cp.planner.predict.hardware import Hardware
from megatron_cp.planner.predict.kernels import copy_seconds
from megatron_cp.planner.predict.program import Edges, Program, Seconds

_AT_A_TIME = 4  # rounds that the pairwise transport has in flight


class WalkBase:
    """A walk over a plan's steps that builds their program.

    Args:
        plan: the plan of the layer.
        hardware: rates of a rank.
        item_size: bytes of an element.
        forward: the direction.
        hosts: the host of each rank; a collective of equal shares crosses each network card once for a host.
    """

    def __init__(
        self, plan: Plan, hardware: Hardware, item_size: int, *, forward: bool, hosts: tuple[int, ...] = ()
    ) -> None:
        self.plan, self.hardware, self.item, self.is_forward = plan, hardware, item_size, forward
        self.program = Program(
            plan.cp_size, collective=hardware.collective, transfer=hardware.transfer, issue=hardware.host[0]
        )
        self.gathers_over = gathers_over_hosts(plan, hardware, hosts)
        self.second_hops: dict[int, tuple[str, Edges]] = {}
        self.degree = plan.ulysses_degree
        self.ranks = np.arange(plan.cp_size)
        self.kv_ranks, self.head_ranks = self.ranks // self.degree, self.ranks % self.degree
        self.next_ranks = (self.ranks + self.degree) % plan.cp_size  # the next rank of a ring

    def _start(self, name: str, edges: Edges, *, shares: bool = False, is_second: bool = False) -> int:
        """Starts a transfer by the plan's transport; returns the key to wait for it.

        Args:
            shares: every receiver gets the same bytes from a sender.
            is_second: the plan itself sends in two hops, and this is the second one.
        """
        transport = self.plan.transport
        hosts = transport.hosts or (self.gathers_over if shares else ())
        if hosts:
            first, second = _host_hops(edges, np.array(hosts), shares=shares)
            key = self.program.start(name, first)
            if transport.hosts or second.senders.size:
                self.second_hops[key] = name, second
            return key
        rounds = num_rounds(self.degree if self.degree > 1 else self.plan.cp_size)
        starts = 1 if transport.name == "collective" else max(1, rounds // _AT_A_TIME)
        return self.program.start(name, edges, starts, is_second=is_second)

    def _wait(self, key: int) -> None:
        """Waits for a transfer; a hierarchical transport starts its second hop after the first has arrived."""
        self.program.wait(key)
        if key in self.second_hops:
            name, edges = self.second_hops.pop(key)
            self.program.wait(self.program.start(f"{name}, within hosts", edges, is_second=True))

    def _copy(self, name: str, nbytes: IntArray | Seconds, exchange: Exchange | None = None) -> None:
        """Adds work that writes so many bytes; a codec reads and writes once more."""
        passes = 2.0 if exchange is not None and exchange.codec is not None else 1.0
        self.program.work(name, "copy", copy_seconds(self.hardware, nbytes, passes))


def gathers_over_hosts(plan: Plan, hardware: Hardware, hosts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the hosts over which the backend gathers equal shares in two hops, nothing where it does not.

    Devices' backend sends a share to each other host once, over rings or trees of hosts. What CPUs' backend does is in
    the measured numbers of its links.
    """
    one_by_one = hardware.cores or plan.transport.name != "collective" or len(set(hosts)) < 2
    return () if one_by_one else hosts


def _host_hops(edges: Edges, hosts: IntArray, *, shares: bool) -> tuple[Edges, Edges]:
    """Splits messages into the two hops of a hierarchical transport.

    The first hop is a message to each other host, to the rank of the same place there, which forwards it in the second.

    Args:
        hosts: the host of each rank.
        shares: receivers of a host get the same bytes, which travel once.
    """
    sizes, by_host = np.bincount(hosts), np.argsort(hosts, kind="stable")
    first_of_host = np.cumsum(sizes) - sizes
    place = np.empty(hosts.size, dtype=np.int64)
    place[by_host] = np.arange(hosts.size) - np.repeat(first_of_host, sizes)
    far = hosts[edges.senders] != hosts[edges.receivers]
    senders, receivers, nbytes = edges.senders[far], edges.receivers[far], edges.nbytes[far]
    there = hosts[receivers]
    proxy = by_host[first_of_host[there] + place[senders] % sizes[there]]
    pairs, pair_of_edge = np.unique(senders * hosts.size + proxy, return_inverse=True)
    together = np.zeros(pairs.size, dtype=np.int64)
    (np.maximum if shares else np.add).at(together, pair_of_edge, nbytes)
    first = Edges(
        np.concatenate([edges.senders[~far], pairs // hosts.size]),
        np.concatenate([edges.receivers[~far], pairs % hosts.size]),
        np.concatenate([edges.nbytes[~far], together]),
    )
    return first, Edges.from_messages(proxy, receivers, nbytes)
