"""Tests that measured memory equals the formula in every scheme, forward and backward."""

from contextlib import nullcontext

import pytest
import torch

from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.memory import peak_bytes
from megatron_cp.softmax.attention import attention
from megatron_cp.softmax.kernels import AttentionKernel
from tests.covering import covering
from tests.peak_memory import PeakMemory
from tests.random_tiles import TILED, assign_all_to, assign_at_random
from tests.scheme_in_halves import add_halves

RAGGED = (700, 1, 301, 60, 2)
SHAPES = {
    "6:2": {"heads": 6, "kv_heads": 2, "head_dim": 16},
    "7 heads": {"heads": 7, "kv_heads": 7, "head_dim": 16},
    "one key head": {"heads": 8, "kv_heads": 1, "head_dim": 16},
    "4:1 small": {"heads": 4, "kv_heads": 1, "head_dim": 3, "value_head_dim": 2},
    "24/16": {"heads": 4, "kv_heads": 4, "head_dim": 24, "value_head_dim": 16},
}
SLACK = 0.03  # rows of messages are padded to 16 bytes, those of numbers that are merged to cache lines


class Zeros(AttentionKernel):
    """Writes what it must and needs no memory to do so."""

    name, package, unrounded_partials = "zeros", "torch", True

    def refusal(self, call):
        return None

    def forward(self, out, lse, *rest):
        out.zero_(), lse.zero_()

    def backward(self, dq, dk, dv, *rest):
        dq.zero_(), dk.zero_(), dv.zero_()


def measured(group, plan, dtype, batch):
    """The peaks of the second step, forward and backward: the first makes the batch's tables."""
    for step in range(2):
        tensors = []
        for block, layout in zip(plan.sections.blocks, (plan.layout, plan.kv_layout, plan.kv_layout), strict=True):
            rows = int(layout.row_counts[group.rank])
            tensors.append(torch.randn(rows, *batch, block.num_heads, block.head_dim).to(dtype).requires_grad_())
        gradient = tensors[0].new_ones(*tensors[0].shape[:-1], tensors[2].shape[-1])
        memory = PeakMemory()
        with memory if step else nullcontext():
            out = attention(*tensors, plan, memory.watch(group), kernel=Zeros())
            forward = memory.peak
            memory.restart()
            torch.autograd.grad(out, tensors, gradient)
    return forward, memory.peak


def check(plan, dtype=torch.float32, batch=()):
    copies = batch[0] if batch else 1
    for rank, peaks in enumerate(run_ranks(measured, plan.cp_size, plan, dtype, batch)):
        for peak, forward in zip(peaks, (True, False), strict=True):
            formula = copies * peak_bytes(plan, rank, dtype.itemsize, forward=forward)
            assert peak == pytest.approx(formula, rel=SLACK), f"rank {rank}, {forward=}: {peak} and not {formula}"


def planned(scheme, cp, layout="zigzag", lengths=RAGGED, shape="6:2", mask="causal", align=1, **options):
    packing = Packing(lengths)
    mask = Mask.named(packing, mask)
    layout = layout_by_name(layout, packing, cp, align=align, seed=0, mask=mask)
    return plan_attention(packing, layout, mask=mask, scheme=scheme, **SHAPES[shape], **options)


def grids(schemes, sizes):
    return [(scheme, cp) for scheme in schemes for cp in sizes if cp == 4 or "+" not in scheme]


@pytest.mark.filterwarnings("ignore:.*compute nothing here")
@pytest.mark.parametrize(
    ("scheme", "cp", "layout", "dtype", "shape", "batch"),
    covering(
        tuple(SCHEMES), (3, 4), ("zigzag", "contiguous", "random"), (torch.bfloat16, torch.float32, torch.float64),
        tuple(SHAPES), ((), (2,)), allowed=lambda scheme, cp, *_: cp == 4 or "+" not in scheme,
    ),
    ids=str,
)  # fmt: skip
@pytest.mark.few(of=lambda **values: tuple(values.values()))
def test_the_peak_is_the_formula(scheme, cp, layout, dtype, shape, batch):
    """With a batch axis it is as many times as much."""
    check(planned(scheme, cp, layout, shape=shape), dtype, batch)


@pytest.mark.parametrize(("scheme", "cp"), grids(SCHEMES, (3, 4)))
@pytest.mark.parametrize(
    "options",
    [
        {"mask": "window:20,0"}, {"mask": "full", "lengths": (5, 1030)}, {"align": 16}, {"lengths": (1, 1)},
        {"lengths": (300,), "shape": "24/16"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.few
def test_the_peak_is_the_formula_where_ranks_differ(scheme, cp, options):
    check(planned(scheme, cp, **options))


@pytest.mark.parametrize("chunks", [1, 3, 7])
@pytest.mark.parametrize("scheme", [name for name, s in SCHEMES.items() if s.chunks_keys and not s.is_product])
@pytest.mark.few
def test_the_peak_is_the_formula_in_any_number_of_head_chunks(scheme, chunks):
    check(planned(scheme, 3, shape="7 heads", head_chunks=chunks), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.few
def test_the_peak_is_the_formula_where_keys_are_fetched_twice(chunks, dtype, monkeypatch):
    add_halves(monkeypatch)
    check(planned("halves", 4, shape="7 heads", head_chunks=chunks), dtype)


@pytest.mark.parametrize(
    ("scheme", "cp", "dtype", "shape", "chunks", "mask"),
    covering(
        TILED,
        (3, 4),
        (torch.bfloat16, torch.float32, torch.float64),
        tuple(SHAPES),
        (1, 2),
        ("causal", "full"),
        allowed=lambda scheme, cp, dtype, shape, chunks, mask: (
            (cp == 4 or "+" not in scheme) and (chunks == 1 or (shape == "7 heads" and "+" not in scheme))
        ),
    ),
    ids=str,
)
@pytest.mark.few(of=lambda **values: tuple(values.values()))
def test_the_peak_is_the_formula_whichever_rank_computes_a_tile(scheme, cp, dtype, shape, chunks, mask, monkeypatch):
    for seed in range(2):
        assign_at_random(monkeypatch, seed)
        plan = planned(scheme, cp, shape=shape, head_chunks=chunks, mask=mask, align=4)
        assert plan.attend.moves_queries(forward=True)
        assert plan.attend.moves_queries(forward=False)
        check(plan, dtype)


@pytest.mark.parametrize("shape", ["4:1 small", "24/16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.few
def test_the_peak_is_the_formula_where_one_rank_computes_all(dtype, shape, monkeypatch):
    assign_all_to(monkeypatch, 1)
    check(planned("tiled", 3, shape=shape, head_chunks=1), dtype)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(
    ("scheme", "cp", "chunks"), [("a2a", 3, 2), ("a2a", 2, 3), ("a2a+p2p", 4, 2), ("a2a+p2p", 4, 3)]
)
@pytest.mark.few
def test_the_peak_is_the_formula_where_heads_change_places_in_chunks(scheme, cp, chunks, layout):
    check(planned(scheme, cp, layout, shape="7 heads", head_chunks=chunks), torch.bfloat16)


@pytest.mark.parametrize(("scheme", "cp"), grids(SCHEMES, (3, 4)))
@pytest.mark.few
def test_the_peak_of_cross_attention_is_the_formula(scheme, cp):
    packing, keys = Packing([70, 1, 300]), Packing([500, 3, 90])
    plan = plan_attention(
        packing, Layout.zigzag(packing, cp), kv_packing=keys, kv_layout=Layout.contiguous(keys, cp), scheme=scheme,
        heads=8, kv_heads=4, head_dim=16,
    )  # fmt: skip
    check(plan)


def test_one_rank_allocates_what_it_returns_and_saves():
    plan = planned("a2a", 1)
    check(plan)
    tokens, heads = sum(RAGGED), 6
    assert peak_bytes(plan, 0, 4, forward=True) == tokens * heads * (16 + 1) * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("cp", "hosts", "options"), [(4, 2, {}), (5, 2, {"head_chunks": 1}), (6, 3, {"mask": "full"})])
@pytest.mark.few
def test_the_peak_is_the_formula_where_keys_go_by_host(cp, hosts, options, dtype):
    plan = planned("exact_by_host", cp, topology=machine("h100").topology(cp, hosts), **options)
    assert plan.collectives(forward=True) == 2 * plan.attend.head_chunks
    check(plan, dtype)
