"""`IndexedCorpus` on files of Megatron's own builder, and on what is left of them after an accident."""

import itertools
import struct

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from megatron_cp.data import is_indexed
from megatron_cp.data.stream import PackedStream
from megatron_cp.errors import ArgumentError
from megatron_cp.megatron.indexed import IndexedCorpus
from tests.refusals import rejects
from tests.unit_tests.megatron.indexed_files import write_indexed

# The reader's destructors must not speak.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

# One sequence, several, none, an empty one among others, one token.
DOCUMENTS = [[[3, 1, 4]], [[1, 5], [9, 2, 6]], [], [[5], [], [3, 5]], [[8]], [[]]]
TOKENS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5], [8]]


@pytest.fixture
def prefix(tmp_path):
    write_indexed(tmp_path / "corpus", DOCUMENTS)
    return tmp_path / "corpus"


def rejected(prefix, vocab_size=10):
    with pytest.raises(ArgumentError) as caught:
        IndexedCorpus(prefix, vocab_size)
    assert caught.value.argument == "data_path"
    assert str(prefix) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_documents_are_their_sequences(suffix, prefix):
    corpus = IndexedCorpus(f"{prefix}{suffix}", 10)
    assert corpus.lengths.tolist() == [len(document) for document in TOKENS]
    assert [corpus.tokens(number).tolist() for number in range(4)] == TOKENS
    assert corpus.tokens(1, 1, 4).tolist() == [5, 9, 2]
    assert corpus.tokens(1, 3).tolist() == [2, 6]
    assert corpus.tokens(1).dtype == np.int64
    assert corpus.skipped == {"empty": 2}
    assert (corpus.name, corpus.vocab_size) == (str(prefix), 10)


def test_a_corpus_without_empty_documents_skips_nothing_and_one_without_tokens_is_rejected(tmp_path):
    write_indexed(tmp_path / "corpus", [[[1, 2]], [[3], [4]]])
    corpus = IndexedCorpus(tmp_path / "corpus", 10)
    assert corpus.skipped == {}
    assert [corpus.tokens(number).tolist() for number in range(2)] == [[1, 2], [3, 4]]
    write_indexed(tmp_path / "corpus", [[[]], []])
    assert "Cannot read it" in rejected(tmp_path / "corpus")  # a .bin of no bytes cannot be mapped
    (tmp_path / "corpus.bin").write_bytes(b"spare")
    assert "at least one document. It holds none." in rejected(tmp_path / "corpus")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_tokens_of_every_type(dtype, tmp_path):
    write_indexed(tmp_path / "corpus", [[[65535, 0]]], dtype)
    assert IndexedCorpus(tmp_path / "corpus", 65536).tokens(0).tolist() == [65535, 0]


def test_rejects_tokens_outside_the_vocabulary_and_epochs_hold_the_others(prefix):
    stream = PackedStream(IndexedCorpus(prefix, 10), 4, seed=3)
    packs = [stream.pack(number)[1] for number in range(stream.packs_per_epoch(0))]
    assert sorted(np.concatenate(packs).tolist()) == sorted(itertools.chain(*TOKENS))
    corpus = IndexedCorpus(prefix, 9)
    assert corpus.tokens(0).tolist() == TOKENS[0]
    rejects(r"vocab_size: got 9; allowed: more than every token .* where 9 occurs", corpus.tokens, 1)


# A file of the pair, what is left of its bytes, and the words of the refusal.
BROKEN = [
    (".bin", lambda _: None, "There is no {}.bin."), (".idx", lambda _: None, "There is no {}.idx."),
    *((".idx", lambda whole, kept=kept: whole[:kept], "Cannot read it: ") for kept in (0, 5, 9, 12, 17, 20, 30, 40)),
    (".idx", lambda whole: b"something else" + whole, "bad header"),
    (".idx", lambda whole: whole[:9] + struct.pack("<Q", 2) + whole[17:], "bad version"),
    (".bin", lambda whole: whole[:0], "Cannot read it: "),
    *((".bin", lambda whole, kept=kept: whole[:kept], f"{{}}.bin has {kept} bytes and should have 48")
      for kept in (1, 44)),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "left", "says"), BROKEN)
def test_rejects_what_an_accident_leaves(suffix, left, says, prefix, capfd):
    file = prefix.with_suffix(suffix)
    content = left(file.read_bytes())
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert says.format(prefix) in rejected(prefix)
    assert capfd.readouterr().err == ""


# Of two documents of 5 and 7 tokens in 4 bytes each.
SOUND = {"lengths": [5, 7], "pointers": [0, 20], "documents": [0, 1, 2], "code": 4}


def write_index(tmp_path, spare=0, **changes):
    """A pair with what Megatron's own writer would not write."""
    index = SOUND | changes
    (tmp_path / "corpus.bin").write_bytes(np.arange(12 + spare, dtype=np.int32).tobytes())
    content = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, index["code"])
    content += struct.pack("<QQ", len(index["lengths"]), len(index["documents"]))
    content += np.array(index["lengths"], np.int32).tobytes() + np.array(index["pointers"], np.int64).tobytes()
    (tmp_path / "corpus.idx").write_bytes(content + np.array(index["documents"], np.int64).tobytes())
    return tmp_path / "corpus"


def test_a_pair_without_damage_or_as_other_tools_write_it_is_read(tmp_path):
    corpus = IndexedCorpus(write_index(tmp_path), 12)
    assert [corpus.tokens(number).tolist() for number in range(2)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11]]
    # Sequences in another order than their tokens, with holes between, and some of them twice.
    changes = {"lengths": [5, 3, 5, 0, 5], "pointers": [28, 0, 28, 4, 28], "documents": [0, 1, 3, 5]}
    corpus = IndexedCorpus(write_index(tmp_path, spare=4, **changes), 16)
    shown = [corpus.tokens(number).tolist() for number in range(3)]
    assert shown == [[7, 8, 9, 10, 11], [0, 1, 2, 7, 8, 9, 10, 11], [7, 8, 9, 10, 11]]


DAMAGED = {
    "a length below 0": ({"lengths": [5, -7]}, "sequence 1 has -7 tokens"),
    "the smallest length": ({"lengths": [-(2**31), 7]}, "sequence 0 has -2147483648 tokens"),
    "documents that fall": ({"documents": [0, -1, 2]}, "document 1 starts at sequence -1, before document 0"),
    "documents read twice": (
        {"lengths": [5, 3, 4], "pointers": [0, 20, 32], "documents": [0, 2, 1, 3]},
        "document 2 starts at sequence 1, before document 1",
    ),
    "a first sequence of no document": ({"documents": [1, 2]}, "its documents start at sequence 1"),
    "a start below 0": ({"documents": [-2, 1, 2]}, "its documents start at sequence -2"),
    "documents beyond the sequences": ({"documents": [0, 3, 2]}, "document 2 starts at sequence 2, before document 1"),
    "an end beyond the sequences": ({"documents": [0, 1, 3]}, "AssertionError"),
    "no documents": ({"documents": []}, "index -1 is out of bounds"),
    "sequences that overlap": ({"pointers": [0, 16]}, "two sequences overlap at byte 16"),
    "sequences in another order that overlap": ({"pointers": [24, 0]}, "two sequences overlap at byte 24"),
    "a pointer inside a token": ({"pointers": [0, 18]}, "sequence 1 starts at byte 18, inside a token"),
    "a pointer below 0": ({"pointers": [-20, 20]}, "sequence 0 starts at byte -20"),
    "a pointer just below 0": ({"pointers": [0, -4]}, "sequence 1 starts at byte -4"),
    "an end that wraps": ({"pointers": [0, 2**63 - 4]}, "corpus.bin has 48 bytes and should have 9223372036854775832"),
    "an end beyond the tokens": ({"pointers": [0, 24]}, "corpus.bin has 48 bytes and should have 52"),
    "tokens that are floats": ({"code": 7}, "its tokens are float32"),
    "tokens that are doubles": ({"code": 6, "lengths": [2, 3], "pointers": [0, 16]}, "its tokens are float64"),
    "tokens of no type": ({"code": 9}, "9 is not a valid DType"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_rejects_a_damaged_index(damage, tmp_path, capfd):
    changes, says = DAMAGED[damage]
    found = rejected(write_index(tmp_path, **changes), 12)
    assert f"Cannot read it: {says}" in found or (says.startswith("corpus") and says in found)
    assert capfd.readouterr().err == ""


def test_rejects_tokens_below_0(tmp_path):
    prefix = write_index(tmp_path)
    (tmp_path / "corpus.bin").write_bytes(np.array([3, -1, *range(10)], np.int32).tobytes())
    corpus = IndexedCorpus(prefix, 12)
    rejects(r"data_path: got .* tokens of at least 0. Document 0 holds -1.", corpus.tokens, 0)


def test_what_is_a_pair_and_what_is_text(prefix, tmp_path):
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx", tmp_path / "missing.bin"):
        assert is_indexed(name)
    (tmp_path / "folder.bin").mkdir()
    for name in (None, tmp_path, tmp_path / "folder.bin", tmp_path / "text.txt", "", "x" * 300):
        assert not is_indexed(name)
