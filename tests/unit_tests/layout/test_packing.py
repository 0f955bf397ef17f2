"""`Packing`: the documents of one packed batch."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Packing
from tests.refusals import rejects

ragged = settings(max_examples=100)
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 5, 13, 97, 101]) | st.integers(0, 300), min_size=1, max_size=8)


@pytest.mark.parametrize(
    "container",
    [list, tuple, np.array, torch.tensor, lambda c: np.array(c, np.int32)],
    ids=["list", "tuple", "numpy", "torch", "int32"],
)
@ragged
@given(lengths=LENGTHS)
def test_cu_seqlens_round_trip(container, lengths):
    offsets = container(Packing(lengths).cu_seqlens.tolist())
    assert Packing.from_cu_seqlens(offsets).lengths.tolist() == lengths


@ragged
@given(lengths=LENGTHS)
def test_positions_documents_and_spans_match_a_loop(lengths):
    held = [(document, position) for document, length in enumerate(lengths) for position in range(length)]
    packing = Packing(lengths)
    assert packing.total == len(held)
    assert packing.num_documents == len(lengths)
    assert packing.max_length == max(lengths)
    assert packing.documents_of(np.arange(packing.total)).tolist() == [document for document, _ in held]
    assert packing.positions().tolist() == [position for _, position in held]
    assert list(packing.spans()) == [
        (sum(lengths[:document]), sum(lengths[: document + 1])) for document, length in enumerate(lengths) if length
    ]


def test_documents_of_steps_over_documents_without_tokens():
    packing = Packing([0, 0, 2, 0, 1, 0])
    assert packing.documents_of(np.array([[2, 0], [1, 2]])).tolist() == [[4, 2], [2, 4]]


@ragged
@given(lengths=LENGTHS, other=LENGTHS)
def test_equal_exactly_where_the_lengths_are(lengths, other):
    packing = Packing(lengths)
    assert packing == Packing(np.array(lengths, np.int32)) == Packing(iter(lengths))
    assert {packing: "found"}[Packing(lengths)] == "found"
    assert (packing == Packing(other)) == (lengths == other)
    assert packing != Packing([*lengths, 0])
    assert packing != lengths


@pytest.mark.parametrize("name", ["lengths", "cu_seqlens"])
def test_is_immutable(name):
    with pytest.raises(ValueError, match="read-only"):
        getattr(Packing([3, 1]), name)[0] = 7


def test_has_a_value_of_its_own():
    lengths = np.array([3, 1])
    packing = Packing(lengths)
    lengths[0] = 9
    assert packing == Packing([3, 1])
    packing = Packing([3, 1])
    assert packing.memo("key", lambda: "device tensor") == packing.memo("key", lambda: "made again")
    copy = pickle.loads(pickle.dumps(packing))
    assert copy == packing
    assert copy.memo("key", lambda: "made again") == "made again"


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [([3, 0, 1], "Packing([3, 0, 1])"), ([2] * 9, "Packing([2, 2, 2, 2, 2, 2, 2, 2, ...]; 9 documents, 18 tokens)")],
    ids=["few", "many"],
)
def test_repr_says_how_much_it_holds(lengths, shown):
    assert repr(Packing(lengths)) == shown


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ([7, 1, 130], r"If these are the documents' lengths: Packing\(\[7, 1, 130\]\)\."),
        ([0, 5, 3], r"If these are the documents' lengths: Packing\(\[0, 5, 3\]\)\."),
        ([7, 8, 138], r"Packing\(\[7, 8, 138\]\)\. If they are where documents end, put a 0 before them\."),
        ([9] * 10, r"Packing\(\[9, 9, 9, 9, 9, 9, 9, 9, \.\.\.\]\)\."),
    ],
)
def test_rejects_lengths_given_as_cu_seqlens(given, remedy):
    rejects(remedy, Packing.from_cu_seqlens, given)


def test_rejects_a_stream_for_cu_seqlens_given_as_lengths():
    def refusal(lengths, tokens):
        with pytest.raises(ArgumentError) as error:
            Layout.contiguous(Packing(lengths), 2).shard(np.arange(tokens), 0)
        return str(error.value)

    said = refusal([0, 7, 8, 138, 138], 138)
    assert said.endswith("cu_seqlens: Packing.from_cu_seqlens([0, 7, 8, 138, 138]) has 138 tokens.")
    assert "291 tokens of the packed stream" in said
    for lengths, tokens in (([0, 7, 8, 138], 137), ([7, 8, 138], 138), ([0, 8, 7, 138], 138), ([0, 3, 0], 0)):
        assert "cu_seqlens" not in refusal(lengths, tokens)
