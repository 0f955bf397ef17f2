"""Runs one exchange by every transport, and by plain loops, and counts its bytes between hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_cp.apps.bench.wire_job import Job, split_counts_of
from megatron_cp.exchange import SplitCounts
from megatron_cp.executor import ROUNDS_IN_FLIGHT, Communicator, Message, Pairwise, Pending, RankGroup
from megatron_cp.plan import TRANSPORTS, Transport, knows_hosts, num_rounds
from megatron_cp.testing import Case

EXCHANGES = ("all_to_all", "all_gather")
NAIVE, AT_ONCE = "naive loop", "all at once"
_IN_FLIGHT = (1, 2, 4)

Call = Callable[[RankGroup], None]


def transports(group: RankGroup, job: Job) -> dict[tuple[str, str], tuple[Call, Tensor]]:
    """Returns, by kind of exchange and transport, a call and the tensor that it fills."""
    one_host = len(set(job.hosts)) == 1 and job.sent.device == "cpu"
    # The groups that count here are none of torch.distributed, which symmetric memory needs.
    names = [name for name in TRANSPORTS if name != "symmetric_memory" and (one_host or name != "shared_memory")]
    of_hosts = {name: Transport(name, job.hosts if knows_hosts(name) else ()) for name in names}
    moved = AllToAll(split_counts_of(job.sent.plan(), job.sent), group.rank, job.sent.device)
    exchanges: dict[str, Call] = {name: partial(moved.by, transport) for name, transport in of_hosts.items()}
    exchanges |= {NAIVE: moved.by_loop, AT_ONCE: moved.at_once}
    exchanges |= {pairwise(count): partial(moved.by_rounds, count) for count in in_flight_of(group.size)}
    own = torch.full((share_bytes(job.sent),), group.rank, dtype=torch.uint8, device=job.sent.device)
    everyone = own.new_empty(len(own) * group.size)
    gathers = {name: partial(_all_gather, everyone, own, transport) for name, transport in of_hosts.items()}
    kinds = ((EXCHANGES[0], exchanges, moved.received), (EXCHANGES[1], gathers, everyone))
    return {(kind, name): (call, received) for kind, calls, received in kinds for name, call in calls.items()}


def count_bytes(
    calls: Mapping[tuple[str, str], tuple[Call, Tensor]], group: RankGroup, hosts: Sequence[int]
) -> dict[tuple[str, str], int]:
    """Returns the bytes that each call sends to other hosts. All must deliver the same as the backend's own."""
    counted: dict[tuple[str, str], int] = {}
    expected: dict[str, Tensor] = {}
    for (kind, name), (call, received) in calls.items():
        received.zero_()
        counting = Counting(group, hosts)
        call(counting)
        counted[kind, name] = counting.sent
        if not torch.equal(received, expected.setdefault(kind, received.clone())):
            raise RuntimeError(f"{kind} by {name} gave rank {group.rank} other data than {TRANSPORTS[0]}")
    return counted


class Counting(RankGroup):
    """A group that counts the bytes that this rank sends to other hosts."""

    def __init__(self, group: RankGroup, hosts: Sequence[int]) -> None:
        self._group, self.sent = group, 0
        self.rank, self.size, self.agreed = group.rank, group.size, group.agreed
        self._is_away = [host != hosts[group.rank] for host in hosts]

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Pending:
        self.sent += sent.element_size() * int(np.array(sent_splits)[self._is_away].sum())
        return self._group.start_all_to_all(received, sent, received_splits, sent_splits)

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return self._group.start_all_gather(received, sent)  # how, only the backend knows

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.sent += sum(message.tensor.nbytes for message in sends if self._is_away[message.peer])
        return self._group.start_messages(sends, receives)

    def barrier(self) -> None:
        self._group.barrier()


class AllToAll:
    """An all-to-all on one rank, by any transport, between tensors that exist beforehand."""

    def __init__(self, split_counts: SplitCounts, rank: int, device: str) -> None:
        random = torch.Generator().manual_seed(rank)
        sizes, arriving = split_counts.sent_by(rank), split_counts.received_by(rank)
        self.split_counts = split_counts
        self.sent = torch.randint(256, (sum(sizes),), generator=random, dtype=torch.uint8).to(device)
        self.received = torch.empty(sum(arriving), dtype=torch.uint8, device=device)
        self._pieces = list(zip(self.sent.split(sizes), self.received.split(arriving), strict=True))

    def by(self, transport: Transport, group: RankGroup) -> None:
        Communicator(group, transport).start_all_to_all(self.received, self.sent, self.split_counts).wait()

    def by_rounds(self, in_flight: int, group: RankGroup) -> None:
        transport = Pairwise(group, Transport("pairwise"), rounds_in_flight=in_flight)
        transport.start_all_to_all(self.received, self.sent, self.split_counts).wait()

    def by_loop(self, group: RankGroup) -> None:
        for sent, received in self._messages(group.rank):
            group.start_messages([sent], [received]).wait()

    def at_once(self, group: RankGroup) -> None:
        messages = self._messages(group.rank)
        group.start_messages([sent for sent, _ in messages], [received for _, received in messages]).wait()

    def _messages(self, rank: int) -> list[tuple[Message, Message]]:
        """Copies the own piece, and returns the messages to and from each peer in rank order."""
        self._pieces[rank][1].copy_(self._pieces[rank][0])
        peers = [peer for peer in range(len(self._pieces)) if peer != rank]
        return [(Message(self._pieces[peer][0], peer), Message(self._pieces[peer][1], peer)) for peer in peers]


def _all_gather(received: Tensor, sent: Tensor, transport: Transport, group: RankGroup) -> None:
    Communicator(group, transport).start_all_gather(received, sent).wait()


def in_flight_of(cp: int) -> list[int]:
    """Returns numbers of rounds in flight to compare with pairwise's own."""
    rounds = num_rounds(cp)
    return sorted({count for count in (*_IN_FLIGHT, rounds) if count <= rounds} - {min(ROUNDS_IN_FLIGHT, rounds)})


def pairwise(in_flight: int) -> str:
    """Returns the name of a pairwise transport with so many rounds in flight."""
    return f"pairwise, {in_flight}"


def share_bytes(case: Case) -> int:
    """Returns the bytes of an average rank's keys and values."""
    return sum(case.lengths) // case.cp * case.groups * (case.head_dim + case.value_head_dim) * case.dtype.itemsize
