"""Tests of the documents that share a pack."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.data import Piece, best_fit
from megatron_cp.data.pieces import cut
from tests.counts import calls_of
from tests.refusals import rejects

ragged = settings(max_examples=150)


@st.composite
def lengths_and_budget(draw):
    budget = draw(st.integers(1, 30) | st.sampled_from([97, 4096]))
    lengths = draw(st.lists(st.integers(1, budget) | st.sampled_from([1, budget, budget // 2 + 1]), max_size=40))
    return lengths, budget


def naive(lengths, budget):
    """Best-fit decreasing as it is told: look at every pack."""
    packs = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fits = [pack for pack in packs if sum(lengths[held] for held in pack) + lengths[index] <= budget]
        if not fits:
            packs.append(pack := [])
        else:
            pack = max(fits, key=lambda pack: sum(lengths[held] for held in pack))  # the first of equals
        pack.append(index)
    return packs


@ragged
@given(case=lengths_and_budget())
def test_every_index_is_in_the_pack_that_best_fit_finds(case):
    lengths, budget = case
    packs = best_fit(lengths, budget)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in pack) <= budget for pack in packs)
    assert best_fit(*case) == naive(*case)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16], ids=lambda kind: kind.__name__)
def test_lengths_may_be_an_array(kind):
    packs = best_fit(np.array([3, 5, 2, 6, 4], kind), 10)
    assert packs == [[3, 4], [1, 0, 2]]
    assert all(type(index) is int for pack in packs for index in pack)


@pytest.mark.parametrize("budget", [4096, 1_000_000])
def test_calls_grow_no_faster_than_lengths(budget):
    lengths, found = np.random.default_rng(0).integers(1, budget + 1, 20_000), []
    assert calls_of(lambda: found.append(best_fit(lengths, budget))) < 20 * lengths.size
    (packs,) = found
    assert sum(map(len, packs)) == lengths.size
    assert lengths.sum() / (len(packs) * budget) > 0.99


@ragged
@given(case=st.tuples(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 15)), seed=st.integers(0, 9))
def test_pieces_cover_every_document_in_parts_of_the_budget(case, seed):
    lengths, budget = case
    documents = np.random.default_rng(seed).permutation(len(lengths))
    rows = cut(documents, np.array(lengths, np.int64)[documents], budget)
    expected = [
        (document, start, min(start + budget, lengths[document]))
        for document in documents.tolist()
        for start in range(0, lengths[document], budget)
    ]
    assert [Piece(*row) for row in rows.tolist()] == expected


def test_a_piece_may_be_a_single_token_and_there_may_be_none():
    assert cut(np.array([4]), np.array([9]), 8).tolist() == [[4, 0, 8], [4, 8, 9]]
    assert best_fit([], 8) == []


@pytest.mark.parametrize(
    "lengths", [[3, 9], [0, 3], [-1], [1.5, 2.0], [True, True]], ids=["long", "empty", "negative", "fraction", "bool"]
)
def test_rejects_lengths_that_no_pack_can_hold(lengths):
    rejects(re.escape(f"lengths: got {lengths}; allowed: integers from 1 to"), best_fit, lengths, 8)
