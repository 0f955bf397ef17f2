"""Tile problems of masks, what an answer makes ranks send, and the bands that each rank computes."""

import functools

import numpy as np
import pytest

import megatron_cp as cp
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import bands as band
from megatron_cp.planner.tiles import TileProblem, TileWeights, bands_by_rank, solve, tiles_of
from megatron_cp.planner.tiles.problem import check, cost, loads, volumes
from tests.mask_oracle import pairs_of
from tests.refusals import rejects
from tests.tile_masks import table_problem

WEIGHTS = TileWeights(3, 5, 7, 11)


def drawn(seed, rows=5, columns=4, ranks=3):
    """A table of random work and owners."""
    random = np.random.default_rng(seed)
    work = random.integers(1, 9, (rows, columns)) * (random.random((rows, columns)) < 0.7)
    return table_problem(work, random.integers(0, ranks, rows), random.integers(0, ranks, columns), ranks, WEIGHTS)


def told(problem, ranks):
    """Bytes sent and received, one transfer after the other."""
    sent, received = [0] * problem.num_ranks, [0] * problem.num_ranks
    weights = problem.weights
    for lines, chunks, out, back in (
        (problem.tile_rows, problem.rows, weights.row_in, weights.row_back),
        (problem.tile_columns, problem.columns, weights.col_in, weights.col_back),
    ):
        for line, rank in {(int(line), int(rank)) for line, rank in zip(lines, ranks, strict=True)}:
            owner, size = int(chunks.owners[line]), int(chunks.sizes[line])
            if owner != rank:
                sent[owner] += out * size
                received[rank] += out * size
                sent[rank] += back * size
                received[owner] += back * size
    return sent, received


@pytest.mark.parametrize("seed", range(8))
def test_volumes_are_those_of_transfers_one_by_one(seed):
    problem = drawn(seed)
    ranks = np.random.default_rng(seed).integers(0, 3, problem.num_tiles)
    sent, received = volumes(problem, ranks)
    assert (sent.tolist(), received.tolist()) == told(problem, ranks)
    assert sent.sum() == received.sum()


def test_bytes_between_hosts_cost_more_and_are_reported_as_they_are():
    work = np.ones((2, 2), dtype=int)
    problem = table_problem(work, [0, 1], [0, 1], 2, TileWeights(1, 0, 10, 0))
    chunks = problem.rows, problem.columns
    apart = TileProblem(
        2, *chunks, problem.tile_rows, problem.tile_columns, problem.work, problem.weights, hosts=[0, 1], host_cost=8
    )
    ranks = np.array([0, 0, 1, 1])  # each computes its own row, and receives a column
    assert [each.tolist() for each in volumes(apart, ranks)] == [[10, 10], [10, 10]]
    assert (cost(problem, ranks), cost(apart, ranks), cost(apart.single_host(), ranks)) == (10, 80, 10)


def test_weights_of_a_direction():
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 64, "value_head_dim": 32, "item_size": 2}
    forward, backward = TileWeights.forward(**shape), TileWeights.backward(**shape)
    assert forward == TileWeights(8 * 64 * 2, 8 * 33 * 4, 2 * 96 * 2, 0)
    assert backward == TileWeights(8 * (96 * 2 + 8), 8 * 64 * 2, 2 * 96 * 2, 2 * 96 * 2)
    wide = TileWeights.forward(**shape | {"item_size": 8})
    assert wide.row_back == 8 * 33 * 8


RAGGED = cp.Packing([35, 1, 151, 19, 0, 5])


def layouts(packing, size):
    yield cp.Layout.contiguous(packing, size)
    yield cp.Layout.zigzag(packing, size)
    yield cp.Layout.balanced(packing, size)


MASKS = ["causal", "full", "window:20,3", "first:2+window:9,0", "strided", "global_local", "star", "streaming"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [3, 4])
def test_bands_of_ranks_are_the_mask_once(mask, size):
    mask = cp.Mask.named(RAGGED, mask)
    for layout in layouts(RAGGED, size):
        problem = tiles_of(mask, layout, weights=WEIGHTS)
        random = np.random.default_rng(size)
        problem = problem._but(load_cap=problem.total)
        ranks = random.integers(0, size, problem.num_tiles)
        bands, offsets = bands_by_rank(mask, problem, ranks)
        seen = np.zeros((RAGGED.total, RAGGED.total), dtype=int)
        for rank in range(size):
            own = bands[offsets[rank] : offsets[rank + 1]]
            pairs = shown(own)
            assert pairs.max(initial=0) <= 1
            assert np.array_equal(pairs, expected(mask, layout, problem, ranks, rank))
            assert band.area(own) == loads(problem, ranks)[rank]
            assert (np.diff(own[:, 0]) >= 0).all()
            seen += pairs
        assert np.array_equal(seen, shown(mask.bands))


def shown(bands):
    return pairs_of(bands, RAGGED.total, RAGGED.total)


def expected(mask, layout, problem, ranks, rank):
    """Computes the cost by the tile of each pair, and checks that chunks are of one owner."""
    tile = np.full((problem.rows.owners.size, problem.columns.owners.size), -1)
    tile[problem.tile_rows, problem.tile_columns] = ranks
    of_token = []
    for chunks in (problem.rows, problem.columns):
        chunk = np.repeat(chunks.chunk_of_range, np.diff(chunks.starts, append=chunks.total))
        assert np.array_equal(chunks.owners[chunk], layout.owners)
        of_token.append(chunk)
    return shown(mask.bands) * (tile[of_token[0][:, None], of_token[1]] == rank)


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


@pytest.mark.parametrize("name", ["row_in", "row_back", "col_in", "col_back"])
@pytest.mark.parametrize("value", [None, -1, 1.0, True, "1", 2**41])
def test_rejects_weights_that_are_none(name, value):
    rejects(f"^{name}:", TileWeights, **dict.fromkeys(("row_in", "row_back", "col_in", "col_back"), 1) | {name: value})


@pytest.mark.parametrize("make", [TileWeights.forward, TileWeights.backward])
@pytest.mark.parametrize("name", ["heads", "kv_heads", "head_dim", "value_head_dim", "item_size"])
def test_rejects_shapes_that_are_none(make, name):
    for value in (0, -1, 1.5, True, "2"):
        rejects(f"^{name}:", make, **{"heads": 2, "kv_heads": 1, "head_dim": 4} | {name: value})


def test_rejects_more_tiles_than_there_may_be_and_what_solve_cannot_take():
    packing = cp.Packing([3000])
    with pytest.raises(ArgumentError, match="90000 tiles'; allowed: at most 65536 tiles"):
        tiles_of(cp.Mask.full(packing), cp.Layout.contiguous(packing, 300), weights=WEIGHTS)
    scattered = cp.Layout.striped(cp.Packing([3000]), 4)
    rejects(r"^layout: .* at most 4194304 pieces", tiles_of, cp.Mask.full(packing), scattered, weights=WEIGHTS)
    rejects(r"^problem:", solve, None)
    for value in (-1, None, "5", float("nan"), float("inf"), True):
        rejects(r"^search_seconds:", solve, PROBLEM, search_seconds=value)
