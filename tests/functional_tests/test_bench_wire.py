"""`megatron-cp bench wire`: what it reports, that bytes are those of the plan, and what it refuses."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_cp.apps.bench.overlap import Overlapped
from megatron_cp.apps.bench.transports import AllToAll, Counting
from megatron_cp.apps.bench.wire import LAYERS
from megatron_cp.apps.bench.wire_job import HALVES, Job, between_hosts, split_counts_of
from megatron_cp.cli.main import main
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.transport import TRANSPORTS, Transport
from megatron_cp.testing.parity import Case, draw
from tests.commands import command, only_json, reported
from tests.limits import limit

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "tools" / "cluster"
TINY = ["--device", "cpu", "--tokens-per-rank", "40", "--head-dim", "16", "--repeats", "2", "--json"]
OVER_HOSTS = [name for name in TRANSPORTS if name not in ("shared_memory", "symmetric_memory")]
EVERY = [*OVER_HOSTS, "naive loop", "all at once"]
OF_TRANSPORTS = (
    "collective_over_pairwise", "naive_over_pairwise", "at_once_over_pairwise", "flat_over_hierarchical",
    "gather_flat_over_hierarchical",
)  # fmt: skip
OF_CODECS = tuple(f"{codec}_{name}" for codec in ("fp8", "int8") for name in ("over_none_speedup", "byte_ratio"))
OF_OVERLAP = ("hidden_share", "one_chunk_over_chunked", "transfer_ms", "compute_ms", "together_ms")


def check_spread(value, *, positive=True):
    assert value["low"] <= value["median"] <= value["high"]
    assert not positive or value["low"] > 0


def check_transports(report, sizes):
    assert next(iter(report)) == OF_TRANSPORTS[0]  # ratios first
    for name in OF_TRANSPORTS:
        assert list(report[name]) == sizes
        for size in sizes:
            check_spread(report[name][size])
    for size in sizes:
        sent, planned = report["bytes_between_hosts"]["all_to_all"][size], report["bytes_planned_between_hosts"][size]
        rounds = [f"pairwise, {count}" for count in report["pairwise_over_rounds_in_flight"][size]]
        assert list(sent) == [*EVERY, *rounds]
        assert set(sent.values()) == {planned}  # hierarchical and flat alike
        assert planned > 0
        gathered = report["bytes_between_hosts"]["all_gather"][size]
        assert gathered["collective"] is None
        assert 0 < gathered["hierarchical"] <= gathered["pairwise"]
        for name in ("pairwise_is_slower_than_naive", "hierarchical_is_slower_than_flat"):
            assert report[name][size] in (False, True)
        for kind in ("all_to_all", "all_gather"):
            for taken in report["transports_ms"][kind][size].values():
                check_spread(taken)


def check_codecs(report, chunks):
    for name in OF_CODECS[::2]:
        assert list(report[name]) == chunks
        for value in report[name].values():
            check_spread(value)
    sent = report["coded_bytes_between_hosts"]
    assert len(set(sent["none"].values())) == 1  # however they are cut
    for codec in ("fp8", "int8"):
        assert report[f"{codec}_byte_ratio"] == {n: sent["none"][n] / sent[codec][n] for n in chunks}
        assert report[f"{codec}_share_of_byte_ratio"][chunks[0]]["median"] > 0


def check_overlap(report, layers, chunks):
    for name in OF_OVERLAP:
        assert list(report[name]) == layers
        for layer in layers:
            assert list(report[name][layer]) == chunks
            for ways in report[name][layer].values():
                assert list(ways) == ["forward", "backward", "both"]
                for value in ways.values():
                    check_spread(value, positive=name != "hidden_share")
    for layer in layers:
        assert report["one_chunk_over_chunked"][layer]["1"]["both"]["median"] == 1


def test_everything_is_measured_between_threads():
    text, report = reported(["bench", "wire", "--ranks", "threads", "--cp", "3", *TINY])
    check_transports(report, ["3"])
    check_codecs(report, ["1", "4"])
    check_overlap(report, ["attention", "gdn"], ["1", "2", "4"])
    assert (report["cp"], report["hosts"], report["dtype"], report["transport"]) == (
        3, [0, 0, 1], "bfloat16", "collective",
    )  # fmt: skip
    assert "| 3 | all-to-all | pairwise, 3 |" in text
    assert "| gdn | 4 | both |" in text


def test_local_runs_have_several_sizes(capsys):
    assert main(["bench", "wire", "--ranks", "threads", "--only", "transports", "--hosts", "3", *TINY]) == 0
    report = only_json(capsys.readouterr().out)
    check_transports(report, ["3", "4", "5", "8"])
    assert (report["cp"], report["hosts"]) == (4, [0, 0, 1, 2])
    assert set(report["pairwise_over_rounds_in_flight"]["8"]) == {"1", "2", "7"}
    assert not set(report) & {*OF_CODECS, *OF_OVERLAP}


def test_parts_by_another_transport_with_other_options(capsys):
    options = ["--only", "overlap,codecs", "--transport", "hierarchical", "--codec", "fp8_e5m2", "--layer", "attention"]
    options += ["--heads", "8", "--kv-heads", "4", "--head-chunks", "2", "--cp", "2", "--dtype", "float32"]
    assert main(["bench", "wire", "--ranks", "threads", *options, *TINY]) == 0
    report = only_json(capsys.readouterr().out)
    check_overlap(report, ["attention"], ["1", "2"])
    assert list(report["codecs_ms"]) == ["none", "fp8_e5m2"]
    # 4 + 2 + 2 heads of 16 + 4 bytes
    assert report["fp8_e5m2_byte_ratio"] == dict.fromkeys(report["codecs_ms"]["none"], 8 * 64 / (8 * 20))
    assert report["transport"] == "hierarchical"
    assert not set(report) & set(OF_TRANSPORTS)


def test_heads_of_128_go_in_half_the_bytes(capsys):
    options = [
        "--only", "codecs", "--cp", "2", "--tokens-per-rank", "16", "--repeats", "1", "--device", "cpu", "--json",
    ]  # fmt: skip
    assert main(["bench", "wire", "--ranks", "threads", *options]) == 0
    report = only_json(capsys.readouterr().out)
    assert report["fp8_byte_ratio"]["1"] == pytest.approx(256 / 132, rel=0.001)
    assert report["int8_byte_ratio"] == report["fp8_byte_ratio"]


def test_shared_memory_is_compared_on_one_host():
    one = ["--ranks", "threads", "--cp", "2", "--only", "transports", "--hosts", "1"]
    _, report = reported(["bench", "wire", *one, *TINY])
    assert "shared_memory" in report["transports_ms"]["all_to_all"]["2"]


@pytest.mark.thorough
def test_torchrun_brings_its_ranks():
    run = command("bench", "wire", "--only", "transports,codecs", *TINY, ranks=2)
    report = only_json(run.stdout)
    check_transports(report, ["2"])
    check_codecs(report, ["1", "4"])
    assert report["hosts"] == [0, 1]  # made up, where there is but one
    assert run.stdout.count("collective_over_pairwise") == 1  # one rank prints


@pytest.mark.thorough
def test_hosts_are_those_of_the_cluster():
    check = subprocess.run([sys.executable, CLUSTER, "check"], capture_output=True, text=True, timeout=limit(30))
    if check.returncode == 2:
        pytest.skip(check.stderr.strip())
    run = subprocess.run(
        [
            sys.executable, CLUSTER, "run", "--ranks-per-host", "2,1", "--between", "100mbit", "--time-limit", "100",
            "--", sys.executable, "-m", "megatron_cp.cli.main", "bench", "wire", "--only", "transports", *TINY,
        ],
        capture_output=True, text=True, timeout=limit(120), cwd=ROOT, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    report = only_json(run.stdout)
    check_transports(report, ["3"])
    assert report["hosts"] == [0, 0, 1]


def test_traffic_between_hosts_is_what_the_plan_sends_there():
    case = Case("attention", 4, (70, 1, 130, 64), heads=12, groups=6, dtype=torch.bfloat16)
    plan = case.plan()
    everyone = between_hosts(split_counts_of(plan, case), range(4))
    exchange = plan.steps[0].exchange
    assert everyone == sum(exchange.bytes_sent(2, to_heads=True))
    assert 0 < between_hosts(split_counts_of(plan, case), [0, 0, 1, 1]) < everyone
    assert between_hosts(split_counts_of(plan, case), [0] * 4) == 0


def sent_on(group, counts, hosts):
    moved, found = AllToAll(SplitCounts(counts), group.rank, "cpu"), {}
    transports = {name: Transport(name, hosts if name == "hierarchical" else ()) for name in OVER_HOSTS}
    calls = {name: partial(moved.by, transport) for name, transport in transports.items()}
    calls |= {"loop": moved.by_loop, "at once": moved.at_once, "rounds": lambda ranks: moved.by_rounds(1, ranks)}
    for name, call in calls.items():
        counting = Counting(group, hosts)
        moved.received.zero_()
        call(counting)
        found[name] = counting.sent, moved.received.clone()
    return moved.sent, found


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 0, 1, 2), (0, 0, 0)], ids=str)
def test_every_transport_brings_every_piece_and_is_counted(hosts):
    size = len(hosts)
    counts = np.random.default_rng(0).integers(0, 9, (size, size))
    ranks = run_ranks(sent_on, size, counts, hosts)
    planned = between_hosts(SplitCounts(counts), hosts)
    for name in ranks[0][1]:
        assert sum(found[name][0] for _, found in ranks) == planned
        for rank, (_, found) in enumerate(ranks):
            pieces = [sent.split(counts[source].tolist())[rank] for source, (sent, _) in enumerate(ranks)]
            assert torch.equal(found[name][1], torch.cat(pieces))


def test_a_road_that_brings_something_else_is_found(capsys, monkeypatch):
    monkeypatch.setattr(AllToAll, "at_once", lambda self, group: None)
    assert main(["bench", "wire", "--ranks", "threads", "--cp", "2", "--only", "transports", *TINY]) == 1
    assert "all_to_all by all at once gave rank" in capsys.readouterr().err


def halves_on(group, layer, chunks):
    case = Case(layer, 2, (40, 23), heads=4, groups=4, scheme="a2a" if layer == "attention" else "headwise")
    job = Job(("overlap",), 1, (0, 1), Transport(), case, case, ("none",), (case,), (chunks,))
    counting, results, counts = Counting(group, job.hosts), {}, {}
    overlapped = Overlapped(case, draw(case), job.plan(case, head_chunks=chunks), counting)
    for half in HALVES:

        def remember(way, call, half=half):
            counting.sent = 0
            results[half, way] = call()
            counts[half, way] = counting.sent
            return results[half, way]

        getattr(overlapped, half)(remember)
    return results, counts


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_halves_do_what_the_whole_does(layer, chunks):
    """Compute sends nothing; transfer sends all that the layer sends, and returns the results."""
    for results, counts in run_ranks(halves_on, 2, layer, chunks):
        assert len(results["compute", "forward"]) == chunks
        for way in ("forward", "backward"):
            assert counts["compute", way] == 0
            assert counts["transfer", way] == counts["together", way] > 0
        (brought,) = results["transfer", "forward"]
        torch.testing.assert_close(brought.flatten(), results["together", "forward"].flatten())
