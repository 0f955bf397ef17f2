"""Counting what readers get from owners."""

import numpy as np
import pytest

from megatron_cp.exchange import split_counts
from megatron_cp.exchange.split_counts import count_by_owner


@pytest.mark.parametrize("most", [1, 40, 2**17], ids=["a rank at a time", "some ranks", "all ranks"])
@pytest.mark.parametrize("seed", range(6))
def test_counts_are_sums_over_ranges(seed, most, monkeypatch):
    monkeypatch.setattr(split_counts, "_MOST_COUNTS", most)
    random = np.random.default_rng(seed)
    ranks, readers, n = 5, 4, 12
    owner, amount = random.integers(0, ranks, n), random.integers(1, 2**40, n)
    edges = np.sort(random.integers(0, n + 1, (9, 2)), axis=1)  # some are empty
    offsets = np.array([0, 3, 3, 7, 9])  # one reader wants nothing
    found = count_by_owner(owner, amount, edges[:, 0], edges[:, 1], offsets, ranks)
    expected = np.zeros((ranks, readers), dtype=np.int64)
    for reader in range(readers):
        for start, end in edges[offsets[reader] : offsets[reader + 1]]:
            np.add.at(expected[:, reader], owner[start:end], amount[start:end])
    assert found.tolist() == expected.tolist()


def test_readers_that_want_nothing_get_nothing():
    none = np.array([], dtype=np.int64)
    assert count_by_owner(np.array([0]), np.array([7]), none, none, np.array([0, 0]), 2).tolist() == [[0], [0]]
