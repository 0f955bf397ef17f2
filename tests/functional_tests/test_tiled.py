"""Attention over tiles that a planner assigned: exact, in the bytes that were planned, taken by auto where it pays."""

import contextlib
import dataclasses
import functools
import warnings

import numpy as np
import pytest
import torch

from megatron_cp.executor.agreement import compare_calls
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.choose import _search_notes
from megatron_cp.testing.parity import Case, draw, run_layer, whole
from megatron_cp.testing.poison import poisoned
from tests.counting_group import CountingGroup
from tests.covering import covering
from tests.limits import limit
from tests.scheme_cases import check, check_results


@pytest.fixture(scope="module", autouse=True)
def quick_search():
    """Plans end after a twentieth of the usual moves: a search is the subject of the planner's own tests."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tiled", "tiles.fast"):
            patch.setattr(f"megatron_cp.planner.{module}.USUAL_STEPS", 400)
        yield


TOKENS, BLOCK = 47, 5
PACKS = {"1 document": (TOKENS,), "5 documents": (11, 1, 19, 3, 13)}
SHAPES = {
    "MHA": {"heads": 3, "groups": 3, "head_dim": 8, "value_head_dim": 8},
    "8:2": {"heads": 8, "groups": 2, "head_dim": 8, "value_head_dim": 8},
    "one head": {"heads": 1, "groups": 1, "head_dim": 8, "value_head_dim": 8},
    "MLA": {"heads": 2, "groups": 2, "head_dim": 24, "value_head_dim": 16},
}


def table():
    """Makes a table in which blocks of queries see themselves and a few others; one sees none, the last is short."""
    blocks = -(-TOKENS // BLOCK)
    found = np.random.default_rng(3).random((blocks, blocks)) < 0.35
    found |= np.eye(blocks, dtype=bool)
    found[3] = False
    return found


# Masks of one spelling for both packs, and such that depend on the pack.
MASKS = {
    **{name: name for name in ("full", "causal", "strided", "global_local", "star", "streaming")},
    **{name: name for name in ("window:6,0", "window:4,3", "first:2+window:5,0", "prefix:7", "chunk:6")},
    "shared questions": {
        "1 document": ("shared_question", ((17, 11, 4, 15),)),
        "5 documents": ("shared_question", ((5, 4, 2), (1,), (7, 0, 12), (1, 1, 1), (13,))),
    },
    "slices": (
        "from_slices",
        ((0, 30, 5, 47, "causal"), (2, 40, 0, 11, "full"), (20, 47, 8, 30, "inverse_causal"), (9, 33, 14, 47, "both")),
    ),
    "blocks": ("from_blocks", table(), BLOCK),
    "blocks below the diagonal": ("from_blocks", np.tril(table()), BLOCK),
}


def case_of(mask, pack, shape, size, layout="zigzag", seed=0):
    given = MASKS[mask]
    given = given[pack] if isinstance(given, dict) else given
    return Case("attention", size, PACKS[pack], layout, scheme="tiled", mask=given, seed=seed, **SHAPES[shape])


def run_twice(group, case, problem, other):
    """This rank's results of two problems, and the bytes that it sent for the first."""
    compare_calls(group, False)  # what a plan costs once is not part of it
    counted = CountingGroup(group)
    with poisoned() if case.seed % 8 == 0 else contextlib.nullcontext():
        first = run_layer(counted, case, problem)
    return first, counted.bytes_sent, run_layer(group, case, other)


def with_other_numbers(problem, packing, document):
    """Returns the problem with other numbers in one document, of everything that has rows of tokens."""
    start, end = packing.cu_seqlens[document : document + 2].tolist()

    def changed(tensor):
        tensor = tensor.clone()
        tensor[start:end] = 3 - 2 * tensor[start:end]
        return tensor

    inputs = {name: changed(tensor) for name, tensor in problem.inputs.items()}
    return dataclasses.replace(problem, inputs=inputs, output_gradient=changed(problem.output_gradient))


AXES = tuple(MASKS), tuple(PACKS), tuple(SHAPES), (3, 4, 5, 8), ("contiguous", "zigzag", "balanced", "random")


@pytest.mark.parametrize("axes", covering(*AXES), ids=str)
@pytest.mark.few(of=lambda axes: axes)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of ranks without tokens
def test_planned_tiles_are_dense_attention_in_the_planned_bytes(axes):
    """A case is run twice: as it is, for the same bits, or with one document changed, of which no other may notice."""
    case = case_of(*axes, seed=list(MASKS).index(axes[0]))
    plan, problem = case.plan(), draw(case)  # a plan that all share while it is held
    document = 2 if len(case.lengths) > 1 else None
    other = problem if document is None else with_other_numbers(problem, case.packing, document)
    ranks = run_ranks(run_twice, case.cp, case, problem, other, timeout=limit(60))
    planned = [sum(pair) for pair in zip(*(plan.bytes_sent(8, forward=way) for way in (True, False)), strict=True)]
    assert [sent for _, sent, _ in ranks] == planned
    first, second = (whole(case, [each[place] for each in ranks]) for place in (0, 2))
    check_results(case, first)
    documents = case.packing.documents_of(np.arange(case.packing.total))
    others = torch.from_numpy(documents != document)  # all of them, if no document was changed
    for name, value in first.items():
        assert torch.equal(value[others], second[name][others]), name


def test_tiles_travel_in_the_cases():
    """Most of them: in most, queries leave their owners too."""
    plans = [case_of(mask, "1 document", "8:2", 4).plan() for mask in MASKS]
    assert all(max(plan.bytes_sent(8, forward=True)) > 0 for plan in plans)
    visited = [plan for plan in plans if plan.attend.moves_queries(forward=True)]
    assert len(visited) >= len(plans) // 3


@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
@pytest.mark.parametrize(("heads", "groups", "chunks"), [(6, 3, 2), (1, 1, None)])
def test_head_ranks_may_have_no_heads_in_a_chunk(heads, groups, chunks):
    shape = {"heads": heads, "groups": groups, "head_chunks": chunks, "head_dim": 8, "value_head_dim": 8}
    check(Case("attention", 4, PACKS["5 documents"], scheme="a2a+tiled", ulysses_degree=2, mask="strided", **shape))


def test_the_chunks_planned_before_do_not_change_a_plan():
    packing = Packing(PACKS["5 documents"])
    shape = {"heads": 2, "kv_heads": 2, "head_dim": 1, "value_head_dim": 2, "scheme": "tiled"}
    mask = Mask.named(packing, "strided")
    fresh = plan_attention(packing, Layout.contiguous(packing, 4), **shape, mask=mask, head_chunks=2)
    layout = Layout.contiguous(packing, 4)
    plan_attention(packing, layout, **shape, mask=mask, head_chunks=1)
    assert plan_attention(packing, layout, **shape, mask=mask, head_chunks=2).fingerprint() == fresh.fingerprint()


@functools.cache
def plan_of(mask, *, heads=1, kv_heads=1, **changes):
    packing = Packing([65_536])
    layout = Layout.contiguous(packing, 4)
    return plan_attention(
        packing, layout, heads=heads, kv_heads=kv_heads, head_dim=128, mask=Mask.named(packing, mask), **changes
    )


def test_no_rank_has_much_more_work_and_auto_takes_tiles_where_they_pay(monkeypatch):
    plan = plan_of("causal", scheme="tiled")
    assert plan.work_imbalance <= 1.06
    assert plan_of("causal", scheme="exact").work_imbalance > 1.7
    assert plan_of("global_local").scheme != "tiled"
    with monkeypatch.context() as patch:
        patch.setattr("megatron_cp.planner.tiled.USUAL_STEPS", 400)  # poor tiles pay already
        assert plan_of("global_local", search_seconds=0.01).scheme == "tiled"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert plan_of("causal", heads=32, kv_heads=32, search_seconds=0.01).scheme == "a2a"


def test_what_is_known_of_a_plan_is_said():
    plan = plan_of("global_local", scheme="tiled")
    for found in plan.attend.tiled.solutions:
        assert 0 < found.bound <= found.busiest_bytes
        assert found.load_cap >= plan.mask.area / 4
    # Rows that no tile of a chunk needs are not sent: what is sent may be less than what was assigned, never more.
    assert max(plan.bytes_sent(2, forward=True)) <= plan.attend.tiled.solutions[0].busiest_bytes
    said = plan.explain()
    assert "tiles of the mask assigned to 4 ranks" in said
    assert said.count("no assignment of these needs less than") + said.count("which is the least") == 2


@pytest.mark.parametrize("scheme", [pytest.param("tiled", marks=pytest.mark.thorough), "auto"])
def test_a_plan_says_that_a_search_was_too_large_for_the_solver(monkeypatch, scheme):
    """Also where auto priced tiles and took others."""
    monkeypatch.setattr("megatron_cp.planner.tiles.exact.MOST_CHOICES", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_of("global_local", scheme=scheme, search_seconds=0.02)
        quick, exact = plan_of("global_local", scheme="tiled"), plan_of("global_local", scheme="exact")
    assert plan.attend.tiled is not None
    texts = [note for note in plan.notes if "the search makes only random moves, and proves nothing" in note]
    assert texts
    assert f"note: {texts[0]}" in plan.explain()
    assert not any("proves nothing" in note for note in quick.notes)
    (of_others,) = _search_notes([exact, plan], exact)[:1]
    assert of_others.startswith("tiled")
    assert of_others.endswith(texts[0])


def test_tiles_are_not_assigned_where_they_cannot_win(monkeypatch):
    """A head exchange that is nearly as fast as the work alone; auto says what tiles take at least."""

    def fail(*_):
        raise AssertionError("a search that cannot be worth it")

    monkeypatch.setattr("megatron_cp.planner.request.assigned_tiles", fail)
    packing = Packing([131_072])
    layout, shape = Layout.contiguous(packing, 4), {"heads": 32, "kv_heads": 32, "head_dim": 128}
    plan = plan_attention(packing, layout, **shape, mask=Mask.full(packing), search_seconds=1)
    assert plan.scheme == "a2a"
    of_tiles = [price for price in plan.prices if "tiled" in price.scheme]
    assert [price.scheme + price.detail for price in of_tiles] == ["tiled", "a2a+tiled (u = 2)"]
    assert all(price.is_bound and price.total * 1.05 + 0.1 >= plan.prices[0].total for price in of_tiles)
