"""Tests of transport `symmetric_memory` without a device: its rounds and signals on the host, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import RankGroup, ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.transports import symmetric_memory
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.plan.transport import Transport
from megatron_cp.testing.parity import Case, run_layer
from megatron_cp.testing.poison import poisoned
from tests.host_windows import host_windows
from tests.refusals import rejects

BY = Transport("symmetric_memory")
WINDOW_OF = symmetric_memory.window_of
LENGTHS = (7, 1, 40, 13, 2)
ATTENTION = Case("attention", 1, LENGTHS, heads=6, groups=3, scheme="a2a", transport="symmetric_memory")
LINEAR = Case("gdn", 1, LENGTHS, heads=6, groups=3, scheme="headwise", transport="symmetric_memory")
SIZES = {scheme: 4 if "+" in scheme else (2, 3, 5)[number % 3] for number, scheme in enumerate(SCHEMES)}
CASES = {
    f"{case}": case
    for case in (
        *(replace(ATTENTION, cp=size, scheme=scheme, layout="random") for scheme, size in SIZES.items()),
        *(replace(ATTENTION, cp=size, scheme="p2p", layout="zigzag") for size in (2, 3, 5)),
        replace(ATTENTION, cp=3, groups=6, scheme="a2a", head_chunks=2),
        replace(LINEAR, cp=3, scheme="headwise"),
        replace(LINEAR, cp=5, scheme="chunkwise"),
    )
}


@pytest.fixture(autouse=True)
def windows(monkeypatch):
    """Slots so small that nearly all messages take several rounds."""
    monkeypatch.setattr(symmetric_memory, "window_of", host_windows(512))


@pytest.mark.parametrize("name", CASES)
def test_layers_have_the_bits_of_a_collective(name: str):
    case = CASES[name]

    def rank_main(group: RankGroup, transport: str) -> dict[str, torch.Tensor]:
        with poisoned():
            return run_layer(group, replace(case, transport=transport))

    found, expected = (run_ranks(rank_main, case.cp, by) for by in ("symmetric_memory", "collective"))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_signals_are_taken_before_they_are_sent_again():
    """At most one signal of each reader and slot is left over, so that pads stay flags."""

    def rank_main(group: RankGroup) -> int:
        comm = Communicator(group, BY)
        for _ in range(5):
            comm.start_all_gather(torch.empty(900 * group.size), torch.ones(900)).wait()
        window = symmetric_memory.window_of(group)
        return len([key for key in window._handle.memory.signals if key[0] == group.rank])

    assert max(run_ranks(rank_main, 3)) <= 2 * 2


@pytest.fixture
def of_torch(monkeypatch):
    """Has ranks pass for those of torch.distributed with a device each, and the set-up that there is for these."""
    monkeypatch.setattr(symmetric_memory, "window_of", WINDOW_OF)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(symmetric_memory, "symmetric_backend", lambda device: "CUDA")
    monkeypatch.setattr(symmetric_memory, "DeviceWindow", lambda *_: "a window")
    monkeypatch.setattr(ThreadGroup, "process_group", ThreadGroup)


def each_in_turn(*values):
    """Returns a function whose calls return the values, or raise those that are errors."""
    left = iter(values)

    def call(*_):
        value = next(left)
        if isinstance(value, Exception):
            raise value
        return value

    return call


OVERLAP = RuntimeError("detected allocations from overlapping devices")
# What is otherwise than `of_torch` has it, and what both ranks then say.
REFUSED = [
    (ThreadGroup, "process_group", None, r"rank 0: it is no rank of a torch.distributed group; rank 1: it is no rank"),
    (torch.cuda, "device_count", lambda: 0, "rank 0: it has no CUDA device"),
    (symmetric_memory, "symmetric_backend", each_in_turn("CUDA", "NVSHMEM"),
     r'rank \d: torch has the backend NVSHMEM of symmetric memory, and not "CUDA"\)'),
    (symmetric_memory, "symmetric_backend", lambda _: None, "rank 0: torch has the backend None"),
    (symmetric_memory, "system", each_in_turn("one", "another"), "the ranks are on several hosts, or in several cont"),
    (symmetric_memory, "symmetric_memory", each_in_turn((None, None), OVERLAP), rf"rank \d: {OVERLAP}\)"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "value", "says"), REFUSED)
def test_rejects_on_every_rank_what_cannot_be_shared_though_one_rank_could(
    owner, name, value, says, of_torch, monkeypatch
):
    monkeypatch.setattr(owner, name, value)
    start = "^transport: got 'symmetric_memory'; allowed: "
    start += r"processes of one host, each with a CUDA device that the others reach \("
    run_ranks(lambda group: rejects(start + says, Communicator, group, BY), 2)
    assert not symmetric_memory._windows


def test_rejects_tensors_of_another_device():
    def rank_main(group: RankGroup) -> None:
        start = Communicator(group, BY).start_all_gather
        sent = torch.empty(4, device="meta")
        rejects(r"allowed: tensors of the rank's device cpu, not of meta", start, sent.new_empty(8), sent)

    run_ranks(rank_main, 2)


def test_one_rank_needs_no_window(of_torch):
    comm = Communicator(ThreadGroup.create(1)[0], BY)
    received = torch.empty(3)
    comm.start_all_gather(received, torch.ones(3)).wait()
    assert received.tolist() == [1.0] * 3
