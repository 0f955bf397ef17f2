"""`Hierarchical`: one message from each rank to each other host, and from there to the ranks that it is for.

    start   one message to each other host, and direct ones within the own host
    wait    what came here for other ranks of the host goes on to them

Between hosts comes first, since those links are slow: they are busy while the ranks compute, and only the hop within
the host is left for the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, keep_own
from megatron_cp.executor.transports.base import GroupTransport


class Hierarchical(GroupTransport):
    """Knows which ranks share a host."""

    def start_all_to_all(self, received: Tensor, sent: Tensor, split_counts: SplitCounts) -> Pending:
        rank = self.group.rank
        incoming = received.split(split_counts.received_by(rank))
        outgoing = sent.split(split_counts.sent_by(rank, sent.numel()))
        return _TwoHops(self, incoming, outgoing, split_counts, sent)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return _SharesByTwoHops(self, received.split([sent.numel()] * self.group.size), sent)

    @property
    def hosts(self) -> Hosts:
        return _hosts_of(self.group.rank, self.transport.hosts)

    def start_hop(self, sends: list[Message], receives: list[Message], like: Tensor) -> Pending:
        """Starts the messages of a hop, also where this rank has none.

        No hop is left out, not even one in which no rank of the group has a message: the group may be a part of a
        larger one whose other parts have some.
        """
        if not sends and not receives:
            sends, receives = [self.nothing(like)], [self.nothing(like)]
        return self.group.start_messages(sends, receives)


class Hosts:
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
def _hosts_of(rank: int, hosts: tuple[int, ...]) -> Hosts:
    """The same for every exchange of a transport."""
    return Hosts(rank, hosts)


class _TwoHops(Pending):
    """An all-to-all: one message to each other host, which there goes on to the ranks that it is for."""

    def __init__(
        self, transport: Hierarchical, incoming: Sequence[Tensor], outgoing: Sequence[Tensor],
        split_counts: SplitCounts, sent: Tensor,
    ) -> None:  # fmt: skip
        self._transport, self._group, self._activity = transport, transport.group, transport.group.activity
        self._incoming, self._counts, self._like = incoming, split_counts.counts, sent
        self._hosts = hosts = transport.hosts
        self._acquired: list[Tensor] = []
        rank = self._group.rank
        keep_own(incoming[rank], outgoing[rank])
        peers = [peer for peer in hosts.home if peer != rank]
        sends = [Message(outgoing[peer], peer) for peer in peers]
        for number in hosts.others:
            ranks = hosts.members[number]
            bundle = self._bundle([outgoing[member] for member in ranks], ranks)
            sends.append(Message(bundle, hosts.proxy_rank(rank, number)))
        self._senders = hosts.senders_to(rank)
        sizes = [int(self._counts[sender, hosts.home].sum()) for sender in self._senders]
        self._bundles = self._acquire(sum(sizes)).split(sizes)
        receives = [Message(incoming[peer], peer) for peer in peers]
        receives += [Message(bundle, sender) for bundle, sender in zip(self._bundles, self._senders, strict=True)]
        self._pending = transport.start_hop(sends, receives, sent)

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
            bundle = self._acquire(sum(sizes))
            receives.append(Message(bundle, peer))
            arrived += list(zip(sources, bundle.split(sizes), strict=True))
        self._group.activity = self._activity
        self._transport.start_hop(sends, receives, self._like).wait()
        for source, piece in arrived:
            self._incoming[source].copy_(piece)
        self._group.buffers.release(*self._acquired)
        del self._bundles, self._incoming, self._like

    def _bundle(self, pieces: Sequence[Tensor], ranks: Sequence[int] = ()) -> Tensor:
        """Pieces in one message: as they lie, where they are those of neighbouring ranks."""
        if len(pieces) == 1:
            return pieces[0]
        size = sum(piece.numel() for piece in pieces)
        if ranks and ranks[-1] - ranks[0] == len(ranks) - 1:
            start = pieces[0].storage_offset()
            return pieces[0].as_strided((size,), (1,), start)
        bundle = self._acquire(size)
        for target, piece in zip(bundle.split([piece.numel() for piece in pieces]), pieces, strict=True):
            target.copy_(piece)
        return bundle

    def _acquire(self, size: int) -> Tensor:
        self._acquired.append(self._group.buffers.acquire_like(self._like, size))
        return self._acquired[-1]


class _SharesByTwoHops(Pending):
    """An all-gather likewise: each share goes to each other host once."""

    def __init__(self, transport: Hierarchical, incoming: Sequence[Tensor], sent: Tensor) -> None:
        self._transport, self._group, self._activity = transport, transport.group, transport.group.activity
        self._incoming, self._like = incoming, sent
        self._hosts = hosts = transport.hosts
        rank = self._group.rank
        incoming[rank].copy_(sent)
        self._peers = [peer for peer in hosts.home if peer != rank]
        targets = [*self._peers, *(hosts.proxy_rank(rank, number) for number in hosts.others)]
        self._senders = hosts.senders_to(rank)
        self._pending = transport.start_hop(
            [Message(sent, target) for target in targets],
            [Message(incoming[source], source) for source in (*self._peers, *self._senders)],
            sent,
        )

    def wait(self) -> None:
        self._pending.wait()
        self._group.activity = self._activity
        self._transport.start_hop(
            [Message(self._incoming[source], peer) for peer in self._peers for source in self._senders],
            [Message(self._incoming[source], peer) for peer in self._peers for source in self._hosts.senders_to(peer)],
            self._like,
        ).wait()
