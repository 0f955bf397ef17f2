"""Tests of each transport by itself: the same bytes, as many operations on every rank, its own memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_cp as cp
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import Message, RankGroup, TorchGroup
from megatron_cp.executor.groups.base import Done, check_peers
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.transports import LAID_OVER_GROUP, symmetric_memory
from megatron_cp.plan.transport import TRANSPORTS, Transport, num_rounds
from megatron_cp.planner.capabilities import working
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.testing.poison import poisoned
from tests.counting_group import CountingGroup
from tests.host_windows import host_windows
from tests.limits import limit
from tests.refusals import rejects

CPU = torch.device("cpu")
HOSTS = {1: (0,), 2: (0, 1), 3: (0, 1, 1), 4: (0, 1, 0, 1), 5: (0, 0, 0, 1, 2), 6: (0, 1, 1, 2, 2, 2)}
UNEVEN = "hierarchical"


@pytest.fixture(autouse=True, scope="module")
def windows():
    """Symmetric memory on the host, so small that pieces take several rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "window_of", host_windows(32))
        yield


def named(name: str, size: int, hosts: tuple[int, ...] | None = None) -> Transport:
    return Transport(name, (hosts or HOSTS[size]) if name == UNEVEN else ())


def test_every_name_has_a_class():
    assert ("collective", *LAID_OVER_GROUP) == TRANSPORTS == tuple(working("transport"))


def test_collective_is_the_group_itself():
    def rank_main(group: RankGroup) -> None:
        assert Communicator(group).wire is group

    run_ranks(rank_main, 2)


def landed(comm: Communicator, like: torch.Tensor, count: int, *, kept: bool) -> torch.Tensor:
    return comm.acquire(count * like.itemsize, CPU, kept=kept).view(like.dtype)


def everything(group: RankGroup, data: Transport, counts: np.ndarray, share: int) -> dict[str, list[float]]:
    """Returns a rank's received data of an all-to-all, its reverse, an all-gather and a ring, all under way at once."""
    comm, rank = Communicator(group, data), group.rank
    there, back = SplitCounts(counts), SplitCounts(counts).reversed()
    draw = torch.Generator().manual_seed(rank)
    with poisoned():
        sent = {
            "there": torch.randn(int(counts[rank].sum()), generator=draw),
            "back": torch.randn(int(counts[:, rank].sum()), generator=draw),
            "share": torch.randn(share, generator=draw),
            "ring": torch.randn(int(counts[rank, rank]), generator=draw),
        }
        sizes = {"there": int(counts[:, rank].sum()), "back": int(counts[rank].sum()), "share": share * group.size}
        if group.size > 1:
            before = (rank - 1) % group.size
            sizes["ring"] = int(counts[before, before])
        received = {
            name: landed(comm, sent[name], size, kept=name == "back") for name, size in sizes.items()
        }  # fmt: skip
        pending = [
            comm.start_all_to_all(received["there"], sent["there"], there),
            comm.start_all_to_all(received["back"], sent["back"], back),
            comm.start_all_gather(received["share"], sent["share"]),
        ]
        if group.size > 1:
            after = Message(sent["ring"], (rank + 1) % group.size)
            pending.append(comm.start_messages([after], [Message(received["ring"], before)]))
        for each in pending:
            each.wait()
    found = {name: tensor.tolist() for name, tensor in received.items()}
    comm.release(*received.values(), *sent.values())  # those that are kept, and not its own, are left alone
    assert not group.buffers._taken
    return found


@st.composite
def splits(draw, size: int) -> np.ndarray:
    counts = st.lists(st.sampled_from([0, 0, 1, 3, 17]), min_size=size, max_size=size)
    return np.array(draw(st.lists(counts, min_size=size, max_size=size)))


@settings(max_examples=16)
@given(st.data())
def test_all_transports_bring_the_same(data):
    size = data.draw(st.integers(1, 6))
    counts, share = data.draw(splits(size)), data.draw(st.sampled_from([0, 1, 5]))
    drawn = data.draw(st.lists(st.integers(0, size - 1), min_size=size, max_size=size))
    hosts = tuple(sorted(set(drawn)).index(host) for host in drawn)  # any, in any order of ranks
    results = {name: run_ranks(everything, size, named(name, size, hosts), counts, share) for name in TRANSPORTS}
    for name, found in results.items():
        assert found == results["collective"], name


NAMES = st.sampled_from(["contiguous", "zigzag", "random"])


@settings(max_examples=10)
@given(st.data())
def test_gather_and_relayout_are_the_same_by_all_transports(data):
    """Their gradients too; in float32, where another order of a sum has other bits."""
    size = data.draw(st.integers(1, 6))
    packing = cp.Packing(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=5)))
    source, target = (layout_by_name(data.draw(NAMES), packing, size, align=align) for align in (3, 1))

    def rank_main(group: RankGroup, transport: Transport) -> list[torch.Tensor]:
        draw, found = torch.Generator().manual_seed(group.rank), []
        for operation in (
            lambda x: cp.gather(x, source, group, transport=transport),
            lambda x: cp.gather(x, source, group, same_loss=True, transport=transport),
            lambda x: cp.relayout(x, source, target, group, transport=transport),
        ):
            local = torch.randn(int(source.row_counts[group.rank]), 2, 3, generator=draw, requires_grad=True)
            with poisoned():
                out = operation(local)
                out.backward(torch.randn(out.shape, generator=draw))
            found += [out.detach(), local.grad]
        assert not group.buffers._taken
        return found

    expected = run_ranks(rank_main, size, Transport())
    for name in TRANSPORTS[1:]:
        for mine, theirs in zip(run_ranks(rank_main, size, named(name, size)), expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True)), name


def test_rejects_the_hosts_of_other_ranks():
    local, layout = torch.zeros(4), cp.Layout.contiguous(cp.Packing([8]), 2)

    def rank_main(group: RankGroup) -> None:
        for operation in (
            lambda **how: cp.gather(local, layout, group, **how),
            lambda **how: cp.relayout(local, layout, layout, group, **how),
        ):
            for wrong in (Transport(UNEVEN, (0, 0, 1)), UNEVEN, "pigeon"):
                rejects(r"^transport: got ", operation, transport=wrong)
        rejects(r"the host of each of the 2 ranks. Use .*hosts_of", Communicator, group, Transport(UNEVEN, (0, 0, 1)))

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_memory_is_the_groups_unless_it_is_kept(name: str):
    def rank_main(group: RankGroup) -> None:
        comm = Communicator(group, named(name, 2))
        read, kept = comm.acquire(100, CPU), comm.acquire(100, CPU, kept=True)
        assert group.buffers.allocations == len(group.buffers._taken) == 1
        kept.fill_(7)
        comm.release(read[:10], kept)
        assert not group.buffers._taken
        again = comm.acquire(90, CPU).fill_(1)
        assert group.buffers.allocations == 1  # the same once more
        assert again.untyped_storage().data_ptr() == read.untyped_storage().data_ptr()
        assert bool((kept == 7).all())

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_several_messages_to_one_rank_stay_in_order_also_from_memory_of_nobody(name: str):
    def rank_main(group: RankGroup) -> None:
        comm, other = Communicator(group, named(name, 2)), 1 - group.rank
        for _ in range(3):
            sent = [torch.full((n,), float(n + group.rank)) for n in (3, 0, 700, 5)]
            received = [torch.empty(n) for n in (3, 0, 700, 5)]
            comm.start_messages([Message(x, other) for x in sent], [Message(x, other) for x in received]).wait()
            assert [x.tolist() for x in received] == [[float(n + other)] * n for n in (3, 0, 700, 5)]
        assert not group.buffers._taken

    run_ranks(rank_main, 2)


class Numbered(CountingGroup):
    """Notes what a backend that numbers operations is given: it cannot start one without a tensor."""

    def __init__(self, inner: RankGroup) -> None:
        super().__init__(inner)
        self.started: list[str] = []

    def start_all_to_all(self, *args):
        self.started.append("all_to_all")
        return super().start_all_to_all(*args)

    def start_all_gather(self, *args):
        self.started.append("all_gather")
        return super().start_all_gather(*args)

    def start_messages(self, sends, receives):
        assert sends or receives, "an operation of nothing, on no device"
        self.started.append("messages")
        return super().start_messages(sends, receives)


@pytest.mark.parametrize("counts", [np.zeros((6, 6), int), np.eye(6, k=1, dtype=int), np.ones((6, 6), int)], ids=str)
@pytest.mark.parametrize("size", range(2, 7))
@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.few(together=2)
def test_every_rank_starts_as_many_operations(name: str, size: int, counts: np.ndarray):
    def rank_main(inner: RankGroup, hosts: tuple[int, ...]) -> tuple[list[str], int]:
        group = Numbered(inner)
        everything(group, named(name, size, hosts), counts[:size, :size], 2)
        return group.started, group.bytes_sent

    for hosts in (HOSTS[size], (0,) * size, tuple(range(size)))[: 3 if name == UNEVEN else 1]:
        started = [operations for operations, _ in run_ranks(rank_main, size, hosts)]
        assert started == [started[0]] * size
        rounds = {"collective": 1, "pairwise": num_rounds(size), "hierarchical": 2}
        # Through shared or symmetric memory the group only carries, once, what ranks tell each other of it.
        assert len(started[0]) == (3 * rounds[name] + 1 if name in rounds else {"shared_memory": 6}.get(name, 2))


def test_parts_start_as_many_operations_whatever_hosts_they_have():
    """Parts of a group talk through it: no part may leave out a hop that another has."""
    data = Transport(UNEVEN, (0, 0, 1, 2, 0, 3))

    def rank_main(inner: RankGroup) -> list[str]:
        group, first = Numbered(inner), inner.rank - inner.rank % 2
        part = range(first, first + 2)
        everything(group.part(part), data.part(part), np.ones((2, 2), int), 2)
        return group.started

    started = run_ranks(rank_main, 6)
    assert started == [started[0]] * 6
    assert len(started[0]) == 3 * 2 + 1


class FusedMessages(TorchGroup):
    """Sends messages as over NCCL: those of a round in one all-to-all, counted. gloo carries the bytes."""

    def __init__(self, group: TorchGroup) -> None:
        super().__init__(group.group)
        self.collectives: list[tuple[list[int], list[int]]] = []

    def start_messages(self, sends, receives):
        check_peers((*sends, *receives), self.rank)
        return self._start_fused_messages(sends, receives) if sends or receives else Done()

    def start_all_to_all(self, received, sent, received_splits, sent_splits, split_counts=None):
        self.collectives.append((received_splits, sent_splits))
        return super().start_all_to_all(received, sent, received_splits, sent_splits)


def over_gloo(group: TorchGroup, name: str) -> tuple[int, list[int], int, dict[str, list[float]]]:
    """Collectives as NCCL would number them; messages that gloo sent to each rank; what arrived by either way."""
    data, counts = named(name, group.size, (0, 1, 1)), np.ones((group.size, group.size), int)
    counts[0, 2] = 0
    plain = everything(group, data, counts, 2)
    sent = [count for count, _ in group._tagged.started()["send"]]
    numbered = FusedMessages(group)
    assert everything(numbered, data, counts, 2) == plain
    idle = sum(not any(splits) for pair in numbered.collectives for splits in pair)
    return len(numbered.collectives), sent, idle, plain


@pytest.mark.parametrize("name", ["pairwise", "hierarchical"])
def test_ranks_number_alike_what_they_start_over_nccl_and_gloo_sends_nothing_for_it(name: str):
    answers = run_ranks(over_gloo, 3, name, kind="processes", timeout=limit(60))
    numbers, sent, idle, _ = zip(*answers, strict=True)
    rounds = {"pairwise": 3, "hierarchical": 2}[name]
    assert numbers == (3 * rounds + 1,) * 3
    assert any(idle)
    assert [to[rank] for rank, to in enumerate(sent)] == [0, 0, 0]
    if name == "pairwise":  # there, back and share to both others, but for the empty pieces, and the ring
        assert list(sent) == [[0, 4, 2], [3, 0, 4], [3, 3, 0]]
