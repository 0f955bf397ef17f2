"""`Communicator`: the ranks of a plan and the transport between them.

With every transport an all-to-all is started, and waited for later; both are collective, and ranks wait in the order
of starting. The transports that are not the backend's own are made of messages from rank to rank:

    pairwise        start: own piece copied, messages of the first rounds under way   wait: the other rounds
    hierarchical    start: one message to each other host, and direct ones at home    wait: what came for others goes on

Between hosts comes first, since those links are slow: they are busy while the ranks compute, and only the hop within
the host is left for the wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup
from megatron_cp.plan.transport import COLLECTIVE, Transport, num_rounds, round_robin_peer

ROUNDS_IN_FLIGHT = 4  # so that a slow pair holds nobody up; more would be a crowd on one link again


class Communicator:
    """How what a plan sends travels, seen from one rank.

    Args:
        group: the ranks.
        transport: how messages travel.
        operation: what the plan is of, for errors.
        rounds_in_flight: how many rounds of the pairwise transport are under way at a time.
    """

    def __init__(
        self,
        group: RankGroup,
        transport: Transport = COLLECTIVE,
        operation: str = "",
        *,
        rounds_in_flight: int = ROUNDS_IN_FLIGHT,
    ) -> None:
        if transport.hosts and len(transport.hosts) != group.size:
            raise ArgumentError("hosts", transport.hosts, f"the host of each of the {group.size} ranks")
        self.group, self.transport = group, transport
        self.operation, self.rounds_in_flight = operation, rounds_in_flight
        self.rank, self.size = group.rank, group.size

    @property
    def buffers(self) -> Buffers:
        return self.group.buffers

    def part(self, ranks: range) -> Communicator:
        """The communicator of some of the ranks, this one among them."""
        if len(ranks) == self.size:
            return self
        group, transport = self.group.part(ranks), self.transport.part(ranks)
        return Communicator(group, transport, self.operation, rounds_in_flight=self.rounds_in_flight)

    def start_all_to_all(self, received: Tensor, sent: Tensor, split_counts: SplitCounts, step: str = "") -> Pending:
        """Piece r of flat `sent` goes to rank r, and piece r of flat `received` comes from it."""
        self._enter(step)
        sent_splits, received_splits = split_counts.sent_by(self.rank), split_counts.received_by(self.rank)
        if self.transport.name == "collective":
            return self.group.start_all_to_all(received, sent, received_splits, sent_splits)
        outgoing, incoming = sent.split(sent_splits), received.split(received_splits)
        if self.transport.name == "pairwise":
            return self._start_rounds(incoming, outgoing)
        return _TwoHops(self.group, self.transport, incoming, outgoing, split_counts, sent)

    def start_all_gather(self, received: Tensor, sent: Tensor, step: str = "") -> Pending:
        """Fills flat `received` with every rank's flat `sent`, in rank order; all ranks send equally much."""
        self._enter(step)
        if self.transport.name == "collective":
            return self.group.start_all_gather(received, sent)
        incoming = received.split([sent.numel()] * self.size)
        if self.transport.name == "pairwise":
            return self._start_rounds(incoming, [sent] * self.size)
        return _SharesByTwoHops(self.group, self.transport, incoming, sent)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message], step: str = "") -> Pending:
        """As the group does: every transport sends messages alike."""
        self._enter(step)
        return self.group.start_messages(sends, receives)

    def _enter(self, step: str) -> None:
        """Tells the group what it is used for from now on."""
        self.group.activity = ", ".join(word for word in (self.operation, step) if word)

    def _start_rounds(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]) -> Pending:
        incoming[self.rank].copy_(outgoing[self.rank])
        met = [round_robin_peer(self.rank, self.size, number) for number in range(num_rounds(self.size))]
        pairs = [[] if p is None else [(Message(outgoing[p], p), Message(incoming[p], p))] for p in met]
        return _Rounds(self.group, pairs, self.rounds_in_flight)


def direction(*, forward: bool) -> str:
    """The word for it."""
    return "forward" if forward else "backward"


def over(group: RankGroup | Communicator) -> Communicator:
    """A group with its backend's own transport, or a communicator as it is."""
    return group if isinstance(group, Communicator) else Communicator(group)


class _Rounds(Pending):
    """Pairs that talk both ways, some rounds at a time; a rank that is idle in a round says nothing in it."""

    def __init__(self, group: RankGroup, rounds: list[list[tuple[Message, Message]]], in_flight: int) -> None:
        self._group, self._ahead, self._activity = group, deque(rounds), group.activity
        self._under_way: deque[Pending] = deque()
        for _ in range(min(in_flight, len(rounds))):
            self._start_next()

    def _start_next(self) -> None:
        pairs = self._ahead.popleft()
        sends, receives = [sent for sent, _ in pairs], [received for _, received in pairs]
        self._group.activity = self._activity  # others may have been started meanwhile
        self._under_way.append(self._group.start_messages(sends, receives))

    def wait(self) -> None:
        while self._under_way:
            self._under_way.popleft().wait()
            if self._ahead:
                self._start_next()


class _Hosts:
    """Who shares a host with whom, seen from one rank."""

    def __init__(self, rank: int, hosts: tuple[int, ...]) -> None:
        self.members = [[r for r, host in enumerate(hosts) if host == number] for number in range(max(hosts) + 1)]
        self.local_host, self._hosts = hosts[rank], hosts
        self.home = self.members[self.local_host]
        self.others = [number for number in range(len(self.members)) if number != self.local_host]
        self._senders: dict[int, list[int]] = {proxy_rank: [] for proxy_rank in self.home}
        for sender in (rank for number in self.others for rank in self.members[number]):
            self._senders[self.proxy_rank(sender, self.local_host)].append(sender)

    def proxy_rank(self, sender: int, host: int) -> int:
        """The rank of another host that takes in what a rank sends there: its counterpart, counted round."""
        place = self.members[self._hosts[sender]].index(sender)
        return self.members[host][place % len(self.members[host])]

    def senders_to(self, proxy_rank: int) -> list[int]:
        """The ranks of other hosts whose messages a rank of this host takes in."""
        return self._senders[proxy_rank]


@lru_cache(maxsize=1024)  # ranks that are threads have one each
def _hosts_of(rank: int, hosts: tuple[int, ...]) -> _Hosts:
    """The same for every exchange of a transport."""
    return _Hosts(rank, hosts)


class _TwoHops(Pending):
    """An all-to-all: one message to each other host, which there goes on to the ranks that it is for."""

    def __init__(
        self, group: RankGroup, transport: Transport, incoming: Sequence[Tensor], outgoing: Sequence[Tensor],
        split_counts: SplitCounts, sent: Tensor,
    ) -> None:  # fmt: skip
        self._group, self._incoming, self._counts, self._like = group, incoming, split_counts.counts, sent
        self._activity = group.activity
        self._hosts = hosts = _hosts_of(group.rank, transport.hosts)
        self._taken: list[Tensor] = []
        incoming[group.rank].copy_(outgoing[group.rank])
        peers = [rank for rank in hosts.home if rank != group.rank]
        sends = [Message(outgoing[peer], peer) for peer in peers]
        for number in hosts.others:
            ranks = hosts.members[number]
            bundle = self._bundle([outgoing[rank] for rank in ranks], ranks)
            sends.append(Message(bundle, hosts.proxy_rank(group.rank, number)))
        self._senders = hosts.senders_to(group.rank)
        sizes = [int(self._counts[rank, hosts.home].sum()) for rank in self._senders]
        self._bundles = self._room(sum(sizes)).split(sizes)
        receives = [Message(incoming[peer], peer) for peer in peers]
        receives += [Message(bundle, rank) for bundle, rank in zip(self._bundles, self._senders, strict=True)]
        self._pending = group.start_messages(sends, receives)

    def wait(self) -> None:
        self._pending.wait()
        rank, home = self._group.rank, self._hosts.home
        # What came through here, by the rank of this host that it is for.
        pieces = [
            dict(zip(home, bundle.split(self._counts[source, home].tolist()), strict=True))
            for source, bundle in zip(self._senders, self._bundles, strict=True)
        ]
        for source, of_source in zip(self._senders, pieces, strict=True):
            self._incoming[source].copy_(of_source[rank])
        sends, receives, arrived = [], [], []
        for peer in home:
            if peer == rank:
                continue
            sends.append(Message(self._bundle([of_source[peer] for of_source in pieces]), peer))
            sources = self._hosts.senders_to(peer)
            sizes = self._counts[sources, rank].tolist()
            bundle = self._room(sum(sizes))
            receives.append(Message(bundle, peer))
            arrived += list(zip(sources, bundle.split(sizes), strict=True))
        self._group.activity = self._activity
        self._group.start_messages(sends, receives).wait()
        for source, piece in arrived:
            self._incoming[source].copy_(piece)
        self._group.buffers.release(*self._taken)
        del self._bundles, self._incoming, self._like

    def _bundle(self, pieces: Sequence[Tensor], ranks: Sequence[int] = ()) -> Tensor:
        """Pieces in one message: as they lie, where they are those of neighbouring ranks."""
        if len(pieces) == 1:
            return pieces[0]
        size = sum(piece.numel() for piece in pieces)
        if ranks and ranks[-1] - ranks[0] == len(ranks) - 1:
            start = pieces[0].storage_offset()
            return pieces[0].as_strided((size,), (1,), start)
        bundle = self._room(size)
        for target, piece in zip(bundle.split([piece.numel() for piece in pieces]), pieces, strict=True):
            target.copy_(piece)
        return bundle

    def _room(self, size: int) -> Tensor:
        self._taken.append(self._group.buffers.acquire_like(self._like, size))
        return self._taken[-1]


class _SharesByTwoHops(Pending):
    """An all-gather likewise: each share goes to each other host once."""

    def __init__(self, group: RankGroup, transport: Transport, incoming: Sequence[Tensor], sent: Tensor) -> None:
        self._group, self._incoming, self._activity = group, incoming, group.activity
        self._hosts = hosts = _hosts_of(group.rank, transport.hosts)
        incoming[group.rank].copy_(sent)
        self._peers = [rank for rank in hosts.home if rank != group.rank]
        targets = [*self._peers, *(hosts.proxy_rank(group.rank, number) for number in hosts.others)]
        self._senders = hosts.senders_to(group.rank)
        self._pending = group.start_messages(
            [Message(sent, target) for target in targets],
            [Message(incoming[source], source) for source in (*self._peers, *self._senders)],
        )

    def wait(self) -> None:
        self._pending.wait()
        self._group.activity = self._activity
        self._group.start_messages(
            [Message(self._incoming[source], peer) for peer in self._peers for source in self._senders],
            [Message(self._incoming[source], peer) for peer in self._peers for source in self._hosts.senders_to(peer)],
        ).wait()
