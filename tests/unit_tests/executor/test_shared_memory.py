"""Tests of transport `shared_memory`: over processes, where ranks fail, and what it refuses."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megatron_cp as cp
from megatron_cp.errors import PeerError
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import Message, RankGroup
from megatron_cp.executor.launch import FIRST_STEP, RankError, run_ranks
from megatron_cp.executor.transports import shared_memory
from megatron_cp.plan.transport import Transport
from megatron_cp.planner.predict.machine_files import machine
from megatron_cp.planner.predict.price import priced
from megatron_cp.testing.parity import Case, run_layer
from megatron_cp.testing.poison import poisoned
from tests.limits import limit
from tests.refusals import rejects

CPU, BY = torch.device("cpu"), Transport("shared_memory")
CASE = Case("attention", 3, (7, 1, 40, 13, 2), heads=6, groups=3, scheme="a2a+p2p", ulysses_degree=1)


def talk(group: RankGroup) -> Communicator:
    return Communicator(group, BY, "an operation", "a scheme")


def swapped(comm: Communicator, size: int, number: float, step: str = "") -> torch.Tensor:
    """Sends `size` numbers to every rank, and returns what arrives."""
    counts = SplitCounts(torch.full((comm.size, comm.size), size).numpy())
    sent = comm.buffers.acquire(4 * size * comm.size, CPU).view(torch.float32).fill_(number)
    received = comm.acquire(4 * size * comm.size, CPU).view(torch.float32)
    comm.start_all_to_all(received, sent, counts, step).wait()
    found = received.clone()
    comm.release(sent, received)
    return found


def over_processes(group: RankGroup, case: Case) -> tuple[bool, int, float]:
    """Returns whether a layer has gloo's bits, how many messages gloo carried meanwhile, and the limit of waits."""
    expected = run_layer(group, replace(case, transport="collective"))
    run_layer(group, case)  # the ranks compare their calls, and exchange what they need
    before = [count for count, _ in group._tagged.started()["send"]]
    with poisoned():
        found = run_layer(group, case)
    after = [count for count, _ in group._tagged.started()["send"]]
    return all(torch.equal(found[name], expected[name]) for name in expected), sum(after) - sum(before), group.patience


def test_processes_have_the_bits_of_gloo_which_carries_nothing():
    case = replace(CASE, scheme="exact", transport="shared_memory", dtype=torch.float32)
    timeout = limit(240)
    found = run_ranks(over_processes, 3, case, kind="processes", timeout=timeout)
    assert [each[:2] for each in found] == [(True, 0)] * 3
    assert [each[2] for each in found] == pytest.approx([min(FIRST_STEP, 0.75 * timeout)] * 3, abs=1e-3)


def test_buffers_are_made_reused_and_mapped_anew():
    def rank_main(group: RankGroup) -> None:
        comm = talk(group)
        for number in range(23):  # sizes grow and shrink
            found = swapped(comm, 1 + 700 * number % 1900, number + group.rank)
            assert sorted(set(found.tolist())) == [number + rank for rank in range(3)]

    run_ranks(rank_main, 3)


def test_more_notes_than_a_pipe_has_room_for(monkeypatch):
    """Each rank starts more messages than another one's pipe has room for, while that one does the same."""
    monkeypatch.setattr(shared_memory, "_PIPE_SIZE", 4096)

    def rank_main(group: RankGroup) -> None:
        comm, others = talk(group), [rank for rank in range(3) if rank != group.rank]
        received, pending = [], []
        for number in range(40):
            received.append([torch.empty(3) for _ in others])
            pending.append(
                comm.start_messages(
                    [Message(torch.full((3,), 10.0 * number + group.rank), peer) for peer in others],
                    [Message(piece, peer) for piece, peer in zip(received[-1], others, strict=True)],
                )
            )
        for number, (each, pieces) in enumerate(zip(pending, received, strict=True)):
            each.wait()
            assert [piece.tolist() for piece in pieces] == [[10.0 * number + peer] * 3 for peer in others]
        assert not comm.wire.heap._arrived
        assert not comm.wire.heap._unread

    run_ranks(rank_main, 3)


def test_memory_is_given_back():
    def files() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    def rank_main(group: RankGroup) -> None:
        swapped(talk(group), 1000, 1.0)

    run_ranks(rank_main, 2)
    before = files()
    for _ in range(3):
        run_ranks(rank_main, 2)
    assert files() <= before + 2


@pytest.mark.parametrize(("numbers_more", "steps_apart"), [(1, 0), (0, 1)], ids=["sizes", "steps"])
def test_ranks_that_call_different_operations_are_named(numbers_more, steps_apart):
    def rank_main(group: RankGroup) -> None:
        other = group.rank // 2
        swapped(talk(group), 5 + other * numbers_more, 1.0, f"step {other * steps_apart}")

    with pytest.raises(
        RankError, match=r"expects 2\d bytes from rank \d, which sent 2\d in an operation, a scheme, step \d"
    ):
        run_ranks(rank_main, 3)


def test_a_rank_that_does_not_come_is_named():
    def rank_main(group: RankGroup) -> None:
        comm = talk(group)
        swapped(comm, 5, 1.0)
        group._limit = 0.5
        if group.rank == 0:
            swapped(comm, 5, 1.0)

    with pytest.raises(RankError, match=r"rank 0 of 2, in an operation, a scheme: rank 1 did not answer in 0 s"):
        run_ranks(rank_main, 2)


def test_ranks_that_are_threads_do_not_wait_for_one_that_failed():
    heard = []

    def rank_main(group: RankGroup) -> None:
        if group.rank == 0:
            talk(group)
            raise ValueError("of its own")
        # Rank 0 may fail before this rank has opened its memory, or while it waits for a message.
        with pytest.raises(PeerError) as caught:
            swapped(talk(group), 5, 1.0)
        heard.append(str(caught.value))

    with pytest.raises(RankError, match="rank 0 of 2 failed: ValueError: of its own"):
        run_ranks(rank_main, 2)
    assert "another rank of its group failed" in heard[0]


def leave(group: RankGroup) -> None:
    comm = talk(group)
    swapped(comm, 5, 1.0)
    if group.rank == 1:
        os._exit(3)
    swapped(comm, 5, 1.0)


def test_a_process_that_ends_is_named():
    with pytest.raises(RankError, match="rank 1 of 3 ended with exit code 3"):
        run_ranks(leave, 3, kind="processes", timeout=limit(60))


def refused_by_the_kernel(group: RankGroup) -> None:
    if group.rank == 1:  # as in containers that allow older calls only

        def refusing(pid: int) -> int:
            raise PermissionError(1, "Operation not permitted")

        os.pidfd_open = refusing
    rejects(r"allowed: processes of one user \(rank 1: .*not permitted\). Use \"collective\"", talk, group)


def test_every_rank_refuses_where_one_cannot_watch_processes():
    run_ranks(refused_by_the_kernel, 2, kind="processes", timeout=limit(60))


def test_refuses_other_hosts_and_devices(monkeypatch):
    def on_a_device(group: RankGroup) -> None:
        sent = torch.empty(4, device="meta")
        rejects(r"^transport: got 'shared_memory'; allowed: tensors of the host, not of meta",
                talk(group).start_all_gather, sent.new_empty(8), sent)  # fmt: skip

    def elsewhere(group: RankGroup) -> None:
        rejects(r"^transport: got 'shared_memory'; allowed: ranks that are processes of one Linux host", talk, group)

    run_ranks(on_a_device, 2)
    names = iter(("one", "another"))
    monkeypatch.setattr(shared_memory, "system", lambda: next(names))
    run_ranks(elsewhere, 2)
    monkeypatch.setattr(shared_memory, "system", lambda: None)  # no Linux
    run_ranks(elsewhere, 2)


def test_it_is_priced_below_gloo_on_a_host_and_alike_on_devices():
    packing = cp.Packing([4096])
    sizes = {"heads": 8, "head_dim": 64, "scheme": "a2a"}
    layout = cp.Layout.zigzag(packing, 2)
    waits = {
        (name, by): priced(cp.plan_attention(packing, layout, transport=by, **sizes), machine(name)).exposed
        for name in ("cpu", "h100")
        for by in ("collective", "shared_memory")
    }
    assert waits["cpu", "shared_memory"] < 0.6 * waits["cpu", "collective"]
    assert waits["h100", "shared_memory"] == waits["h100", "collective"]
    on = machine("cpu")
    assert on.sharing_memory(on.topology(4)) == (on, on.topology(4))  # of two hosts
