"""`Hierarchical`: sends one message from each rank to each other host, and passes its parts on to ranks there.

    start   sends one message to each other host, and direct ones within the host
    wait    passes on the parts of received messages that are for other ranks of the host

The hop between hosts is first, since those links are slow: it overlaps with computation, and only the hop within the
host remains for the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup, Wire, empty_message, keep_own
from megatron_cp.plan.transport import Transport, checked_transport


class Hierarchical(Wire):
    """Sends one message to each other host, where a rank passes its parts on.

    Raises:
        ArgumentError: the transport has the hosts of another number of ranks.
    """

    def __init__(self, group: RankGroup, transport: Transport) -> None:
        self.group, self.buffers = group, group.buffers
        self.hosts = _host_ranks(group.rank, checked_transport(transport, group.size).hosts)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        assert split_counts is not None
        return _TwoHopAllToAll(self, received.split(received_splits), sent.split(sent_splits), split_counts, sent)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return _TwoHopAllGather(self, received.split([sent.numel()] * self.group.size), sent)

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self.group.start_messages(sends, receives)

    def start_hop(self, sends: list[Message], receives: list[Message], like: Tensor) -> Pending:
        """Starts the messages of a hop, also if this rank has none.

        A hop is never skipped, even if no rank of the group has a message, since the group may be a part of a larger
        one whose other parts have messages.
        """
        if not sends and not receives:
            sends = receives = [empty_message(like, self.group.rank)]
        return self.group.start_messages(sends, receives)


class HostRanks:
    """The ranks of each host, seen from one rank.

    Attributes:
        members: the ranks of each host.
        local_host, local_ranks: the number and the ranks of this rank's host.
        other_hosts: the numbers of the other hosts.
    """

    def __init__(self, rank: int, hosts: tuple[int, ...]) -> None:
        self.members = [[r for r, host in enumerate(hosts) if host == number] for number in range(max(hosts) + 1)]
        self.local_host, self._hosts = hosts[rank], hosts
        self.local_ranks = self.members[self.local_host]
        self.other_hosts = [number for number in range(len(self.members)) if number != self.local_host]
        self._senders: dict[int, list[int]] = {proxy_rank: [] for proxy_rank in self.local_ranks}
        for sender in (rank for number in self.other_hosts for rank in self.members[number]):
            self._senders[self.proxy_rank(sender, self.local_host)].append(sender)

    def proxy_rank(self, sender: int, host: int) -> int:
        """Returns the rank of `host` that receives the messages of `sender`: its counterpart modulo the host's size."""
        place = self.members[self._hosts[sender]].index(sender)
        return self.members[host][place % len(self.members[host])]

    def senders_to(self, proxy_rank: int) -> list[int]:
        """Returns the ranks of other hosts whose messages a rank of this host receives."""
        return self._senders[proxy_rank]


_host_ranks = lru_cache(maxsize=1024)(HostRanks)  # large enough for ranks that are threads, which have an entry each


class _TwoHopAllToAll(Pending):
    """An all-to-all with one message to each other host, whose parts are passed on there."""

    def __init__(
        self, wire: Hierarchical, incoming: Sequence[Tensor], outgoing: Sequence[Tensor],
        split_counts: SplitCounts, sent: Tensor,
    ) -> None:  # fmt: skip
        self._wire, self._group, self._activity = wire, wire.group, wire.group.activity
        self._incoming, self._counts, self._like = incoming, split_counts.counts, sent
        self._hosts = hosts = wire.hosts
        self._acquired: list[Tensor] = []
        rank = self._group.rank
        keep_own(incoming[rank], outgoing[rank])
        peers = [peer for peer in hosts.local_ranks if peer != rank]
        sends = [Message(outgoing[peer], peer) for peer in peers]
        for number in hosts.other_hosts:
            ranks = hosts.members[number]
            bundle = self._bundle([outgoing[member] for member in ranks], ranks)
            sends.append(Message(bundle, hosts.proxy_rank(rank, number)))
        self._senders = hosts.senders_to(rank)
        sizes = [int(self._counts[sender, hosts.local_ranks].sum()) for sender in self._senders]
        self._bundles = self._acquire(sum(sizes)).split(sizes)
        receives = [Message(incoming[peer], peer) for peer in peers]
        receives += [Message(bundle, sender) for bundle, sender in zip(self._bundles, self._senders, strict=True)]
        self._pending = wire.start_hop(sends, receives, sent)

    def wait(self) -> None:
        self._pending.wait()
        rank, local_ranks = self._group.rank, self._hosts.local_ranks
        # The parts of the messages of other hosts, by their destination among the ranks of this host.
        pieces = [
            dict(zip(local_ranks, bundle.split(self._counts[source, local_ranks].tolist()), strict=True))
            for source, bundle in zip(self._senders, self._bundles, strict=True)
        ]
        for source, source_pieces in zip(self._senders, pieces, strict=True):
            self._incoming[source].copy_(source_pieces[rank])
        sends, receives, arrived = [], [], []
        for peer in local_ranks:
            if peer == rank:
                continue
            sends.append(Message(self._bundle([source_pieces[peer] for source_pieces in pieces]), peer))
            sources = self._hosts.senders_to(peer)
            sizes = self._counts[sources, rank].tolist()
            bundle = self._acquire(sum(sizes))
            receives.append(Message(bundle, peer))
            arrived += list(zip(sources, bundle.split(sizes), strict=True))
        self._group.activity = self._activity
        self._wire.start_hop(sends, receives, self._like).wait()
        for source, piece in arrived:
            self._incoming[source].copy_(piece)
        self._group.buffers.release(*self._acquired)
        del self._bundles, self._incoming, self._like

    def _bundle(self, pieces: Sequence[Tensor], ranks: Sequence[int] = ()) -> Tensor:
        """Returns pieces as one message, without a copy if they are those of consecutive ranks."""
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


class _TwoHopAllGather(Pending):
    """An all-gather that sends each share to each other host once."""

    def __init__(self, wire: Hierarchical, incoming: Sequence[Tensor], sent: Tensor) -> None:
        self._wire, self._group, self._activity = wire, wire.group, wire.group.activity
        self._incoming, self._like = incoming, sent
        self._hosts = hosts = wire.hosts
        rank = self._group.rank
        incoming[rank].copy_(sent)
        self._peers = [peer for peer in hosts.local_ranks if peer != rank]
        targets = [*self._peers, *(hosts.proxy_rank(rank, number) for number in hosts.other_hosts)]
        self._senders = hosts.senders_to(rank)
        self._pending = wire.start_hop(
            [Message(sent, target) for target in targets],
            [Message(incoming[source], source) for source in (*self._peers, *self._senders)],
            sent,
        )

    def wait(self) -> None:
        self._pending.wait()
        self._group.activity = self._activity
        self._wire.start_hop(
            [Message(self._incoming[source], peer) for peer in self._peers for source in self._senders],
            [Message(self._incoming[source], peer) for peer in self._peers for source in self._hosts.senders_to(peer)],
            self._like,
        ).wait()
