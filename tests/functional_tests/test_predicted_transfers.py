"""The transfers that a prediction walks over are those of a real run: the bytes of each to and from each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.planner.predict.hardware import Rates
from megatron_cp.planner.predict.machine_files import machine
from megatron_cp.planner.predict.walk import workload_of
from megatron_cp.testing.parity import Case, run_layer
from tests.counting_group import CountingGroup
from tests.random_tiles import assign_at_random

Log = list[tuple[dict[int, int], dict[int, int]]]
LENGTHS = (37, 1, 130, 64, 5, 211)
HEADS = {"heads": 12, "groups": 4, "dtype": torch.float32}
SCHEMES = [
    (3, "a2a", None), (4, "p2p", None), (3, "all_gather", None), (5, "exact", None), (4, "a2a+p2p", 2),
    (4, "a2a+exact", 2), (4, "a2a+all_gather", 2),
]  # fmt: skip
LAYOUTS = ("zigzag", "contiguous")
CASES = [
    *(
        Case("attention", size, LENGTHS, layout, scheme=scheme, ulysses_degree=degree, **HEADS)
        for size, scheme, degree in SCHEMES
        for layout in LAYOUTS
    ),
    Case("attention", 3, LENGTHS, "balanced", scheme="a2a", head_chunks=2, heads=12, groups=6, dtype=torch.float32),
    *(
        Case("attention", 2, LENGTHS, scheme=scheme, dtype=torch.bfloat16, codec="int8", heads=12, groups=4)
        for scheme in ("a2a", "p2p", "all_gather", "tiled")
    ),
    # Chunks that are not equal: 9 groups over 3 ranks in 2 chunks.
    Case("attention", 3, LENGTHS, scheme="a2a", head_chunks=2, heads=18, groups=9, dtype=torch.float32),
    Case("gdn", 3, LENGTHS, scheme="headwise", head_chunks=2, heads=18, groups=9, dtype=torch.float32),
    Case("attention", 5, LENGTHS, scheme="a2a", heads=6, groups=3, dtype=torch.float32),  # ranks without heads
    Case("attention", 3, LENGTHS, kv_lengths=(5, 60, 7, 1, 90, 33), mask="full", scheme="a2a", **HEADS),
    Case("attention", 3, LENGTHS, kv_lengths=(5, 60, 7, 1, 90, 33), mask="full", scheme="exact", **HEADS),
    *(
        Case("attention", 5, LENGTHS, scheme=scheme, transport="hierarchical", hosts=(0, 0, 0, 1, 1), **HEADS)
        for scheme in ("a2a", "exact", "all_gather", "p2p")
    ),
    Case("attention", 4, LENGTHS, scheme="a2a", transport="hierarchical", hosts=(0, 1, 0, 1), **HEADS),
    Case("attention", 4, LENGTHS, "random", mask="window:40,0", scheme="exact", dtype=torch.bfloat16),
    *(
        Case(layer, 3, LENGTHS, layout, scheme=mode, dtype=torch.float32)
        for layer in ("gdn", "mamba", "conv1d")
        for mode in ("headwise", "chunkwise")
        for layout in LAYOUTS
    ),
]


def transfers_of(program: Any, rank: int) -> Any:
    """Yields one rank's transfers in order: the name, the bytes to each other rank, and the bytes from each."""
    for start in program.transfers:
        edges = start.edges
        sent, received = edges.senders == rank, edges.receivers == rank
        yield (
            start.name, _by_peer(edges.receivers[sent], edges.nbytes[sent]),
            _by_peer(edges.senders[received], edges.nbytes[received]),
        )  # fmt: skip


def _by_peer(peers: Any, nbytes: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for peer, count in zip(peers.tolist(), nbytes.tolist(), strict=True):
        found[peer] = found.get(peer, 0) + count
    return found


class Logging(CountingGroup):
    """Notes the bytes to and from each other rank of every operation that is started."""

    def __init__(self, inner: RankGroup) -> None:
        super().__init__(inner)
        self.log: Log = []

    def note(self, sent: dict[int, int], received: dict[int, int]) -> None:
        ways = ({peer: n for peer, n in sorted(way.items()) if n and peer != self.rank} for way in (sent, received))
        self.log.append(tuple(ways))

    def start_all_to_all(
        self, received: Any, sent: Any, received_splits: list[int], sent_splits: list[int], *_: Any
    ) -> Any:
        pairs = ((sent, sent_splits), (received, received_splits))
        self.note(*({peer: n * x.element_size() for peer, n in enumerate(splits)} for x, splits in pairs))
        return super().start_all_to_all(received, sent, received_splits, sent_splits)

    def start_all_gather(self, received: Any, sent: Any) -> Any:
        self.note(*[dict.fromkeys(range(self.size), sent.nbytes)] * 2)
        return super().start_all_gather(received, sent)

    def start_messages(self, sends: Any, receives: Any) -> Any:
        ways: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for way, given in zip(ways, (sends, receives), strict=True):
            for message in given:
                way[message.peer] = way.get(message.peer, 0) + message.tensor.nbytes
        self.note(*ways)
        return super().start_messages(sends, receives)

    def host_all_gather(self, received: Any, sent: Any) -> None:  # ranks compare plans, outside of the step
        self.inner.host_all_gather(received, sent)


def logged(group: RankGroup, case: Case) -> Log:
    """Returns the operations that this rank starts, forward and backward: the bytes to and from each other rank."""
    logging = Logging(group)
    run_layer(logging, case)
    return logging.log


def predicted(case: Case, rank: int) -> Log:
    plan, hardware = case.plan(), machine().hardware
    log: Log = []
    for forward in (True, False):
        workload = workload_of(plan, Rates(hardware, case.dtype.itemsize, forward))
        log += [tuple(dict(sorted(way.items())) for way in ways) for _, *ways in transfers_of(workload, rank)]
    return log


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.few(
    of=lambda case: (case.layer, case.scheme, case.layout, case.head_chunks, case.codec, case.dtype, case.transport)
)
def test_walks_over_the_transfers_of_a_real_run(case):
    for rank, log in enumerate(run_ranks(logged, case.cp, case)):
        assert log == predicted(case, rank), f"rank {rank}"


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("size", "scheme"), [(3, "tiled"), (4, "a2a+tiled")])
def test_walks_over_the_transfers_of_assigned_tiles(size, scheme, chunks, monkeypatch):
    assign_at_random(monkeypatch)
    case = Case("attention", size, LENGTHS, scheme=scheme, head_chunks=chunks, **HEADS)
    for rank, log in enumerate(run_ranks(logged, case.cp, case)):
        assert log == predicted(case, rank), f"rank {rank}"
