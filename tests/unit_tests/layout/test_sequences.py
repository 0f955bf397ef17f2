"""Common beginnings of sequences are found, held once, and given back."""

import pickle
import random

import numpy as np
import pytest
import torch

from megatron_cp import Packing
from megatron_cp.errors import ArgumentError


def test_random_sequences_come_back_and_common_beginnings_are_held_once():
    draw = random.Random(0)
    for _ in range(400):
        given = [[draw.randrange(2) for _ in range(draw.randrange(8))] for _ in range(draw.randrange(1, 7))]
        least = draw.choice([1, 1, 2, 3])
        packing = Packing.from_sequences(given, min_shared=least)
        assert [part.tolist() for part in packing.split(packing.tokens)] == given
        copies = np.zeros(packing.total, dtype=np.int64)
        for places in packing.places:
            copies[places] += 1
            assert (packing.positions()[places] == np.arange(places.size)).all()
        assert (copies == packing.copies()).all()
        if least == 1:
            assert packing.total == len({tuple(each[: end + 1]) for each in given for end in range(len(each))})


def test_short_common_beginnings_are_kept_apart():
    given = [[1, *range(10, 20)], [1, *range(20, 30)]]
    assert Packing.from_sequences(given) == Packing([11, 11])
    assert Packing.from_sequences(given, min_shared=1).total == 21


def test_a_sequence_without_tokens_joins_nothing():
    packing = Packing.from_sequences([[1] * 5, [2] * 6, [], [3] * 7])
    assert packing.branches is None
    assert sorted(packing.lengths.tolist()) == [0, 5, 6, 7]
    assert [part.size for part in packing.split(packing.tokens)] == [5, 6, 0, 7]


def test_values_are_split_as_tensors_and_a_packing_can_be_pickled():
    packing = Packing.from_sequences([[5, 6, 7], [5, 6, 8, 9]], min_shared=1)
    parts = packing.split(torch.arange(5.0).requires_grad_())
    assert [part.tolist() for part in parts] == [[0, 1, 2], [0, 1, 3, 4]]
    assert parts[0].requires_grad
    again = pickle.loads(pickle.dumps(packing))
    assert again == packing
    assert hash(again) == hash(packing)
    assert repr(packing) == "SequencePacking(2 sequences of 7 tokens in 3 segments of 5)"


@pytest.mark.parametrize("given", [[], [[1.5]], [[[1]]], [5], "text"])
def test_what_is_no_list_of_sequences_is_refused(given):
    with pytest.raises(ArgumentError, match="sequences"):
        Packing.from_sequences(given)


def test_values_of_another_stream_are_refused():
    with pytest.raises(ArgumentError, match="values"):
        Packing.from_sequences([[1, 2]]).split([1, 2, 3])
