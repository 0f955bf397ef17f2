"""Packs of more tokens than 31, 32 or 40 bits count: planned right, in little memory, or refused."""

import re
import tracemalloc

import numpy as np
import pytest
import torch

from megatron_cp.exchange.device import on_device
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.batch import BatchPlan, LinearSpec
from megatron_cp.planner.linear import plan_linear
from megatron_cp.planner.predict.memory import buffer_bytes, peak_bytes
from tests.refusals import rejects

LARGE = [2**31, 2**33 - 7, 2**39 + 1]
CP, CPU = 4, torch.device("cpu")


@pytest.fixture
def little_memory():
    """Far below a byte a token."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 2**20


def causal(n):
    return n * (n + 1) // 2


@pytest.mark.parametrize("n", [2**31 + 1, 2**32, 2**33 - 1, 2**40])
def test_areas_are_exact_beyond_63_bits(n):
    assert Mask.causal(Packing([n])).area == causal(n)
    assert Mask.full(Packing([n])).area == n * n
    assert Mask.window(Packing([n]), left=2**30).area == causal(n) - causal(n - 2**30 - 1)
    assert Mask.full(Packing([n]), Packing([3])).area == 3 * n
    if n < 2**40:
        assert Mask.causal(Packing([5, n, 1])).area == 15 + causal(n) + 1


def test_layouts_are_even_at_any_total():
    for total in (2**62, 2**62 + 1023, 2**63 - 2**12):
        counts = Layout.contiguous(Packing([total]), 1024).token_counts.tolist()
        assert sum(counts) == total
        assert max(counts) - min(counts) <= 1
    for total in (2**31 - 1, 2**31, 2**40 + 17):
        layout = Layout.zigzag(Packing([total]), 5)
        assert sum(layout.token_counts.tolist()) == total
        assert np.ptp(layout.token_counts) <= 1
    layout = Layout.contiguous(Packing([3, 2]), 2)
    labels, mask = layout.labels(np.arange(5), 1, shift=2**63 - 1)
    assert labels.tolist() == [-100] * 3
    assert not mask.any()


def test_balanced_looks_at_no_token(little_memory):
    packing = Packing([7, 2**30 + 1, 1, 2**29])
    layout, mask = Layout.balanced(packing, CP), Mask.causal(packing)
    work = plan_attention(packing, layout, heads=8, head_dim=64, mask=mask, scheme="exact").work_per_rank()
    assert np.ptp(layout.token_counts) <= 1
    assert max(work) * CP <= 1.002 * sum(work)


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "zigzag_of_pack"])
@pytest.mark.parametrize("n", LARGE)
def test_attention_is_planned(n, name, little_memory):
    packing = Packing([7, n, 1])
    layout = getattr(Layout, name)(packing, CP)
    mask, whole = Mask.causal(packing), 28 + causal(n) + 1
    for scheme, record in SCHEMES.items():
        if record.assigns_tiles:  # whose sums of work are of 53 bits
            rejects("visible pairs", plan_attention, packing, layout, heads=8, head_dim=64, mask=mask, scheme=scheme)
            continue
        plan = plan_attention(packing, layout, heads=8, head_dim=64, mask=mask, scheme=scheme)
        assert sum(plan.work_per_rank()) == 8 * whole
        assert sum(plan.bytes_sent(2, forward=True)) > 0
        assert plan.explain().startswith(f"attention by {scheme} over {CP} ranks: 3 documents, {n + 8} tokens")
        assert peak_bytes(plan, 0, 2, forward=False) > peak_bytes(plan, 0, 2, forward=True) > n // CP
        assert buffer_bytes(plan, 0, 2) > n // CP


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize("n", LARGE)
def test_linear_layers_are_planned(n, name, little_memory):
    packing = Packing([7, n, 1])
    layout = getattr(Layout, name)(packing, CP)
    for kind, sizes in (("gdn", {"heads": 8, "head_dim": 64}), ("conv1d", {"channels": 64})):
        for mode in ("headwise", "chunkwise", "redistribute", "auto"):
            plan = plan_linear(packing, layout, kind, mode=mode, hidden_size=256, **sizes)
            assert f"{n + 8} tokens" in plan.explain()
            assert plan.work_imbalance >= 1
    assert len(BatchPlan(layout, [LinearSpec("mamba", 8, 1, 16, 16, hidden_size=64)]).fingerprint()) == 16


def test_bytes_of_a_redistribution_are_those_of_the_tokens_that_move():
    packing = Packing([700, 1, 300])
    layout, inner = Layout.zigzag(packing, CP), Layout.contiguous(packing, CP)
    plan = plan_linear(packing, layout, "gdn", heads=8, head_dim=16, mode="redistribute", hidden_size=24)
    moved = layout.owners != inner.owners
    counts = np.bincount(layout.owners[moved], minlength=CP) + np.bincount(inner.owners[moved], minlength=CP)
    assert plan.redistribution.bytes_sent(plan.layout, 2) == (counts * 24 * 2).tolist()


def test_located_tokens_are_those_of_the_tables():
    packing = Packing([40, 0, 1, 23])
    fragments = [[(50, 64), (3, 9)], [], [(0, 3), (20, 50)], [(9, 20)]]
    for layout in (Layout.from_fragments(packing, fragments), Layout.striped(packing, 3), Layout.zigzag(packing, 5)):
        owners, rows = layout.located(np.arange(64))
        assert owners.tolist() == layout.owners.tolist()
        for rank in range(layout.cp_size):
            assert rows[layout.tokens(rank)].tolist() == list(range(layout.token_counts[rank]))


def test_tables_hold_what_32_bits_hold():
    assert on_device(np.array([2**31 - 1, -(2**31)]), CPU).tolist() == [2**31 - 1, -(2**31)]
    assert on_device(np.array([2**31]), CPU, torch.int64).tolist() == [2**31]


BEYOND = Packing([2**40, 1])  # of what a mask's bounds tell apart


@pytest.mark.parametrize(
    ("argument", "says", "make"),
    [
        *(("packing", "fewer than 2**31 tokens", lambda number=number: on_device(np.array([0, number]), CPU))
          for number in (2**31, 2**40, -(2**31) - 1)),
        ("packing", "at most 2**40 tokens", lambda: Mask.causal(BEYOND)),
        ("packing", "at most 2**40 tokens", lambda: Mask.window(BEYOND, 5)),
        ("kv_packing", "at most 2**40 tokens", lambda: Mask.full(Packing([1, 1]), BEYOND)),
        ("mask", "Use zigzag", lambda: Layout.balanced(Packing([2**33]), CP)),
        ("align", "fewer than 2**63", lambda: Layout.contiguous(Packing([5]), 2).padded(align=2**62)),
        ("min_rows", "fewer than 2**63", lambda: Layout.contiguous(Packing([5]), 2).padded(min_rows=2**62)),
    ],
)  # fmt: skip
def test_rejects_what_is_too_large_to_count(argument, says, make):
    rejects(f"^{argument}: got .*{re.escape(says)}", make)
