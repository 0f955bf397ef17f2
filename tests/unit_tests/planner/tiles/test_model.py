"""Tile problems of masks, what an answer makes ranks send, and the bands that each rank computes."""

import functools

import numpy as np
import pytest

import megatron_cp as cp
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import bands as band
from megatron_cp.planner.tiles import TileWeights, bands_by_rank, solve, tiles_of
from megatron_cp.planner.tiles.problem import check, cost
from tests.refusals import rejects

WEIGHTS = TileWeights(3, 5, 7, 11)


def test_weights_of_a_direction():
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 64, "value_head_dim": 32, "item_size": 2}
    forward, backward = TileWeights.forward(**shape), TileWeights.backward(**shape)
    assert forward == TileWeights(8 * 64 * 2, 8 * 33 * 4, 2 * 96 * 2, 0)
    assert backward == TileWeights(8 * (96 * 2 + 8), 8 * 64 * 2, 2 * 96 * 2, 2 * 96 * 2)
    wide = TileWeights.forward(**shape | {"item_size": 8})
    assert wide.row_back == 8 * 33 * 8


def test_adjacent_tiles_of_a_rank_are_one_band():
    packing = cp.Packing([64])
    mask, layout = cp.Mask.full(packing), cp.Layout.contiguous(packing, 4)
    problem = tiles_of(mask, layout, weights=WEIGHTS)
    ranks = problem.rows.owners[problem.tile_rows]
    bands, offsets = bands_by_rank(mask, problem, ranks)
    assert bands[:, :4].tolist() == [[16 * rank, 16 * rank + 16, 0, 64] for rank in range(4)]
    assert offsets.tolist() == [0, 1, 2, 3, 4]
    grid = ranks // 2 * 2 + problem.columns.owners[problem.tile_columns] % 2
    assert len(bands_by_rank(mask, problem, grid)[0]) == 8


MASKS = ("causal", "full", "window:20,3", "first:2+window:9,0", "strided", "global_local", "star", "streaming")


def test_tiles_are_small_and_few():
    packing = cp.Packing([4096])
    for name in MASKS:
        problem = tiles_of(cp.Mask.named(packing, name), cp.Layout.contiguous(packing, 8), weights=WEIGHTS)
        assert problem.work.max() <= problem.total / 39
        assert problem.load_cap <= 1.05 * problem.total / 8
        assert max(problem.rows.owners.size, problem.columns.owners.size) <= 2 * 16 * 8
    packing = cp.Packing([37, 41] * 400)
    problem = tiles_of(cp.Mask.causal(packing), cp.Layout.contiguous(packing, 4), weights=WEIGHTS)
    assert problem.num_tiles <= 50
    assert cost(problem, problem.rows.owners[problem.tile_rows]) <= 3 * 41 * 7  # parts of the documents that are cut
    packing = cp.Packing(np.random.default_rng(0).integers(100, 900, 64).tolist())
    problem = tiles_of(cp.Mask.causal(packing), cp.Layout.zigzag(packing, 64), weights=WEIGHTS)
    assert problem.num_tiles <= 1 << 14
    assert np.bincount(problem.rows.owners).min() >= 2


def test_other_weights_are_of_the_same_tiles():
    packing = cp.Packing([700, 1, 300])
    mask, layout = cp.Mask.causal(packing), cp.Layout.zigzag(packing, 4)
    forward, backward = (
        TileWeights.forward(heads=2, kv_heads=1, head_dim=8),
        TileWeights.backward(heads=2, kv_heads=1, head_dim=8),
    )
    hosts = {"hosts": np.array([0, 0, 1, 1]), "host_cost": 3}
    problem = tiles_of(mask, layout, weights=forward, **hosts)
    other, alone = problem.with_weights(backward), tiles_of(mask, layout, weights=backward, **hosts)
    assert problem.weights != other.weights == alone.weights
    assert not np.array_equal(np.hstack(problem.line_costs), np.hstack(alone.line_costs))
    assert np.array_equal(np.hstack(other.line_costs), np.hstack(alone.line_costs))
    for name in ("work", "tile_rows", "tile_columns", "load_cap", "pair_cost"):
        assert np.array_equal(getattr(other, name), getattr(alone, name))


def test_keys_of_their_own_and_nothing_visible():
    queries, keys = cp.Packing([30, 17]), cp.Packing([12, 50])
    mask = cp.Mask.full(queries, keys)
    problem = tiles_of(mask, cp.Layout.zigzag(queries, 3), cp.Layout.contiguous(keys, 3), weights=WEIGHTS)
    assert (problem.rows.total, problem.columns.total, problem.total) == (47, 62, 30 * 12 + 17 * 50)
    bands, _ = bands_by_rank(mask, problem, solve(problem, steps=50).ranks)
    assert band.area(bands) == mask.area
    packing = cp.Packing([8])
    problem = tiles_of(cp.Mask.from_slices(packing, []), cp.Layout.contiguous(packing, 2), weights=WEIGHTS)
    found = solve(problem)
    assert (problem.num_tiles, found.sent.tolist(), found.ranks.size) == (0, [0, 0], 0)
    assert len(bands_by_rank(cp.Mask.from_slices(packing, []), problem, found.ranks)[0]) == 0


PACKING = cp.Packing([64])
LAYOUT = cp.Layout.contiguous(PACKING, 4)
MASK = cp.Mask.causal(PACKING)
PROBLEM = tiles_of(MASK, LAYOUT, weights=WEIGHTS)


@functools.cache
def good():
    return solve(PROBLEM, steps=50).ranks


def test_rejects_answers_and_masks_of_another_problem():
    ranks = good()
    for bad in (None, "0", ranks[:-1], ranks * 1.0, ranks - 1, ranks + 4, ranks[:, None], [True] * ranks.size):
        rejects("ranks_of_tiles", check, PROBLEM, bad)
    rejects(r"a rank with 2080 pairs.*load_cap", check, PROBLEM, ranks * 0)
    for mask in (cp.Mask.full(PACKING), cp.Mask.window(PACKING, 5)):
        rejects(r"^mask: .* that the problem was made of", bands_by_rank, mask, PROBLEM, good())
    mirrored = cp.Mask.from_slices(PACKING, [(0, 64, 0, 64, "inverse_causal")])  # as many pairs
    rejects(r"^mask: .* that the problem was made of", bands_by_rank, mirrored, PROBLEM, good())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("mask", None), ("mask", "causal"), ("queries", None), ("queries", PACKING),
        ("queries", cp.Layout.contiguous(cp.Packing([63]), 4)), ("keys", "zigzag"),
        ("keys", cp.Layout.contiguous(PACKING, 3)), ("weights", None), ("weights", (1, 1, 1, 1)), ("imbalance", 0.99),
        ("imbalance", None), ("imbalance", float("nan")), ("imbalance", 5), ("load_cap", 1), ("load_cap", 519.0),
        ("hosts", [0, 0, 1]), ("hosts", [0, 0, 1, 4]), ("hosts", "0011"), ("host_cost", 0), ("host_cost", 1.5),
    ],
)  # fmt: skip
def test_rejects_what_tiles_are_not_made_of(argument, value):
    given = {"mask": MASK, "queries": LAYOUT, "weights": WEIGHTS}
    rejects(rf"^{argument}:", tiles_of, **given | {argument: value})


SIDES = dict.fromkeys(("row_in", "row_back", "col_in", "col_back"), 1)
SHAPE = {"heads": 2, "kv_heads": 1, "head_dim": 4, "value_head_dim": 4, "item_size": 2}


@pytest.mark.parametrize(
    ("make", "given", "bad"),
    [
        (TileWeights, SIDES, (None, -1, 1.0, True, "1", 2**41)),
        *((make, SHAPE, (0, -1, 1.5, True, "2")) for make in (TileWeights.forward, TileWeights.backward)),
    ],
)  # fmt: skip
def test_rejects_weights_and_shapes_that_are_none(make, given, bad):
    for name in given:
        for value in bad:
            rejects(f"^{name}:", make, **given | {name: value})


def test_rejects_more_tiles_than_there_may_be_and_what_solve_cannot_take():
    packing = cp.Packing([3000])
    with pytest.raises(ArgumentError, match="90000 tiles'; allowed: at most 65536 tiles"):
        tiles_of(cp.Mask.full(packing), cp.Layout.contiguous(packing, 300), weights=WEIGHTS)
    scattered = cp.Layout.striped(cp.Packing([3000]), 4)
    rejects(r"^layout: .* at most 4194304 pieces", tiles_of, cp.Mask.full(packing), scattered, weights=WEIGHTS)
    rejects(r"^problem:", solve, None)
    for value in (-1, None, "5", float("nan"), float("inf"), True):
        rejects(r"^search_seconds:", solve, PROBLEM, search_seconds=value)
