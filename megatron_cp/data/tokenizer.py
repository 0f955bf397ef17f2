"""`Tokenizer`: text to token numbers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISFIFO
from typing import Protocol

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.extras import install
from megatron_cp.layout.packing import IntArray


class Tokenizer(Protocol):
    """The properties of a vocabulary that a corpus needs.

    Attributes:
        name: for logs.
        vocab_size: a bound that every token is below: the rows of an embedding.
        end_of_document: the token that a corpus puts behind each document; `encode` itself adds none.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    def encode(self, text: str) -> IntArray:
        """Returns `[tokens]` of the text, which must be valid Unicode; empty if the text has none."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, with a mark in place of what is no text; it ends where a document ends."""


class ByteTokenizer:
    """UTF-8 bytes, and one more token for the end of a document: no file, no training, nothing unknown."""

    name = "bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> IntArray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(_until(tokens, self.end_of_document)).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` package.

    A document's text stays text: truncation, padding and templates of the file are switched off, and a special token
    that is spelled out in a document is not taken for one, so nothing but the corpus ends a document.

    Args:
        path: the `tokenizer.json`.

    Raises:
        ArgumentError: no such file, one that cannot be read or is no tokenizer, one without an end of document, or
            the `tokenizers` package is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        allowed = "a Hugging Face tokenizer.json"
        try:
            if S_ISFIFO(Path(path).stat().st_mode):  # can be read only once, and blocks without a writer
                raise OSError("It is no regular file")
            text = Path(path).read_text("utf-8")
        except (OSError, ValueError) as error:  # not UTF-8, or an impossible path
            raise ArgumentError("tokenizer_model", self.name, allowed, f"Cannot read it: {error}.") from None
        try:
            package = importlib.import_module("tokenizers")
        except ImportError:
            allowed = "bytes (no file) as long as the tokenizers package is missing"
            raise ArgumentError("tokenizer_model", self.name, allowed, f"{install('tokenizers')}.") from None
        try:
            self._tokenizer = package.Tokenizer.from_str(text)
        except Exception as error:  # the package has no narrower one
            raise ArgumentError("tokenizer_model", self.name, allowed, f"Not a tokenizer: {error}.") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        # The largest, since added tokens may leave gaps.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        ends = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>"]
        known = [vocabulary[end] for end in ends if end in vocabulary]
        if not known:
            allowed = f"a tokenizer that knows an end of document: one of {', '.join(ends)}"
            raise ArgumentError("tokenizer_model", self.name, allowed, "Add one to the file's added_tokens.")
        self.end_of_document = known[0]

    def encode(self, text: str) -> IntArray:
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        except Exception as error:  # the package has no narrower one
            allowed = "a tokenizer that can encode every text, such as one whose unk_token is in its vocabulary"
            raise ArgumentError("tokenizer_model", self.name, allowed, f"It fails on {text[:40]!r}: {error}.") from None

    def decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in _until(tokens, self.end_of_document) if token < self.vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=False))


def _until(tokens: Sequence[int], end: int) -> list[int]:
    found = list(tokens)
    return found[: found.index(end)] if end in found else found


def read_tokenizer(path: str | Path | None) -> Tokenizer:
    """Returns the tokenizer of a `tokenizer.json`, or bytes without a path.

    Raises:
        ArgumentError: as `FileTokenizer`.
    """
    return ByteTokenizer() if path is None else FileTokenizer(path)
