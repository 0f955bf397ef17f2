"""Plans ride on the graph: recomputed activations and several microbatches in flight change nothing."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.parity import Case, draw
from tests.counting_group import CountingGroup
from tests.limits import limit
from tests.random_tiles import assign_at_random

WAYS = {
    "attention": ("attention", "auto"),
    "gdn": ("gdn", "headwise"),
    "gdn chunkwise": ("gdn", "chunkwise"),
    "mamba chunkwise": ("mamba", "chunkwise"),
}
CHUNKS = {"heads": 6, "groups": 6, "head_chunks": 2}
CASES = {
    "attention in chunks": [
        Case("attention", 3, (7, 1, 70), scheme="a2a", **CHUNKS),
        Case("attention", 3, (2, 33, 5, 1), "random", scheme="a2a", **CHUNKS),
    ],
    "gdn in chunks": [
        Case("gdn", 3, (7, 1, 70), scheme="headwise", **CHUNKS),
        Case("gdn", 3, (2, 33, 5, 1), "random", scheme="headwise", **CHUNKS),
    ],
} | {
    way: [Case(layer, 3, (7, 1, 70), scheme=scheme), Case(layer, 3, (2, 33, 5, 1), "random", scheme=scheme)]
    for way, (layer, scheme) in WAYS.items()
}


def layer_of(case, problem, group):
    """The layer as a function of its local inputs alone."""
    plan = case.plan()
    if case.layer == "attention":
        return lambda q, k, v: cp.attention(q, k, v, plan, group, dropout=case.dropout, seed=3)
    mixer = cp.gated_delta_net if case.layer == "gdn" else cp.mamba2_mixer
    return lambda *inputs: mixer(*inputs, plan, group, **problem.parameters)


def start(case, group):
    problem, layout = draw(case), case.plan().layout
    inputs = [layout.shard(x, group.rank).requires_grad_() for x in problem.inputs.values()]
    return layer_of(case, problem, group), inputs, layout.shard(problem.output_gradient, group.rank)


def alone(group, case):
    layer, inputs, gradient = start(case, group)
    out = layer(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


def recomputed(group, case, use_reentrant):
    layer, inputs, gradient = start(case, group)
    out = checkpoint(layer, *inputs, use_reentrant=use_reentrant)
    out.backward(gradient)
    return [out.detach(), *(x.grad for x in inputs)]


def together(group, cases, backward_order):
    """Runs all forwards, then the backwards in the given order."""
    started = [start(case, group) for case in cases]
    outs = [layer(*inputs) for layer, inputs, _ in started]
    for number in backward_order:
        outs[number].backward(started[number][2])
    return [[out.detach(), *(x.grad for x in inputs)] for out, (_, inputs, _) in zip(outs, started, strict=True)]


def assert_same_bits(found, expected):
    for of_rank, expected_of_rank in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(of_rank, expected_of_rank, strict=True))


@pytest.mark.any_cpu
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("layer", CASES)
@pytest.mark.few
def test_recomputed_activations_give_the_same_bits(layer, use_reentrant):
    case = CASES[layer][0]
    assert_same_bits(run_ranks(recomputed, 3, case, use_reentrant), run_ranks(alone, 3, case))


def left_under_way(group, case, use_reentrant):
    counted = CountingGroup(group)
    recomputed(counted, case, use_reentrant)
    return counted.calls["all_to_all"], counted.under_way


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("layer", CASES)
@pytest.mark.few
def test_recomputing_waits_for_all_that_it_starts(layer, use_reentrant):
    """A non-reentrant checkpoint stops once it has what was saved: that may be before the last part has arrived."""
    for started, under_way in run_ranks(left_under_way, 3, CASES[layer][0], use_reentrant):
        assert started > 0
        assert under_way == 0


def recomputed_rule(group, kind, mode, sizes, lengths, trained=slice(None)):
    packing = cp.Packing(lengths)
    plan = cp.plan_linear(packing, cp.Layout.contiguous(packing, group.size), kind, mode=mode, **sizes)
    rows = int(plan.layout.row_counts[group.rank])
    if kind == "conv1d":
        tensors = [torch.randn(rows, sizes["channels"]), torch.randn(sizes["channels"], 4), torch.randn(2)]
        run = cp.causal_conv1d
    else:
        heads, size = sizes["heads"], sizes["head_dim"]
        tensors = [torch.randn(rows, heads, size) for _ in "qkv"] + [-torch.rand(rows, heads), torch.rand(rows, heads)]
        run = cp.gated_delta_rule
    for tensor in tensors[trained]:
        tensor.requires_grad_()
    found = [
        torch.autograd.grad(layer(*tensors, plan, group).square().sum(), tensors[trained])
        for layer in (run, lambda *args: checkpoint(run, *args, use_reentrant=False))
    ]
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("kind", "mode", "sizes", "lengths"),
    [
        ("gdn", "headwise", {"heads": 2, "head_dim": 8}, (7, 1, 70)),  # three ranks, two heads
        ("conv1d", "headwise", {"channels": 2}, (7, 1, 70)),
        ("conv1d", "chunkwise", {"channels": 2}, (2,)),  # three ranks, two tokens
        ("gdn", "chunkwise", {"heads": 2, "head_dim": 8}, (2,)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
def test_ranks_without_work_recompute_with_the_others(kind, mode, sizes, lengths):
    """Non-reentrant checkpoints recompute only where something was saved."""
    assert run_ranks(recomputed_rule, 3, kind, mode, sizes, lengths, timeout=limit(20)) == [True] * 3


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
def test_ranks_with_work_recompute_for_a_bias_alone(mode):
    """Autograd keeps nothing for the gradient of an added bias, and a rank without work must not recompute alone."""
    case = ("conv1d", mode, {"channels": 2}, (2,), slice(2, 3))
    assert run_ranks(recomputed_rule, 3, *case, timeout=limit(20)) == [True] * 3


@pytest.mark.any_cpu
@pytest.mark.parametrize("backward_order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
@pytest.mark.parametrize("layer", CASES)
@pytest.mark.few
def test_two_microbatches_in_flight_do_not_mix(layer, backward_order):
    found = run_ranks(together, 3, CASES[layer], backward_order)
    for number, case in enumerate(CASES[layer]):
        assert_same_bits([of_rank[number] for of_rank in found], run_ranks(alone, 3, case))


def test_assigned_tiles_in_flight_do_not_mix_and_recompute_to_the_same_bits(monkeypatch):
    assign_at_random(monkeypatch)
    cases = [replace(case, scheme="tiled") for case in CASES["attention in chunks"]]
    expected = [run_ranks(alone, 3, case) for case in cases]
    found = run_ranks(together, 3, cases, (1, 0))
    for number in range(2):
        assert_same_bits([of_rank[number] for of_rank in found], expected[number])
    assert_same_bits(run_ranks(recomputed, 3, cases[0], False), expected[0])
    assert all(under_way == 0 for _, under_way in run_ranks(left_under_way, 3, cases[0], False))


@pytest.mark.any_cpu
@pytest.mark.parametrize("layer", CASES)
def test_a_second_backward_through_a_kept_graph_gives_the_same_bits(layer):
    def twice(group, case):
        run, inputs, gradient = start(case, group)
        out = run(*inputs)
        first = torch.autograd.grad(out, inputs, gradient, retain_graph=True)
        return all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out, inputs, gradient), strict=True))

    assert run_ranks(twice, 3, CASES[layer][0]) == [True] * 3
