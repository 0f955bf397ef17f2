"""`python -m benchmarks`: its numbers count what they say, peers compute the same, and what it refuses."""

import itertools
import json
import re
from dataclasses import fields, replace

import pytest
import torch

import megatron_cp as cp
from benchmarks import exchange, layer, timing, wire
from benchmarks.__main__ import main, parser, run
from benchmarks.ranks import MEGATRON
from benchmarks.timing import DIRECTIONS, Watch, WatchedGroup, interleaved_order
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.plan import schemes
from megatron_cp.planner.predict import machine
from megatron_cp.testing.parity import Case
from tests.commands import ROOT, run_python

QUICK = ["--device", "cpu", "--lengths", "70,1,130,64,2", "--repeats", "1"]
THREADS = ["--ranks", "threads", *QUICK]
HEADS = {
    "gdn": ["--heads", "4", "--key-heads", "2", "--head-dim", "16"],
    "kda": ["--heads", "2", "--head-dim", "16"],
    "mamba": ["--heads", "4", "--groups", "2", "--head-dim", "16", "--state", "8"],
    "conv1d": ["--heads", "3", "--head-dim", "16"],
}
SHAPE = ["--device", "cpu", "--heads", "4", "--key-heads", "2", "--head-dim", "16", "--repeats", "1", "--cp", "2"]
PASSES = {"zigzag": 2, "contiguous": 1}
EPSILON = 0.2  # rows are padded to 16 bytes, of which heads of 16 features have few
CASE = Case("gdn", 2, (12, 28, 40), heads=4, scheme="headwise", dtype=torch.bfloat16)


def reported(*words):
    """The text and the numbers that a command prints."""
    args = parser().parse_args(words)
    args.words = list(words)
    text, data = run(args)
    return text, json.loads(json.dumps(data))


def under_torchrun(*words):
    """The numbers that two processes of torchrun print."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks")
    return json.loads(run_python(*launcher, *words, "--json").stdout)  # one rank prints


def is_spread(value):
    return 0 < value["low"] <= value["median"] <= value["high"]


def check_ways(report, ways):
    assert list(report["local_over_ideal"]) == ways
    for way, direction in itertools.product(ways, DIRECTIONS):
        assert is_spread(report["local_over_ideal"][way][direction])
        assert 0 < report["wait_share"][way][direction]["median"] < 1
        assert report["busy_ms"][way][direction]["median"] > 0
        # A plan counts the layer's own messages; hidden states that are redistributed come on top.
        sent, planned = (report[f"bytes_{what}_per_rank"][way][direction] for what in ("sent", "planned"))
        assert sent == planned or (way == "redistribute" and sum(sent) > sum(planned))
    assert {"repeats", "versions", "cores", "device", "not_run"} <= set(report)


def test_every_scheme_that_runs_is_measured_and_the_others_say_why():
    text, report = reported("attention", "--cp", "3", *HEADS["kda"], "--gpu", "cpu", *THREADS)
    check_ways(report, [name for name, scheme in schemes.SCHEMES.items() if not scheme.is_product])
    assert list(report["not_run"]) == [name for name, scheme in schemes.SCHEMES.items() if scheme.is_product]
    assert "use a2a, p2p or another number of ranks" in report["not_run"]["a2a+p2p"]
    assert "| exact | backward |" in text
    assert min(way["forward"] for way in report["predicted_ms"].values()) > 0


@pytest.mark.thorough
def test_processes_are_the_default_and_four_ranks_run_everything():
    check_ways(reported("attention", "--cp", "4", *QUICK)[1], list(schemes.SCHEMES))


@pytest.mark.parametrize("kind", HEADS)
def test_every_mode_of_a_linear_layer_is_measured(kind):
    check_ways(
        reported("linear", "--layer", kind, *HEADS[kind], *THREADS)[1], ["headwise", "chunkwise", "redistribute"]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["linear", "exchange", "wire"])  # attention is as linear, and layer as exchange
def test_torchrun_brings_its_ranks(name):
    if name == "exchange":
        pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    small = ["--device", "cpu", "--tokens-per-rank", "40", "--documents", "3", "--repeats", "1"]
    assert under_torchrun(name, *small)["repeats"] == 1


@pytest.mark.parametrize("hosts", [1, 2])
def test_transports_and_codecs_bring_the_same_in_as_many_bytes_as_are_planned(hosts):
    _, report = reported("wire", "--cp", "4", "--hosts", str(hosts), "--heads", "16", "--head-dim", "128", *THREADS)
    (cell,) = report["cells"]
    rows = cell["rows"]
    assert cell["hosts"] == [0, 0, 1, 1] if hosts == 2 else [0] * 4
    assert ("shared_memory" in rows) == (hosts == 1)
    assert all(is_spread(row["collective_over_this"]) for row in rows.values())
    case = Case("attention", 4, (70, 1, 130, 64, 2), "balanced", 16, 16, 128, dtype=torch.bfloat16)
    planned = wire.inbound(replace(case, groups=4)).bytes_sent(2, to_heads=True)
    counted = {name: row["bytes_between_hosts"] for name, row in rows.items()}
    if hosts == 1:
        assert set(counted.values()) <= {0, None}
        return
    assert 0 < counted["collective"] < sum(planned)
    assert counted["collective"] == counted["pairwise"] == counted["hierarchical"]
    assert counted["collective"] / counted["collective, fp8"] == pytest.approx(256 / 132, rel=0.02)  # rows of 16 bytes


def test_a_transport_that_brings_something_else_is_found(monkeypatch):
    monkeypatch.setattr(wire, "_to_heads", lambda exchange, transport, *_: [torch.tensor([len(transport.name)])])
    with pytest.raises(RankError, match=r"pairwise gave rank \d other data than collective"):
        reported("wire", "--cp", "2", *THREADS)


@pytest.fixture(scope="module")
def exchanges():
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    return reported("exchange", *SHAPE, "--tokens-per-rank", "40", "--documents", "3")[1]


def test_exchanges_are_compared_with_both_peers(exchanges):
    (cell,) = exchanges["cells"]
    for peer in exchange.PEERS.values():
        ratios = cell[f"{peer}_over_ours"]
        for key in ("inbound, zigzag, with the gate", "inbound, contiguous, without the gate", "outbound, zigzag"):
            assert is_spread(ratios[key]["both"])
            assert exchanges[f"{peer}_over_ours"][key]["both"] == pytest.approx(ratios[key]["both"]["median"])


def test_counts_of_an_exchange_are_what_is_claimed(exchanges):
    (cell,) = exchanges["cells"]
    rows = cell["rows"]
    for layout, claimed in PASSES.items():
        for gate in exchange.GATES:  # backward gathers separate gradients, and cuts or gathers rows
            assert claimed < rows[f"inbound, {layout}, {gate}"]["passes"] <= claimed + 2 + EPSILON
        assert rows[f"outbound, {layout}"]["passes"] <= 2 * claimed + EPSILON
    assert rows[f"inbound, {MEGATRON}"]["passes"] >= 8
    for key, row in rows.items():
        sections = 6 if key.startswith("inbound") else 1
        assert row["collectives"] == 2 * (sections * cell["documents"] if exchange.LOOP in key else 1)
        assert MEGATRON in key or exchange.LOOP in key or row["host_syncs"] == 0


def check_all(group, case):
    batch = exchange.Batch(case)
    for layout in exchange.LAYOUTS:
        for contender in exchange.ours(batch, layout, Communicator(group, batch.plans[layout].transport)):
            contender.check()


@pytest.mark.parametrize("changes", [{}, {"head_chunks": 2, "groups": 4}, {"codec": "int8"}], ids=str)
def test_exchanges_deliver_what_was_sent(changes):
    run_ranks(check_all, 2, replace(CASE, **changes))


def test_sees_an_exchange_that_delivers_something_else(monkeypatch):
    finish = exchange.ToHeadsInParts.finish
    monkeypatch.setattr(
        exchange.ToHeadsInParts, "finish", lambda *args: [tensor.roll(1, 0) for tensor in finish(*args)]
    )
    with pytest.raises(RankError, match="with the gate returns other data than was sent"):
        run_ranks(check_all, 2, CASE)


TINY = ["--device", "cpu", "--model", "tiny", "--tokens-per-rank", "32", "--documents", "3", "--repeats", "2"]


def test_layers_are_compared_and_a_trace_of_ours_is_written(tmp_path):
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    trace = tmp_path / "trace.json"
    text, report = reported("layer", *TINY, "--profile", str(trace))
    assert f"Trace of our layer on rank 0: {trace}." in text
    assert "ours stand in for" in report["stand_ins"]
    assert 0 < max(report["errors"].values()) < 0.05
    for name in ("megatron_over_ours", "megatron_over_ours_local"):
        assert all(is_spread(report[name][way]) for way in (*DIRECTIONS, "both"))
    events = json.loads(trace.read_text())["traceEvents"]
    ranges = [event["name"] for event in events if event.get("ph") == "X" and event["name"].startswith("cp ")]
    assert [name for name in ranges if "to_heads" not in name and "to_tokens" not in name] == [
        f"cp headwise {step}{way} layer 1"
        for way, steps in (("", ("conv", "gates", "rule")), (" backward", ("rule", "gates", "conv")))
        for step in steps
    ]


def compare(group, factor):
    case, rows = Case("gdn", 2, (8,), dtype=torch.float32), torch.arange(1.0, 9.0)
    # Of a parameter, ranks have shares that only together are the same.
    shares = rows * (group.rank + 1), rows * (2 - group.rank)
    found = {layer.OURS: [rows, rows, shares[0]], MEGATRON: [rows, rows, shares[1] * factor]}
    return layer.compared(found, case, group)


def test_sides_that_compute_the_same_are_told_from_others():
    for errors in run_ranks(compare, 2, 1.0, kind="processes"):
        assert errors == {"out": 0.0, "gradients": 0.0}
    with pytest.raises(RankError, match="they do not compute the same"):
        run_ranks(compare, 2, 1.01, kind="processes")


@pytest.mark.thorough
def test_rates_of_this_machine_are_a_file_that_predictions_read(tmp_path):
    path = tmp_path / "mine.toml"
    reported("planner", "--cp", "2", "--repeats", "1", "--ranks", "threads", "--calibrate", str(path))
    mine = machine(path)
    assert mine.ranks_per_host == 2
    assert mine.hardware.sources["memory"].startswith("not measured")
    names = {field.name for field in fields(mine.hardware)} - {"name", "about", "sources"}
    measured = {name for name, source in mine.hardware.sources.items() if source.startswith("measured by")}
    given = {"memory", "units", "rule_floor", "matrix_rows", "wider", "between"}
    assert measured == (names | {"within"}) - given
    packing = cp.Packing([100, 1])
    plan = cp.plan_attention(packing, cp.Layout.zigzag(packing, 2), heads=4, head_dim=16, hardware=str(path))
    assert plan.prices[0].hardware.startswith("measured: 2 ranks")


class Clock:
    """A clock on which time passes where it is told to; it stands for the module `time`."""

    now = 0

    def thread_time(self):
        return self.now

    perf_counter = thread_time


def test_time_in_transfers_is_told_from_the_rest(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    watch, (group,) = Watch(), ThreadGroup.create(1)

    def pass_time(seconds):
        clock.now += seconds

    class Slow(WatchedGroup):
        def wait(self):
            pass_time(4)

    watched = WatchedGroup(group, watch)
    watched._group = Slow(group, Watch())
    watched._group.start_all_gather = lambda *_: (pass_time(2), watched._group)[1]

    def call():
        pass_time(1)
        pending = watched.start_all_gather(torch.zeros(1), torch.zeros(1))
        pass_time(3)
        pending.wait()

    _, spent = watch.timed(call)
    assert (spent.wire, spent.total, spent.busy) == (6, 10, 4)


def test_nobody_always_comes_first_or_after_the_same_one():
    names = ["a", "b", "c", "d"]
    order = list(interleaved_order(names, 12))
    rounds = [order[start : start + 4] for start in range(0, 48, 4)]
    assert all(sorted(one) == names for one in rounds)
    assert {one[0] for one in rounds} == set(names)
    assert {before for before, after in itertools.pairwise(order) if after == "a"} >= {"b", "c", "d"}
    assert order == list(interleaved_order(names, 12))  # on every rank


REFUSED = {
    "nonsense": [([], "benchmark: got 'nonsense'; allowed: exchange or layer or attention or linear")],
    "attention": [
        (["--layer", "gdn"], "--layer: got 'gdn'; allowed: attention"),
        (["--kernel", "varlen"], "runs on CUDA"),
        (["--parents=-1,0,0", "--lengths", "7,3,2"], "--parents: got [-1, 0, 0]; allowed: only with check and plan"),
        (["--profile", "a.json"], "--profile: got 'a.json'; allowed: only with layer"),
    ],
    "exchange": [
        (["--cp", "3"], "--cp: got 3; allowed: divisors of the 16 key heads above 1"),
        (["--tokens-per-rank", "64", "--documents", "40"], "allowed: multiples of 2 * cp = 4, one a document"),
        (["--lengths", "7,1", "--cp", "2"], "--lengths: got [7, 1]; allowed: multiples of 2 * cp = 4"),
        (["--scheme", "chunkwise"], "--scheme: got 'chunkwise'; allowed: headwise"),
        (["--ranks", "threads"], "--ranks: got 'threads'; allowed: processes"),
    ],
    "layer": [
        (["--layout", "balanced"], "--layout: got 'balanced'; allowed: zigzag"),
        (["--kernel", "fla"], "--kernel: got 'fla'; allowed: auto"),
        (["--profile", "nowhere/trace.json"], "allowed: a file ending in .json, in a folder that exists"),
    ],
    "linear": [
        (["--layer", "attention"], "--layer: got 'attention'; allowed: gdn or kda or mamba or conv1d"),
    ],
    "wire": [
        (["--transport", "slow"], "--transport: got 'slow'; allowed: collective or pairwise or hierarchical"),
        (["--codec", "zip"], "--codec: got 'zip'; allowed: none or fp8"),
        (["--scheme", "p2p"], "--scheme: got 'p2p'; allowed: nothing. This benchmark measures a2a."),
        (["--cp", "1"], "--cp: got 1; allowed: 2 ranks or more"),
    ],
    "planner": [
        (["--cp", "1"], "--cp: got 1; allowed: at least 2 ranks"),
        (["--calibrate", "/no/such/folder/x.toml"], "a file in a folder that exists"),
        (["--gpu", "h100"], "--gpu: got 'h100'; allowed: only with attention and linear"),
    ],
}


@pytest.mark.parametrize(
    ("name", "words", "says"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)  # fmt: skip
def test_rejects_what_cannot_run_with_status_2(name, words, says, capsys):
    if name in ("exchange", "layer"):
        pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    assert main([name, *words, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["attention", "--repeats", "0"], ["attention", "--cp", "2,3"], ["wire", "--no"]])
def test_rejects_bad_usage_with_status_2(words, capsys):
    assert main(words) == 2
    assert "See python -m benchmarks --help." in capsys.readouterr().err


def test_a_device_that_there_is_not_and_a_run_out_of_time_are_refused(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["attention", "--device", "cuda"]) == 2
    assert "--device: got 'cuda'; allowed: cpu" in capsys.readouterr().err
    slow = ["--kernel", "reference", "--lengths", "4000,4000", "--ranks", "threads", "--timeout", "0.2"]
    assert main(["attention", "--device", "cpu", *slow]) == 1
    assert "did not finish in 0.2 s" in capsys.readouterr().err


def test_commands_of_pages_are_parsed():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("tools/*.md")]
    found = {
        words
        for page in pages
        for words in re.findall(r"python -m benchmarks ([a-z]+ [^#`\n]*)", page.read_text().replace("\\\n", " "))
    }
    assert len(found) >= 6
    for words in found:
        parser().parse_args(words.split())
