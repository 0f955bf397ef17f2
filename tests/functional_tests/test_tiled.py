"""Attention over tiles that a planner assigned: exact, in the bytes that were planned, taken by auto where it pays."""

import functools
import warnings

import pytest

from megatron_cp.executor.agreement import compare_calls
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.planner.attention import _search_notes, plan_attention
from megatron_cp.testing.parity import Case, run_layer
from tests.counting_group import CountingGroup
from tests.scheme_cases import check


@pytest.fixture(scope="module", autouse=True)
def quick_search():
    """Plans end after a twentieth of the usual moves: a search is the subject of the planner's own tests."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tiled", "tiles.fast"):
            patch.setattr(f"megatron_cp.planner.{module}.USUAL_STEPS", 400)
        yield


ONE, FIVE = (131,), (37, 1, 60, 5, 28)
SHAPES = {
    "MHA": {"heads": 3, "groups": 3},
    "8:2": {"heads": 8, "groups": 2},
    "one head": {"heads": 1, "groups": 1},
    "MLA": {"heads": 2, "groups": 2, "head_dim": 24, "value_head_dim": 16},
}
MASKS = ("full", "causal", "strided", "global_local", "star", "streaming")
# Every mask with every shape, number of ranks and kind of pack, each pair at least once.
CASES = [
    (mask, tuple(SHAPES)[(row + column) % 4], (3, 4, 5, 8)[column], (ONE, FIVE)[(row + column // 2) % 2])
    for row, mask in enumerate(MASKS)
    for column in range(4)
]


def case_of(mask, shape, size, lengths, **changes):
    sizes = {"head_dim": 8, "value_head_dim": 8, **SHAPES[shape]}
    layout = ("contiguous", "zigzag")[size % 2]
    return Case("attention", size, lengths, **{"layout": layout, "scheme": "tiled", "mask": mask, **sizes, **changes})


@pytest.mark.parametrize(("mask", "shape", "size", "lengths"), CASES, ids=lambda value: str(value))
@pytest.mark.few(of=lambda mask, shape, size, lengths: (mask, shape, size, lengths))
def test_planned_tiles_are_dense_attention(mask, shape, size, lengths):
    check(case_of(mask, shape, size, lengths))


def bytes_of(group, case):
    compare_calls(group, False)  # what a plan costs once is not part of it
    counted = CountingGroup(group)
    run_layer(counted, case)
    return counted.bytes_sent


@pytest.mark.parametrize("mask", ["full", "strided", "star"])
def test_ranks_send_what_was_planned(mask):
    case = case_of(mask, "8:2", 4, FIVE)
    plan = case.plan()
    planned = [sum(pair) for pair in zip(*(plan.bytes_sent(8, forward=way) for way in (True, False)), strict=True)]
    assert run_ranks(bytes_of, 4, case) == planned
    assert max(planned) > 0


@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
@pytest.mark.parametrize(("heads", "groups", "chunks"), [(6, 3, 2), (1, 1, None)])
def test_head_ranks_may_have_no_heads_in_a_chunk(heads, groups, chunks):
    shape = {"heads": heads, "groups": groups, "head_chunks": chunks, "head_dim": 8, "value_head_dim": 8}
    check(Case("attention", 4, FIVE, scheme="a2a+tiled", ulysses_degree=2, mask="strided", **shape))


def test_the_chunks_planned_before_do_not_change_a_plan():
    packing = Packing(list(FIVE))
    shape = {"heads": 2, "kv_heads": 2, "head_dim": 1, "value_head_dim": 2, "scheme": "tiled"}
    mask = Mask.named(packing, "strided")
    fresh = plan_attention(packing, Layout.contiguous(packing, 4), **shape, mask=mask, head_chunks=2)
    layout = Layout.contiguous(packing, 4)
    plan_attention(packing, layout, **shape, mask=mask, head_chunks=1)
    assert plan_attention(packing, layout, **shape, mask=mask, head_chunks=2).fingerprint() == fresh.fingerprint()


def bits_of(group, case):
    return {name: tensor.view(-1).tolist() for name, tensor in run_layer(group, case).items()}


def test_the_same_run_twice_gives_the_same_bits():
    case = case_of("causal", "8:2", 5, FIVE)
    assert run_ranks(bits_of, 5, case) == run_ranks(bits_of, 5, case)


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
    texts = [note for note in plan.notes if "the search makes random moves alone, and proves nothing" in note]
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

    monkeypatch.setattr("megatron_cp.planner.attention.assigned_tiles", fail)
    packing = Packing([131_072])
    layout, shape = Layout.contiguous(packing, 4), {"heads": 32, "kv_heads": 32, "head_dim": 128}
    plan = plan_attention(packing, layout, **shape, mask=Mask.full(packing), search_seconds=1)
    assert plan.scheme == "a2a"
    of_tiles = [price for price in plan.prices if "tiled" in price.scheme]
    assert [price.scheme + price.detail for price in of_tiles] == ["tiled", "a2a+tiled (u = 2)"]
    assert all(price.is_bound and price.total * 1.05 + 0.1 >= plan.prices[0].total for price in of_tiles)
