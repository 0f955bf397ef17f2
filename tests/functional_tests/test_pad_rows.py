"""Tests that the contents of pad rows change nothing: NaN gives the bits of zeros, in outputs and every gradient."""

import math

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Mask
from megatron_cp.testing.parity import Case, draw, run_linear
from tests.functional_tests.test_linear_operations import LENGTHS, OPERATIONS, OPTIONS, PARAMETERS, SIZES, tensors_of
from tests.limits import limit
from tests.random_tiles import TILED, assign_at_random

ALIGN = 4
ATTENTION = {
    "a2a": {"scheme": "a2a"}, "a2a in chunks": {"scheme": "a2a", "head_chunks": 2, "groups": 6},
    "a2a, one rank": {"scheme": "a2a", "cp": 1},
    "a2a, one rank in order": {"scheme": "a2a", "cp": 1, "layout": "contiguous"},
    "a2a, coded": {"scheme": "a2a", "codec": "fp8", "dtype": torch.bfloat16}, "p2p": {"scheme": "p2p"},
    "p2p by pairs": {"scheme": "p2p", "transport": "pairwise"}, "all_gather": {"scheme": "all_gather"},
    "exact": {"scheme": "exact", "layout": "random"}, "a2a+p2p": {"scheme": "a2a+p2p", "cp": 4},
    "a2a+all_gather": {"scheme": "a2a+all_gather", "cp": 4}, "a2a+exact": {"scheme": "a2a+exact", "cp": 4},
    "p2p, reference": {"scheme": "p2p", "kernel": "reference", "softcap": 1.5},
    "exact in bf16": {"scheme": "exact", "dtype": torch.bfloat16},
}  # fmt: skip
LINEAR = {
    "headwise": {"scheme": "headwise"},
    "headwise in chunks": {"scheme": "headwise", "head_chunks": 2, "groups": 6},
    "headwise, one rank": {"scheme": "headwise", "cp": 1},
    "headwise, hierarchical": {"scheme": "headwise", "transport": "hierarchical"},
    "headwise, reference": {"scheme": "headwise", "kernel": "reference"},
    "chunkwise": {"scheme": "chunkwise"},
    "chunkwise, balanced": {"scheme": "chunkwise", "layout": "balanced"},
    "chunkwise, reference": {"scheme": "chunkwise", "kernel": "reference"},
    "chunkwise in bf16": {"scheme": "chunkwise", "dtype": torch.bfloat16},
    "redistribute": {"scheme": "redistribute", "hidden_size": 8},
}
CASES = {
    **{f"attention, {name}": Case("attention", lengths=LENGTHS, align=ALIGN, learned_sink=True, **{"cp": 3, **more})
       for name, more in ATTENTION.items()},
    **{f"{layer}, {name}": Case(layer, lengths=LENGTHS, align=ALIGN, **{"cp": 3, "groups": 3, **more})
       for layer in ("gdn", "kda", "mamba", "conv1d") for name, more in LINEAR.items()
       if not (layer == "conv1d" and "chunks" in name)},
}  # fmt: skip


def padded(layout, stream, rank, pad_value):
    return layout.shard(stream, rank, pad_value=pad_value)


def run_mixer(group, case, pad_value):
    """This rank's output and gradients of a whole layer, its pad rows among them."""
    problem, plan = draw(case), case.plan()
    hidden_layout = plan.hidden_layout or plan.layout
    inputs = {
        name: padded(hidden_layout, x, group.rank, pad_value).requires_grad_() for name, x in problem.inputs.items()
    }
    parameters = {name: x.clone().requires_grad_() for name, x in problem.parameters.items()}
    if case.layer == "attention":
        sink = parameters["sink"]
        out = cp.attention(*inputs.values(), plan, group, sink=sink, kernel=case.kernel, softcap=case.softcap)
    else:
        out = run_linear(group, case, plan, inputs, parameters)
    out.backward(padded(hidden_layout, problem.output_gradient, group.rank, pad_value))
    return {"out": out.detach()} | {name: x.grad for name, x in (inputs | parameters).items()}


def run_rule(group, kind, mode, pad_value):
    """Runs a bare rule with these pad rows."""
    packing = cp.Packing(LENGTHS)
    layout = cp.Layout.zigzag(packing, group.size, align=ALIGN)
    plan = cp.plan_linear(packing, layout, kind, mode=mode, **SIZES[kind])
    local = {
        name: (x.clone() if name in PARAMETERS else padded(layout, x, group.rank, pad_value)).requires_grad_()
        for name, x in tensors_of(kind).items()
    }
    more = {}
    if kind == "mamba":
        more = {name: torch.ones(4, dtype=torch.float64, requires_grad=True) for name in ("D", "dt_bias")}
    out = OPERATIONS[kind](*local.values(), plan, group, **OPTIONS[kind], **more)
    gradient = torch.linspace(-1, 1, sum(LENGTHS) * out[0].numel(), dtype=torch.float64).view(-1, *out.shape[1:])
    out.backward(padded(layout, gradient, group.rank, pad_value))
    return {"out": out.detach()} | {name: x.grad for name, x in (local | more).items()}


def run_moved(group, operation, pad_value):
    """Runs an operation that moves rows, with these pad rows."""
    packing = cp.Packing(LENGTHS)
    source, target = cp.Layout.zigzag(packing, group.size, align=ALIGN), cp.Layout.contiguous(packing, group.size)
    target = target.padded(align=ALIGN)
    stream = torch.linspace(-1, 1, packing.total * 2, dtype=torch.float64).view(-1, 2)
    local = padded(source, stream, group.rank, pad_value).requires_grad_()
    if operation == "relayout":
        out = cp.relayout(local, source, target, group)
        out.backward(padded(target, stream, group.rank, pad_value))
    else:
        out = cp.gather(local, source, group, same_loss=operation == "gather, same loss")
        out.backward(stream)
    return {"out": out.detach(), "local": local.grad}


def run_batched(group, scheme, pad_value):
    """Runs attention with a batch axis and keys of another pack, chunk by chunk in a2a, with these pad rows."""
    packing, kv_packing = cp.Packing(LENGTHS), cp.Packing(LENGTHS[::-1])
    layout, kv_layout = cp.Layout.zigzag(packing, group.size, align=ALIGN), cp.Layout.zigzag(
        kv_packing, group.size, align=ALIGN
    )  # fmt: skip
    plan = cp.plan_attention(
        packing, layout, heads=6, kv_heads=3, head_dim=8, mask=Mask.full(packing, kv_packing), scheme=scheme,
        kv_packing=kv_packing, kv_layout=kv_layout,
    )  # fmt: skip
    random = torch.Generator().manual_seed(0)
    streams = [torch.randn(packing.total, 2, heads, 8, generator=random, dtype=torch.float64) for heads in (6, 3, 3)]
    local = [
        padded(of, x, group.rank, pad_value).requires_grad_()
        for of, x in zip((layout, kv_layout, kv_layout), streams, strict=True)
    ]
    sink = torch.ones(6, dtype=torch.float64, requires_grad=True)

    def project(heads, kv_heads):
        return local[0][:, :, heads], local[1][:, :, kv_heads], local[2][:, :, kv_heads]

    out = cp.projected_attention(project, plan, group, sink=sink)
    out.backward(padded(layout, streams[0], group.rank, pad_value))
    return {"out": out.detach(), "q": local[0].grad, "k": local[1].grad, "v": local[2].grad, "sink": sink.grad}


def assert_nan_is_as_good_as_zero(size, run, *arguments):
    zeros, nans = (run_ranks(run, size, *arguments, value, timeout=limit(60)) for value in (0.0, math.nan))
    for rank, (expected, found) in enumerate(zip(zeros, nans, strict=True)):
        for name, value in expected.items():
            assert torch.isfinite(value).all(), (rank, name)
            assert torch.equal(found[name], value), (rank, name)
    return zeros


@pytest.mark.any_cpu
@pytest.mark.filterwarnings("ignore:.*ranks get no")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layers_ignore_pad_rows(case):
    plan = case.plan()
    assert plan.layout.pad_rows.any()
    assert_nan_is_as_good_as_zero(case.cp, run_mixer, case)
    del plan  # held so far, so that it was made once


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("scheme", TILED)
@pytest.mark.few
def test_assigned_tiles_ignore_pad_rows(scheme, kernel, monkeypatch):
    assign_at_random(monkeypatch)
    more = {"learned_sink": True, "kernel": kernel, "head_chunks": 2, "heads": 12, "groups": 6}
    case = Case("attention", 4, LENGTHS, scheme=scheme, align=ALIGN, **more)
    plan = case.plan()
    assert plan.layout.pad_rows.any()
    assert_nan_is_as_good_as_zero(case.cp, run_mixer, case)
    del plan


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("kind", OPERATIONS)
def test_bare_rules_ignore_pad_rows(kind, mode):
    assert_nan_is_as_good_as_zero(3, run_rule, kind, mode)


@pytest.mark.parametrize("operation", ["relayout", "gather", "gather, same loss"])
def test_moving_rows_ignores_pad_rows(operation):
    assert_nan_is_as_good_as_zero(3, run_moved, operation)


@pytest.mark.parametrize("scheme", ["a2a", "p2p", "all_gather", "exact", "tiled"])
def test_keys_of_another_pack_and_a_batch_ignore_pad_rows(scheme, monkeypatch):
    assign_at_random(monkeypatch)
    assert_nan_is_as_good_as_zero(3, run_batched, scheme)
