"""Transports in parts of a group, and the messages that they send; that all bring the same is in `test_transports`."""

from collections import Counter

import numpy as np
import pytest
import torch

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import RankGroup, ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.transports import Pairwise
from megatron_cp.plan.transport import COLLECTIVE, TRANSPORTS, Transport, num_rounds, round_robin_peer
from megatron_cp.testing.poison import poisoned
from tests.refusals import rejects


class Noting(RankGroup):
    """Writes down who else is sent how many bytes, message by message."""

    def __init__(self, group):
        self.group, self.rank, self.size, self.sent = group, group.rank, group.size, []

    def start_all_to_all(self, *args):
        raise AssertionError("no collective of the backend's")

    start_all_gather = start_all_to_all

    def start_messages(self, sends, receives):
        self.sent += [(message.peer, message.tensor.nbytes) for message in sends if message.peer != self.rank]
        return self.group.start_messages(sends, receives)

    def barrier(self):
        self.group.barrier()


def piece(source: int, target: int, count: int) -> torch.Tensor:
    return torch.arange(count) + 1000 * target + 100_000 * source


def exchanged(group: RankGroup, transport: Transport, counts: np.ndarray) -> torch.Tensor:
    """Returns the `piece`s that a rank receives, through two all-to-alls under way at once."""
    comm, split_counts, rank = Communicator(group, transport), SplitCounts(counts), group.rank
    with poisoned():
        sent = torch.cat([piece(rank, target, int(count)) for target, count in enumerate(counts[rank])])
        received = [torch.empty(int(counts[:, rank].sum()), dtype=sent.dtype) for _ in range(2)]
        under_way = [comm.start_all_to_all(received[0], sent, split_counts)]
        under_way.append(comm.start_all_to_all(received[1], sent + 1, split_counts))
        for pending in under_way:
            pending.wait()
    assert torch.equal(received[0] + 1, received[1])
    return received[0]


def expected(counts: np.ndarray, rank: int) -> torch.Tensor:
    return torch.cat([piece(source, rank, int(count)) for source, count in enumerate(counts[:, rank])])


@pytest.mark.parametrize("name", ["collective", "pairwise", "hierarchical"])
@pytest.mark.parametrize("ranks", [range(3), range(1, 6, 2), range(4, 6)], ids=str)
def test_parts_of_a_group_of_any_stride(name, ranks):
    """Every part talks, as the rows and columns of a grid of ranks do; ranks of two hosts."""
    whole = Transport.even_hosts(name, 6, 2)
    counts = np.arange(len(ranks) ** 2).reshape(len(ranks), -1) % 5
    parts = {
        range(3): [range(3), range(3, 6)],
        range(1, 6, 2): [range(0, 6, 2), range(1, 6, 2)],
        range(4, 6): [range(2), range(2, 4), range(4, 6)],
    }[ranks]

    def rank_main(group: RankGroup) -> torch.Tensor:
        own = next(part for part in parts if group.rank in part)
        comm = Communicator(group, whole).part(own)
        received = exchanged(comm.group, comm.transport, counts)
        assert torch.equal(received, expected(counts, comm.rank))
        return received

    run_ranks(rank_main, 6)


@pytest.mark.parametrize("size", range(1, 18))
def test_rounds_are_pairs_and_all_meet_once(size):
    met: Counter[tuple[int, int]] = Counter()
    for number in range(num_rounds(size)):
        peers = [round_robin_peer(rank, size, number) for rank in range(size)]
        for rank, other in enumerate(peers):
            assert other is None or (other != rank and peers[other] == rank)
            if other is not None:
                met[rank, other] += 1
        assert peers.count(None) == size % 2
    assert met == Counter((a, b) for a in range(size) for b in range(size) if a != b)


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_as_many_rounds_are_under_way_as_the_caller_says(in_flight):
    def rank_main(inner: RankGroup) -> tuple[int, int]:
        group = Noting(inner)
        transport = Pairwise(group, Transport("pairwise"), rounds_in_flight=in_flight)
        received, sent = torch.zeros(6), torch.ones(6)
        pending = transport.start_all_to_all(received, sent, [1] * 6, [1] * 6)
        started = len(group.sent)
        pending.wait()
        assert received.all()
        return started, len(group.sent)

    assert run_ranks(rank_main, 6) == [(in_flight, 5)] * 6


HOSTS = [(0, 0, 1, 1), (0, 0, 0, 1, 1), (0, 1, 1, 1, 1), (0, 1, 0, 1, 2, 2, 2), (0, 0, 0, 0), (0, 1, 2)]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_one_message_to_each_other_host_and_no_byte_twice_between_them(hosts):
    size = len(hosts)
    counts = np.arange(size * size).reshape(size, size) % 7 + 1

    def rank_main(inner: RankGroup) -> list[tuple[int, int]]:
        group = Noting(inner)
        Communicator(group, Transport("hierarchical", hosts)).start_all_to_all(
            torch.empty(int(counts[:, group.rank].sum()), dtype=torch.int64),
            torch.zeros(int(counts[group.rank].sum()), dtype=torch.int64),
            SplitCounts(counts),
        ).wait()
        return group.sent

    for rank, sent in enumerate(run_ranks(rank_main, size)):
        for host in set(hosts) - {hosts[rank]}:
            across = [nbytes for peer, nbytes in sent if hosts[peer] == host]
            members = [other for other in range(size) if hosts[other] == host]
            assert across == [8 * int(counts[rank, members].sum())]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_share_is_gathered_once_and_staging_is_allocated_once(hosts):
    def rank_main(inner: RankGroup) -> list[tuple[int, int]]:
        group = Noting(inner)
        comm = Communicator(group, Transport("hierarchical", hosts))
        comm.start_all_gather(torch.empty(5 * group.size), torch.ones(5)).wait()
        return group.sent

    for rank, sent in enumerate(run_ranks(rank_main, len(hosts))):
        across = sorted(hosts[peer] for peer, _ in sent if hosts[peer] != hosts[rank])
        assert across == sorted(set(hosts) - {hosts[rank]})
    counts = np.arange(len(hosts) ** 2).reshape(len(hosts), -1) % 7 + 1

    def staged(group: RankGroup) -> int:
        exchanged(group, Transport("hierarchical", hosts), counts)
        before = group.buffers.allocations
        for _ in range(3):
            exchanged(group, Transport("hierarchical", hosts), counts)
        return group.buffers.allocations - before

    assert run_ranks(staged, len(hosts)) == [0] * len(hosts)


def test_all_links_between_hosts_are_used():
    """Every rank of a host receives from one rank of the other."""
    hosts = (0, 0, 0, 1, 1, 1)

    def rank_main(inner: RankGroup) -> set[int]:
        group = Noting(inner)
        exchanged(group, Transport("hierarchical", hosts), np.ones((6, 6), dtype=np.int64))
        return {peer for peer, _ in group.sent if hosts[peer] != hosts[group.rank]}

    assert run_ranks(rank_main, 6) == [{3}, {4}, {5}, {0}, {1}, {2}]


@pytest.mark.parametrize("hosts", [[0, 0, 1], np.array([0, 0, 1]), torch.tensor([0, 0, 1]), [np.int64(0)] * 2 + [1]])
def test_hosts_may_be_any_sequence(hosts):
    made = Transport("hierarchical", hosts)
    assert made == Transport("hierarchical", (0, 0, 1))
    assert [type(host) for host in made.hosts] == [int] * 3
    assert hash(made)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: Transport("smoke signals"), "transport"), (lambda: Transport("hierarchical"), "hosts"),
        (lambda: Transport("pairwise", (0, 1)), "hosts"),
        *((lambda hosts=hosts: Transport("hierarchical", hosts), "hosts") for hosts in (
            (0, 2), (1, 2), (-1, 0), (0, 1.0), (False, True), ("a", "b"), "01", {0, 1}, 2, None,
        )),
        *((lambda name=name, hosts=hosts: Transport.even_hosts(name, 4, hosts), "hosts")
          for name in TRANSPORTS for hosts in (0, 5, 99, 2.0)),
        (lambda: Communicator(ThreadGroup.create(2)[0], Transport("hierarchical", (0, 1, 1))), "transport"),
    ],
)  # fmt: skip
def test_rejects_what_is_no_transport_of_these_ranks(call, argument):
    rejects(f"^{argument}: got ", call)


def test_hosts_of_equal_size_are_made_up():
    assert Transport.even_hosts("hierarchical", 5, 2).hosts == (0, 0, 0, 1, 1)
    assert Transport.even_hosts("collective", 5, 2) == COLLECTIVE
