"""`megatron-cp bench layer`: what it reports, that both sides compute the same, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from megatron_cp.apps.bench import layer as benchmark
from megatron_cp.apps.bench import timing
from megatron_cp.apps.bench.layer import LAYERS, OURS
from megatron_cp.apps.bench.peer_limits import MEGATRON
from megatron_cp.apps.bench.profile import trace_files
from megatron_cp.apps.bench.timing import DIRECTIONS, Watch
from megatron_cp.apps.bench.watched_kernels import WatchedLinearKernel, watched
from megatron_cp.cli.main import main
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.linear.gated_delta_net import gated_delta_net
from megatron_cp.linear.mamba2 import mamba2_mixer
from megatron_cp.testing.parity import Case, draw
from tests.commands import reported

TINY = ["--device", "cpu", "--model", "tiny", "--tokens-per-rank", "32", "--documents", "3", "--repeats", "2"]
WAYS = [*DIRECTIONS, "both"]
RATIOS = ("megatron_over_ours", "megatron_over_ours_local", "megatron_over_ours_rest")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    trace = tmp_path_factory.mktemp("traces") / "trace.json"
    return reported(["bench", "layer", *TINY, "--profile", str(trace)])


def test_both_layers_are_measured_ratios_first(found):
    text, report = found
    assert list(report)[:3] == list(RATIOS)
    assert list(report["layers"]) == list(LAYERS)
    for name, layer in report["layers"].items():
        assert f"{name}, hidden size 96" in text
        assert "ours stand in for" in layer["stand_ins"]
        assert 0 < max(layer["errors"].values()) < 0.05
        assert layer["not_run"] == {}
        for ratios in (layer[name] for name in RATIOS):
            assert list(ratios) == WAYS
            assert all(0 < ratio["low"] <= ratio["median"] <= ratio["high"] for ratio in ratios.values())
        for side in (OURS, MEGATRON):
            for way in WAYS:
                wall, alike, rest, wire = (
                    layer[kind][side][way]["median"] for kind in ("wall_ms", "alike_ms", "rest_ms", "wire_ms")
                )
                assert wall > 0
                assert min(alike, rest, wire) > 0
        assert layer["megatron_over_ours"] == report["megatron_over_ours"][name]
    assert (report["cp"], report["device"], report["layers"]["gdn"]["dtype"]) == (2, "cpu", "bfloat16")


def test_a_trace_of_our_layer_is_written_for_each(found):
    text, report = found
    assert [path.rpartition("trace.")[2] for path in report["traces"].values()] == [f"{name}.json" for name in LAYERS]
    sections = {"gdn": "q,k,v,beta,alpha", "mamba": "x,B,C,dt"}
    for name, path in report["traces"].items():
        assert f"Trace of one forward and backward of our {name} on rank 0: {path}." in text
        events = json.loads(Path(path).read_text())["traceEvents"]
        ranges = [event["name"] for event in events if event.get("ph") == "X" and event["name"].startswith("cp ")]
        assert all(name.endswith(" layer 1") for name in ranges)
        assert [name for name in ranges if "to_heads" not in name and "to_tokens" not in name] == [
            f"cp headwise {step}{way} layer 1"
            for way, steps in (("", ("conv", "gates", "rule")), (" backward", ("rule", "gates", "conv")))
            for step in steps
        ]
        for step in (f"to_heads {sections[name]}", "to_tokens wait out", f"to_tokens {sections[name]} backward"):
            assert ranges.count(f"cp headwise {step} layer 1") == 1


def test_a_trace_of_one_layer_is_the_file_that_was_asked_for():
    assert trace_files("folder/t.json", ["mamba"]) == {"mamba": "folder/t.json"}
    assert trace_files("t.json", ["gdn", "mamba"]) == {"gdn": "t.gdn.json", "mamba": "t.mamba.json"}


@pytest.mark.parametrize("path", ["nowhere/trace.json", "trace.txt", "folder.json", "a\0.json"])
def test_rejects_a_trace_that_cannot_be_written_before_anything_is_measured(path, capsys, monkeypatch, tmp_path):
    (tmp_path / "folder.json").mkdir()
    monkeypatch.setattr(benchmark, "report", None)
    assert main(["bench", "layer", *TINY, "--profile", str(tmp_path / path)]) == 2
    error = capsys.readouterr().err
    assert "--profile: got" in error
    assert "allowed: a file ending in .json, in a folder that exists" in error


def test_needs_megatron_and_says_what_does_not(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "megatron_missing", lambda: {MEGATRON: "it is not installed"})
    assert main(["bench", "layer", *TINY]) == 2
    error = capsys.readouterr().err
    assert "allowed: a machine with megatron-core" in error
    assert "bench linear measures mixers without it" in error


def compare(group, factor):
    case, rows = Case("gdn", 2, (8,), dtype=torch.float32), torch.arange(1.0, 9.0)
    # Of a parameter, ranks have shares that only together are the same.
    shares = rows * (group.rank + 1), rows * (2 - group.rank)
    found = {OURS: [rows, rows, shares[0]], MEGATRON: [rows, rows, shares[1] * factor]}
    return benchmark._compared(found, case, group)


def test_sides_that_compute_the_same_are_told_from_others():
    for errors in run_ranks(compare, 2, 1.0, kind="processes"):
        assert errors == {"out": 0.0, "gradients": 0.0}
    with pytest.raises(RankError, match="they do not compute the same"):
        run_ranks(compare, 2, 1.01, kind="processes")


class Clock:
    """A clock on which time passes in `Slow` alone; it stands for the module `time`."""

    now = 0

    def thread_time(self):
        return self.now

    perf_counter = thread_time


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.backward = clock, backward
        clock.now += forward
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.backward
        return 2 * gradient, None, None, None


def test_the_time_of_a_watched_function_is_told_from_that_around_it(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    watch, x, y = Watch(), torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    inside = watched(watch, lambda x, *, y: (Slow.apply(x, clock, 2, 4) + y, None))

    def forward():
        out, nothing = inside(Slow.apply(x, clock, 3, 5), y=y)
        assert nothing is None
        return Slow.apply(out, clock, 1, 1)

    out, spent = watch.timed(forward)
    assert (spent.kernel, spent.total) == (2, 6)
    with torch.autograd.set_multithreading_enabled(False):
        gradients, spent = watch.timed(lambda: torch.autograd.grad(out, [x, y], torch.ones(3)))
    assert (spent.kernel, spent.total) == (4, 10)
    assert [gradient.tolist() for gradient in gradients] == [[8.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("kind", ["gdn", "mamba"])
def test_our_kernels_are_watched_forward_and_backward(kind):
    case, watch = Case(kind, 1, (40, 23), "contiguous", scheme="headwise", dtype=torch.float32), Watch()
    problem, plan, group = draw(case), case.plan(), ThreadGroup.create(1)[0]
    tensors = [x.requires_grad_() for x in (*problem.inputs.values(), *problem.parameters.values())]
    count = len(problem.inputs)

    def run(kernel):
        operation = gated_delta_net if kind == "gdn" else mamba2_mixer
        return operation(*tensors[:count], plan, group, **problem.parameters, kernel=kernel)

    out, forward = watch.timed(lambda: run(WatchedLinearKernel(watch)))
    assert torch.equal(out, run("auto"))
    with torch.autograd.set_multithreading_enabled(False):
        _, backward = watch.timed(lambda: torch.autograd.grad(out, tensors, problem.output_gradient))
    for spent in (forward, backward):
        assert 0 < spent.kernel < spent.total


def seconds_in_handed_kernel(group, kind):
    from megatron_cp.apps.bench.peers import layers

    layers.start(group.size, on_cpu=True)
    case, watch = Case(kind, 2, (24, 12), "zigzag", heads=4, scheme="headwise", dtype=torch.float32), Watch()
    pair = layers.layers(case, 32, lambda function: function, WatchedLinearKernel(watch))
    _, spent = watch.timed(lambda: pair.ours.forward(torch.ones(18, 1, 32)))
    return spent.kernel


@pytest.mark.parametrize("kind", LAYERS)
def test_our_layer_computes_with_the_kernel_that_it_is_handed(kind):
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    assert min(run_ranks(seconds_in_handed_kernel, 2, kind, kind="processes")) > 0
