"""Tiles count pairs in the rows at hand, and know which tokens stand in them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout.bands import ranges_seen, ranges_seen_by_ranks
from megatron_cp.layout.tiles import (
    Tiles,
    bands_of_held_keys,
    bands_of_keys,
    bands_of_queries,
    bands_of_ranks,
)
from megatron_cp.planner.layouts import layout_by_name
from tests.mask_oracle import causal, pairs_of, window

RAGGED = Packing([5, 1, 9, 0, 4])
MASKS = {"causal": (Mask.causal(RAGGED), causal(RAGGED)), "window": (Mask.window(RAGGED, 2, 1), window(RAGGED, 2, 1))}


def pairs_by_token(tiles):
    """Returns each visible pair as places in the packed streams."""
    seen = pairs_of(tiles.bands, len(tiles.q_tokens), len(tiles.k_tokens))
    assert seen.max(initial=0) <= 1  # no pair twice
    queries, keys = np.nonzero(seen)
    return {(int(tiles.q_tokens[q]), int(tiles.k_tokens[k])) for q, k in zip(queries, keys, strict=True)}


def tiles_of(mask, layout, queries_of, keys_of):
    bands = bands_of_held_keys(bands_of_queries(mask.bands, layout, queries_of), layout, keys_of)
    return Tiles(bands, layout.tokens(queries_of), layout.tokens(keys_of))


@given(mask=st.sampled_from(sorted(MASKS)), cp_size=st.integers(1, 4), seed=st.integers(0, 9), place=st.integers(0, 15))
def test_cropping_keeps_every_pair_and_the_tokens_of_its_rows(mask, cp_size, seed, place):
    made, pairs = MASKS[mask]
    layout = layout_by_name("random", RAGGED, cp_size, seed=seed)
    queries_of, keys_of = place % cp_size, place // 4 % cp_size
    tiles = tiles_of(made, layout, queries_of, keys_of)
    rows = np.ix_(layout.tokens(queries_of), layout.tokens(keys_of))
    assert len(pairs_by_token(tiles)) == pairs[rows].sum()
    for cropped in (tiles.cropped, tiles.cropped_keys):
        assert pairs_by_token(cropped) == pairs_by_token(tiles)


def test_cropped_tiles_begin_and_end_with_a_visible_row():
    layout = Layout.contiguous(RAGGED, 2)  # tokens 0 to 8, and 9 to 18
    tiles = tiles_of(MASKS["window"][0], layout, 1, 0)
    assert (tiles.query_rows, tiles.key_rows) == (slice(0, 2), slice(7, 9))
    assert tiles.cropped.q_tokens.tolist() == [9, 10]
    assert tiles.cropped.k_tokens.tolist() == [7, 8]
    assert tiles.cropped_keys.q_tokens.tolist() == list(range(9, 19))


@given(mask=st.sampled_from(sorted(MASKS)), cp_size=st.integers(1, 4), rank=st.integers(0, 3))
def test_the_keys_that_are_seen_are_all_and_only_those(mask, cp_size, rank):
    made, pairs = MASKS[mask]
    layout = Layout.zigzag(RAGGED, cp_size)
    rank %= cp_size
    bands = bands_of_queries(made.bands, layout, rank)
    starts, ends = ranges_seen(bands)
    seen = [token for start, end in zip(starts, ends, strict=True) for token in range(start, end)]
    assert seen == np.flatnonzero(pairs[layout.tokens(rank)].any(0)).tolist()
    assert (starts[1:] > ends[:-1]).all()  # the fewest ranges
    tiles = Tiles(bands_of_keys(bands, starts, ends), layout.tokens(rank), np.array(seen, dtype=np.int64))
    assert len(pairs_by_token(tiles)) == pairs[layout.tokens(rank)].sum()


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "random"])
@pytest.mark.parametrize("ranks", [range(4), range(1, 3), range(3, 4)], ids=str)
def test_ranks_at_once_are_ranks_by_themselves(name, ranks):
    packing = Packing([5, 1, 9, 0, 4])
    layout = layout_by_name(name, packing, 4, seed=3)
    for mask in (Mask.causal(packing), Mask.window(packing, 2, 1), Mask.from_slices(packing, [])):
        bands, offsets = bands_of_ranks(mask.bands, layout, ranks, queries=True)
        starts, ends, firsts = ranges_seen_by_ranks(bands, offsets)
        assert len(offsets) == len(firsts) == len(ranks) + 1
        for number, rank in enumerate(ranks):
            own = bands_of_queries(mask.bands, layout, rank)
            assert bands[slice(*offsets[number : number + 2])].tolist() == own.tolist()
            seen = slice(*firsts[number : number + 2])
            assert [starts[seen].tolist(), ends[seen].tolist()] == [edges.tolist() for edges in ranges_seen(own)]
        bands, offsets = bands_of_ranks(mask.bands, layout, ranks, queries=False)
        for number, rank in enumerate(ranks):
            held = bands_of_held_keys(mask.bands, layout, rank)
            assert bands[slice(*offsets[number : number + 2])].tolist() == held.tolist()
