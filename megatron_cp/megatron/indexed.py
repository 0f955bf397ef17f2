"""Reads Megatron's `.bin/.idx` files as a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_cp.data.corpus import indexed_stem
from megatron_cp.errors import ArgumentError
from megatron_cp.layout.memo import frozen
from megatron_cp.layout.packing import IntArray
from megatron_cp.megatron.patches import silent_destructors


class IndexedCorpus:
    """The tokenised documents of a `.bin/.idx` pair, which are read from disk when needed.

    Args:
        prefix: the path without `.bin` or `.idx`, or with either.
        vocab_size: every token must be below it.

    Raises:
        ArgumentError: a file is missing, no such index, a damaged one, or holds no document.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        stem = indexed_stem(prefix)
        allowed = "the prefix of a .bin and an .idx file that Megatron's tools wrote"
        for suffix in (".bin", ".idx"):
            if not Path(stem + suffix).is_file():
                raise ArgumentError("data_path", str(prefix), allowed, f"There is no {stem}{suffix}.")
        data = _open(stem)
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

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> IntArray:
        """Returns `[end - start]` tokens of a document, or all of them."""
        first, last = self._first_sequence[document : document + 2].tolist()
        whole = np.concatenate([self._data[sequence] for sequence in range(first, last)])[start:end].astype(np.int64)
        if whole.size and int(whole.min()) < 0:
            remedy = f"Document {document} holds {int(whole.min())}."
            raise ArgumentError("data_path", self.name, "a corpus of tokens of at least 0", remedy)
        if whole.size and int(whole.max()) >= self.vocab_size:
            allowed = f"more than every token of {self.name}, where {int(whole.max())} occurs"
            raise ArgumentError("vocab_size", self.vocab_size, allowed)
        return whole

    def is_learnt(self, document: int, start: int = 0, end: int | None = None) -> None:
        """Returns None, which means that all tokens are to be predicted."""


def _open(stem: str) -> IndexedDataset | str:
    """Returns Megatron's reader of the pair, or the reason why it cannot be read."""
    with silent_destructors():  # the reader's destructors fail if its constructor did
        try:
            data = IndexedDataset(stem)
        except Exception as error:  # a damaged file may lead to any error
            return str(error) or type(error).__name__
    return _damage(data, Path(f"{stem}.bin")) or data


def _damage(data: IndexedDataset, tokens: Path) -> str | None:
    """Returns the first inconsistency of an index with its file `tokens`, or None.

    The reader checks only what it needs to map the files. Other damage would end a run in the middle, or be trained on.
    The check takes 0.15 s for 10 million sequences in the order of their tokens, and 4 s in any other order.
    """
    item, lengths, pointers = data.index.dtype_size, data.sequence_lengths, data.index.sequence_pointers
    there = tokens.stat().st_size
    if not np.issubdtype(data.index.dtype, np.integer):
        return f"its tokens are {np.dtype(data.index.dtype).name}, and should be integers"
    if lengths.size and lengths.min() < 0:
        worst = int(lengths.argmin())
        return f"sequence {worst} has {lengths[worst]} tokens"
    if pointers.size and pointers.min() < 0:
        worst = int(pointers.argmin())
        return f"sequence {worst} starts at byte {pointers[worst]}"
    if (pointers % item).any():
        worst = int(np.flatnonzero(pointers % item)[0])
        return f"sequence {worst} starts at byte {pointers[worst]}, inside a token of {item} bytes"
    if pointers.size:
        last = int(pointers.argmax())
        needed, ends = int(pointers[last]) + int(lengths[last]) * item, pointers
        if needed <= there:  # then no sum below overflows, since a length has 31 bits
            ends = pointers + lengths * np.int64(item)
            needed = int(ends.max())
        if needed > there:
            return f"{tokens} has {there} bytes and should have {needed}"
        overlap = _first_overlap(pointers, ends)
        if overlap is not None:
            return f"two sequences overlap at byte {overlap}"
    return _damaged_documents(data.document_indices)


def _first_overlap(starts: IntArray, ends: IntArray) -> int | None:
    """Returns the first byte of a sequence that begins inside another one, or None.

    The same sequence may be listed several times, by tools that sample some documents more often than others.
    """
    if (ends[:-1] <= starts[1:]).all():
        return None  # the sequences are in the order of their tokens, as Megatron writes them
    filled = starts < ends
    order = np.flatnonzero(filled)[np.argsort(starts[filled], kind="stable")]
    starts, ends = starts[order], ends[order]
    same = (starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1])
    inside = np.flatnonzero((ends[:-1] > starts[1:]) & ~same)
    return int(starts[inside[0] + 1]) if inside.size else None


def _damaged_documents(indices: IntArray) -> str | None:
    """Returns the first error in the documents' first sequences, or None. The reader checks the last entry itself."""
    if indices[0] != 0:
        return f"its documents start at sequence {indices[0]}, and should at 0"
    falls = np.flatnonzero(indices[1:] < indices[:-1])
    if falls.size:
        place = int(falls[0]) + 1
        return f"document {place} starts at sequence {indices[place]}, before document {place - 1}"
    return None
