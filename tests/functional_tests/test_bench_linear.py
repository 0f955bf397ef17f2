"""`megatron-cp bench linear`: what it reports for each layer, what layers save, and what it refuses."""

import sys

import pytest
import torch

from megatron_cp.apps.bench.linear_report import LAYERS, MODES
from megatron_cp.apps.bench.saved_bytes import saved_bytes
from megatron_cp.apps.bench.segments import PLACES, piece_lengths, segments
from megatron_cp.apps.bench.timing import Watch
from megatron_cp.apps.bench.work import Work, mixer
from megatron_cp.cli.main import main
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.parity import Case, draw
from tests.commands import command, only_json, reported

QUICK = ["--device", "cpu", "--lengths", "70,1,20,9,2", "--repeats", "1", "--json"]
HEADS = {
    "gdn": ["--heads", "4", "--key-heads", "2", "--head-dim", "16"],
    "kda": ["--heads", "2", "--head-dim", "16"],
    "mamba": ["--heads", "4", "--groups", "2", "--head-dim", "16", "--state", "8"],
    "conv1d": ["--heads", "3", "--head-dim", "16"],
}
RATIOS = (
    "chunkwise_over_plain", "target", "megatron_over_ours", "headwise_over_chunkwise", "headwise_over_chunkwise_local",
    "wait_share", "saved_headwise_over_chunkwise",
)  # fmt: skip
ABSOLUTE = ("local_ms", "busy_ms", "transfer_ms", "wall_ms", "bytes_sent_per_rank", "bytes_planned_per_rank")
WAYS = ["forward", "backward", "both"]


def check_report(report):
    names = list(report)
    assert names[: len(RATIOS)] == list(RATIOS)  # ratios first
    assert set(names) >= {
        *ABSOLUTE, "cp", "layer", "lengths", "repeats", "device", "kernel", "megatron_core", "not_run",
    }  # fmt: skip
    assert list(report["chunkwise_over_plain"]) == list(PLACES)
    for ratios in (
        *report["chunkwise_over_plain"].values(),
        report["headwise_over_chunkwise"],
        report["headwise_over_chunkwise_local"],
    ):
        assert list(ratios) == WAYS
        assert all(0 < ratio["low"] <= ratio["median"] <= ratio["high"] for ratio in ratios.values())
    for mode in MODES:
        assert report["saved_bytes_per_token"][mode] > 0
        assert all(0 < report["wait_share"][mode][way]["median"] < 1 for way in ("forward", "backward"))
    assert report["saved_index_bytes"] == dict.fromkeys(MODES, 0)
    assert report["bytes_sent_per_rank"] == report["bytes_planned_per_rank"]
    assert max(report["bytes_sent_per_rank"]["chunkwise"]["forward"]) > 0


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_is_measured(layer):
    text, report = reported(["bench", "linear", "--layer", layer, *HEADS[layer], "--ranks", "threads", *QUICK])
    check_report(report)
    assert (report["layer"], report["cp"], report["kernel"]) == (layer, 2, "chunked")
    if layer == "gdn":
        assert list(report["megatron_over_ours"]) == WAYS
        assert "one document, megatron-core |" in text
    else:
        assert f"megatron-core was not run: it has nothing of its own in plain torch for {layer}." in text
        assert report["megatron_over_ours"] is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_planned_is_sent_in_other_layouts_too(dtype, capsys):
    options = ["--layer", "kda", *HEADS["kda"], "--cp", "3", "--layout", "zigzag", "--align", "4", "--dtype", dtype]
    assert main(["bench", "linear", "--ranks", "threads", *options, *QUICK]) == 0  # one rank has no head
    check_report(only_json(capsys.readouterr().out))


def test_processes_are_the_default(capsys):
    assert main(["bench", "linear", "--layer", "mamba", *HEADS["mamba"], *QUICK]) == 0
    report = only_json(capsys.readouterr().out)
    check_report(report)
    assert (report["cp"], report["device"]) == (2, "cpu")


@pytest.mark.thorough
def test_torchrun_brings_its_ranks():
    run = command("bench", "linear", "--layer", "conv1d", *QUICK, ranks=2)
    check_report(only_json(run.stdout))
    assert run.stdout.count("chunkwise_over_plain") == 1  # one rank prints


@pytest.mark.thorough
def test_a_middle_segment_costs_little_more_than_a_document(capsys):
    options = ["--device", "cpu", "--tokens-per-rank", "512", "--head-dim", "64", "--repeats", "3", "--json"]
    assert main(["bench", "linear", "--ranks", "threads", *options]) == 0
    report = only_json(capsys.readouterr().out)
    middle, few = (report["chunkwise_over_plain"][name]["both"]["median"] for name in ("middle", "few"))
    assert (
        middle < 3
    )  # a walk of state and map where a document has one of the state; loose, since others share the cores
    assert few < 2
    assert report["target"] == {"middle_both_at_most": 1.35, "met": middle <= 1.35}


def test_runs_without_megatron_and_says_where_its_rule_differs(capsys, monkeypatch):
    monkeypatch.setattr("megatron_cp.apps.bench.peers.delta_rule.gated_delta_rule", lambda q, k, v, g, beta: 1.01 * v)
    assert main(["bench", "linear", *HEADS["gdn"], "--ranks", "threads", *QUICK]) == 1
    assert "megatron-core's rule differs from ours by" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "megatron_cp.apps.bench.peers.delta_rule", None)
    assert main(["bench", "linear", *HEADS["gdn"], "--ranks", "threads", *QUICK]) == 0
    report = only_json(capsys.readouterr().out)
    assert report["megatron_over_ours"] is None
    assert list(report["not_run"]) == ["megatron-core"]


def saved_on(group, case):
    work = mixer(case, draw(case), group)
    return saved_bytes(work, work.inputs[len(draw(case).inputs) :])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.few(together=2)
def test_no_layer_saves_an_index_of_tokens(layer, mode, layout):
    case = Case(layer, 2, (20, 17, 36, 57), layout, heads=4, scheme=mode, dtype=torch.float32)
    longer = Case(layer, 2, (40, 34, 72, 114), layout, heads=4, scheme=mode, dtype=torch.float32)
    for short, long in zip(run_ranks(saved_on, 2, case), run_ranks(saved_on, 2, longer), strict=True):
        assert short.numbers > 0
        assert (short.indices, long.indices) == (0, 0)
        # What autograd refers to otherwise does not grow with tokens.
        assert (short.tables, short.masks) == (long.tables, long.masks)


def alone(forward):
    x, weight = torch.ones(10, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    work = Work(lambda _: forward(x, weight), [x, weight], torch.ones(10, 4), ThreadGroup.create(1)[0])
    return saved_bytes(work, [weight])


class Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.held = torch.arange(10)
        return x[ctx.held]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


TABLE = torch.arange(10)


@pytest.mark.parametrize(
    ("forward", "numbers", "indices", "tables"),
    [
        (lambda x, w: x.exp() * w, 160, 0, 0),
        (lambda x, w: x * w, 160, 0, 0),  # the input; the parameter is there anyway
        (lambda x, w: x.index_select(0, torch.arange(10)), 0, 80, 0),
        (lambda x, w: x.index_select(0, TABLE), 0, 0, 80),
        (Holding.apply, 0, 80, 0),
        (lambda x, w: x * torch.ones(160, dtype=torch.uint8).view(torch.float32).view(10, 4), 160, 0, 0),
    ],
    ids=["result", "input", "own index", "table of the batch", "held by a function", "numbers that came as bytes"],
)
def test_what_is_saved_is_told_apart(forward, numbers, indices, tables):
    saved = alone(forward)
    assert (saved.numbers, saved.indices, saved.tables) == (numbers, indices, tables)


# Whether the rank that stands there sends anything to others, forward and backward.
SENDS = {
    "plain": [False, False], "few plain": [False, False], "first": [True, False], "middle": [True, True],
    "last": [False, True], "few": [True, True],
}  # fmt: skip


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("layer", LAYERS)
def test_segments_stand_where_they_should_and_compute_what_whole_documents_do(layer, tokens):
    case = Case(layer, 2, (2 * tokens,), scheme="chunkwise", heads=4)
    results, sends, watch = {}, {name: [] for name in SENDS}, Watch()
    for name, work in segments(case, tokens).items():

        def remember(way, call, name=name):
            results[name, way], spent = watch.timed(call)
            sends[name].append(spent.sent > 0)
            return results[name, way]

        work.step(remember, watch)
        plain = "few plain" if "few" in name else "plain"
        torch.testing.assert_close(results[name, "forward"], results[plain, "forward"])
        torch.testing.assert_close(results[name, "backward"], results[plain, "backward"])
    assert not torch.allclose(results["plain", "forward"], results["few plain", "forward"])
    assert sends == SENDS


@pytest.mark.parametrize("tokens", [1, 2, 3, 40, 2048])
def test_pieces_cover_the_tokens(tokens):
    pieces = piece_lengths(tokens)
    assert sum(pieces) == tokens
    assert min(pieces) >= 1
    assert len(pieces) <= 32


@pytest.mark.parametrize("tokens", ["1", "2", "3"])
def test_few_tokens_are_enough(tokens, capsys):
    options = ["--layer", "mamba", *HEADS["mamba"], "--device", "cpu", "--lengths", tokens, "--repeats", "1"]
    assert main(["bench", "linear", "--ranks", "threads", "--json", *options]) == 0
    assert only_json(capsys.readouterr().out)["lengths"] == [int(tokens)]
