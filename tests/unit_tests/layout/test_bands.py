"""Bands, pair by pair: areas, cuts, moves, unions."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_cp.layout import bands as band
from megatron_cp.layout.bands import NO_BANDS, UNBOUNDED
from tests.mask_oracle import pairs_of

TOTAL = 12  # queries and keys
many = settings(max_examples=120)
RANGE = st.tuples(st.integers(0, TOTAL), st.integers(0, TOTAL)).map(sorted)
LO, HI = (st.integers(-TOTAL - 1, TOTAL + 1) | st.just(far) for far in (-UNBOUNDED, UNBOUNDED))
BAND = st.tuples(RANGE, RANGE, LO, HI).map(lambda given: [*given[0], *given[1], *given[2:]])
ANY_BANDS = st.lists(BAND, max_size=7).map(lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 6))
DISJOINT = ANY_BANDS.map(band.disjoint)


def pairs(bands):
    return pairs_of(bands, TOTAL, TOTAL)


@st.composite
def ranges(draw):
    cuts = sorted(draw(st.sets(st.integers(0, TOTAL), min_size=2)))
    kept = [(start, end) for start, end in pairwise(cuts) if draw(st.booleans())]
    return np.array(kept, dtype=np.int64).reshape(-1, 2).T


@many
@given(bands=ANY_BANDS)
def test_tight_bands_and_areas_are_those_of_the_pairs(bands):
    shrink = band.shrink(bands)
    np.testing.assert_array_equal(pairs(shrink), pairs(bands))
    for row in shrink:
        box = pairs([row])[row[0] : row[1], row[2] : row[3]]
        assert box.any(axis=0).all()
        assert box.any(axis=1).all()
    assert band.areas(bands).tolist() == [pairs([row]).sum() for row in bands]
    assert band.area(bands) == pairs(bands).sum()


def test_areas_beyond_53_bits_are_exact():
    n = 300_000_007  # areas that a float64 would round
    rows = [
        [0, n, 0, n, -UNBOUNDED, UNBOUNDED],
        [0, n, 0, n, -UNBOUNDED, 0],
        [0, n, 0, n, -1_000_003, 0],
        [7, n, 5, n - 9, 0, UNBOUNDED],
    ]
    window = n * (n + 1) // 2 - (n - 1_000_004) * (n - 1_000_003) // 2
    # From query 7 on, each sees the keys from its own place up to n - 10.
    assert band.areas(np.array(rows)).tolist() == [n * n, n * (n + 1) // 2, window, (n - 16) * (n - 15) // 2]
    assert n * n // 2 > 2**53


@many
@given(bands=DISJOINT)
def test_canonical_and_unbound_bands_are_the_same_pairs(bands):
    assert band.keys_seen(bands, TOTAL).tolist() == pairs(bands).sum(axis=1).tolist()
    canonical = band.canonical(bands)
    np.testing.assert_array_equal(pairs(canonical), pairs(bands))
    for q0, q1, k0, k1, lo, hi in canonical.tolist():
        assert lo == -UNBOUNDED or lo == k0 - q0
        assert hi == UNBOUNDED or hi == k1 - q1
    np.testing.assert_array_equal(pairs(band.unbound(bands)), pairs(bands))
    for row in band.unbound(bands):
        for bound, far in ((4, -UNBOUNDED), (5, UNBOUNDED)):
            freed = row.copy()
            freed[bound] = far
            assert row[bound] == far or pairs([freed]).sum() > pairs([row]).sum()


@many
@given(bands=ANY_BANDS, given_ranges=ranges(), queries=st.booleans())
def test_cut_to_ranges(bands, given_ranges, queries):
    starts, ends = given_ranges
    pieces, number = band.cut(bands, starts, ends, queries=queries)
    first, last = (0, 1) if queries else (2, 3)
    assert (starts[number] <= pieces[:, first]).all()
    assert (pieces[:, last] <= ends[number]).all()
    inside = np.zeros(TOTAL, dtype=bool)
    for start, end in zip(starts, ends, strict=True):
        inside[start:end] = True
    np.testing.assert_array_equal(pairs(pieces), pairs(bands) * (inside[:, None] if queries else inside))


@many
@given(bands=DISJOINT, queries=st.integers(0, 5), keys=st.integers(0, 5))
def test_moved(bands, queries, keys):
    moved = pairs_of(band.moved(bands, queries, keys), TOTAL + queries, TOTAL + keys)
    np.testing.assert_array_equal(moved[queries:, keys:], pairs(bands))
    assert moved.sum() == pairs(bands).sum()


# Two that meet where one of them has narrowed to nothing.
MEETING = np.array([[0, 11, 1, 12, -5, -3], [0, 11, 1, 10, -UNBOUNDED, -5]])


@many
@given(bands=ANY_BANDS, barriers=st.sets(st.integers(0, TOTAL)))
@example(bands=MEETING, barriers=set())
def test_disjoint_bands_have_the_pairs_of_the_union(bands, barriers):
    union = band.disjoint(bands, np.array(sorted(barriers), dtype=np.int64))
    np.testing.assert_array_equal(pairs(union), (pairs(bands) > 0).astype(int))
    np.testing.assert_array_equal(union, band.shrink(union))


@many
@given(bands=ANY_BANDS, barriers=st.sets(st.integers(1, TOTAL - 1), min_size=1))
def test_disjoint_bands_go_on_over_no_wall(bands, barriers):
    inside = sorted({0, TOTAL, *barriers})
    pieces, _ = band.cut(bands, np.array(inside[:-1]), np.array(inside[1:]), queries=True)
    for q0, q1, *_ in band.disjoint(pieces, np.array(inside)):
        assert not any(q0 < barrier < q1 for barrier in barriers)


@many
@given(whole=BAND, queries=ranges(), data=st.data())
def test_a_band_cut_up_is_joined_again(whole, queries, data):
    whole = band.unbound(band.shrink(np.array([whole])))
    cuts = np.union1d(queries.ravel(), [0, TOTAL])
    pieces, _ = band.cut(whole, cuts[:-1], cuts[1:], queries=True)
    shuffled = pieces[data.draw(st.permutations(range(len(pieces))))] if len(pieces) else pieces
    np.testing.assert_array_equal(band.joined(shuffled), whole)


def test_bands_are_joined_where_they_can_be():
    # Side by side, so that every break of one chain lies within pieces of the other.
    rows = [
        [q, q + 4, k, k + 1, -UNBOUNDED, UNBOUNDED]
        for k, phase in ((0, 0), (5, 2))
        for q in range(phase, 400 + phase, 4)
    ]
    assert band.joined(np.array(rows))[:, :4].tolist() == [[0, 400, 0, 1], [2, 402, 5, 6]]
    rows = np.array([[0, 5, 0, 5, -UNBOUNDED, 0], [7, 9, 0, 5, -UNBOUNDED, UNBOUNDED]])
    np.testing.assert_array_equal(band.disjoint(rows), rows)
    rows = np.array([[2, 5, 0, 2, -UNBOUNDED, UNBOUNDED], [2, 5, 2, 5, -UNBOUNDED, 0]])
    np.testing.assert_array_equal(band.disjoint(rows), [[2, 5, 0, 5, -UNBOUNDED, 0]])


@pytest.mark.parametrize("function", [band.shrink, band.canonical, band.unbound, band.joined, band.disjoint])
def test_no_bands(function):
    assert function(NO_BANDS).shape == (0, 6)
    assert band.area(NO_BANDS) == 0
