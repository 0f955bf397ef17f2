"""Megatron's `.bin/.idx` files as a corpus."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.packing import IntArray
from megatron_cp.layout.tables import frozen


class IndexedCorpus:
    """The documents of a `.bin/.idx` pair, tokenised before; read from disk as they are asked for.

    Args:
        prefix: the path without `.bin` or `.idx`, or with either.
        vocab_size: every token must be below it.

    Raises:
        ArgumentError: a file is missing, no such index, or holds no document.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        stem = _stem(prefix)
        allowed = "the prefix of a .bin and an .idx file that Megatron's tools wrote"
        for suffix in (".bin", ".idx"):
            if not Path(stem + suffix).is_file():
                raise ArgumentError("data_path", str(prefix), allowed, f"There is no {stem}{suffix}.")
        data = _opened(stem)
        if isinstance(data, str):
            raise ArgumentError("data_path", str(prefix), allowed, f"Cannot read it: {data}.")
        self._data = data
        self.name = stem
        self.vocab_size = vocab_size
        self.skipped: Mapping[str, int] = {}
        starts = np.concatenate([[0], np.cumsum(self._data.sequence_lengths, dtype=np.int64)])
        offsets = starts[self._data.document_indices]
        self._first_sequence = np.asarray(self._data.document_indices, dtype=np.int64)
        empty = int(np.count_nonzero(offsets[1:] == offsets[:-1]))
        if empty:
            self.skipped = {"empty": empty}
            self._first_sequence = self._first_sequence[np.append(offsets[1:] > offsets[:-1], True)]
            offsets = np.unique(offsets)
        if offsets.size < 2:
            raise ArgumentError("data_path", str(prefix), "a corpus with at least one document", "It holds none.")
        self.lengths: IntArray = frozen(np.diff(offsets))

    @staticmethod
    def is_prefix(path: str | Path | None) -> bool:
        """True if `path` names a `.bin/.idx` pair rather than text."""
        try:
            if path is None or Path(path).is_dir():
                return False
            stem = _stem(path)
            return stem != str(path) or Path(stem + ".idx").is_file() or Path(stem + ".bin").is_file()
        except OSError:  # in a folder that cannot be searched, say: who reads it as text will say so
            return False

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> IntArray:
        """`[end - start]` tokens of a document, or all of them."""
        first, last = self._first_sequence[document : document + 2].tolist()
        whole = np.concatenate([self._data[sequence] for sequence in range(first, last)])[start:end].astype(np.int64)
        if whole.size and not 0 <= int(whole.min()) <= int(whole.max()) < self.vocab_size:
            raise ArgumentError(
                "vocab_size",
                self.vocab_size,
                f"more than every token of {self.name}, where {int(whole.max())} occurs",
            )
        return whole


def _opened(stem: str) -> IndexedDataset | str:
    """Megatron's reader of the pair, or why it cannot be read."""
    # The reader's destructors fail where its constructor did, and Python reports that on standard error.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        data = IndexedDataset(stem)
    except Exception as error:  # whatever a damaged file leads to
        return str(error)
    finally:
        sys.unraisablehook = hook
    sizes = data.sequence_lengths.astype(np.int64) * data.index.dtype_size
    needed, there = int((data.index.sequence_pointers + sizes).max(initial=0)), Path(f"{stem}.bin").stat().st_size
    return data if needed <= there else f"{stem}.bin has {there} bytes and should have {needed}"


def _stem(prefix: str | Path) -> str:
    text = str(prefix)
    return text[:-4] if text.endswith((".bin", ".idx")) else text
