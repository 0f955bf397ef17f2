"""`simulate`: simulates a workload on the ranks of a machine, operation by operation, all ranks at a time.

A rank has one stream for computing; what it sends and receives goes over ports that work meanwhile: one a rank and
direction for its own host, one a network card and direction for others, which several ranks may share. A message
leaves when its sender and its receiver have reached the start, and the ports are free; a transfer has arrived at a rank
when all messages to it have. No torch in here.

Ranks that share cores slow each other down while they compute, but not while they wait. The times of waiting are known
after a simulation, so the workload is simulated again with them until they do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.array_types import BoolArray, IntArray
from megatron_cp.planner.predict.hardware import Link, Topology
from megatron_cp.planner.predict.workload import Arrival, Edges, Seconds, TimedWork, Transfer, Workload

_ROUNDS = 12  # simulations of a workload; most need five


@dataclass(frozen=True, eq=False)
class Span:
    """An operation on all ranks.

    Attributes:
        name, kind: the name and kind of the work; the kind of a transfer is "send" or "receive", of a wait "wait".
        start, end: `[ranks]` seconds; equal where a rank has no part in the operation.
        edges: the messages of a transfer.
    """

    name: str
    kind: str
    start: Seconds
    end: Seconds
    edges: Edges | None = None


@dataclass(frozen=True, eq=False)
class Timeline:
    """The times of all operations on all ranks.

    Attributes:
        spans: the operations, in the order of the workload.
        end: `[ranks]` seconds at which each rank finished.
        waited: `[ranks]` seconds in which a rank computed nothing.
        host: seconds of a device's host to issue the operations.
    """

    spans: list[Span]
    end: Seconds
    waited: Seconds
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """The time at which the last rank finished, or the host's if it is longer: then each layer waits for it."""
        return max(float(self.end.max(initial=0.0)), self.host)

    @property
    def busy(self) -> Seconds:
        """`[ranks]` seconds in which each rank computed."""
        return self.end - self.waited

    @property
    def exposed(self) -> float:
        """The seconds by which transfers, waits for each other, and the host exceed the busiest rank's work."""
        return self.seconds - float(self.busy.max(initial=0.0))

    @property
    def imbalance(self) -> float:
        """The seconds by which the busiest rank's work exceeds that of the mean rank."""
        return float(self.busy.max() - self.busy.mean()) if self.busy.size else 0.0


@dataclass(frozen=True, eq=False)
class _PortRoute:
    """The ports of one kind over which a transfer's messages go, whatever their bytes.

    Attributes:
        chosen: `[messages]` the messages of the transfer that use these ports; None for all of them.
        senders, receivers: `[n]` the ranks of the chosen messages.
        send_ports, receive_ports: `[n]` their ports.
        disjoint: no port has two messages in one direction.
    """

    chosen: BoolArray | None
    senders: IntArray
    receivers: IntArray
    send_ports: IntArray
    receive_ports: IntArray
    disjoint: bool


class _Ports:
    """The ports of one kind, in both directions."""

    def __init__(self, link: Link, port: IntArray) -> None:
        self.link, self.port = link, port
        self.count = int(port.max(initial=-1)) + 1
        self.free_out, self.free_in = np.zeros(self.count), np.zeros(self.count)

    def route(self, edges: Edges, chosen: BoolArray) -> _PortRoute | None:
        """Returns the route of the chosen messages; None where there are none."""
        if not chosen.any():
            return None
        some = None if chosen.all() else chosen
        senders, receivers = (ends if some is None else ends[some] for ends in (edges.senders, edges.receivers))
        outgoing, incoming = self.port[senders], self.port[receivers]
        disjoint = all(np.bincount(ports).max() == 1 for ports in (outgoing, incoming))
        return _PortRoute(some, senders, receivers, outgoing, incoming, disjoint)

    def send(self, route: _PortRoute, nbytes: IntArray, ready: Seconds, latency: float, out: _Ends) -> None:
        """Writes to `out` the times at which each rank's last message has left, and the last one to it has arrived."""
        link, count = self.link, self.count
        outgoing, incoming = route.send_ports, route.receive_ports
        size = nbytes if route.chosen is None else nbytes[route.chosen]
        took = size / link.bandwidth + link.message
        sender_ready, receiver_ready = ready[route.senders], ready[route.receivers]
        if route.disjoint:
            took = took + link.ramp * np.sqrt(size)
            begins = np.maximum(sender_ready, self.free_out[outgoing])
            left = begins + took
            opens = np.maximum(np.maximum(begins, self.free_in[incoming]), receiver_ready)
            came = np.maximum(opens + took, left)
            self.free_out[outgoing], self.free_in[incoming] = left, came
        else:
            # Ports without a message stay free as they were.
            begins = np.maximum(_latest(outgoing, sender_ready, count), self.free_out)
            self.free_out = begins + self._busy(outgoing, took, size)
            left = self.free_out[outgoing]
            first = np.full(count, np.inf)
            np.minimum.at(first, incoming, begins[outgoing])
            opens = np.maximum(np.where(np.isinf(first), -np.inf, first), self.free_in)
            opens = np.maximum(opens, _latest(incoming, receiver_ready, count))
            busy_until = opens + self._busy(incoming, took, size)
            self.free_in = np.maximum(busy_until, _latest(incoming, left, count))
            came = self.free_in[incoming]
        np.maximum.at(out.left, route.senders, left)
        np.maximum.at(out.arrived, route.receivers, came + latency)

    def _busy(self, port: IntArray, took: Seconds, nbytes: IntArray) -> Seconds:
        """Returns `[ports]` the seconds of each port's messages of a transfer."""
        found: Seconds = np.bincount(port, took, minlength=self.count)
        if self.link.ramp:
            found += self.link.ramp * np.sqrt(np.bincount(port, nbytes, minlength=self.count))
        return found


class _Ends(NamedTuple):
    """The times `[ranks]` at which all messages of a rank have left, and all to it have arrived; -inf for none."""

    left: Seconds
    arrived: Seconds


class _Network:
    """The ports of all ranks, and the routes of the last transfer, which a ring uses again."""

    def __init__(self, topology: Topology) -> None:
        self.hosts = np.array(topology.hosts)
        self.kinds = _Ports(topology.within, np.arange(topology.size)), _Ports(topology.between, topology.rail)
        self.last: tuple[Edges, list[tuple[_Ports, _PortRoute]]] | None = None

    def send(self, edges: Edges, now: Seconds, starts: int) -> _Ends:
        """Simulates the messages of a transfer, which its ranks reach at `now`."""
        out = _Ends(np.full(now.size, -np.inf), np.full(now.size, -np.inf))
        for ports, route in self._routes(edges):
            ports.send(route, edges.nbytes, now, ports.link.latency * starts, out)
        return out

    def alone(self, edges: Edges) -> Seconds:
        """Returns `[ranks]` the seconds of the longest message to each rank, if nothing else were on its way."""
        found = np.zeros(self.hosts.size)
        near = self.hosts[edges.senders] == self.hosts[edges.receivers]
        for ports, chosen in zip(self.kinds, (near, ~near), strict=True):
            link, nbytes = ports.link, edges.nbytes[chosen]
            taken = link.latency + link.message + nbytes / link.bandwidth + link.ramp * np.sqrt(nbytes)
            np.maximum.at(found, edges.receivers[chosen], taken)
        return found

    def _routes(self, edges: Edges) -> list[tuple[_Ports, _PortRoute]]:
        if self.last is not None:
            before, routes = self.last
            if before.senders is edges.senders and before.receivers is edges.receivers:
                return routes
        near: BoolArray = self.hosts[edges.senders] == self.hosts[edges.receivers]
        found = [(ports, ports.route(edges, chosen)) for ports, chosen in zip(self.kinds, (near, ~near), strict=True)]
        routes = [(ports, route) for ports, route in found if route is not None]
        self.last = edges, routes
        return routes


def _latest(index: IntArray, values: Seconds, count: int) -> Seconds:
    found = np.full(count, -np.inf)
    np.maximum.at(found, index, values)
    return found


class _Cores:
    """The speed of each rank over time, on cores that the ranks of a computer share.

    Args:
        computers: `[ranks]` the computer of each rank.
        cores: the cores of a computer; 0 where each rank has a device of its own.
        busy: for each rank `[n, 2]` the times in which it computes; None for always.
    """

    def __init__(self, computers: IntArray, cores: int, busy: list[Seconds] | None = None) -> None:
        self._count = np.bincount(computers)[computers]
        self.shares = bool(cores) and bool((self._count > cores).any())
        self.handles: Seconds = (self._count >= cores).astype(np.float64)  # 0 where a spare core handles messages
        self._always = np.maximum(self._count / cores, 1.0) if cores else np.ones(computers.size)
        self._clocks = None if busy is None or not self.shares else self._speed_changes(computers, cores, busy)

    @staticmethod
    def _speed_changes(computers: IntArray, cores: int, busy: list[Seconds]) -> list[tuple[Seconds, Seconds]]:
        """Returns for each rank the times at which its speed changes, and the work that it can do until each."""
        clocks = []
        for rank, computer in enumerate(computers.tolist()):
            others = [busy[other] for other in np.flatnonzero(computers == computer) if other != rank]
            begins, ends = np.concatenate([np.zeros((0, 2)), *others]).T
            times = np.unique(np.concatenate([[0.0], begins, ends]))
            sharing = 1 + np.searchsorted(np.sort(begins), times, side="right").astype(np.float64)
            sharing -= np.searchsorted(np.sort(ends), times, side="right")
            speed = 1 / np.maximum(sharing / cores, 1.0)
            done = np.append(0.0, np.cumsum(np.diff(times) * speed[:-1]))
            clocks.append((np.append(times, times[-1] + 1e9), np.append(done, done[-1] + 1e9)))
        return clocks

    def finish(self, now: Seconds, seconds: Seconds) -> Seconds:
        """Returns `[ranks]` the times at which work that begins now is finished."""
        if self._clocks is None:
            found: Seconds = now + seconds * self._always
            return found
        return np.array(
            [
                begin + work if not work else np.interp(np.interp(begin, times, done) + work, done, times)
                for (times, done), begin, work in zip(self._clocks, now, seconds, strict=True)
            ]
        )


def simulate(workload: Workload, topology: Topology, *, cores: int = 0) -> Timeline:
    """Simulates a workload.

    Args:
        workload: what as many ranks do as the topology has.
        topology: the hosts of the ranks.
        cores: ranks of a host, or of the computer that all hosts share, that compute at a time; 0 for all of them.

    Raises:
        ArgumentError: a topology of another number of ranks.
    """
    if topology.size != workload.ranks:
        raise ArgumentError("topology", f"{topology.size} ranks", f"the {workload.ranks} ranks of the plan")
    computers = np.zeros(workload.ranks, dtype=np.int64) if topology.shares_cores else np.array(topology.hosts)
    sharing = _Cores(computers, cores)
    found = _simulated(workload, topology, sharing)
    for _ in range(_ROUNDS if sharing.shares else 0):
        before = found
        found = _simulated(workload, topology, _Cores(computers, cores, _busy(before)))
        if np.allclose(found.end, before.end, rtol=1e-3, atol=0.0):
            break
    return found


def _busy(timeline: Timeline) -> list[Seconds]:
    """Returns for each rank the `[n, 2]` times in which it computes."""
    work = [span for span in timeline.spans if span.kind not in ("send", "receive", "wait")]
    if not work:
        return [np.zeros((0, 2))] * timeline.end.size
    starts, ends = np.stack([span.start for span in work]), np.stack([span.end for span in work])
    return [np.stack([begin, end], axis=1)[end > begin] for begin, end in zip(starts.T, ends.T, strict=True)]


def _simulated(workload: Workload, topology: Topology, cores: _Cores) -> Timeline:
    network = _Network(topology)
    now, waited = np.zeros(workload.ranks), np.zeros(workload.ranks)
    spans: list[Span] = []
    pending: dict[int, tuple[Seconds, Seconds, Transfer, Seconds]] = {}
    for operation in workload.operations:
        match operation:
            case TimedWork(name, kind, seconds):
                begun, now = now, cores.finish(now, seconds)
                spans.append(Span(name, kind, begun, now))
            case Transfer(name, key, edges, starts):
                reached = now
                left, arrived = network.send(edges, now, starts)
                spans.append(Span(name, "send", now, np.maximum(left, now), edges))
                spans.append(Span(name, "receive", now, np.maximum(arrived, now), edges))
                pending[key] = left, arrived, operation, reached
            case Arrival(key):
                left, arrived, start, reached = pending.pop(key)
                if start.handling.any():
                    begun, now = now, cores.finish(now, start.handling * cores.handles)
                    spans.append(Span(f"handle {start.name}", "copy", begun, now))
                begun, now = now, np.maximum(np.maximum(left, arrived), now)
                if start.overlap < 1:  # what work would hide and does not
                    hidden = np.minimum(network.alone(start.edges), begun - reached)
                    now = now + (1 - start.overlap) * hidden
                waited = waited + now - begun
                spans.append(Span("wait", "wait", begun, now))
    return Timeline(spans, now, waited, workload.host)
