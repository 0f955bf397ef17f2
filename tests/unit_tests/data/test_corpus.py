"""`Corpus`: documents as tokens, and its parts."""

import json
import os
import platform
import re
import sysconfig
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_cp.data import ByteTokenizer, TokenCorpus, read_corpus
from megatron_cp.data.corpus import split_corpus
from megatron_cp.errors import ArgumentError
from tests.refusals import rejects

END = 256
not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")


@contextmanager
def refusal_of(path, *said):
    with pytest.raises(ArgumentError, match=re.escape(f"data_path: got {str(path)!r}; allowed: ")) as caught:
        yield
    assert caught.value.argument == "data_path"
    for part in said:
        assert part in str(caught.value)


def write(folder, contents):
    """Files by name."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def read(path):
    return read_corpus(path, ByteTokenizer())


def texts_of(corpus):
    """Every document as text, after a check of everything else a corpus promises."""
    documents = [corpus.tokens(document) for document in range(len(corpus.lengths))]
    assert corpus.lengths.tolist() == [document.size for document in documents]
    assert all(document.dtype == np.int64 and document[-1] == END for document in documents)
    return [bytes(document[:-1].tolist()).decode() for document in documents]


def test_files_are_documents_and_what_is_no_text_is_skipped_and_counted(tmp_path):
    write(tmp_path, {"b": "4\r\n", "a/z": "zä", "a-b": "folders first", "a/b/c.py": "1", "c.jsonl": '{"text": ""}\n'})
    corpus = read(tmp_path)
    assert texts_of(corpus) == ["1", "zä", "folders first", "4\r\n", '{"text": ""}\n']
    assert (corpus.name, corpus.vocab_size, corpus.skipped) == (str(tmp_path), 257, {})
    assert texts_of(read(str(tmp_path))) == texts_of(corpus)
    write(tmp_path, {"book.txt": "one\n\ntwo\n"})
    corpus = read(str(tmp_path / "book.txt"))
    assert texts_of(corpus) == ["one\n\ntwo\n"]
    assert corpus.name == str(tmp_path / "book.txt")
    write(tmp_path / "spaces", {"a": " ", "b": "b"})
    words = SimpleNamespace(vocab_size=2, end_of_document=1, encode=lambda text: np.zeros(len(text.split()), np.int64))
    corpus = read_corpus(tmp_path / "spaces", words)
    assert corpus.lengths.tolist() == [2]
    assert corpus.skipped == {"empty": 1}


def test_a_folder_skips_and_counts_what_is_no_text(tmp_path):
    write(tmp_path, {"a": "", "b": "", "c": b"\xff\xfe", "d": "kept", "e": b"caf\xe9"})
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    corpus = read(tmp_path)
    assert texts_of(corpus) == ["kept"]
    assert corpus.skipped == {"empty": 2, "not UTF-8": 2, "unreadable": 1}


def test_a_folder_leaves_out_what_is_hidden_links_to_folders_and_pipes(tmp_path):
    write(tmp_path / ".below", {".git/config": "x", "a/.hidden/b": "x", ".env": "x", "a/seen": "seen"})
    assert texts_of(read(tmp_path / ".below")) == ["seen"]
    write(tmp_path, {"file": "once"})
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "twin").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    corpus = read(tmp_path)
    assert texts_of(corpus) == ["once", "once"]
    assert corpus.skipped == {}


@not_root
def test_a_folder_skips_and_counts_what_may_not_be_read(tmp_path):
    write(tmp_path, {"file": "secret", "folder/a": "secret", "names/b": "secret", "kept": "kept"})
    modes = {"file": 0o000, "folder": 0o000, "names": 0o444}  # names: may be listed, its files may not be reached
    for name, mode in modes.items():
        (tmp_path / name).chmod(mode)
    try:
        corpus = read(tmp_path)
    finally:
        for name in modes:
            (tmp_path / name).chmod(0o700)
    assert texts_of(corpus) == ["kept"]
    assert corpus.skipped == {"unreadable": 3}


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    lines = [
        json.dumps({"text": "zä\n", "id": 1}), "", "  \t", json.dumps({"text": ""}), '{"text": "half \\ud800"}',
        '{"text": "whole \\ud83d\\ude00"}', json.dumps({"text": "b\u2028c"}, ensure_ascii=False),
    ]  # fmt: skip
    write(tmp_path, {"corpus.jsonl": "\r\n".join(lines)})
    corpus = read(tmp_path / "corpus.jsonl")
    assert texts_of(corpus) == ["zä\n", "whole 😀", "b\u2028c"]
    assert corpus.skipped == {"empty": 1, "not UTF-8": 1}


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32), (2**31, np.int32),
        (2**31 + 1, np.int64), (2**32, np.int64),
    ],
)  # fmt: skip
def test_the_smallest_type_that_holds_the_vocabulary_is_kept(tmp_path, vocab_size, dtype):
    write(tmp_path, {"a": "ab"})
    tokens = np.array([0, vocab_size - 2])
    corpus = read_corpus(
        tmp_path, SimpleNamespace(vocab_size=vocab_size, end_of_document=vocab_size - 1, encode=lambda text: tokens)
    )
    assert corpus.flat.dtype == dtype
    assert corpus.tokens(0).tolist() == [0, vocab_size - 2, vocab_size - 1]


@pytest.mark.parametrize("token", [-1, 3, 259, 2**40])
def test_rejects_tokens_outside_their_vocabulary(tmp_path, token):
    """In the type that is kept 259 would be 3, and -1 be 255."""
    write(tmp_path, {"a": "a"})
    words = SimpleNamespace(name="words", vocab_size=3, end_of_document=2, encode=lambda text: np.array([1, token]))
    rejects(rf"tokenizer_model: got 'words'; .* below its vocab_size, 3. .*{token}", read_corpus, tmp_path, words)


def test_a_range_of_a_document_stays_inside_it():
    corpus = TokenCorpus("two", 9, np.arange(7, dtype=np.uint8), np.array([0, 3, 7]))
    assert corpus.lengths.tolist() == [3, 4]
    assert [corpus.tokens(1).tolist(), corpus.tokens(1, 2).tolist()] == [[3, 4, 5, 6], [5, 6]]
    assert [corpus.tokens(0, 1, 3).tolist(), corpus.tokens(0, 1, 9).tolist()] == [[1, 2], [1, 2]]
    assert corpus.skipped == {}


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("flat", np.arange(7) * 1.0), ("flat", list(range(7))), ("flat", np.full(7, 2**63, np.uint64)),
        ("offsets", [0, 5, 3, 7]), ("offsets", [0.0, 7.0]), ("offsets", [0, 6]), ("offsets", [1, 7]), ("offsets", []),
    ],
)  # fmt: skip
def test_rejects_tokens_and_offsets_of_no_corpus(argument, given):
    arrays = {"flat": np.arange(7), "offsets": np.array([0, 3, 7]), argument: given}
    rejects(rf"{argument}: got .*; allowed: (a flat|offsets that|integers below)", TokenCorpus, "two", 9, **arrays)


def test_what_is_read_out_is_nobody_elses(tmp_path):
    write(tmp_path, {"a": "abc"})
    corpus = read(tmp_path)
    corpus.tokens(0)[:] = 0
    assert texts_of(corpus) == ["abc"]
    for kept in (corpus.flat, corpus.offsets, corpus.lengths):
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 7


def test_the_standard_library_is_read_without_a_path(tmp_path, monkeypatch):
    corpus = read(None)
    assert corpus.lengths.max() > 20 * np.median(corpus.lengths)
    assert corpus.lengths.sum() > 1_000_000
    source = "import this\n"
    write(tmp_path, {"json.py": source, "asyncio/base.py": "async", "b.txt": "x", "pyc": "x", "lib/x.pyc": "x"})
    write(tmp_path, {f"{folder}/a.py": "x" for folder in ("site-packages", "dist-packages", "asyncio/__pycache__")})
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    corpus = read(None)
    assert texts_of(corpus) == ["async", source]
    assert corpus.name == f"Python {platform.python_version()} standard library"


@pytest.mark.parametrize(
    ("path", "said"),
    [("nowhere", "No file or folder is there"), ("", "No file or folder is there"), ("x" * 180, "No file"),
     ("pipe", "a folder, a .jsonl file or a text file"), ("x" * 5000, "Cannot read it: File name too long.")],
    ids=lambda text: text[:9],
)  # fmt: skip
def test_rejects_paths_that_lead_to_no_file(tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(write(tmp_path, {"a": "not meant"}))
    os.mkfifo(tmp_path / "pipe")
    rejects(rf"^data_path: .*{re.escape(said)}", read, path)


@pytest.mark.parametrize(
    ("contents", "path", "said"),
    [
        ({}, ".", "Nothing is there"), ({"a": b"\xff", "b": "", "c": ""}, ".", "Skipped: 2 empty, 1 not UTF-8."),
        ({"a.jsonl": '\n{"text": ""}\n'}, "a.jsonl", "Skipped: 1 empty."), ({"a.txt": ""}, "a.txt", "1 empty"),
        ({"a.txt": b"\xff"}, "a.txt", "1 not UTF-8"),
    ],
)  # fmt: skip
def test_rejects_folders_and_files_without_a_document(tmp_path, contents, path, said):
    with refusal_of(write(tmp_path, contents) / path, said):
        read(tmp_path / path)


@not_root
@pytest.mark.parametrize("name", ["file.txt", "file.jsonl", "folder", "folder/below"])
def test_rejects_a_path_that_may_not_be_read(tmp_path, name):
    write(tmp_path, {"file.txt": "secret", "file.jsonl": '{"text": "secret"}', "folder/below": "secret"})
    locked = tmp_path / name.partition("/")[0]
    locked.chmod(0o000)
    try:
        with refusal_of(tmp_path / name, "unreadable" if name == "folder" else "Permission denied"):
            read(tmp_path / name)
    finally:
        locked.chmod(0o700)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"plain text", "Line 3 is b'plain text': Expecting value."), (b'{"text": "a"', "Expecting ',' delimiter."),
        (b'["text"]', 'no object with "text", with "prompt" and "answer", or with "messages".'),
        (b'"text"', 'no object with "text", '), (b'{"txt": "a"}', 'no object with "text", '),
        (b'{"text": null}', '"text" is no string.'), (b'{"text": 7}', '"text" is no string.'),
        (b'{"text": "caf\xe9"}', "utf-8"), (b"[" * 100_000, "nested too deeply"),
    ],
    ids=["text", "cut", "list", "string", "other key", "null", "number", "latin-1", "nested"],
)  # fmt: skip
def test_rejects_a_line_that_is_no_document(tmp_path, line, said):
    write(tmp_path, {"a.jsonl": b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n'})
    with refusal_of(tmp_path / "a.jsonl", "Line 3 is b'", said):
        read(tmp_path / "a.jsonl")


NUMBERS = TokenCorpus("numbers", 64, np.arange(40, dtype=np.uint8), np.arange(0, 44, 4))


def test_parts_hold_every_document_once():
    training, validation, test = split_corpus(NUMBERS, "8,2,0")
    assert test is None
    assert training.lengths.tolist() == [4] * 8
    assert validation.lengths.tolist() == [4] * 2
    assert training.tokens(7).tolist() == [28, 29, 30, 31]
    assert validation.tokens(0).tolist() == [32, 33, 34, 35]
    assert validation.tokens(1, 1, 3).tolist() == [37, 38]
    assert (validation.vocab_size, validation.skipped) == (64, {})
    assert validation.name == "documents 8 to 10 of numbers"


@pytest.mark.parametrize("shares", ["", "a,b", "-1,2", "0,0,0", "nan,1", "1,inf"])
def test_rejects_shares_that_are_none(shares):
    rejects(r"split: got .*; allowed: shares of at least 0", split_corpus, NUMBERS, shares)


def test_rejects_a_part_without_documents():
    rejects("split: got 'documents 10 to 10'; allowed: at least one of the 10", split_corpus, NUMBERS, "99,1,0")
