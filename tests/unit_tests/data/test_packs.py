"""`Packs`: packs that swap documents until their work is even."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.data.packs import Packs


def packs_of(packs, ranks=1, budget=None, power=2):
    """Makes packs from the lengths of their documents; work is a power of the length."""
    lengths = np.array([length for pack in packs for length in pack])
    documents = np.split(np.arange(lengths.size), np.cumsum([len(pack) for pack in packs])[:-1])
    budget = budget or max(map(sum, packs))
    return Packs(lengths, lengths.astype(float) ** power, budget, ranks, documents), lengths


def lengths_of(made, lengths):
    return [lengths[pack].tolist() for pack in made.packs]


def test_work_is_by_microbatch_and_a_copy_changes_apart():
    made, lengths = packs_of([[1, 3], [2], [1, 1], [4]], ranks=2)
    assert made.work.tolist() == [[10, 4], [2, 16]]
    assert made.longest.tolist() == [[9, 4], [1, 16]]
    assert lengths_of(made, lengths) == [[3, 1], [2], [1, 1], [4]]
    made, lengths = packs_of([[4, 4], [1]], ranks=2, budget=8)
    kept = made.copy()
    made.meet_targets(np.full((1, 2), 16.5), 10)
    assert lengths_of(kept, lengths) == [[4, 4], [1]]
    assert lengths_of(made, lengths) != [[4, 4], [1]]


def test_a_pack_gives_until_it_is_even():
    made, lengths = packs_of([[4, 4], [1] * 8], ranks=2)
    made.meet_targets(np.full((1, 2), 20.0), 10)
    assert lengths_of(made, lengths) == [[4, 1, 1, 1, 1]] * 2
    made, lengths = packs_of([[5] * 6, [1] * 30], ranks=2)
    made.meet_targets(np.full((1, 2), 90.0), 10)
    assert lengths_of(made, lengths) == [[5, 5, 5] + [1] * 15] * 2
    made, lengths = packs_of([[6] * 5, [1] * 30, [1] * 30], ranks=3)
    made.meet_targets(np.full((1, 3), 80.0), 2)  # two tries: two swaps
    assert [pack.count(6) for pack in lengths_of(made, lengths)] == [3, 1, 1]
    made, lengths = packs_of([[5, 4], [1]], ranks=2)
    made.meet_targets(np.full((1, 2), 21.0), 10)
    assert sorted(lengths_of(made, lengths)) == [[4, 1], [5]]
    made, lengths = packs_of([[8], [1], [1]], ranks=3, budget=8)
    made.meet_targets(np.full((1, 3), 22.0), 10)
    assert lengths_of(made, lengths) == [[8], [1], [1]]
    made, lengths = packs_of([[4, 4], [4, 4]], ranks=2, budget=16)
    made.meet_targets(np.array([[16.0, 48.0]]), 10)
    assert lengths_of(made, lengths) == [[4], [4, 4, 4]]


@pytest.mark.parametrize("keep_peaks", [False, True])
def test_ranks_swap_packs_of_a_microbatch(keep_peaks):
    """No document can be exchanged: all packs are full, and lengths differ."""
    made, lengths = packs_of([[9], [7], [6], [4]], ranks=2, budget=9, power=1)
    made.even_ranks(10, keep_peaks=keep_peaks)
    assert made.work.sum(0).tolist() == [13, 13]
    assert lengths_of(made, lengths) in ([[7], [9], [6], [4]], [[9], [7], [4], [6]])


def test_ranks_exchange_documents_and_keep_peaks():
    made, _ = packs_of([[8], [8], [4, 4], [1] * 8], ranks=2)
    made.even_ranks(10, keep_peaks=True)
    assert made.work.sum(0).tolist() == [84, 84]
    made, _ = packs_of([[4, 4], [4, 4], [1], [1]], ranks=2, budget=9, power=1)
    made.even_ranks(10, keep_peaks=False)
    assert made.work.sum(0).tolist() == [9, 9]
    made, _ = packs_of([[5], [5], [5, 5, 5, 5], [1]], ranks=2, budget=40, power=1)
    peaks = made.work.max(1)
    made.even_ranks(10, keep_peaks=True)
    assert (made.work.max(1) <= peaks).all()
    assert made.work.sum(0).max() < 25
    made, _ = packs_of([[1], [9], [8], [2]], ranks=2, power=1)
    made.sort_into_microbatches()
    assert made.work.tolist() == [[9, 8], [1, 2]]  # the rank of the heaviest gets the lightest
    made, _ = packs_of([[1], [9], [8], [2]], ranks=2, power=1)
    made.sort_in_ranks()
    assert made.work.tolist() == [[8, 9], [1, 2]]


@settings(max_examples=100)
@given(
    packs=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=4, max_size=12),
    ranks=st.sampled_from([1, 2, 4]),
    keep_peaks=st.booleans(),
    room=st.integers(0, 10),
)
def test_exchanges_lose_nothing_and_never_make_it_worse(packs, ranks, keep_peaks, room):
    packs = packs[: len(packs) // ranks * ranks]
    made, lengths = packs_of(packs, ranks, max(map(sum, packs)) + room)
    heaviest, busiest = made.work.max(), made.work.sum(0).max()
    if keep_peaks:
        made.meet_targets(np.full_like(made.work, made.work.mean()), 20)
        assert made.work.max() <= heaviest * (1 + 1e-9)
    else:
        made.even_ranks(20, keep_peaks=False)
        assert made.work.sum(0).max() <= busiest * (1 + 1e-9)
    assert sorted(np.concatenate(made.packs).tolist()) == list(range(lengths.size))
    assert max(lengths[pack].sum() for pack in made.packs) <= max(map(sum, packs)) + room
    assert all(pack.size for pack in made.packs)
    np.testing.assert_allclose(made.work.ravel(), [(lengths[pack] ** 2).sum() for pack in made.packs])
