"""`Packing`: the documents of one packed (THD) batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout.array_types import Array, IntArray
from megatron_cp.layout.branches import Branches, trie_of
from megatron_cp.layout.memo import Memo, frozen


class Packing(Memo):
    """The document lengths of one packed batch, on the host.

    The documents lie one after another in the *packed stream* of `total` tokens. Lengths follow no rule: one token,
    primes, and zero (a padded `cu_seqlens` repeats its last entry) are all fine.

    Immutable, and compared and hashed by value.

    Args:
        lengths: the number of tokens of each document, in stream order.

    Attributes:
        branches: the segments of documents that share tokens, which `tree` makes; None if no document branches. Each
            tree of segments then counts as one document of the packing.

    Raises:
        ArgumentError: no document, or a length that is not an integer of at least 0.

    Example:
        >>> packing = Packing([3, 1, 2])
        >>> packing.cu_seqlens.tolist(), packing.total
        ([0, 3, 4, 6], 6)
        >>> packing.positions().tolist()
        [0, 1, 2, 0, 0, 1]
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        given = host_array("lengths", lengths)
        if given.ndim != 1 or given.size == 0:
            raise ArgumentError("lengths", given.tolist(), "a flat list with at least one document length")
        if not is_integral(given) or not 0 <= int(given.min()) <= int(given.max()) < 2**63:
            raise ArgumentError("lengths", given.tolist(), "integers of at least 0")
        if sum(given.tolist()) >= 2**63:
            raise ArgumentError("lengths", given.tolist(), "a total below 2**63")
        self.lengths = frozen(given.astype(np.int64))
        self.branches: Branches | None = None

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Iterable[int]) -> Packing:
        """Makes the packing whose documents start and end at `cu_seqlens` (`[num_documents + 1]`, rising from 0).

        Takes any iterable of integers; a tensor must already be on the host, since reading it elsewhere would
        synchronise.

        Raises:
            ArgumentError: fewer than two entries, a first entry other than 0, a falling entry, or a tensor elsewhere.
        """
        offsets = host_array("cu_seqlens", cu_seqlens)
        integral = offsets.ndim == 1 and is_integral(offsets)
        # Compared, not subtracted: differences of unsigned integers never fall below 0.
        if not integral or offsets.size < 2 or offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
            allowed = "at least two integers that start at 0 and never fall"
            raise ArgumentError("cu_seqlens", offsets.tolist(), allowed, _lengths_remedy(offsets) if integral else "")
        return cls(np.diff(offsets))

    @classmethod
    def tree(cls, lengths: Iterable[int], parents: Iterable[int], ends: Iterable[int] | None = None) -> Packing:
        """Makes the packing of documents that share their beginnings: every segment continues its parent.

        A document is a path from a root to a segment with which it ends. Each segment is held and computed once,
        and each document's results are those that it has alone: a token sees the keys of its own path, and its
        position, its convolution and its recurrent state continue those of the parent segment. All segments of
        a tree are one document of the packing, which layouts cut anywhere.

        Args:
            lengths: `[n]` tokens of each segment, in stream order.
            parents: `[n]` the number of the segment that each one continues, an earlier one; -1 for a root. The
                segments of a tree follow one another.
            ends: `[n]` how many documents end with each segment; one with each segment that no other continues if
                None. Losses count a token as often as documents hold it.

        Returns:
            a packing with `branches`; one without if no document shares tokens with another.

        Raises:
            ArgumentError: parents that are not earlier segments, trees that are mixed, or counts that do not fit.

        Example:
            >>> packing = Packing.tree([3, 2, 1], [-1, 0, 0])
            >>> packing.lengths.tolist(), packing.positions().tolist(), packing.copies().tolist()
            ([6], [0, 1, 2, 3, 4, 3], [2, 2, 2, 1, 1, 1])
        """
        sizes = cls(lengths).lengths
        above = _checked_parents(parents, sizes.size)
        roots = np.arange(sizes.size)
        for segment, parent in enumerate(above.tolist()):
            if parent >= 0:
                roots[segment] = roots[parent]
        if (np.diff(roots) < 0).any():
            mixed = int(np.flatnonzero(np.diff(roots) < 0)[0]) + 1
            given, allowed = f"segment {mixed} after one of another tree", "trees whose segments follow one another"
            raise ArgumentError("parents", given, allowed, "Put each tree's segments, and their tokens, together.")
        first = np.flatnonzero(roots == np.arange(sizes.size))
        packing = cls(np.add.reduceat(sizes, first))
        leaf = np.bincount(above[above >= 0], minlength=sizes.size) == 0
        counts = leaf.astype(np.int64) if ends is None else _checked_ends(ends, sizes.size)
        branches = Branches(sizes, above, counts)
        if branches.runs.starts.size > np.count_nonzero(packing.lengths) or (branches.copies[sizes > 0] != 1).any():
            packing.branches = branches
        return packing

    @classmethod
    def from_sequences(cls, sequences: Iterable[Iterable[int]], *, min_shared: int = 16) -> SequencePacking:
        """Packs sequences of token ids, and holds what several of them begin with once; see `tree`.

        Args:
            sequences: the token ids of each sequence, such as a prompt with each of its answers.
            min_shared: the least number of tokens, counted from the first, that sequences share: a few common tokens,
                such as the one that begins every sequence, are not worth a tree. Below a shared beginning a segment
                may be one token.

        Returns:
            a packing with the `tokens` to shard, which prints what it saved, and `split`, which returns results in the
            order of the sequences.

        Raises:
            ArgumentError: no sequences, or one that is not of integers.

        Example:
            >>> packing = Packing.from_sequences([[5, 6, 7], [5, 6, 8, 9], [4]], min_shared=1)
            >>> packing.tokens.tolist(), packing.branches.parents.tolist()
            ([4, 5, 6, 7, 8, 9], [-1, -1, 1, 1])
            >>> [part.tolist() for part in packing.split(packing.tokens)]
            [[5, 6, 7], [5, 6, 8, 9], [4]]
        """
        given = [host_array(f"sequences[{number}]", sequence) for number, sequence in enumerate(sequences)]
        for number, ids in enumerate(given):
            if ids.ndim != 1 or (ids.size and not is_integral(ids)):
                raise ArgumentError(f"sequences[{number}]", ids.tolist(), "a flat list of token ids")
        if not given:
            raise ArgumentError("sequences", given, "at least one sequence of token ids")
        trie = trie_of([ids.astype(np.int64) for ids in given], checked_integer("min_shared", min_shared, 1))
        tree = cls.tree(trie.lengths, trie.parents, trie.ends)
        packing = SequencePacking(tree.lengths)
        packing.branches, packing.tokens = tree.branches, frozen(trie.tokens)
        ends = np.cumsum(trie.lengths)
        ranges = [np.arange(end - length, end) for end, length in zip(ends.tolist(), trie.lengths, strict=True)]
        packing.places = tuple(frozen(np.concatenate([ranges[segment] for segment in path])) for path in trie.paths)
        return packing

    @cached_property
    def cu_seqlens(self) -> IntArray:
        """`[num_documents + 1]` offsets of the documents in the packed stream; starts at 0, ends at `total`."""
        return frozen(np.concatenate([[0], np.cumsum(self.lengths)]))

    @cached_property
    def barriers(self) -> IntArray:
        """The places of the stream, in rising order, at which bands of a mask end, since kernels compute a band's rows
        together: the ends of documents and, where they branch, of each run of tokens that continue one another.
        """
        if self.branches is None:
            return self.cu_seqlens
        return frozen(np.union1d(self.cu_seqlens, self.branches.runs.starts))

    @cached_property
    def total(self) -> int:
        """Tokens in the packed stream."""
        return int(self.lengths.sum())

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest document."""
        return int(self.lengths.max())

    @property
    def num_documents(self) -> int:
        return int(self.lengths.size)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Returns the half-open token range of each document that has tokens, in stream order."""
        offsets = self.cu_seqlens.tolist()
        return ((start, end) for start, end in itertools.pairwise(offsets) if end > start)

    def documents_of(self, tokens: IntArray) -> IntArray:
        """Returns the document, or the tree, of each given token of the packed stream, in the shape of `tokens`.

        Raises:
            ArgumentError: tokens that are no integers, or outside of the stream.
        """
        tokens = self.checked_tokens(tokens)
        # side="right" steps over documents without tokens, which share their offset with the next one.
        return np.searchsorted(self.cu_seqlens, tokens, side="right") - 1

    def checked_tokens(self, tokens: IntArray) -> IntArray:
        """Returns places of the packed stream after checking them.

        Raises:
            ArgumentError: tokens that are no integers, or outside of the stream.
        """
        tokens = host_array("tokens", tokens)
        if not is_integral(tokens) or (tokens.size and not 0 <= tokens.min() <= tokens.max() < self.total):
            raise ArgumentError("tokens", tokens, f"integers from 0 up to but not including {self.total}")
        return tokens

    def positions(self) -> IntArray:
        """Returns `[total]` the position of every token inside its document, counted from 0; in a tree from its
        root.
        """
        if self.branches is not None:
            return self.branches.positions_of(np.arange(self.total))
        return np.arange(self.total) - np.repeat(self.cu_seqlens[:-1], self.lengths)

    @property
    def run_lengths(self) -> IntArray:
        """`[n]` tokens of each document, or in trees of each part of them between two places where they branch."""
        if self.branches is None:
            return self.lengths
        return self.branches.runs.stops - self.branches.runs.starts

    def copies(self) -> IntArray:
        """Returns `[total]` the number of documents that hold every token: 1, and more where documents share it."""
        if self.branches is None:
            return np.ones(self.total, dtype=np.int64)
        return np.repeat(self.branches.copies, self.branches.lengths)

    def refuse_branches(self, argument: str, given: object, allowed: str, remedy: str = "") -> None:
        """Raises an error for what has no meaning in documents that branch.

        Raises:
            ArgumentError: the documents branch.
        """
        if self.branches is not None:
            raise ArgumentError(argument, given, f"{allowed} where documents branch", remedy)

    @cached_property
    def value(self) -> bytes:
        """Bytes that are equal for equal packings."""
        return self.lengths.tobytes() + (b"" if self.branches is None else self.branches.value)

    @cached_property
    def starts(self) -> IntArray:
        """`[n]` the first token of each document that has tokens, and of each segment where documents branch."""
        if self.branches is not None:
            return frozen(self.branches.starts[self.branches.lengths > 0])
        return frozen(self.cu_seqlens[:-1][self.lengths > 0])

    def describe(self) -> str:
        """Returns the numbers of documents and tokens in words."""
        if self.branches is not None:
            return self.branches.describe()
        documents = "document" if self.num_documents == 1 else "documents"
        return f"{self.num_documents} {documents}, {self.total} {'token' if self.total == 1 else 'tokens'}"

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Packing) and self.value == other.value)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        if self.branches is not None:
            sizes, parents = self.branches.lengths, self.branches.parents
            return f"Packing.tree({_shown(sizes)}, {_shown(parents)}; {self.branches.describe()})"
        if self.num_documents <= 8:
            return f"Packing({_shown(self.lengths)})"
        return f"Packing({_shown(self.lengths)}; {self.num_documents} documents, {self.total} tokens)"


class SequencePacking(Packing):
    """The documents of sequences of token ids; made by `Packing.from_sequences`.

    Attributes:
        tokens: `[total]` int64, the token ids of the packed stream.
        places: for each sequence `[length]` the places of its tokens in the stream.
    """

    tokens: IntArray
    places: tuple[IntArray, ...]

    def split(self, values: Array) -> list[Array]:
        """Returns `[length, ...]` values of each sequence from those of the stream.

        Args:
            values: `[total, ...]`, numpy or torch: what `unshard` or `gather` returned.
        """
        if not hasattr(values, "shape") or len(values) != self.total:
            given = f"{len(values)} rows" if hasattr(values, "shape") else values
            raise ArgumentError("values", given, f"an array or a tensor, a row for each of {self.total} tokens")
        return [values[place.copy()] for place in self.places]  # torch warns of arrays that cannot be written

    def __repr__(self) -> str:
        alone = sum(place.size for place in self.places)
        held = f"{self.starts.size} segments of {self.total}"
        return f"SequencePacking({len(self.places)} sequences of {alone} tokens in {held})"


def _shown(numbers: NDArray) -> str:
    """Formats the first eight numbers as a list."""
    return f"[{', '.join(map(str, numbers[:8].tolist()))}{', ...' if numbers.size > 8 else ''}]"


def offsets_remedy(packing: Packing, num_tokens: int) -> str:
    """Returns a remedy for a batch of `num_tokens` tokens instead of `total`: `cu_seqlens` were given as lengths.

    Offsets are legal lengths, since documents may be empty, so only the number of tokens tells them apart. Returns ""
    where the lengths are no such offsets.
    """
    lengths = packing.lengths
    rises = lengths[0] == 0 and (lengths[1:] >= lengths[:-1]).all()
    if not rises or lengths[-1] != num_tokens or num_tokens in (0, packing.total):
        return ""
    return f"These lengths look like cu_seqlens: Packing.from_cu_seqlens({_shown(lengths)}) has {num_tokens} tokens."


def _lengths_remedy(offsets: NDArray) -> str:
    """Returns a remedy that names the probable meaning of integers that are not `cu_seqlens`."""
    if offsets.size == 0 or offsets.min() < 0:
        return ""
    remedy = f"If these are the documents' lengths: Packing({_shown(offsets)})."
    ends = offsets[0] != 0 and (offsets[1:] >= offsets[:-1]).all()
    return f"{remedy} If they are where documents end, put a 0 before them." if ends else remedy


def checked_packing(packing: Packing, argument: str = "packing") -> Packing:
    """Returns the packing after checking its type."""
    if not isinstance(packing, Packing):
        raise ArgumentError(argument, packing, "a Packing, as in Packing([7, 1, 130])")
    return packing


def _checked_parents(parents: Iterable[int], segments: int) -> IntArray:
    given = host_array("parents", parents)
    if given.shape != (segments,) or not is_integral(given):
        raise ArgumentError("parents", given.tolist(), f"an integer for each of {segments} segments")
    wrong = np.flatnonzero((given < -1) | (given >= np.arange(segments)))
    if wrong.size:
        number = int(wrong[0])
        allowed = f"-1 for a root, or an earlier segment, below {number}"
        raise ArgumentError(f"parents[{number}]", int(given[number]), allowed, "Parents come before their children.")
    return given.astype(np.int64)


def _checked_ends(ends: Iterable[int], segments: int) -> IntArray:
    given = host_array("ends", ends)
    if given.shape != (segments,) or not is_integral(given) or (given < 0).any() or (given >= 2**31).any():
        raise ArgumentError("ends", given.tolist(), f"a number of documents for each of {segments} segments")
    return given.astype(np.int64)


def host_array(argument: str, values: Iterable[int]) -> NDArray:
    """Returns an ordered collection of integers as an array.

    Raises:
        ArgumentError: the values have no order, hide some numbers, contain booleans or numbers that int64 cannot
            hold, or are not a list.
    """
    if isinstance(values, _NO_LISTS):
        raise ArgumentError(argument, values, "a list, an array or a tensor of integers")
    try:
        given = values if hasattr(values, "__array__") else list(values)
        if isinstance(given, list) and _TRUTH_VALUES & set(map(type, given)):
            raise ArgumentError(argument, given, "integers, without True and False among them")
        return check_signed(argument, np.asarray(given))
    except ArgumentError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        # A tensor on a device, sparse or with a gradient, no sequence, or lists of unequal lengths.
        raise ArgumentError(argument, values, "integers on the host", str(error)) from None


# Sets lose order and repetitions, mappings their values, bytes are text; a masked array's mask would be ignored.
_NO_LISTS = (Set, Mapping, str, bytes, bytearray, memoryview, np.ma.MaskedArray)
_TRUTH_VALUES = {bool, np.bool_}


def check_signed(argument: str, integers: NDArray) -> NDArray:
    """Returns an array, unless it holds unsigned numbers that would be negative as int64."""
    if integers.dtype == np.uint64 and integers.size and int(integers.max()) >= 2**63:
        raise ArgumentError(argument, int(integers.max()), "integers below 2**63")
    return integers


def is_integral(array: NDArray) -> bool:
    """Returns True for integer types; time spans, which numpy counts among those, are not."""
    return array.dtype.kind in "iu"


def lengthened(packing: Packing, steps: int) -> Packing:
    """Returns the packing of documents that are `steps` times as long, made once; without branches."""
    if steps == 1:
        return packing
    found: Packing = packing.memo(("lengthened", steps), lambda: Packing(packing.lengths * steps))
    return found
