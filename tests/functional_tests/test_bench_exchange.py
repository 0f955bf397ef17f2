"""`megatron-cp bench exchange`: what it reports, that its counts are what the project claims, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from megatron_cp.apps.bench import contenders, exchange, local_part
from megatron_cp.apps.bench.contenders import LOOP, ours
from megatron_cp.apps.bench.local_part import DIRECTIONS, local_work
from megatron_cp.apps.bench.peer_limits import MEGATRON, aligned_lengths
from megatron_cp.apps.bench.section_batch import ALL_SECTIONS, GATES, LAYOUTS, SENT, Batch
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.testing.parity import Case
from tests.commands import command, only_json, reported

SHAPE = ["--device", "cpu", "--heads", "4", "--key-heads", "2", "--head-dim", "16", "--repeats", "1"]
SMALL = [*SHAPE, "--cp", "2", "--tokens-per-rank", "40", "--documents", "3", "--cells", "2x64/3,2x96/5"]
RATIOS = ("pack_over_copy", "unpack_over_copy", "megatron_pack_over_copy", "megatron_unpack_over_copy")
EXCHANGED = ("loop_over_ours", "megatron_over_ours")
PASSES = {"zigzag": 2, "contiguous": 1}
EPSILON = 0.2  # rows are padded to 16 bytes, of which heads of 16 features have few
CASE = Case("gdn", 2, (12, 28, 40), heads=4, scheme="headwise", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def printed():
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    return reported(["bench", "exchange", *SMALL])


@pytest.fixture(scope="module")
def report(printed):
    return printed[1]


def is_spread(value):
    return 0 < value["low"] <= value["median"] <= value["high"]


@pytest.mark.thorough
def test_ratios_come_first_and_every_cell_is_printed(printed, report):
    assert list(report)[:4] == list(RATIOS)
    for words in ("2 ranks, 64 tokens in 3 documents:", "2 ranks, 96 tokens in 5 documents:", "Geometric means"):
        assert words in printed[0]
    assert [(cell["ranks"], cell["tokens"], cell["documents"]) for cell in report["cells"]] == [(2, 64, 3), (2, 96, 5)]
    for cell in report["cells"]:
        assert all(length % 4 == 0 for length in cell["lengths"])
        assert sum(cell["lengths"]) == cell["tokens"]
    for name in (*EXCHANGED, "local", "local_targets", "exchange_targets", "lengths", "codec", "repeats", "not_run"):
        assert name in report
    assert report["not_run"] == {}


def test_the_local_part_is_measured_over_a_copy(report):
    for layout in LAYOUTS:
        for gate in GATES:
            name = f"{layout}, {gate}"
            assert list(report["pack_over_copy"][name]) == list(DIRECTIONS)
            assert list(report["unpack_over_copy"][name]) == list(DIRECTIONS)
    for what in ("pack", "unpack"):
        ratios = [*report[f"{what}_over_copy"].values(), report[f"megatron_{what}_over_copy"]]
        assert all(is_spread(value) for of_ways in ratios for value in of_ways.values())
        target = report["local_targets"][what]
        aimed = [ratio for name, ratio in report[f"{what}_over_copy"].items() if name.endswith(ALL_SECTIONS)]
        ways = DIRECTIONS if what == "pack" else DIRECTIONS[:2]
        assert target["worst"] == max(ratio[way]["median"] for ratio in aimed for way in ways)
        assert target["met"] == (target["worst"] <= target["at_most"])


def test_exchanges_are_compared_cell_by_cell_and_over_all(report):
    aims = {"loop": LOOP, "megatron": MEGATRON}
    for name, peer in aims.items():
        ratios = report[f"{name}_over_ours"]
        for key in ("inbound, zigzag, with the gate", "inbound, contiguous, without the gate", "outbound, zigzag"):
            of_cells = [cell[f"{name}_over_ours"][key]["both"] for cell in report["cells"]]
            assert all(is_spread(value) for value in of_cells)
            first, second = (value["median"] for value in of_cells)
            assert ratios[key]["both"] == pytest.approx((first * second) ** 0.5)
        target = report["exchange_targets"][name]
        assert target["found"] == ratios["inbound, zigzag, with the gate"]
        assert target["met"] == (target["found"]["both"] >= target["at_least"])
        assert peer in {row["contender"] for row in report["cells"][0]["rows"]}


def test_counts_are_what_is_claimed(report):
    for cell in report["cells"]:
        rows = {(row["stage"], row["contender"], row["gradients"]): row for row in cell["rows"]}
        passes = {key: row["copy_passes"] for key, row in rows.items()}
        for layout, claimed in PASSES.items():
            for gate in GATES:
                name = f"{layout}, {gate}"
                assert claimed - 0.01 < passes["inbound forward", name, ""] <= claimed + EPSILON
                assert claimed - 0.01 < passes["inbound backward", name, "in place"] <= claimed + EPSILON
                assert passes["inbound backward", name, "separate"] <= 2 + EPSILON
            assert passes["outbound forward", layout, ""] <= claimed + EPSILON
            assert passes["outbound backward", layout, ""] <= claimed + EPSILON
        assert passes["inbound forward", MEGATRON, ""] >= 3
        assert passes["inbound backward", MEGATRON, "in place"] >= 5
        for (stage, name, _), row in rows.items():
            sections = 6 if stage.startswith("inbound") else 1
            assert row["collectives"] == (sections * cell["documents"] if name == LOOP else 1)
            assert name in (MEGATRON, LOOP) or row["host_syncs"] == 0
    assert sum(report["megatron_host_syncs_in_checks"].values()) == 7


@pytest.mark.parametrize(
    "options",
    [[], ["--transport", "pairwise", "--head-chunks", "2", "--codec", "fp8"]],
    ids=lambda options: " ".join(options) or "as it is",
)
def test_runs_ours_alone_by_every_road(options, monkeypatch):
    monkeypatch.setattr(exchange, "megatron_missing", lambda: {MEGATRON: "it is not installed"})
    shape = [*SHAPE, "--heads", "8", "--key-heads", "8"]
    text, report = reported(["bench", "exchange", *shape, *options, "--tokens-per-rank", "64", "--cells", "2x64/3"])
    assert list(report["not_run"]) == [MEGATRON]
    assert "megatron-core was not run" in text
    assert report["megatron_pack_over_copy"] is None
    assert report["megatron_over_ours"] == report["exchange_targets"] == {}
    assert report["cells"][0]["megatron_over_ours"] == {}
    row = report["cells"][0]["rows"][0]
    assert row["contender"] == "zigzag, with the gate"
    assert row["milliseconds"]["median"] > 0
    assert report["cp"] == 4  # of the local part


@pytest.mark.thorough
def test_torchrun_brings_its_ranks():
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    options = [*SHAPE, "--tokens-per-rank", "40", "--documents", "3", "--cells", "2x64/3", "--json"]
    run = command("bench", "exchange", *options, ranks=2)
    report = only_json(run.stdout)
    assert is_spread(report["cells"][0]["megatron_over_ours"]["inbound, zigzag, with the gate"]["both"])
    assert report["cp"] == 2
    assert run.stdout.count('"pack_over_copy"') == 1  # one rank prints


def check_all(group, case):
    batch = Batch(case)
    for layout in LAYOUTS:
        for contender in ours(batch, layout, Communicator(group, batch.plans[layout].transport)):
            contender.check()


def check_locally(case):
    for layout in LAYOUTS:
        for gate, tensors in GATES.items():
            local_work(Batch(case), layout, gate, tensors)


@pytest.mark.parametrize("changes", [{}, {"head_chunks": 2, "groups": 4}, {"codec": "int8"}], ids=str)
def test_everything_delivers_what_was_sent(changes):
    case = replace(CASE, **changes)
    check_locally(case)
    run_ranks(check_all, 2, case)


def shifted(function):
    def call(*args):
        return [tensor.roll(1, 0) for tensor in function(*args)]

    return call


@pytest.mark.parametrize("name", ["unpack_heads", "unpack_tokens"])
def test_sees_a_local_part_that_delivers_something_else(name, monkeypatch):
    monkeypatch.setattr(local_part, name, shifted(getattr(local_part, name)))
    with pytest.raises(RuntimeError, match=r"zigzag, with the gate: to .* returns other data than was sent"):
        check_locally(CASE)


def test_sees_what_delivers_something_else(monkeypatch):
    monkeypatch.setattr(contenders.ToHeadsInParts, "finish", shifted(contenders.ToHeadsInParts.finish))
    with pytest.raises(RankError, match="with the gate, inbound returns other data than was sent"):
        run_ranks(check_all, 2, CASE)
    monkeypatch.undo()
    monkeypatch.setattr(local_part, "in_place", shifted(local_part.in_place))
    with pytest.raises(RuntimeError, match="gradients in place make another message"):
        local_work(Batch(CASE), "zigzag", "without the gate", SENT)


def test_sees_a_peer_that_delivers_something_else(monkeypatch):
    peers = pytest.importorskip("megatron_cp.apps.bench.peers.head_exchange")
    local_part.megatrons_local_work(Batch(CASE))
    monkeypatch.setattr(peers.StockExchange, "unpack", lambda self, arrived: arrived.clone())
    with pytest.raises(RuntimeError, match="megatron-core: to heads returns other data than was sent"):
        local_part.megatrons_local_work(Batch(CASE))


@pytest.mark.parametrize(("tokens", "documents", "multiple"), [(64, 3, 4), (1024, 16, 8), (8192, 64, 8), (16, 4, 4)])
def test_documents_are_what_megatron_can_deal(tokens, documents, multiple):
    lengths = aligned_lengths(tokens, documents, multiple)
    assert len(lengths) == documents
    assert sum(lengths) == tokens
    assert min(lengths) >= multiple
    assert all(length % multiple == 0 for length in lengths)
    assert tokens == documents * multiple or len(set(lengths)) > 1
