"""Blends of corpora: which pack is whose."""

import numpy as np
import pytest

import megatron_cp as cp
from megatron_cp.data import BlendedStream, ByteTokenizer, PackedStream, TokenCorpus, read_corpus
from tests.refusals import rejects


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


def test_a_pack_is_that_of_its_stream_and_shares_are_those_of_tokens():
    streams = [stream(1), stream(2, 5)]
    blend = BlendedStream(streams, [1, 2])
    in_order = [BlendedStream(streams, [1, 2]).pack(index) for index in range(9)]
    for index in (8, 0, 3, 8):
        packing, tokens = blend.pack(index)
        which, number = blend.place(index)
        assert packing == streams[which].pack(number)[0] == in_order[index][0]
        assert tokens.tolist() == [which + 1] * 4 == in_order[index][1].tolist()
    blend = BlendedStream([stream(1, 1), stream(2, 3)])
    assert [blend.place(index)[0] for index in range(4000)].count(0) == 1000


@pytest.mark.parametrize(
    ("streams", "weights", "name"),
    [
        ([], None, "streams"), ([1], None, "streams"), ([stream(1)], [1, 2], "data_path"),
        ([stream(1)], [0], "data_path"), ([stream(1), stream(2)], [1, float("nan")], "data_path"),
        ([stream(1), stream(2)], [1, -1], "data_path"),
    ],
    ids=["none", "a number", "weights of two", "zero", "nan", "below zero"],
)  # fmt: skip
def test_rejects_blends(streams, weights, name):
    rejects(f"^{name}: ", BlendedStream, streams, weights)


@pytest.mark.parametrize("index", [-1, 0.5, "1"])
def test_rejects_numbers_of_packs(index):
    rejects(r"^index: ", BlendedStream([stream(1)]).pack, index)


def test_a_blend_of_conversations_is_learnt_as_each_stream_is(tmp_path):
    """By the interface of a single stream: what is read and not said by the assistant has no weight."""
    talk, text = tmp_path / "talk.jsonl", tmp_path / "text.jsonl"
    talk.write_text('{"prompt": "what is it", "answer": "so"}\n{"prompt": "and", "answer": "it is that"}\n')
    text.write_text('{"text": "all of it"}\n{"text": "is learnt"}\n')
    streams = [PackedStream(read_corpus(path, ByteTokenizer()), 24) for path in (talk, text)]
    blend, learnt = BlendedStream(streams, [1, 1]), []
    for index in range(6):
        which, number = blend.place(index)
        weights, (packing, tokens) = blend.loss_weights(index), blend.pack(index)
        if which == 1:
            assert weights is None
            continue
        assert np.array_equal(weights, streams[0].loss_weights(number))
        batch = cp.shard_batch(tokens, cp.Layout.contiguous(packing, 1), loss_mask=weights)
        learnt.append(bytes(token for token in batch.labels.tolist() if 0 <= token < 256))
    assert sorted(set(learnt)) == [b"it is that", b"so"]


def test_documents_without_marks_are_learnt_whole_beside_those_with_some():
    class Mixed(TokenCorpus):
        def is_learnt(self, document, start=0, end=None):
            return None if document else np.array([False, False, True, True])[start:end]

    mixed = PackedStream(Mixed("", 9, np.arange(8), np.array([0, 4, 8])), 8)
    _, tokens = mixed.pack(0)
    expected = {0: [0, 1, 1, 0], 4: [1, 1, 1, 0]}
    assert mixed.loss_weights(0).tolist() == [weight for first in tokens[::4] for weight in expected[int(first)]]
