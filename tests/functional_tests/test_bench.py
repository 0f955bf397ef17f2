"""`megatron-cp bench attention`: what it reports, on threads, processes and torchrun, and what it refuses."""

import dataclasses
import importlib
import itertools
import re
from types import SimpleNamespace

import pytest
import torch

import megatron_cp as cp
from megatron_cp.apps.bench import on_ranks, planner
from megatron_cp.apps.bench.timing import interleaved_order, with_progress
from megatron_cp.cli import options
from megatron_cp.cli.main import main
from megatron_cp.executor.launch import RankError
from megatron_cp.plan import schemes
from megatron_cp.planner.predict import machine
from tests.commands import ROOT, command, only_json, reported
from tests.forked_commands import run_forked
from tests.limits import limit
from tests.terminal import Terminal

TINY = ["--device", "cpu", "--lengths", "70,1,130,64,2", "--heads", "4", "--kv-heads", "2", "--head-dim", "8"]
QUICK = [*TINY, "--repeats", "1", "--json"]
RATIOS = (
    "compute_over_ideal", "outside_kernel_share", "peak_over_formula", "peak_with_kernel_over_formula",
    "buffers_over_formula", "wait_share",
)  # fmt: skip
ABSOLUTE = ("kernel_ms", "busy_ms", "wall_ms", "one_rank_kernel_ms", "peak_bytes", "bytes_sent_per_rank")
SCHEMES = [name for name, scheme in schemes.SCHEMES.items() if not scheme.is_product]
PRODUCTS = [name for name, scheme in schemes.SCHEMES.items() if scheme.is_product]


def check_report(report, schemes):
    names = list(report)
    assert names[: len(RATIOS)] == list(RATIOS)  # ratios first
    assert set(names) >= {*ABSOLUTE, "work_imbalance", "cp", "lengths", "repeats", "device", "kernel", "not_run"}
    for name in (*RATIOS, "peak_bytes", "buffer_bytes"):
        assert list(report[name]) == schemes
    for scheme in schemes:
        for way in ("forward", "backward"):
            compute, outside, wait = (
                report[name][scheme][way] for name in ("compute_over_ideal", "outside_kernel_share", "wait_share")
            )
            assert 0 < compute["low"] <= compute["median"] <= compute["high"]
            assert 0 < outside["median"] < 1
            assert 0 < wait["median"] < 1
            assert report["peak_over_formula"][scheme][way] == pytest.approx(1, abs=0.1)
            assert report["peak_with_kernel_over_formula"][scheme][way] >= report["peak_over_formula"][scheme][way]
            assert max(report["bytes_sent_per_rank"][scheme][way]) > 0
        assert report["buffer_bytes"][scheme] > 0
        assert 0.3 < report["buffers_over_formula"][scheme] < 1.5


def test_every_scheme_that_runs_is_measured_and_the_others_say_why(monkeypatch):
    monkeypatch.setattr("sys.stderr", err := Terminal())
    text, report = reported(["bench", "attention", "--cp", "3", "--ranks", "threads", *QUICK])
    check_report(report, SCHEMES)
    count = len(SCHEMES) + 1  # one rank with the whole batch as well
    for what in ("measurements of memory", "timings"):  # of the first rank alone, with an end in sight
        seen = re.findall(rf"\r([0-9]+)/{count} {what}, about [0-9]+ s left *(?=\r)", err.getvalue())
        assert [int(number) for number in seen] == list(range(1, count + 1))
    assert re.search(r"\r +\r$", err.getvalue())  # and nothing of it stays
    assert list(report["not_run"]) == PRODUCTS
    assert "use a2a, p2p or another number of ranks" in report["not_run"]["a2a+p2p"]
    assert "a2a+p2p was not run" in text
    assert "| exact | backward |" in text
    assert "the share of the busiest" in text


@pytest.mark.thorough
def test_processes_are_the_default_and_four_ranks_run_everything(capsys):
    assert main(["bench", "attention", "--cp", "4", *QUICK]) == 0
    report = only_json(capsys.readouterr().out)
    check_report(report, list(schemes.SCHEMES))
    assert (report["cp"], report["device"], report["not_run"]) == (4, "cpu", {})


def test_one_scheme_with_its_options(capsys):
    options = ["--scheme", "exact", "--head-chunks", "1", "--mask", "window:9,0", "--dtype", "float64"]
    options += ["--kernel", "reference", "--learned-sink", "--layout", "contiguous"]
    assert main(["bench", "attention", "--ranks", "threads", *QUICK, *options]) == 0
    report = only_json(capsys.readouterr().out)
    assert list(report["compute_over_ideal"]) == ["exact"]
    assert (report["cp"], report["kernel"]) == (2, "reference")


@pytest.mark.thorough
def test_torchrun_brings_its_ranks():
    run = command("bench", "attention", "--scheme", "p2p", *QUICK, ranks=2)
    check_report(only_json(run.stdout), ["p2p"])
    assert run.stdout.count("peak_bytes") == 1  # one rank prints


def test_rejects_benchmarks_and_devices_that_there_are_not(capsys, monkeypatch):
    assert main(["bench", "planets"]) == 2
    known = "attention or linear or exchange or layer or wire or packs or planner"
    assert f"benchmark: got 'planets'; allowed: {known}" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "attention", "--device", "cuda"]) == 2
    assert "--device: got 'cuda'; allowed: cpu" in capsys.readouterr().err


def test_ways_that_are_predicted_alike_are_named_together(monkeypatch):
    times, prices = {"a": 3.0, "b": 4.0, "c": 2.0}, {"a": 1.0, "b": 1.0, "c": 5.0}
    monkeypatch.setattr(
        planner, "priced", lambda name, *_, **__: SimpleNamespace(total=prices[name], forward=1.0, backward=1.0)
    )
    ways = {name: SimpleNamespace(plan=lambda name=name: name, dtype=torch.float32) for name in times}
    measured = {name: {"forward": time / 2, "backward": time / 2} for name, time in times.items()}
    cells = [planner.Cell("one", ways), planner.Cell("other", {name: ways[name] for name in "ab"})]
    one, other = planner._judged(cells, machine("cpu"), (0, 0), [measured, {name: measured[name] for name in "ab"}])[
        "cells"
    ]
    assert (one["named"], one["fastest"], one["fastest_named"], one["named_over_fastest"]) == (
        ["a", "b"],
        "c",
        False,
        2,
    )
    assert (other["named"], other["fastest"], other["fastest_named"]) == (["a", "b"], "a", True)


@pytest.mark.thorough
def test_planner_puts_predictions_beside_measurements(capsys, tmp_path):
    """Every way of a layer on two batches; and the machine's rates as a file that predictions read."""
    path = tmp_path / "mine.toml"
    arguments = ["bench", "planner", "--cp", "2", "--repeats", "1", "--tokens-per-rank", "64", "--layer", "gdn"]
    assert main([*arguments, "--ranks", "threads", "--calibrate", str(path), "--json"]) == 0
    found = only_json(capsys.readouterr().out)
    assert [len(cell["ratio"]) for cell in found["cells"]] == [3, 3, 2]  # the last one as bench linear has it
    for cell in found["cells"]:
        assert set(cell["measured_ms"]) == set(cell["predicted_ms"])
        assert all(
            ratio == cell["predicted_ms"][way] / cell["measured_ms"][way] for way, ratio in cell["ratio"].items()
        )
        for way in ("forward", "backward"):
            assert set(cell["ratio_of"][way]) == set(cell["ratio"])
            assert all(ratio > 0 for ratio in cell["ratio_of"][way].values())
        least = min(cell["predicted_ms"].values())
        assert cell["named"] == [way for way, price in cell["predicted_ms"].items() if price == least]
        assert cell["named_over_fastest"] >= 1
    mine = machine(path)
    assert mine.ranks_per_host == 2
    assert mine.hardware.sources["memory"].startswith("not measured")
    fields = {field.name for field in dataclasses.fields(mine.hardware)} - {"name", "about", "sources"}
    assert set(mine.hardware.sources) == fields | {"within", "between"}
    measured = {name for name, source in mine.hardware.sources.items() if source.startswith("measured by")}
    given = {"memory", "units", "rule_floor", "matrix_rows", "wider", "between"}
    assert measured == (fields | {"within"}) - given
    assert mine.hardware.cores >= 1
    assert not mine.shares_cores
    assert [row[:2] for row in mine.hardware.rule] == [
        (each, size) for each in ("gdn", "kda", "mamba") for size in (64, 128)
    ]
    plan = cp.plan_attention(
        cp.Packing([100, 1]), cp.Layout.zigzag(cp.Packing([100, 1]), 2), heads=4, head_dim=16, hardware=str(path)
    )
    assert plan.prices[0].hardware.startswith("measured: 2 ranks")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cp", "1"], "--cp: got 1; allowed: at least 2 ranks"),
        (["--gpu", "h100", "--calibrate", "x.toml"], "only without --gpu"),
        (["--calibrate", "/no/such/folder/x.toml"], "a file in a folder that exists"),
    ],
)
def test_planner_rejects(arguments, says, capsys):
    assert main(["bench", "planner", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "allowed: attention or linear"),
        (["attention", "--layer", "gdn"], "--layer: got 'gdn'; allowed: attention"),
        (["attention", "--scheme", "a2a+p2p"], "--scheme: got 'a2a+p2p'"),
        (["attention", "--scheme", "tiles"], "Did you mean tiled?"),
        (["attention", "--cp", "1024"], "at most 64 local ranks"),
        (["attention", "--kernel", "varlen"], "runs on CUDA"),
        (["attention", "--kernel", "nonsense"], "--kernel: got 'nonsense'"),
        (["attention", "--mask", "strided:6"], "strided:BLOCKS with a multiple of 4 from 4 to 256"),
        (["attention", "--key-heads", "2"], "--kv-heads"),
        (["attention", "--lengths", "5", "--tokens-per-rank", "7"], "only without --lengths"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_rejects_what_cannot_run_with_status_2(arguments, says, capsys):
    assert main(["bench", *arguments, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["attention", "--repeats", "0"], ["attention", "--cp", "2,3"]])
def test_rejects_bad_usage_with_status_2(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    assert "See megatron-cp bench --help." in capsys.readouterr().err


def test_a_run_out_of_time_ends_with_status_1(tmp_path):
    slow = ["--kernel", "reference", "--lengths", "4000,4000", "--ranks", "threads", "--timeout", "0.2"]
    command = ["bench", "attention", "--device", "cpu", *slow]
    run = run_forked(command, tmp_path, timeout=limit(60), folder=ROOT, environment={})
    assert run.returncode == 1
    assert "did not finish in 0.2 s" in run.stderr


def test_progress_is_shown_by_the_first_rank_and_goes_in_the_end(monkeypatch):
    monkeypatch.setattr("sys.stderr", err := Terminal())
    assert list(with_progress("abc", "letters", rank=1)) == ["a", "b", "c"]
    assert err.getvalue() == ""
    turns = with_progress("abc", "letters")
    assert [next(turns) for _ in range(3)] == ["a", "b", "c"]
    assert err.getvalue().endswith("2/3 letters, about 0 s left")
    turns.close()  # as after an error
    assert err.getvalue().endswith(" \r")


def test_nobody_always_comes_first_or_after_the_same_one():
    names = ["a", "b", "c", "d"]
    order = list(interleaved_order(names, 12))
    rounds = [order[start : start + 4] for start in range(0, 48, 4)]
    assert all(sorted(one) == names for one in rounds)
    assert {one[0] for one in rounds} == set(names)
    assert {before for before, after in itertools.pairwise(order) if after == "a"} >= {"b", "c", "d"}
    assert order == list(interleaved_order(names, 12))  # on every rank


@pytest.mark.parametrize(
    ("what", "option", "value"),
    [
        ("layer", "--only", "codecs"),
        ("exchange", "--only", "codecs"),
        ("wire", "--cells", "2x64/2"),
        ("wire", "--profile", "a.json"),
    ],
)
def test_options_of_another_benchmark_are_refused(what, option, value, capsys):
    assert main(["bench", what, option, value]) == 2
    assert f"{option}: got '{value}'; allowed: only with bench" in capsys.readouterr().err


def test_rejects_documents_that_branch(capsys):
    assert main(["bench", "layer", "--lengths", "7,3,2", "--parents=-1,0,0"]) == 2
    assert "--parents: got [-1, 0, 0]; allowed: only with check and plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "ranks"), [("attention", {2}), ("linear", {2}), ("layer", {2}), ("exchange", {4}), ("wire", {3, 4, 5, 8})]
)
def test_as_many_ranks_as_the_help_says_are_measured(what, ranks, capsys, monkeypatch):
    if what == "layer":
        pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "context-parallel size (default: 2; for exchange 4, for wire 3, 4, 5 and 8, for packs 1, 2, 4 and 8)" in said
    assert "default: float32; bfloat16 for exchange, layer and wire" in said
    module = importlib.import_module(f"megatron_cp.apps.bench.{what}")
    made = []

    def case_of(args, size, **rest):
        made.append(options.case_of(args, size, **rest))
        return made[-1]

    def not_measured(*args, **rest):
        raise RankError("nothing is measured here")

    monkeypatch.setattr(module, "case_of", case_of)
    for starts in (module, on_ranks):
        monkeypatch.setattr(starts, "run_ranks", not_measured, raising=False)
    assert main(["bench", what, "--device", "cpu"]) == 1
    assert capsys.readouterr().err == "megatron-cp bench: nothing is measured here\n"
    assert {case.cp for case in made} == ranks
    assert {case.dtype for case in made} == {torch.float32 if what in ("attention", "linear") else torch.bfloat16}
