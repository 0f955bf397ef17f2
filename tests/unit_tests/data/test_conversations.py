"""Conversations of `.jsonl` files: which tokens are read, and which are learnt."""

import json

import numpy as np
import pytest

from megatron_cp.data import ByteTokenizer, PackedStream, read_corpus
from megatron_cp.data.corpus import split_corpus
from megatron_cp.errors import ArgumentError

CHAT = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "zä?"},
        {"role": "assistant", "content": "ö\n"},
    ]
}
END = 256


def corpus_of(tmp_path, *entries):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    return read_corpus(path, ByteTokenizer())


def learnt(corpus, document):
    """The text of tokens that are to be predicted, an end as `$`, and what separates them as `|`."""
    tokens, which = corpus.tokens(document), corpus.is_learnt(document)
    runs = np.split(np.arange(tokens.size), np.flatnonzero(np.diff(which)) + 1)
    return [
        b"".join(b"$" if token == END else bytes([token]) for token in tokens[run]).decode()
        for run in runs
        if which[run[0]]
    ]


def text(corpus, document):
    tokens = corpus.tokens(document)
    assert tokens[-1] == END
    return bytes(tokens[:-1].tolist()).decode()


def test_what_the_assistant_says_is_learnt(tmp_path):
    corpus = corpus_of(tmp_path, CHAT)
    expected = "<|system|>\nbe brief\n<|user|>\ntwo?\n<|assistant|>\n2\n<|user|>\nzä?\n<|assistant|>\nö\n\n"
    assert text(corpus, 0) == expected
    assert learnt(corpus, 0) == ["2\n", "ö\n\n$"]
    messages = [*CHAT["messages"][:3], {"role": "user", "content": "thanks"}]
    assert learnt(corpus_of(tmp_path, {"messages": messages}), 0) == ["2\n"]


@pytest.mark.parametrize("key", ["answer", "completion"])
def test_an_answer_is_learnt_and_its_prompt_is_not(tmp_path, key):
    corpus = corpus_of(tmp_path, {"prompt": "1+1=", key: "2", "id": 7}, {"text": "all"}, {"prompt": "p", "text": "t"})
    assert [text(corpus, document) for document in range(3)] == ["1+1=2", "all", "t"]
    assert [learnt(corpus, document) for document in range(3)] == [["2$"], ["all$"], ["t$"]]


def test_texts_alone_keep_no_weights(tmp_path):
    corpus = corpus_of(tmp_path, {"text": "a"}, {"text": "bc"})
    assert corpus.learnt is None
    assert corpus.is_learnt(1) is None
    assert PackedStream(corpus, 8).loss_weights(0) is None


@pytest.mark.parametrize("budget", [200, 9])
def test_a_pack_weighs_the_token_before_each_that_is_learnt(tmp_path, budget):
    """Also where a conversation is cut: the first token of a piece has nobody who predicts it."""
    whole = corpus_of(tmp_path, {"text": "a first one"}, CHAT, {"prompt": "1+1=", "answer": "2"})
    corpus = split_corpus(whole, "0,1")[1] if budget == 9 else whole
    stream = PackedStream(corpus, budget)
    seen = 0
    for index in range(stream.packs_per_epoch(0)):
        packing, tokens = stream.pack(index)
        weights = stream.loss_weights(index)
        assert weights.dtype == np.float32
        assert weights.shape == tokens.shape
        at = 0
        for piece, length in zip(stream.pieces(index), packing.lengths.tolist(), strict=True):
            which = corpus.is_learnt(piece.document)[piece.start : piece.end]
            assert weights[at : at + length].tolist() == [*which[1:].astype(float), 0.0]
            at += length
            seen += int(which.sum())
    assert seen == sum(corpus.is_learnt(document).sum() for document in range(corpus.lengths.size)) > 0


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"messages": []}, '"messages" is no list of messages'),
        ({"messages": "hi"}, '"messages" is no list of messages'),
        ({"messages": ["hi"]}, "message 1 has the role None, not one of system, developer, user, assistant, tool"),
        ({"messages": [{"role": "assitant", "content": "a"}]}, "message 1 has the role 'assitant'"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, 'message 2: "content" is no string'),
        ({"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}, 'message 1: "content" is no string'),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the assistant, so nothing to learn"),
        ({"prompt": "a"}, 'no object with "text", with "prompt" and "answer", or with "messages"'),
        ({"answer": "a"}, 'no object with "text", '),
        ({"prompt": ["a"], "answer": "b"}, '"prompt" is no string'),
        ({"prompt": "a", "answer": None}, '"answer" is no string'),
        ({"prompt": "a", "answer": "b", "completion": "c"}, 'both "answer" and "completion"'),
        ({"text": "a", **CHAT}, 'both "text" and "messages"'),
    ],
    ids=str,
)
def test_rejects_lines_that_are_no_conversation(tmp_path, entry, said):
    with pytest.raises(ArgumentError, match=r"^data_path: ") as refusal:
        corpus_of(tmp_path, {"text": "fine"}, entry)
    assert "Line 2 is b'" in str(refusal.value)
    assert said in str(refusal.value)
