"""Tests of the picture of a plan: tokens and work of every rank, on labelled axes."""

import pytest
from matplotlib.figure import Figure

import megatron_cp as cp
from megatron_cp.planner.picture import save_picture


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a plan, and returns what would be saved."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: (path.touch(), figures.append(figure)))

    def draw(plan):
        save_picture(plan, tmp_path / "plan.png")
        return figures.pop()

    return draw


def test_shows_the_tokens_and_the_work_of_every_rank(drawn):
    packing = cp.Packing((5, 1, 6))
    layout = cp.Layout.zigzag(packing, 3)
    plan = cp.plan_attention(packing, layout, heads=3, head_dim=4)
    figure = drawn(plan)
    stream, shares = figure.axes
    for axes in (stream, shares):
        assert axes.get_ylabel() == "rank"
        assert list(axes.get_yticks()) == [0, 1, 2]
        assert axes.get_ylim() == (2.5, -0.5)  # rank 0 on top
    assert stream.get_xlim() == (0, 12)
    assert "token of the packed stream" in stream.get_xlabel()
    bars = [round(bar.get_width() * 12 / 100) for bar in shares.patches[:3]]
    assert bars == layout.token_counts.tolist()
    work = [bar.get_width() for bar in shares.patches[3:]]
    assert work == pytest.approx([100 * each / sum(plan.work_per_rank()) for each in plan.work_per_rank()])
    assert "3 documents, 12 tokens" in figure.get_suptitle()


def test_shows_both_layouts_where_hidden_states_are_redistributed(drawn):
    packing = cp.Packing((50, 1, 600))
    layout = cp.Layout.zigzag(packing, 2)
    plan = cp.plan_linear(packing, layout, "gdn", heads=4, head_dim=8, mode="redistribute", hidden_size=16)
    titles = [axes.get_title() for axes in drawn(plan).axes[::2]]
    assert [title.split(",")[0] for title in titles] == ["outside the run of linear layers", "in the layers"]


def test_shows_the_plan_of_each_kind_of_layer(drawn):
    packing = cp.Packing((50, 1, 600))
    layout = cp.Layout.zigzag(packing, 2)
    plans = [
        cp.plan_attention(packing, layout, heads=4, head_dim=8),
        cp.plan_linear(packing, layout, "gdn", heads=4, head_dim=8, mode="chunkwise"),
    ]
    figure = drawn(plans)
    assert [axes.get_title() for axes in figure.axes[::2]] == [f"attention by {plans[0].scheme}", "gdn by chunkwise"]
    assert f"attention by {plans[0].scheme}, gdn by chunkwise over 2 ranks" in figure.get_suptitle()


@pytest.mark.parametrize(("ranks", "has_bar"), [(2, False), (12, True)])
def test_tiles_have_a_legend_of_few_ranks_and_a_colour_bar_of_many(ranks, has_bar, drawn):
    packing = cp.Packing((300, 20))
    layout = cp.Layout.zigzag(packing, ranks)
    figure = drawn(cp.plan_attention(packing, layout, heads=1, head_dim=4, scheme="tiled"))
    (tiles,) = [part for part in figure.subfigs if len(part.axes) and "tiles of the mask" in part.axes[0].get_title()]
    assert len(tiles.axes) == 2 + has_bar
    assert len(tiles.legends) == (not has_bar)
