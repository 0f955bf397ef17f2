"""Blends of corpora: which pack is whose."""

import numpy as np
import pytest

from megatron_cp.data import BlendedStream, PackedStream, TokenCorpus
from megatron_cp.errors import ArgumentError


def stream(token, documents=2):
    return PackedStream(TokenCorpus("", 9, np.full(4 * documents, token), np.arange(documents + 1) * 4), 4)


def test_packs_come_in_the_order_of_megatrons_blends():
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    random, size = np.random.default_rng(0), 300
    for weights in ([1], [3, 1], [1, 1, 1], [0.3, 0.7], *(random.exponential(size=n) for n in range(2, 9))):
        blend = BlendedStream([stream(1) for _ in weights], weights)
        streams, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_blending_indices(streams, numbers, np.array(weights) / sum(weights), len(weights), size, False)
        expected = list(zip(streams.tolist(), numbers.tolist(), strict=True))
        assert [blend.place(index) for index in range(size)] == expected


def test_a_pack_is_that_of_its_stream_and_depends_on_its_number_alone():
    streams = [stream(1), stream(2, 5)]
    blend = BlendedStream(streams, [1, 2])
    in_order = [BlendedStream(streams, [1, 2]).pack(index) for index in range(9)]
    for index in (8, 0, 3, 8):
        packing, tokens = blend.pack(index)
        which, number = blend.place(index)
        assert packing == streams[which].pack(number)[0] == in_order[index][0]
        assert tokens.tolist() == [which + 1] * 4 == in_order[index][1].tolist()


def test_without_weights_shares_are_those_of_tokens():
    blend = BlendedStream([stream(1, 1), stream(2, 3)])
    assert [blend.place(index)[0] for index in range(4000)].count(0) == 1000


@pytest.mark.parametrize(
    ("streams", "weights", "name"),
    [
        ([], None, "streams"),
        ([1], None, "streams"),
        ([stream(1)], [1, 2], "data_path"),
        ([stream(1)], [0], "data_path"),
        ([stream(1), stream(2)], [1, float("nan")], "data_path"),
        ([stream(1), stream(2)], [1, -1], "data_path"),
    ],
    ids=["none", "a number", "weights of two", "zero", "nan", "below zero"],
)
def test_rejects_blends(streams, weights, name):
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        BlendedStream(streams, weights)


@pytest.mark.parametrize("index", [-1, 0.5, "1"])
def test_rejects_numbers_of_packs(index):
    with pytest.raises(ArgumentError, match=r"^index: "):
        BlendedStream([stream(1)]).pack(index)
