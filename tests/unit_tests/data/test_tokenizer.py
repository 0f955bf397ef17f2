"""`Tokenizer`: text to token numbers."""

import json
import os
import re
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.data import ByteTokenizer, FileTokenizer, read_tokenizer
from megatron_cp.errors import ArgumentError

needs_tokenizers = pytest.mark.usefixtures("tokenizers")


@pytest.fixture
def tokenizers():
    return pytest.importorskip("tokenizers", reason="pip install '.[tokenizers]'")


@pytest.fixture
def write(tmp_path):
    """Writes a `tokenizer.json` of whole words, with tokens added behind the vocabulary."""

    def written(added=("<|endoftext|>",), vocabulary=None, **changes):
        vocabulary = vocabulary or {"a": 0, "b": 1, "<unk>": 2}
        flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        path = tmp_path / "tokenizer.json"
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": max(vocabulary.values()) + 1 + place, "content": token, "special": True, **flags}
                for place, token in enumerate(added)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        }
        path.write_text(json.dumps(content | changes))
        return path

    return written


@contextmanager
def refusal_of(path, remedy):
    with pytest.raises(ArgumentError, match=re.escape(f"tokenizer_model: got {str(path)!r}; allowed: ")) as caught:
        yield
    assert caught.value.argument == "tokenizer_model"
    assert remedy in str(caught.value)


@settings(max_examples=100)
@given(text=st.text(st.characters(codec="utf-8")))
def test_bytes_are_those_of_utf_8(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int64
    assert bytes(tokens.tolist()).decode() == text
    assert tokenizer.end_of_document not in tokens


def test_bytes_and_their_end_of_document_are_the_vocabulary():
    tokenizer = read_tokenizer(None)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_document) == ("bytes", 257, 256)


@needs_tokenizers
@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_a_file_is_read_as_the_package_reads_it(write, kind):
    path = write()
    tokenizer = read_tokenizer(kind(path))
    tokens = tokenizer.encode("b a nowhere")
    assert (tokens.dtype, tokens.tolist()) == (np.int64, [1, 0, 2])
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_document) == (str(path), 4, 3)
    assert tokenizer.encode("").tolist() == []


@needs_tokenizers
def test_a_document_is_neither_cut_nor_framed_and_cannot_spell_its_end(write):
    frame = {"type": "BertProcessing", "sep": ["b", 1], "cls": ["b", 1]}
    truncation = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    padding = {"strategy": {"Fixed": 7}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "b"}
    tokenizer = FileTokenizer(write(truncation=truncation, padding=padding, post_processor=frame))
    assert tokenizer.encode("a a a a").tolist() == [0, 0, 0, 0]
    tokenizer = FileTokenizer(write())
    assert tokenizer.end_of_document not in tokenizer.encode("a <|endoftext|> b")
    assert FileTokenizer(write(vocabulary={"a": 0, "<unk>": 9})).vocab_size == 10


@needs_tokenizers
@pytest.mark.parametrize(
    ("added", "end"),
    [
        (["</s>", "<|endoftext|>"], "<|endoftext|>"),
        (["</s>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["<eos>", "<|im_end|>", "</s>"], "</s>"),
        (["<eos>", "<|im_end|>"], "<|im_end|>"),
        (["<pad>", "<eos>"], "<eos>"),
    ],
    ids=" ".join,
)
def test_the_end_of_document_is_the_first_known(write, added, end):
    assert FileTokenizer(write(added)).end_of_document == 3 + added.index(end)


@needs_tokenizers
def test_rejects_files_without_an_end_and_texts_that_they_cannot_encode(write):
    path = write(added=["<pad>"])
    with refusal_of(path, "one of <|endoftext|>, <|end_of_text|>, </s>, <|im_end|>, <eos>"):
        FileTokenizer(path)
    path = write(model={"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "<unk>"})
    tokenizer = FileTokenizer(path)
    assert tokenizer.encode("a b").tolist() == [0, 1]
    with refusal_of(path, "It fails on 'a nowhere': WordLevel error: Missing [UNK] token"):
        tokenizer.encode("a nowhere")


@needs_tokenizers
@pytest.mark.parametrize("content", ["", "{}", "no JSON"])
def test_rejects_a_file_that_is_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with refusal_of(path, "Not a tokenizer: "):
        read_tokenizer(path)


def test_rejects_a_file_when_the_package_is_missing(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = write()
    with refusal_of(path, "pip install 'tokenizers<1,>=0.21'."):
        read_tokenizer(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "said"),
    [("nowhere.json", "No such file"), (".", "directory"), ("pipe", "no regular file"), ("a\0b", "null"),
     ("tokenizer.model", "utf-8")],
)  # fmt: skip
def test_rejects_paths_that_lead_to_no_file_or_cannot_be_read(tmp_path, name, said):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xfe")
    with refusal_of(tmp_path / name, said):
        read_tokenizer(tmp_path / name)


def test_tokens_become_text_up_to_the_end_of_the_document(write, tokenizers):
    of_bytes, of_file = ByteTokenizer(), FileTokenizer(write())
    assert of_bytes.decode([*of_bytes.encode("naïve"), 256, 65]) == "naïve"
    assert of_bytes.decode([65, 0xFF]) == "A\ufffd"  # half a character
    assert of_file.decode([0, 1, of_file.end_of_document, 0]) == "a b"
    assert of_file.decode([0, of_file.vocab_size + 5]) == "a"  # rows of an embedding that are no tokens
