"""`Mask`: the keys that each query sees, and the forms in which users give it. Pure data; no torch in here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import TypeAlias, TypeGuard, Union

import numpy as np

from megatron_cp.errors import ArgumentError, checked_flag, checked_integer
from megatron_cp.layout import bands as band
from megatron_cp.layout.array_types import BoolArray, IntArray
from megatron_cp.layout.bands import UNBOUNDED
from megatron_cp.layout.block_masks import BLOCK_TABLES, checked_table, runs_of_blocks
from megatron_cp.layout.branches import bands_along_paths
from megatron_cp.layout.memo import Memo, frozen
from megatron_cp.layout.packing import Packing, checked_packing, host_array, is_integral


class Mask(Memo):
    """The keys that each query sees, as disjoint bands over the packed streams of queries and keys.

    A query sees keys of its own document only, and may see none. Immutable; compared and hashed by its packings and
    bands. Make one with `causal`, `full`, `window`, `prefix`, `chunk`, `shared_question`, `from_slices`, `from_blocks`
    or `named`.

    Attributes:
        packing: the documents of the queries.
        kv_packing: the documents of the keys; `packing` itself except for cross-attention.
        bands: `[n, 6]` disjoint and tight, each within one document, in the order of their first query; bounds that cut
            nothing off are out of reach; see `layout/bands.py`.
        name: its spelling, such as "causal" or "window:127,0".

    Example:
        >>> Mask.causal(Packing([3, 1])).area
        7
        >>> Mask.window(Packing([5]), left=1, right=0).seen.tolist()
        [1, 2, 2, 2, 2]
    """

    def __init__(self, packing: Packing, kv_packing: Packing, bands: IntArray, name: str) -> None:
        for argument, documents in (("packing", packing), ("kv_packing", kv_packing)):
            if documents.total > UNBOUNDED:
                raise ArgumentError(argument, f"{documents.total} tokens", "at most 2**40 tokens under a mask")
        bands = band.unbound(band.shrink(bands))
        self.packing, self.kv_packing, self.name = packing, kv_packing, name
        self.bands = frozen(bands[np.lexsort((bands[:, 2], bands[:, 0]))])

    @classmethod
    def causal(cls, packing: Packing, kv_packing: Packing | None = None) -> Mask:
        """Makes a mask in which a query sees the keys of its document up to and including its own position.

        In documents with more or fewer keys than queries, the last query sees the last key, as in flash-attn.
        """
        return cls._document_mask(packing, kv_packing, 0, "causal")

    @classmethod
    def full(cls, packing: Packing, kv_packing: Packing | None = None) -> Mask:
        """Makes a mask in which a query sees every key of its document, which must not branch."""
        checked_packing(packing).refuse_branches("mask", "full", _PATH_MASKS, _LITERAL)
        return cls._document_mask(packing, kv_packing, UNBOUNDED, "full")

    @classmethod
    def window(
        cls, packing: Packing, left: int, right: int = 0, *, first: int = 0, kv_packing: Packing | None = None
    ) -> Mask:
        """Makes a mask in which a query sees `left` keys before its position, its own, and `right` after it; -1 for no
        limit.

        Args:
            packing: the documents.
            left, right: numbers of keys before and after the query's own position.
            first: the number of tokens at the start of each document that stay visible, though none later than `right`
                allows: the attention sinks of StreamingLLM (arXiv 2309.17453).
            kv_packing: the documents of the keys, for cross-attention. If they have more or fewer keys than queries,
                the position of the last query is that of the last key, as in flash-attn.
        """
        left, right = checked_integer("left", left, -1), checked_integer("right", right, -1)
        first = checked_integer("first", first, 0)
        name = f"first:{first}+window:{left},{right}" if first else f"window:{left},{right}"
        kv_packing = _checked_kv_packing(packing, kv_packing)
        if packing.branches is not None:
            if right != 0:
                packing.refuse_branches("mask", name, _PATH_MASKS, _LITERAL)
            return cls._path_mask(packing, lambda path: cls.window(path, left, right, first=first))
        documents = _documents(packing, kv_packing)
        own = documents[:, 3] - documents[:, 1]  # from a query to the key at its own position
        window, kept = documents.copy(), documents.copy()
        # If the first tokens reach the last query's window, every query sees all earlier keys.
        bounded = (kv_packing.lengths - 1 - left > first) & (left >= 0)
        window[:, 4] = np.where(bounded, own - min(left, UNBOUNDED), -UNBOUNDED)
        window[:, 5] = UNBOUNDED if right < 0 else own + min(right, UNBOUNDED)
        kept[:, 3] = np.minimum(kept[:, 3], kept[:, 2] + min(first, UNBOUNDED))
        kept[:, 5] = np.where(bounded, window[:, 4] - 1, -UNBOUNDED)  # disjoint from the window
        return cls(packing, kv_packing, np.concatenate([window, kept]), name)

    @classmethod
    def prefix(cls, packing: Packing, n: int | Sequence[int] | IntArray) -> Mask:
        """Makes a prefix-LM mask: every query sees the first `n` tokens of its document; the rest is causal.

        Args:
            packing: the documents.
            n: numbers of tokens, one for all documents or one for each; a shorter document is all prefix.

        Example:
            >>> Mask.prefix(Packing([4]), 2).seen.tolist()
            [2, 2, 3, 4]
        """
        numbers = _checked_prefix(packing, n)
        packing.refuse_branches("mask", "prefix", _PATH_MASKS, _LITERAL)
        name = "prefix" if isinstance(n, Iterable) else f"prefix:{n}"
        documents = _documents(packing, packing)
        numbers = np.where(numbers == 1, 0, numbers)  # one token sees itself either way
        ends = np.minimum(documents[:, 0] + numbers, documents[:, 1])
        square, rest = documents.copy(), documents.copy()
        square[:, 1] = square[:, 3] = rest[:, 0] = ends
        rest[:, 5] = 0
        return cls(packing, packing, np.concatenate([square, rest]), name)

    @classmethod
    def chunk(cls, packing: Packing, size: int) -> Mask:
        """Makes a mask of chunked-local attention, as in Llama 4: causal in each chunk of `size` tokens of a
        document.
        """
        size = checked_integer("size", size, 1)
        if checked_packing(packing).branches is not None:
            return cls._path_mask(packing, lambda path: cls.chunk(path, size))
        name, size = f"chunk:{size}", min(size, UNBOUNDED)
        count = -(-packing.lengths // size)
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        starts = np.repeat(packing.cu_seqlens[:-1], count) + number * size
        ends = np.minimum(starts + size, np.repeat(packing.cu_seqlens[1:], count))
        return cls(packing, packing, band.range_bands(starts, ends, starts, ends, hi=0), name)

    @classmethod
    def shared_question(cls, packing: Packing, parts: Sequence[Sequence[int]]) -> Mask:
        """Makes a mask for documents of a question and several answers: an answer sees the question and itself,
        causally.

        Args:
            packing: the documents.
            parts: for each document the lengths `[question, answer, answer, ...]`, which sum to its length.

        Example:
            >>> Mask.shared_question(Packing([5]), [[2, 2, 1]]).seen.tolist()
            [1, 2, 3, 4, 3]
        """
        document, starts, ends, question_ends = _checked_parts(packing, parts)
        packing.refuse_branches("mask", "shared_question", _PATH_MASKS, "Causal, a tree's segments are such parts.")
        begins = packing.cu_seqlens[document]
        # The question and the first answer go on from one another as if they were one causal document.
        causal = np.where(starts <= question_ends, begins, starts)
        apart = starts > question_ends
        bands = np.concatenate(
            [
                band.range_bands(starts, ends, causal, ends, hi=0),
                band.range_bands(starts, ends, begins, question_ends)[apart],
            ]
        )
        barriers = np.union1d(packing.cu_seqlens, starts[apart])
        return cls(packing, packing, band.joined(bands, barriers), "shared_question")

    @classmethod
    def from_slices(cls, packing: Packing, slices: Iterable[Slice], kv_packing: Packing | None = None) -> Mask:
        """Makes the union of slices of the packed streams; pairs across documents, or whole trees, are left out.

        Args:
            packing: the documents of the queries.
            slices: `(q_start, q_end, k_start, k_end, kind)`; they may overlap. The kind is "full"; "causal": the last
                query sees up to the last key, the one before it one key less, and so on; "inverse_causal": the first
                query sees from the first key on, the next one from one key later; or "both".
            kv_packing: the documents of the keys, for cross-attention.

        Raises:
            ArgumentError: a slice that is not of this form or leaves the streams.

        Example:
            >>> Mask.from_slices(Packing([4]), [(0, 4, 0, 4, "causal"), (0, 2, 0, 2, "full")]).seen.tolist()
            [2, 2, 3, 4]
        """
        kv_packing = _checked_kv_packing(packing, kv_packing)
        bands = _checked_slices(slices, packing.total, kv_packing.total)
        bands = band.disjoint(_clip_to_documents(bands, packing, kv_packing), packing.barriers)
        return cls(packing, kv_packing, bands, "slices")

    @classmethod
    def from_blocks(cls, packing: Packing, table: BoolArray, block_size: int, *, causal: bool = False) -> Mask:
        """Makes a mask from a block table over the packed stream; only pairs within a document count.

        Args:
            packing: the documents.
            table: `[blocks, blocks]` booleans: True if the queries of a block see the keys of another; there are
                `ceil(total / block_size)` blocks, and the last one may be short.
            block_size: tokens of a block.
            causal: no query sees keys after its own position, regardless of the table.
        """
        block_size, causal = checked_integer("block_size", block_size, 1), checked_flag("causal", causal)
        checked_packing(packing).refuse_branches("mask", "blocks", _PATH_MASKS, _LITERAL)
        rows, first, last = runs_of_blocks(checked_table(packing, table, block_size))
        edges = np.minimum(np.arange(table.shape[0] + 1) * block_size, packing.total)
        runs = band.range_bands(edges[rows], edges[rows + 1], edges[first], edges[last])
        bands = _clip_to_documents(band.joined(_drop_far_bands(runs, packing)), packing, packing)
        if causal:
            bands[:, 5] = np.minimum(bands[:, 5], 0)
        return cls(packing, packing, band.joined(bands, packing.cu_seqlens), "blocks")

    @classmethod
    def named(cls, packing: Packing, spec: str, kv_packing: Packing | None = None) -> Mask:
        """Makes the mask with a spelling of the command line, such as "causal", "window:128", "prefix:5" or "strided".

        `window:128` lets a query see itself and 127 keys before it, as `sliding_window` of transformers; `window:127,0`
        is the same window, since two numbers do not count the query itself, as in Megatron's and flash-attn's.

        The `name` of every mask made by `causal`, `full`, `window`, `prefix` (with one number) and `chunk` is such a
        spelling. `strided`, `global_local`, `star` and `streaming` are tables of blocks that apply to each document
        (`layout/block_masks.py`): it is cut into as many blocks as the table has rows, of equal length except that the
        first ones may be a token longer, and if it has fewer tokens, into blocks of one token, in the first rows of the
        table. A number after a colon is another number of blocks: `strided:32`.

        Raises:
            ArgumentError: a spelling that is not known, or one without a meaning for keys packed otherwise.

        Example:
            >>> Mask.named(Packing([8, 3]), "star").seen.tolist()
            [1, 2, 3, 4, 3, 4, 3, 4, 1, 2, 2]
        """
        checked_packing(packing)
        kind, numbers = _checked_spelling(spec)
        if kind in ("causal", "full"):
            return (cls.causal if kind == "causal" else cls.full)(packing, kv_packing)
        kv_packing = _checked_kv_packing(packing, kv_packing)
        if kv_packing != packing and kind not in ("window", "first"):
            allowed = "causal, full, window:N or first:N+window:LEFT,RIGHT where keys have a packing of their own"
            raise ArgumentError("mask", spec, allowed, "Say which queries see which keys with Mask.from_slices.")
        match kind:
            case "window":
                sides = numbers if len(numbers) == 2 else (numbers[0] - 1, 0)  # a window of N tokens counts its own
                return cls.window(packing, *sides, kv_packing=kv_packing)
            case "first":
                return cls.window(packing, *numbers[1:], first=numbers[0], kv_packing=kv_packing)
            case "prefix":
                return cls.prefix(packing, *numbers)
            case "chunk":
                return cls.chunk(packing, *numbers)
        packing.refuse_branches("mask", spec, _PATH_MASKS, _LITERAL)
        table = BLOCK_TABLES[kind].with_blocks(*numbers)
        bands = table.bands_of_documents(packing.cu_seqlens[:-1], packing.lengths)
        return cls(packing, packing, bands, spec)

    def unpadded(self, lengths: Sequence[int] | IntArray) -> Mask:
        """Returns the mask for documents that end in pads: only the first `lengths[i]` tokens of document i see and are
        seen.

        A named table of blocks cuts these tokens alone into blocks, so that a document sees the same with and without
        pads.

        Args:
            lengths: `[documents]` tokens of each document without its pads; the packing counts pads too.

        Raises:
            ArgumentError: other lengths, or a mask of cross-attention.

        Example:
            >>> Mask.full(Packing([4, 2])).unpadded([3, 2]).seen.tolist()
            [3, 3, 3, 0, 2, 2]
        """
        own, whole = host_array("lengths", lengths), self.packing.lengths
        fits = own.shape == whole.shape and is_integral(own)
        self.packing.refuse_branches("lengths", "documents with pads", "documents without pads")
        if self.is_cross or not fits or ((own < 0) | (own > whole)).any():
            raise ArgumentError("lengths", own.tolist(), f"numbers up to {whole[:8].tolist()}, of self-attention")
        if np.array_equal(own, whole):
            return self
        starts, (kind, numbers) = self.packing.cu_seqlens[:-1], _parsed(self.name)
        if kind in BLOCK_TABLES:
            bands = BLOCK_TABLES[kind].with_blocks(*numbers).bands_of_documents(starts, own)
        else:
            ends = (starts + own)[self.packing.documents_of(self.bands[:, 0])]
            bands = self.bands.copy()
            bands[:, 1], bands[:, 3] = np.minimum(bands[:, 1], ends), np.minimum(bands[:, 3], ends)
        return Mask(self.packing, self.packing, bands, f"{self.name} of {own.sum()} tokens")

    @classmethod
    def _document_mask(cls, packing: Packing, kv_packing: Packing | None, hi: int, name: str) -> Mask:
        """Makes one band a document, its bound counted from the corner where the last query meets the last key."""
        kv_packing = _checked_kv_packing(packing, kv_packing)
        if packing.branches is not None:
            return cls._path_mask(packing, cls.causal)
        bands = _documents(packing, kv_packing)
        if hi < UNBOUNDED:
            bands[:, 5] = bands[:, 3] - bands[:, 1] + hi
        return cls(packing, kv_packing, bands, name)

    @classmethod
    def _path_mask(cls, packing: Packing, mask_of: Callable[[Packing], Mask]) -> Mask:
        """Makes a mask of documents that branch: each sees what `mask_of` lets it see, of a mask without later keys."""
        branches = packing.branches
        assert branches is not None
        path = mask_of(Packing([branches.longest]))
        bands = bands_along_paths(branches, path.bands)
        return cls(packing, packing, band.joined(bands, packing.barriers), path.name)

    @cached_property
    def area(self) -> int:
        """The number of visible (query, key) pairs, exactly."""
        return band.area(self.bands)

    @cached_property
    def seen(self) -> IntArray:
        """`[total]` the number of keys that each query sees."""
        return frozen(band.keys_seen(self.bands, self.packing.total))

    @property
    def is_cross(self) -> bool:
        """True if the keys' documents have other lengths than the queries'."""
        return self.kv_packing != self.packing

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mask)
            and (self.packing, self.kv_packing) == (other.packing, other.kv_packing)
            and np.array_equal(self.bands, other.bands)
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.packing, self.kv_packing, self.bands.tobytes()))

    def __repr__(self) -> str:
        return f"Mask({self.name!r}, {self.packing!r}, {len(self.bands)} bands, {self.area} pairs)"

    def describe(self) -> str:
        """Returns the mask in words and, unless its name and the documents define it, a hash of its bands."""
        if _parsed(self.name)[0] and not self.is_cross:
            return f"{self.name} in each document"
        digest = hashlib.blake2b(self.bands.tobytes(), digest_size=8)
        digest.update(self.kv_packing.value)
        return f"{self.name} ({digest.hexdigest()}) in each document"


_PATH_MASKS = "causal, window:N, first:N+window:LEFT,0 or chunk:N"  # each keeps later keys out
_LITERAL = "Say which tokens of the stream see which with Mask.from_slices."


def _documents(packing: Packing, kv_packing: Packing) -> IntArray:
    """Returns a band for each document in which every query sees every key."""
    queries, keys = packing.cu_seqlens, kv_packing.cu_seqlens
    return band.range_bands(queries[:-1], queries[1:], keys[:-1], keys[1:])


def _clip_to_documents(bands: IntArray, packing: Packing, kv_packing: Packing) -> IntArray:
    """Cuts bands to each document that they meet."""
    documents = _documents(packing, kv_packing)
    documents = documents[documents[:, 1] > documents[:, 0]]
    pieces, number = band.cut(bands, documents[:, 0], documents[:, 1], queries=True)
    pieces[:, 2] = np.maximum(pieces[:, 2], documents[number, 2])
    pieces[:, 3] = np.minimum(pieces[:, 3], documents[number, 3])
    return band.shrink(pieces)


def _drop_far_bands(bands: IntArray, packing: Packing) -> IntArray:
    """Drops bands that lie outside all documents that their queries belong to: most of a large table."""
    starts = packing.cu_seqlens[packing.documents_of(bands[:, 0])]
    ends = packing.cu_seqlens[packing.documents_of(bands[:, 1] - 1) + 1]
    return bands[(bands[:, 2] < ends) & (bands[:, 3] > starts)]


def _checked_kv_packing(packing: Packing, kv_packing: Packing | None) -> Packing:
    packing = checked_packing(packing)
    if kv_packing is None:
        return packing
    if checked_packing(kv_packing, "kv_packing").num_documents != packing.num_documents:
        raise ArgumentError(
            "kv_packing", f"{kv_packing.num_documents} documents", f"the {packing.num_documents} of the queries"
        )
    if kv_packing != packing:
        for documents in (packing, kv_packing):
            documents.refuse_branches("kv_packing", kv_packing, "keys of the same packing")
    return kv_packing


def _checked_prefix(packing: Packing, n: int | Sequence[int] | IntArray) -> IntArray:
    documents = checked_packing(packing).num_documents
    if not isinstance(n, Iterable) or getattr(n, "ndim", 1) == 0:
        return np.full(documents, min(checked_integer("n", n, 0), UNBOUNDED), dtype=np.int64)
    numbers = host_array("n", n)
    if numbers.shape != (documents,) or not is_integral(numbers) or (numbers < 0).any():
        raise ArgumentError("n", n, f"an integer of at least 0, or one for each of {documents} documents")
    return np.minimum(numbers, UNBOUNDED).astype(np.int64)


def _checked_parts(packing: Packing, parts: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Returns `[n]` for each part: its document, start and end in the stream, and the end of its document's
    question.
    """
    documents = checked_packing(packing).num_documents
    if not isinstance(parts, Sequence | np.ndarray) or np.ma.isMaskedArray(parts) or getattr(parts, "ndim", 1) == 0:
        raise ArgumentError("parts", parts, "a list with the lengths [question, answer, ...] of each document")
    if len(parts) != documents:
        raise ArgumentError("parts", f"parts of {len(parts)} documents", f"parts of each of {documents} documents")
    given = [host_array(f"parts[{number}]", sizes) for number, sizes in enumerate(parts)]
    for number, array in enumerate(given):
        if array.size and not (is_integral(array) and array.ndim == 1):
            raise ArgumentError(f"parts[{number}]", parts[number], "integers of at least 0")
    counts = np.array([array.size for array in given])
    sizes = np.concatenate([array.ravel() for array in given]).astype(np.int64)
    document = np.repeat(np.arange(documents), counts)
    sums = np.bincount(document, weights=sizes, minlength=documents).astype(np.int64)
    wrong = np.union1d(document[sizes < 0], np.flatnonzero(sums != packing.lengths))
    if wrong.size:
        given, length = list(parts[wrong[0]]), packing.lengths[wrong[0]]
        raise ArgumentError(
            f"parts[{wrong[0]}]", given, f"lengths of at least 0 that sum to the document's {length} tokens"
        )
    ends = np.cumsum(sizes)
    firsts = np.cumsum(counts) - counts
    question_ends = ends[np.repeat(firsts, counts)]
    return document, ends - sizes, ends, question_ends


# -- slices ------------------------------------------------------------------------------------------------------------

Slice: TypeAlias = tuple[int, int, int, int, str]  # q_start, q_end, k_start, k_end, kind
# The bounds of a query's keys besides the slice's box: a lower bound, an upper bound.
_SLICE_KINDS = {"full": (False, False), "causal": (False, True), "inverse_causal": (True, False), "both": (True, True)}


def _checked_slices(slices: Iterable[Slice], queries: int, keys: int) -> IntArray:
    """Returns a band, `[n, 6]`, for each slice after checking it."""
    allowed = f"(q_start, q_end, k_start, k_end, kind) with a kind of {', '.join(_SLICE_KINDS)}"
    if not isinstance(slices, Iterable) or isinstance(slices, Mapping):
        raise ArgumentError("slices", slices, f"several of {allowed}")
    rows = []
    for number, given in enumerate(slices):
        try:
            *ends, kind = given
            q0, q1, k0, k1 = (checked_integer("end", end, -(2**63)) for end in ends)
            bounds = _SLICE_KINDS[kind]
        except (TypeError, ValueError, KeyError):
            raise ArgumentError(f"slices[{number}]", given, allowed) from None
        if not (0 <= q0 <= q1 <= queries and 0 <= k0 <= k1 <= keys):
            inside = f"rising ranges within {queries} queries and {keys} keys"
            raise ArgumentError(f"slices[{number}]", given, inside)
        rows.append((q0, q1, k0, k1, *bounds))
    bands = np.array(rows, dtype=np.int64).reshape(-1, 6)
    from_first, to_last = bands[:, 4:].T.astype(bool)
    bands[:, 4] = np.where(from_first, bands[:, 2] - bands[:, 0], -UNBOUNDED)
    bands[:, 5] = np.where(to_last, bands[:, 3] - bands[:, 1], UNBOUNDED)
    return bands


# -- spellings ---------------------------------------------------------------------------------------------------------

# No pack has a length of more than 15 digits.
_NUMBER, _LIMIT = "([0-9]{1,15})", "(-1|[0-9]{1,15})"
_SPELLINGS = {
    "causal": "causal",
    "full": "full",
    "window:LEFT,RIGHT": f"window:{_LIMIT},{_LIMIT}",
    "window:N": "window:([1-9][0-9]{0,14})",
    "prefix:N": f"prefix:{_NUMBER}",
    "chunk:N": "chunk:([1-9][0-9]{0,14})",
    "first:N+window:LEFT,RIGHT": rf"first:{_NUMBER}\+window:{_LIMIT},{_LIMIT}",
    **{table.spelling: f"{table.name}(?::{_NUMBER})?" for table in BLOCK_TABLES.values()},
}
_NUMBERS_REMEDY = (
    "A chunk or window of N has at least 1 token; -1 as LEFT or RIGHT is no limit; BLOCKS may be left out."
)


def _parsed(spec: str) -> tuple[str, list[int]]:
    """Returns the first word of a spelling and its numbers; "" if it is not a spelling."""
    for form, pattern in _SPELLINGS.items():
        found = re.fullmatch(pattern, spec) if isinstance(spec, str) else None
        if found:
            return re.split(r"\W", form)[0], [int(number) for number in found.groups() if number is not None]
    return "", []


def _checked_spelling(spec: str) -> tuple[str, list[int]]:
    """Returns the first word of a spelling and its numbers."""
    kind, numbers = _parsed(spec)
    if not kind:
        forms, word = {re.split(r"[:\[]", form)[0]: form for form in _SPELLINGS}, str(spec).partition(":")[0]
        near = [] if word in forms else get_close_matches(word.lower(), forms, 1, 0.75)
        remedy = f"Did you mean {forms[near[0]]}?" if near else _NUMBERS_REMEDY
        raise ArgumentError("mask", spec, " | ".join(_SPELLINGS), remedy)
    return kind, numbers


# -- masks as they are given -------------------------------------------------------------------------------------------

MaskLike: TypeAlias = Union[Mask, str, Callable[[Packing], Mask]]  # noqa: UP007  # evaluated in Python 3.10
MASKS_ALLOWED = (
    "a mask over the same packing, such as Mask.causal(packing), a function of the packing that returns one, or a "
    'name, such as "window:128"'
)
_MASKS_REMEDY = "This mask is over another packing: pass a function, which makes a mask for each batch."


def mask_over(packing: Packing, mask: MaskLike, kv_packing: Packing | None = None) -> Mask:
    """Returns the mask that is given as such, by its spelling, or by a function of the packing."""
    if isinstance(mask, str):
        return Mask.named(packing, mask, kv_packing)
    made = mask(packing) if is_mask_function(mask) else mask
    if isinstance(made, Mask) and (made.packing, made.kv_packing) == (packing, kv_packing or packing):
        return made
    shown = made if made is mask else f"a function that returns {made!r}"
    raise ArgumentError("mask", shown, MASKS_ALLOWED, _MASKS_REMEDY if isinstance(made, Mask) else "")


def mask_of_queries(packing: Packing, mask: MaskLike) -> Mask:
    """Returns the mask as `mask_over` does, with keys of any documents: a layout is of a mask's queries."""
    return mask_over(packing, mask, mask.kv_packing if isinstance(mask, Mask) else None)


def is_mask_function(mask: object) -> TypeGuard[Callable[[Packing], Mask]]:
    """Returns True if a mask is given by a function; a class is none."""
    return callable(mask) and not isinstance(mask, type)


def is_named(mask: Mask) -> bool:
    """Returns True if the mask's name is a spelling, which makes the same mask over other documents."""
    try:
        Mask.named(Packing([1]), mask.name)
    except ArgumentError:
        return False
    return True
