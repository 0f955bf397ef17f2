"""Block tables that change with each batch: planned anew and exact, or refused where they have too many blocks."""

import re

import numpy as np
import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.predict.hardware import Link, Topology
from megatron_cp.planner.tiled import MOST_RUNS
from megatron_cp.testing.parity import Case, run_layer, whole
from tests.limits import limit
from tests.scheme_cases import check_results

LENGTHS, BLOCK, BEST = (37, 1, 60, 5, 28), 4, 4
SHAPE = {"heads": 4, "groups": 2, "head_dim": 8, "value_head_dim": 8}


def top_k(batch):
    """Makes a table in which a block of queries sees itself and the best earlier blocks, by scores of this batch."""
    blocks = -(-sum(LENGTHS) // BLOCK)
    scores = np.random.default_rng(batch).random((blocks, blocks)) + 2 * np.eye(blocks)
    scores[np.triu_indices(blocks, 1)] = -1
    best = np.argsort(-scores, axis=1, kind="stable")[:, :BEST]
    table = np.zeros((blocks, blocks), dtype=bool)
    np.put_along_axis(table, best, True, axis=1)
    return table & (scores >= 0)


def run_batches(group, cases):
    """Runs batch after batch in one process group, and plans each just before."""
    return [run_layer(group, case) for case in cases]


@pytest.mark.parametrize(
    ("size", "scheme"), [(3, "tiled"), pytest.param(4, "tiled", marks=pytest.mark.thorough), (4, "a2a+tiled")]
)
def test_a_new_table_for_each_batch_is_dense_attention(size, scheme):
    cases = [
        Case("attention", size, LENGTHS, scheme=scheme, mask=("from_blocks", top_k(batch), BLOCK), seed=batch, **SHAPE)
        for batch in range(5)
    ]
    plans = [case.plan() for case in cases]  # which the ranks share while they are held
    ranks = run_ranks(run_batches, size, cases, timeout=limit(60))
    assert len({plan.fingerprint() for plan in plans}) == len(cases)
    for number, (case, plan) in enumerate(zip(cases, plans, strict=True)):
        assert max(plan.bytes_sent(8, forward=True)) > 0
        check_results(case, whole(case, [results[number] for results in ranks]))


def chequered(runs):
    """So many visible blocks, no two side by side, of two tokens each: of one, a diagonal would be a single band."""
    blocks = int(np.ceil(np.sqrt(2 * runs))) + 1
    table = np.indices((blocks, blocks)).sum(axis=0) % 2 == 0
    table[np.unravel_index(np.flatnonzero(table)[runs:], table.shape)] = False
    return Mask.from_blocks(Packing([2 * blocks]), table, 2)


@pytest.mark.parametrize("scheme", ["tiled", "a2a+tiled"])
def test_rejects_a_table_of_too_many_blocks(scheme):
    mask = chequered(2 * MOST_RUNS)
    assert len(mask.bands) > MOST_RUNS
    shape = {"heads": 2, "kv_heads": 2, "head_dim": 8, "mask": mask, "scheme": scheme}
    with pytest.raises(ArgumentError) as refused:
        plan_attention(mask.packing, Layout.contiguous(mask.packing, 4), **shape)
    said = str(refused.value)
    assert f"; allowed: at most {MOST_RUNS} runs of blocks" in said
    assert "Take larger blocks, or exact" in said
    assert MOST_RUNS < int(re.match(r"mask: got '(\d+) runs'", said)[1]) <= len(mask.bands)


def test_auto_says_that_a_table_has_too_many_blocks_for_tiles():
    """Links are so slow that tiles would be worth a search."""
    mask, slow = chequered(2 * MOST_RUNS), Link(1e-6, 0.0, 1e7)
    plan = plan_attention(
        mask.packing, Layout.contiguous(mask.packing, 4), heads=2, head_dim=8, mask=mask, search_seconds=0.01,
        topology=Topology((0,) * 4, slow, slow),
    )  # fmt: skip
    assert not any("tiled" in price.scheme for price in plan.prices)
    for name in ("tiled", "a2a+tiled (u = 2)"):
        (note,) = (note for note in plan.notes if note.startswith(f"left out: {name}, for mask: got "))
        assert f"; allowed: at most {MOST_RUNS} runs of blocks" in note
        assert f"note: {note}" in plan.explain()


def test_what_one_rank_holds_is_no_part_of_that_limit():
    packing = Packing([1] * (MOST_RUNS + 1) + [900])
    shape = {"heads": 1, "head_dim": 8, "mask": Mask.causal(packing), "scheme": "tiled"}
    assert len(shape["mask"].bands) > MOST_RUNS
    plan = plan_attention(packing, Layout.contiguous(packing, 4), **shape)
    assert plan.attend.tiled is not None
