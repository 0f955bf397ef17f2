"""A transport that is not ours, whose ranks write into each other's memory: what `Wire` asks for suffices."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_cp as cp
from megatron_cp.errors import PeerError
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.groups import Message, Pending, RankGroup, Wire
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.transports import LAID_OVER_GROUP
from megatron_cp.plan import transport as plan_transport
from megatron_cp.planner import capabilities
from megatron_cp.planner.capabilities import Capability
from megatron_cp.testing.parity import Case, run_layer
from megatron_cp.testing.poison import poisoned

NAME, TIMEOUT = "one_sided", 30.0
LENGTHS = (7, 1, 40, 13, 2)

Pieces = Mapping[int, Sequence[Tensor]]  # by the other rank, in order


class Heap:
    """The memory of all ranks, into which all may write, and what they tell each other about it.

    Attributes:
        acquired: for each rank, by address, the memory in which messages may land.
        kept: for each rank the addresses of memory that is never taken back.
        landing: for each rank, by the number of its operation, where those who write there find room.
        written: how many have written, likewise.
        operations: how many each rank has started.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.acquired: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        self.kept: defaultdict[int, set[int]] = defaultdict(set)
        self.landing: dict[tuple[int, int], Pieces] = {}
        self.written: Counter[tuple[int, int]] = Counter()
        self.operations: Counter[int] = Counter()

    def wait_until(self, condition: Any) -> None:
        if not self.changed.wait_for(condition, TIMEOUT):
            raise PeerError(f"waited {TIMEOUT} s for a rank that writes into another's memory")


class OneSided(Wire):
    """Ranks that are threads, of whole groups, put what they send where it belongs on the other rank."""

    heap: Heap

    def __init__(self, group: RankGroup, transport: plan_transport.Transport) -> None:
        self.group, self.buffers = group, group.buffers

    def acquire(self, size: int, device: torch.device, *, kept: bool = False) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        if size:
            self.heap.acquired[self.group.rank][address(memory)] = memory
        if kept:
            self.heap.kept[self.group.rank].add(address(memory))
        return memory

    def release(self, *tensors: Tensor) -> None:
        acquired, kept = self.heap.acquired[self.group.rank], self.heap.kept[self.group.rank]
        for tensor in tensors:
            if address(tensor) in acquired and address(tensor) not in kept:
                acquired.pop(address(tensor)).fill_(0xFF)  # views of it are dead
        super().release(*tensors)

    def start_all_to_all(
        self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int],
        split_counts: SplitCounts | None = None,
    ) -> Pending:  # fmt: skip
        return self.start(received.split(received_splits), sent.split(sent_splits))

    def start_all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        return self.start(received.split([sent.numel()] * self.group.size), [sent] * self.group.size)

    def start(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]) -> Pending:
        return Puts(self, *({rank: [piece] for rank, piece in enumerate(pieces)} for pieces in (incoming, outgoing)))

    def start_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return Puts(self, *(by_peer(messages) for messages in (receives, sends)))


class Puts(Pending):
    """An operation: this rank has said where the others find room, and writes when it waits."""

    def __init__(self, transport: OneSided, incoming: Pieces, outgoing: Pieces) -> None:
        self.heap, self.rank, self.outgoing, self.num_writers = (
            transport.heap, transport.group.rank, outgoing, len(incoming),
        )  # fmt: skip
        for piece in (piece for pieces in incoming.values() for piece in pieces if piece.numel()):
            assert address(piece) in self.heap.acquired[self.rank], "a message lands in memory of somebody else"
        with self.heap.changed:
            self.number = self.heap.operations[self.rank]
            self.heap.operations[self.rank] += 1
            self.heap.landing[self.number, self.rank] = incoming
            self.heap.changed.notify_all()

    def wait(self) -> None:
        heap = self.heap
        for peer, pieces in self.outgoing.items():
            there = (self.number, peer)
            with heap.changed:
                heap.wait_until(lambda there=there: there in heap.landing)
            for source, target in zip(pieces, heap.landing[there][self.rank], strict=True):
                if peer == self.rank and not source.numel():
                    continue  # the caller writes it
                target.detach().copy_(source)
            with heap.changed:
                heap.written[there] += 1
                heap.changed.notify_all()
        with heap.changed:
            heap.wait_until(lambda: heap.written[self.number, self.rank] == self.num_writers)
        del self.outgoing


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def by_peer(messages: Sequence[Message]) -> Pieces:
    return {peer: [m.tensor for m in messages if m.peer == peer] for peer in {m.peer for m in messages}}


@pytest.fixture
def heap(monkeypatch) -> Heap:
    """A fourth transport, made known as CONTRIBUTING says: a name, a class, a line of the table."""
    made = Heap()
    monkeypatch.setattr(plan_transport, "TRANSPORTS", (*plan_transport.TRANSPORTS, NAME))
    monkeypatch.setitem(LAID_OVER_GROUP, NAME, type("OneSidedHere", (OneSided,), {"heap": made}))
    row = Capability("transport", NAME, True, "of this test")
    monkeypatch.setattr(capabilities, "CAPABILITIES", (*capabilities.CAPABILITIES, row))
    return made


def move_nothing(group: RankGroup) -> None:
    """Makes every transfer by the group itself fail from now on."""
    cp.compare_calls(group, False)
    group.start_all_to_all = group.start_all_gather = group.start_messages = None


def assert_all_is_released(heap: Heap) -> None:
    """Checks that all acquired memory but the kept part is released, and that something was started."""
    assert heap.operations
    assert all(heap.operations.values())
    for rank, acquired in heap.acquired.items():
        assert acquired.keys() <= heap.kept[rank]


CASES = {
    f"{case}": case
    for case in (
        Case("attention", 3, LENGTHS, heads=6, groups=3, scheme="a2a", dtype=torch.float32),
        Case("attention", 3, LENGTHS, "contiguous", heads=6, groups=6, scheme="a2a", head_chunks=2),
        Case("attention", 4, LENGTHS, heads=9, groups=9, scheme="a2a", codec="int8"),
        Case("attention", 4, LENGTHS, heads=4, groups=2, scheme="p2p", dtype=torch.bfloat16),
        Case("attention", 3, (1, 1), heads=4, groups=2, scheme="p2p"),
        Case("attention", 3, LENGTHS, "random", heads=4, groups=2, scheme="exact", head_chunks=2),
        Case("attention", 4, LENGTHS, heads=4, groups=4, scheme="all_gather", head_chunks=2),
        Case("gdn", 3, LENGTHS, heads=6, groups=3, scheme="chunkwise"),
        Case("mamba", 3, LENGTHS, heads=6, groups=3, scheme="headwise"),
        Case("kda", 3, LENGTHS, heads=6, groups=3, scheme="redistribute", hidden_size=32),
    )
}


@pytest.mark.parametrize("name", CASES)
def test_layers_are_the_same(name: str, heap: Heap):
    def rank_main(group: RankGroup, transport: str) -> dict[str, Tensor]:
        if transport == NAME:
            move_nothing(group)
        with poisoned():
            return run_layer(group, replace(CASES[name], transport=transport))

    expected = run_ranks(rank_main, CASES[name].cp, "collective")
    assert not heap.operations
    for mine, theirs in zip(run_ranks(rank_main, CASES[name].cp, NAME), expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert_all_is_released(heap)


@pytest.mark.parametrize("operation", ["gather", "gather, same loss", "relayout"])
def test_gather_and_relayout_are_the_same(operation: str, heap: Heap):
    packing = cp.Packing(LENGTHS)
    source, target = cp.Layout.zigzag(packing, 3, align=4), cp.Layout.contiguous(packing, 3)

    def rank_main(group: RankGroup, transport: str) -> list[Tensor]:
        if transport == NAME:
            move_nothing(group)
        draw = torch.Generator().manual_seed(group.rank)
        local = torch.randn(int(source.row_counts[group.rank]), 5, generator=draw, requires_grad=True)
        with poisoned():
            if operation == "relayout":
                out = cp.relayout(local, source, target, group, transport=transport)
            else:
                out = cp.gather(local, source, group, same_loss="same" in operation, transport=transport)
            out.backward(torch.randn(out.shape, generator=draw))
        return [out.detach(), local.grad]

    expected = run_ranks(rank_main, 3, "collective")
    assert not heap.operations
    for mine, theirs in zip(run_ranks(rank_main, 3, NAME), expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    assert set(heap.operations.values()) == {1 if "same" in operation else 2}
    assert_all_is_released(heap)
