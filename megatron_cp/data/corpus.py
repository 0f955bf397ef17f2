"""`Corpus`: documents as tokens."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.conversations import ALLOWED, Passage, parse_line
from megatron_cp.data.tokenizer import Tokenizer
from megatron_cp.errors import ArgumentError
from megatron_cp.layout.array_types import BoolArray, IntArray
from megatron_cp.layout.memo import frozen
from megatron_cp.layout.packing import check_signed, host_array, is_integral


class Corpus(Protocol):
    """Documents as tokens, in any storage.

    Attributes:
        name: origin of the documents, for logs and errors.
        vocab_size: a bound that every token is below.
        lengths: `[documents]` tokens of each document, its end-of-document token included.
        skipped: reason -> number of documents that were left out.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def lengths(self) -> IntArray: ...

    @property
    def skipped(self) -> Mapping[str, int]: ...

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> IntArray:
        """Returns `[end - start]` tokens of a document, or all of them, which end in the end-of-document token.

        The range avoids copying a whole book for each of its pieces.
        """

    def is_learnt(self, document: int, start: int = 0, end: int | None = None) -> BoolArray | None:
        """Returns `[end - start]` True for tokens that are to be predicted; None if all are."""


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """A corpus in memory. Its arrays are not copied and must not be changed.

    Attributes:
        name: origin of the documents.
        vocab_size: a bound that every token is below.
        flat: `[tokens]` of all documents, one after another, in the smallest type that holds the vocabulary.
        offsets: `[documents + 1]` start of each document in `flat`; starts at 0, ends at its size.
        skipped: reason -> number of documents that were left out.
        learnt: `[tokens]` True for tokens that are to be predicted; None for all.

    Raises:
        ArgumentError: tokens or offsets that are no integers, or offsets that fall or do not end at the last token.
    """

    name: str
    vocab_size: int
    flat: NDArray[Any]
    offsets: IntArray
    skipped: Mapping[str, int] = field(default_factory=dict)
    learnt: BoolArray | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.flat, np.ndarray) or self.flat.ndim != 1 or not is_integral(self.flat):
            raise ArgumentError("flat", getattr(self.flat, "dtype", self.flat), "a flat array of integers, the tokens")
        check_signed("flat", self.flat)
        offsets = checked_counts("offsets", self.offsets)
        ends = offsets[[0, -1]].tolist() if offsets.size else []
        if ends != [0, self.flat.size] or (offsets[1:] < offsets[:-1]).any():
            allowed = f"offsets that rise from 0 to the {self.flat.size} tokens"
            raise ArgumentError("offsets", offsets[:8].tolist(), allowed)

    @cached_property
    def lengths(self) -> IntArray:
        """`[documents]` tokens of each document, its end-of-document token included."""
        return frozen(np.diff(self.offsets))

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> IntArray:
        """Returns a copy of `[end - start]` tokens of a document, or of all of them."""
        whole = self.flat[self.offsets[document] : self.offsets[document + 1]]
        return whole[start:end].astype(np.int64)

    def is_learnt(self, document: int, start: int = 0, end: int | None = None) -> BoolArray | None:
        """Returns `[end - start]` True for tokens that are to be predicted; None if all are."""
        if self.learnt is None:
            return None
        return self.learnt[self.offsets[document] : self.offsets[document + 1]][start:end]


@dataclass(frozen=True, eq=False)
class CorpusPart:
    """The documents `first` up to `last` of a corpus, such as those held out for validation."""

    corpus: Corpus
    first: int
    last: int

    def __post_init__(self) -> None:
        total = self.corpus.lengths.size
        if not 0 <= self.first < self.last <= total:
            raise ArgumentError("split", f"documents {self.first} to {self.last}", f"at least one of the {total}")

    @property
    def name(self) -> str:
        return f"documents {self.first} to {self.last} of {self.corpus.name}"

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def lengths(self) -> IntArray:
        """`[last - first]` tokens of each document."""
        return self.corpus.lengths[self.first : self.last]

    @property
    def skipped(self) -> Mapping[str, int]:
        return self.corpus.skipped

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> IntArray:
        """Returns `[end - start]` tokens of a document, or all of them."""
        return self.corpus.tokens(self.first + document, start, end)

    def is_learnt(self, document: int, start: int = 0, end: int | None = None) -> BoolArray | None:
        """Returns `[end - start]` True for tokens that are to be predicted; None if all are."""
        return self.corpus.is_learnt(self.first + document, start, end)


def indexed_stem(prefix: str | Path) -> str:
    """Returns the path of a `.bin/.idx` pair without either."""
    text = str(prefix)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


def is_indexed(path: str | Path | None) -> bool:
    """Returns True if `path` names a `.bin/.idx` pair of Megatron rather than text."""
    try:
        if path is None or Path(path).is_dir():
            return False
        stem = indexed_stem(path)
        return stem != str(path) or Path(stem + ".idx").is_file() or Path(stem + ".bin").is_file()
    except OSError:  # such as in a folder that cannot be searched; reading it as text will raise an error
        return False


def checked_counts(argument: str, values: Iterable[int]) -> IntArray:
    """Returns a flat array of integers of at least 0, such as lengths or offsets."""
    given = host_array(argument, values)
    if given.ndim != 1 or (given.size and not (is_integral(given) and int(given.min()) >= 0)):
        raise ArgumentError(argument, given[:8].tolist(), "a flat list of integers of at least 0")
    return given.astype(np.int64)


def split_corpus(corpus: Corpus, shares: str) -> list[CorpusPart | None]:
    """Returns the parts of a corpus by Megatron's `--split`, such as "99,1,0"; None for a share of 0."""
    try:
        weights = np.array([float(share) for share in shares.split(",")])
    except ValueError:
        weights = np.array([-1.0])
    if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
        raise ArgumentError("split", shares, "shares of at least 0, such as 99,1,0")
    edges = np.round(np.append(0, np.cumsum(weights)) / weights.sum() * corpus.lengths.size).astype(int).tolist()
    return [
        CorpusPart(corpus, first, last) if weight else None
        for weight, first, last in zip(weights, edges[:-1], edges[1:], strict=True)
    ]


def read_corpus(path: str | Path | None, tokenizer: Tokenizer) -> Corpus:
    """Reads the documents at `path` as tokens in memory, in an order that depends only on their names.

    Documents that are empty, not UTF-8 or unreadable are skipped and counted.

    Args:
        path: a folder (every file below it is one document; hidden files and folders are left out), a `.jsonl` file
            (each line is one document: text, or a conversation; see `conversations.py`), any other text file (one
            document), or None: the source files of Python's standard library, which every machine has: real documents
            with a heavy tail.
        tokenizer: the tokenizer of the documents.

    Raises:
        ArgumentError: no such path, one that cannot be read or without one document, or a line of a `.jsonl` file
            that is no JSON object of text, of a prompt and its answer, or of messages.
    """
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        others = {"site-packages", "dist-packages", "__pycache__"}
        sources = [file for file in _files(library, others) if file.suffix == ".py"]
        return _tokenized(f"Python {platform.python_version()} standard library", map(_content, sources), tokenizer)
    source = Path(path)
    allowed = "a folder, a .jsonl file or a text file that can be read"
    try:
        # To pathlib an empty path, such as an unset shell variable, is the current folder.
        mode = _mode(source)
        is_folder = S_ISDIR(mode) and str(path) != ""
        if not is_folder and not S_ISREG(mode):
            raise ArgumentError("data_path", str(path), allowed, "No file or folder is there.")
        documents: Iterable[list[Passage] | None]
        if is_folder:
            documents = map(_content, _files(source))
        elif source.suffix == ".jsonl":
            documents = _lines(source)
        else:
            documents = [[Passage(source.read_bytes())]]
        return _tokenized(str(path), documents, tokenizer)
    except OSError as error:
        raise ArgumentError("data_path", str(path), allowed, f"Cannot read it: {error.strerror}.") from None


def _mode(path: Path) -> int:
    """Returns a file's type and permissions; 0 for a path that leads nowhere. Python 3.14's `is_file` hides errors."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _files(root: Path, skipped_names: Set[str] = frozenset()) -> list[Path]:
    """Returns every regular file below `root`, sorted; without hidden ones and folders in `skipped_names`."""
    found: list[Path] = []
    # A folder that cannot be listed takes the place of its files: reading it fails too, and is counted.
    for folder, folders, files in os.walk(root, onerror=lambda error: found.append(Path(error.filename))):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_names]
        visible = (Path(folder, name) for name in files if not name.startswith("."))
        found.extend(file for file in visible if _is_regular(file))
    return sorted(found)


def _is_regular(path: Path) -> bool:
    """Returns False for a pipe, which could block for ever, and a link to a folder, which could lead in a circle."""
    try:
        return S_ISREG(path.stat().st_mode)
    except OSError:  # reading it will fail too, and is counted
        return True


def _content(file: Path) -> list[Passage] | None:
    try:
        return [Passage(file.read_bytes())]
    except OSError:
        return None


def _lines(path: Path) -> Iterator[list[Passage]]:
    """Yields the document of every line of a `.jsonl` file."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                parts = parse_line(line)
            except ValueError as problem:
                remedy = f"Line {number} is {line.strip()[:80]!r}: {problem}."
                raise ArgumentError("data_path", str(path), ALLOWED, remedy) from None
            yield parts


def _tokenized(name: str, documents: Iterable[list[Passage] | None], tokenizer: Tokenizer) -> TokenCorpus:
    """Joins the documents' tokens end to end. None stands for a document that could not be read."""
    sizes: dict[type, int] = {np.uint8: 2**8, np.uint16: 2**16, np.int32: 2**31}
    dtype = next((kind for kind, size in sizes.items() if tokenizer.vocab_size <= size), np.int64)
    flat, learnt = bytearray(), bytearray()  # grow in place; joining arrays would need twice the memory
    lengths: list[int] = []
    skipped: Counter[str] = Counter()
    for parts in documents:
        if parts is None:
            skipped["unreadable"] += 1
            continue
        try:
            pieces = [tokenizer.encode(part.text.decode()) for part in parts]
        except UnicodeDecodeError:
            skipped["not UTF-8"] += 1
            continue
        tokens = np.concatenate(pieces)
        if tokens.size == 0:
            skipped["empty"] += 1
            continue
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size:
            outside = tokens[(tokens < 0) | (tokens >= tokenizer.vocab_size)][0]
            allowed = f"a tokenizer whose tokens are below its vocab_size, {tokenizer.vocab_size}"
            raise ArgumentError("tokenizer_model", tokenizer.name, allowed, f"It made token {outside}.")
        flat += np.append(tokens, tokenizer.end_of_document).astype(dtype).tobytes()
        if learnt or not all(part.is_learnt for part in parts):  # not needed for plain texts
            learnt = learnt or bytearray([True]) * sum(lengths)
            for part, piece in zip(parts, pieces, strict=True):
                learnt += bytes([part.is_learnt]) * piece.size
            learnt += bytes([parts[-1].is_learnt])  # the end of the document
        lengths.append(tokens.size + 1)
    if not lengths:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        remedy = f"Skipped: {reasons}." if reasons else "Nothing is there."
        raise ArgumentError("data_path", name, "a corpus with at least one document of UTF-8 text", remedy)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    return TokenCorpus(
        name, tokenizer.vocab_size, frozen(np.frombuffer(flat, dtype)), frozen(offsets), dict(skipped),
        frozen(np.frombuffer(learnt, np.bool_)) if learnt else None,
    )  # fmt: skip
