"""`choose_layout`: by the predicted time of all layers of a model, the same on every rank, and remembered."""

import dataclasses

import pytest

import megatron_cp as cp
from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.model_plan import plan_model
from megatron_cp.planner import layouts, tiled
from megatron_cp.planner.layouts import CHOICES, choose_layout, layout_by_name
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.price import priced
from megatron_cp.planner.tiles import cuts
from tests.refusals import rejects

H100 = machine("h100")
LONG, MANY = cp.Packing([60000, 5000]), cp.Packing([1000] * 65)
GATHERED = cp.AttentionSpec(8, 2, 64, 64, scheme="all_gather")
EXCHANGED = cp.AttentionSpec(8, 8, 64, 64, scheme="a2a")
LINEAR = cp.LinearSpec("gdn", 32, 16, 128, 128, mode="chunkwise")


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(layouts, "_CHOSEN", layouts._RecentChoices(4))


@pytest.mark.parametrize("name", ["qwen3-next", "llama3-8b", "nemotron-h"])
@pytest.mark.parametrize("packing", [cp.Packing([16000, 300, 9000, 4000, 1, 3000]), cp.Packing([700] * 47)], ids=str)
def test_it_is_the_layout_of_the_cheapest_plan(name, packing):
    """The choice differs between layouts by as much as `plan --whole` does."""
    model = read_model(name)
    choice = choose_layout(packing, 8, model.slots())
    times = {
        each: plan_model(
            model, layout_by_name(each, packing, 8), Job(8, each, sharding="none"), H100, H100.topology(8)
        ).milliseconds
        for each in CHOICES
    }
    prices = {price.name: price.milliseconds for price in choice.prices}
    assert set(prices) == set(CHOICES)
    assert times[choice.name] <= 1.001 * min(times.values())
    for each, milliseconds in times.items():
        assert prices[each] == pytest.approx(milliseconds, rel=0.005)


def test_the_choice_is_explained_layout_by_layout():
    lines = choose_layout(LONG, 4, [GATHERED, LINEAR]).explain().splitlines()
    assert lines[0].startswith("chosen layout ")
    assert len(lines) >= 3
    assert all("1 x attention by all_gather" in line and "1 x gdn by chunkwise" in line for line in lines[:3])


def test_the_chosen_layout_has_what_shard_batch_asks_for():
    """A row on each rank, and whole multiples of the tensor-parallel ranks."""
    choice = choose_layout(cp.Packing([5]), 8, [GATHERED], align=2, min_rows=1)
    assert choice.layout.padded(align=2, min_rows=1) is choice.layout
    assert (choice.layout.row_counts % 2 == 0).all()
    assert (choice.layout.row_counts > 0).all()


def test_a_choice_is_remembered_by_value_and_few_are(monkeypatch):
    first = choose_layout(LONG, 4, [GATHERED, GATHERED])
    with monkeypatch.context() as patched:
        patched.setattr(layouts, "_priced_layouts", lambda *given: pytest.fail("priced again"))
        again = choose_layout(cp.Packing([60000, 5000]), 4, [dataclasses.replace(GATHERED)] * 2)
        assert (again.name, again.prices) == (first.name, first.prices)
        assert again.layout == first.layout
        for changed in (
            lambda: choose_layout(cp.Packing([5000, 60000]), 4, [GATHERED] * 2),
            lambda: choose_layout(LONG, 5, [GATHERED] * 2),
            lambda: choose_layout(LONG, 4, [GATHERED]),
            lambda: choose_layout(LONG, 4, [EXCHANGED] * 2),
            lambda: choose_layout(LONG, 4, [GATHERED] * 2, align=2),
            lambda: choose_layout(LONG, 4, [GATHERED] * 2, min_rows=1),
        ):
            with pytest.raises(pytest.fail.Exception):
                changed()
    for length in range(10, 20):
        choose_layout(cp.Packing([length]), 2, [EXCHANGED])
    assert len(layouts._CHOSEN) == 4


def test_near_predictions_count_as_equal():
    """Ranks whose processors add in other ways must not part over the last bits."""
    choice = choose_layout(cp.Packing([8]), 2, [EXCHANGED])
    best = min(price.milliseconds for price in choice.prices)
    near = [price.name for price in choice.prices if price.milliseconds <= 1.001 * best]
    assert choice.name == next(name for name in CHOICES if name in near)


def test_one_rank_and_one_graph_have_nothing_to_choose():
    choice = choose_layout(LONG, 1, [GATHERED])
    assert choice.prices == ()
    assert "one rank holds all tokens" in choice.explain()
    rejects("A graph repeats the launches of one layout", cp.GraphTables, 16, 3, 2, layout="auto")


def test_layouts_that_a_layer_cannot_run_in_are_left_out(monkeypatch):
    """Zigzag cuts a mask into more pieces than contiguous ranges do."""
    monkeypatch.setattr(tiled, "USUAL_STEPS", 100)  # how well tiles are assigned is not asked here
    slot = cp.AttentionSpec(8, 2, 64, 64, scheme="tiled")
    monkeypatch.setattr(cuts, "MOST_PIECES", 90)
    rejects(" ranges, ", slot.plan, layout_by_name("zigzag", LONG, 4))
    choice = choose_layout(LONG, 4, [slot])
    assert {price.name for price in choice.prices} == {"contiguous", "balanced"}
    assert "layout zigzag was left out: layout: got " in choice.explain()
    monkeypatch.setattr(cuts, "MOST_PIECES", 1)
    rejects("pieces", choose_layout, cp.Packing([61000, 5000]), 4, [slot])


def test_very_many_documents_and_layers_by_name(monkeypatch):
    monkeypatch.setattr(layouts, "VERY_MANY", 100)
    choice = choose_layout(MANY, 4, [EXCHANGED])
    assert [price.name for price in choice.prices if price.name == "zigzag"] == []
    assert "layout zigzag was not compared" in choice.explain()
    chosen = layout_by_name("auto", LONG, 4, slots=[GATHERED])
    assert chosen == choose_layout(LONG, 4, [GATHERED]).layout
    rejects("slots: got \\[\\]; allowed: the slot of each layer", layout_by_name, "auto", LONG, 4)


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "balanced", "random"])
def test_every_name_has_the_rows_that_it_is_asked_for(name):
    layout = layout_by_name(name, cp.Packing([3]), 5, align=2, min_rows=1)
    assert (layout.align, layout.min_rows) == (2, 1)


def test_tiles_are_assigned_in_each_layout():
    """So owners of rows are chosen with what tiles send from them."""
    layer = cp.AttentionSpec(1, 1, 128, 128, mask="global_local", scheme="tiled", hardware=H100)
    choice = choose_layout(cp.Packing([1024]), 4, [layer])
    assert {price.name for price in choice.prices} == set(CHOICES)
    assert {kind.scheme for price in choice.prices for kind in price.kinds} == {"tiled"}
    for price in choice.prices:
        layout = layout_by_name(price.name, cp.Packing([1024]), 4)
        assert price.milliseconds == pytest.approx(priced(layer.plan(layout), H100, H100.topology(4)).total)


def test_balanced_is_made_for_masks_of_other_keys_too():
    packing, keys = cp.Packing([9, 1, 30]), cp.Packing([4, 12, 2])
    for mask in (cp.Mask.causal(packing, keys), cp.Mask.full(packing, keys)):
        assert layout_by_name("balanced", packing, 3, mask=mask) == cp.Layout.balanced(packing, 3, mask=mask)
    rejects("mask: .*over another packing", layout_by_name, "balanced", keys, 3, mask=cp.Mask.causal(packing, keys))
