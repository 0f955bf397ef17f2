"""Recomputed activations: the same bits, no transfer that nobody awaits, and no rank that recomputes alone."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.parity import Case, draw, run_linear
from tests.counting_group import CountingGroup
from tests.limits import limit
from tests.random_tiles import assign_at_random

CHUNKS = {"heads": 6, "groups": 6, "head_chunks": 2}
CASES = {
    "attention": Case("attention", 3, (7, 1, 70), scheme="auto"),
    "attention in chunks": Case("attention", 3, (7, 1, 70), scheme="a2a", **CHUNKS),
    "gdn": Case("gdn", 3, (7, 1, 70), scheme="headwise"),
    "gdn in chunks": Case("gdn", 3, (7, 1, 70), scheme="headwise", **CHUNKS),
    "gdn chunkwise": Case("gdn", 3, (7, 1, 70), scheme="chunkwise"),
    "mamba chunkwise": Case("mamba", 3, (7, 1, 70), scheme="chunkwise"),
}


def results(group, case, **how):
    """Returns the output and the inputs' gradients, as a checkpoint recomputes them if it is said how."""
    problem, plan = draw(case), case.plan()
    inputs = [plan.layout.shard(x, group.rank).requires_grad_() for x in problem.inputs.values()]

    def layer(*tensors):
        if case.layer == "attention":
            return cp.attention(*tensors, plan, group)
        return run_linear(group, case, plan, dict(zip(problem.inputs, tensors, strict=True)), problem.parameters)

    out = checkpoint(layer, *inputs, **how) if how else layer(*inputs)
    out.backward(plan.layout.shard(problem.output_gradient, group.rank))
    return [out.detach(), *(x.grad for x in inputs)]


def recomputed(group, case, use_reentrant):
    counted = CountingGroup(group)
    found = results(counted, case, use_reentrant=use_reentrant)
    assert counted.calls.total() > 0
    return found, counted.under_way


def assert_recomputed(case, use_reentrant):
    """A non-reentrant checkpoint stops once it has what was saved: that may be before the last part has arrived."""
    expected = run_ranks(results, 3, case)
    for (found, under_way), right in zip(run_ranks(recomputed, 3, case, use_reentrant), expected, strict=True):
        assert under_way == 0
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.any_cpu
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("layer", CASES)
@pytest.mark.few
def test_recomputed_activations_give_the_same_bits_and_leave_nothing_under_way(layer, use_reentrant):
    assert_recomputed(CASES[layer], use_reentrant)


def test_assigned_tiles_recompute_to_the_same_bits(monkeypatch):
    assign_at_random(monkeypatch)
    assert_recomputed(replace(CASES["attention in chunks"], scheme="tiled"), False)


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
    "case",
    [
        ("gdn", "headwise", {"heads": 2, "head_dim": 8}, (7, 1, 70)),  # three ranks, two heads
        ("conv1d", "headwise", {"channels": 2}, (7, 1, 70)),
        ("conv1d", "chunkwise", {"channels": 2}, (2,)),  # three ranks, two tokens
        ("gdn", "chunkwise", {"heads": 2, "head_dim": 8}, (2,)),
        # Autograd keeps nothing for the gradient of an added bias alone.
        ("conv1d", "headwise", {"channels": 2}, (2,), slice(2, 3)),
        ("conv1d", "chunkwise", {"channels": 2}, (2,), slice(2, 3)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
def test_ranks_without_work_recompute_with_the_others(case):
    """Non-reentrant checkpoints recompute only where something was saved."""
    assert run_ranks(recomputed_rule, 3, *case, timeout=limit(20)) == [True] * 3
