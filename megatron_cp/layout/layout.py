"""`Layout`: the tokens of a packed batch that each rank holds, and their order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout.array_types import Array, BoolArray, IntArray
from megatron_cp.layout.arrays import append_rows, check_array, check_fill, check_shards, concatenate, take, widen_for
from megatron_cp.layout.balance import FEW_TOKENS, TokenWork, even_shares, fewer_keys
from megatron_cp.layout.bands import seen_in_pieces
from megatron_cp.layout.fragments import MAX_CP_SIZE, Fragment, arange_ranges, checked_fragments, joined_up
from megatron_cp.layout.mask import Mask, MaskLike, mask_of_queries
from megatron_cp.layout.memo import Memo, frozen
from megatron_cp.layout.packing import Packing, checked_packing

_SHORT = 64  # mean tokens of a fragment up to which placing tokens one by one is faster
IGNORE_INDEX = -100  # the label that torch's cross entropy skips


class Layout(Memo):
    """The ordered fragments of the packed stream that each rank holds.

    A rank's *rows* are its tokens in fragment order, followed by `pad_rows[rank]` pad rows if `align` or `min_rows`
    asks for them. Fragments may be uneven, may straddle documents, and a rank may hold none. Every token is held
    exactly once.

    Immutable, and compared and hashed by value. Make one with `contiguous`, `zigzag`,
    `zigzag_of_pack`, `striped`, `balanced` or `from_fragments`.

    Attributes:
        packing: the documents.
        cp_size: the number of ranks.
        align: every rank's row count is a multiple of this; above 1 it is also at least `align`, so that no rank is
            empty (sequence parallelism and FP8 matrix products want both). 1 adds no rows.
        min_rows: every rank's row count is at least this; see `padded`.
        starts, ends: `[n]` the fragments, grouped by rank, touching ones joined.
        fragment_offsets: `[cp_size + 1]`; rank r holds fragments `offsets[r]` up to `offsets[r + 1]`.

    Example:
        >>> layout = Layout.zigzag(Packing([8, 3]), cp_size=2)
        >>> [layout.tokens(rank).tolist() for rank in range(2)]
        [[0, 1, 6, 7, 8, 10], [2, 3, 4, 5, 9]]
    """

    def __init__(
        self,
        packing: Packing,
        starts: IntArray,
        ends: IntArray,
        fragment_offsets: IntArray,
        *,
        align: int = 1,
        min_rows: int = 0,
    ) -> None:
        self.packing = checked_packing(packing)
        self.cp_size = _checked_cp_size(fragment_offsets.size - 1)
        self.align = checked_integer("align", align, 1)
        self.min_rows = checked_integer("min_rows", min_rows, 0)
        if self.packing.total + self.cp_size * (self.align + self.min_rows) >= 2**63:
            name, given = max(("align", self.align), ("min_rows", self.min_rows), key=lambda pair: pair[1])
            raise ArgumentError(name, given, f"rows of which {self.cp_size} ranks have fewer than 2**63 in all")
        self.starts, self.ends, self.fragment_offsets = joined_up(starts, ends, fragment_offsets)

    @classmethod
    def contiguous(cls, packing: Packing, cp_size: int, *, align: int = 1) -> Layout:
        """Cuts the stream into `cp_size` ranges whose lengths differ by at most one token.

        Rank order is stream order, so a head exchange from here needs no permutation of tokens.
        """
        cp_size, packing = _checked_cp_size(cp_size), checked_packing(packing)
        # Python integers, whose products do not overflow.
        cuts = np.array([rank * packing.total // cp_size for rank in range(cp_size + 1)])
        return cls(packing, cuts[:-1], cuts[1:], np.arange(cp_size + 1), align=align)

    @classmethod
    def zigzag(cls, packing: Packing, cp_size: int, *, align: int = 1) -> Layout:
        """Cuts every document into `2 * cp_size` chunks; rank r holds chunks r and `2 * cp_size - 1 - r`.

        This is exactly Transformer Engine's and Megatron's THD order if every length is a multiple of `2 * cp_size`.
        Otherwise the remaining `length % (2 * cp_size)` tokens go to the ranks in turn, each document continuing where
        the last one stopped, so that no two ranks differ by more than one token in total.
        """
        cp_size, packing = _checked_cp_size(cp_size), checked_packing(packing)
        # 32-bit tables halve the time where 10,000 documents at cp 64 make over a million chunks.
        dtype: type = np.int32 if packing.total < 2**31 else np.int64
        lengths: NDArray = packing.lengths.astype(dtype)
        begin: NDArray = packing.cu_seqlens[:-1].astype(dtype)
        size, left_over = np.divmod(lengths, 2 * cp_size)
        # The rank that gets each document's first left-over token.
        first: NDArray = ((np.cumsum(left_over) - left_over) % cp_size).astype(dtype)
        front, back = np.minimum(left_over, cp_size), np.maximum(left_over - cp_size, 0)
        rank: NDArray = np.arange(cp_size + 1, dtype=dtype)[:, None]
        # Chunk edges from the left for the front half and from the right for the back half, [cp_size + 1, documents].
        left = begin + rank * size + _served_before(rank, first, front, cp_size)
        right = begin + lengths - rank * size - _served_before(rank, first, back, cp_size)
        starts = np.stack([left[:-1], right[1:]], axis=-1)  # [cp_size, documents, front and back]
        ends = np.stack([left[1:], right[:-1]], axis=-1)
        offsets = np.arange(cp_size + 1) * (2 * packing.num_documents)
        return cls(packing, starts.ravel(), ends.ravel(), offsets, align=align)

    @classmethod
    def zigzag_of_pack(cls, packing: Packing, cp_size: int, *, align: int = 1) -> Layout:
        """Cuts the whole pack into `2 * cp_size` chunks, regardless of documents; rank r holds two of them as in
        `zigzag`.

        This is Megatron's order under `--dataloader-inter-document-masking`.

        Example:
            >>> layout = Layout.zigzag_of_pack(Packing([3, 5]), cp_size=2)
            >>> [layout.tokens(rank).tolist() for rank in range(2)]
            [[0, 1, 6, 7], [2, 3, 4, 5]]
        """
        whole = cls.zigzag(Packing([checked_packing(packing).total]), cp_size)
        return cls(packing, whole.starts, whole.ends, whole.fragment_offsets, align=align)

    @classmethod
    def striped(cls, packing: Packing, cp_size: int, *, align: int = 1) -> Layout:
        """Puts token i of the packed stream on rank `i % cp_size`, as in striped attention (arXiv 2311.09431).

        It has as many fragments as tokens. Schemes that gather keys compute with it as with any other layout; `p2p`
        makes a kernel call for each pair of fragments, which takes very long.

        Example:
            >>> layout = Layout.striped(Packing([3, 4]), cp_size=2)
            >>> [layout.tokens(rank).tolist() for rank in range(2)]
            [[0, 2, 4, 6], [1, 3, 5]]
        """
        cp_size, packing = _checked_cp_size(cp_size), checked_packing(packing)
        starts = np.concatenate([np.arange(rank, packing.total, cp_size) for rank in range(cp_size)])
        counts = (packing.total + cp_size - 1 - np.arange(cp_size)) // cp_size
        return cls(packing, starts, starts + 1, np.concatenate([[0], np.cumsum(counts)]), align=align)

    @classmethod
    def balanced(cls, packing: Packing, cp_size: int, *, mask: MaskLike | None = None, align: int = 1) -> Layout:
        """Balances tokens to within one and attention work, in few fragments.

        The ranks together hold at most `2 * cp_size - 1` fragments: two or three a rank, occasionally four, and more at
        hundreds of ranks. Work is the number of keys that the tokens of a rank see. Each rank in turn misses the mean
        of the rest by at most 2 in 1,000 or, if tokens are few, half the work of one token. The result is never less
        even than `contiguous`, nor with few tokens than `zigzag` if that holds no more fragments. Where
        `contiguous` or `zigzag_of_pack` is as even, to 2 in 1,000, the one is taken whose busiest rank sends or
        receives fewest keys. Ranks are numbered by their first tokens.

        Args:
            packing: the documents.
            cp_size: the number of ranks.
            mask: the mask whose visible pairs are the work: its name, a `Mask` over the packing, or a function of the
                packing that makes it; causal in each document if None.
            align: see the attribute.

        Example:
            >>> layout = Layout.balanced(Packing([8]), cp_size=2)
            >>> [layout.fragments_of(rank) for rank in range(2)]
            [[Fragment(start=0, end=2), Fragment(start=6, end=8)], [Fragment(start=2, end=6)]]

        Raises:
            ArgumentError: a mask over another packing, or none.
        """
        cp_size, packing = _checked_cp_size(cp_size), checked_packing(packing)
        mask = Mask.causal(packing) if mask is None else mask_of_queries(packing, mask)
        if mask.area >= 2**62:
            raise ArgumentError("mask", mask, "one of fewer than 2**62 pairs", "Use zigzag, which counts no work.")
        work = TokenWork(*seen_in_pieces(mask.bands, packing.total), packing.total)
        shares = even_shares(work, cp_size)
        if packing.total > FEW_TOKENS * cp_size and mask.kv_packing == packing:
            others = (make(packing, cp_size) for make in (cls.contiguous, cls.zigzag_of_pack))
            made = [[[(a, b) for a, b in each.fragments_of(rank)] for rank in range(cp_size)] for each in others]
            shares = fewer_keys(shares, made, work, mask.bands)
        flat = np.array([fragment for fragments in shares for fragment in fragments])
        offsets = np.concatenate([[0], np.cumsum([len(fragments) for fragments in shares])])
        layout = cls(packing, flat[:, 0], flat[:, 1], offsets, align=align)
        if packing.total > FEW_TOKENS * cp_size:
            return layout
        zigzag = cls.zigzag(packing, cp_size, align=align)  # sometimes more even if tokens are few
        comparable = [layout, zigzag] if zigzag.starts.size < 2 * cp_size else [layout]
        return min(comparable, key=lambda each: max(mask.seen[each.tokens(rank)].sum() for rank in range(cp_size)))

    @classmethod
    def from_fragments(
        cls, packing: Packing, fragments: Sequence[Iterable[tuple[int, int]]], *, align: int = 1
    ) -> Layout:
        """Makes a layout from each rank's `(start, end)` ranges of the packed stream, in the order of its rows.

        Raises:
            ArgumentError: the fragments leave a token out, hold one twice, or leave the stream.
        """
        packing = checked_packing(packing)
        flat, offsets = checked_fragments(packing, fragments)
        return cls(packing, flat[:, 0], flat[:, 1], offsets, align=align)

    @classmethod
    def from_counts(cls, counts: Sequence[Sequence[int]] | IntArray, *, align: int = 1) -> Layout:
        """Makes a layout of documents that are cut already, into one range a rank, in rank order.

        Args:
            counts: `[cp_size, documents]` tokens of each document that each rank holds.
            align: see the attribute.

        Example:
            >>> layout = Layout.from_counts([[2, 1], [1, 3]])
            >>> layout.packing.lengths.tolist(), [layout.tokens(rank).tolist() for rank in range(2)]
            ([3, 4], [[0, 1, 3], [2, 4, 5, 6]])

        Raises:
            ArgumentError: other than whole numbers of tokens, as many for every rank.
        """
        try:
            table = np.asarray(counts)
        except ValueError:  # rows of different lengths
            table = np.empty(0)
        is_whole = table.ndim == 2 and np.issubdtype(table.dtype, np.integer) and bool((table >= 0).all())
        if not is_whole or not 1 <= len(table) <= MAX_CP_SIZE:
            raise ArgumentError("counts", counts, "numbers of tokens, [cp_size, documents], such as [[2, 1], [1, 3]]")
        packing = Packing(table.sum(0))
        ends = packing.cu_seqlens[:-1] + np.cumsum(table, 0)
        fragments = np.stack([ends - table, ends], -1).tolist()
        return cls.from_fragments(packing, fragments, align=align)

    def padded(self, *, align: int = 1, min_rows: int = 0) -> Layout:
        """Returns the same fragments with other pad rows.

        Args:
            align: every rank's row count is a multiple of this; see the attribute.
            min_rows: every rank has at least this many rows: 1 for code that cannot run on none, such as Megatron's.
        """
        if (align, min_rows) == (self.align, self.min_rows):
            return self
        return Layout(self.packing, self.starts, self.ends, self.fragment_offsets, align=align, min_rows=min_rows)

    @cached_property
    def token_counts(self) -> IntArray:
        """`[cp_size]` tokens that each rank holds, pad rows not counted."""
        sizes = np.concatenate([[0], np.cumsum(self.ends - self.starts, dtype=np.int64)])
        return frozen(np.diff(sizes[self.fragment_offsets]))

    @cached_property
    def pad_rows(self) -> IntArray:
        """`[cp_size]` pad rows at the end of each rank's rows; all zero with `align=1` and `min_rows=0`."""
        least = max(self.min_rows, int(self.align > 1))
        whole = -(-np.maximum(self.token_counts, least) // self.align) * self.align
        return frozen(whole - self.token_counts)

    @cached_property
    def row_counts(self) -> IntArray:
        """`[cp_size]` rows of each rank's local tensors: its tokens and its pad rows."""
        return frozen(self.token_counts + self.pad_rows)

    def fragments_of(self, rank: int) -> list[Fragment]:
        """The fragments of one rank, in the order of its rows."""
        rank = self._checked_rank(rank)
        lo, hi = self.fragment_offsets[rank : rank + 2]
        return list(map(Fragment, self.starts[lo:hi].tolist(), self.ends[lo:hi].tolist()))

    def tokens(self, rank: int) -> IntArray:
        """`[token_counts[rank]]` place in the packed stream of each of a rank's tokens."""
        lo, hi = self.fragment_offsets[self._checked_rank(rank) : rank + 2]
        return arange_ranges(self.starts[lo:hi], self.ends[lo:hi])

    @cached_property
    def order(self) -> IntArray:
        """`[total]` the packed stream as the ranks hold it: the tokens of rank 0, then of rank 1, and so on."""
        return frozen(arange_ranges(self.starts, self.ends))

    @cached_property
    def inverse_order(self) -> IntArray:
        """`[total]` the place in `order` of each token of the packed stream."""
        if _SHORT * self.starts.size > self.packing.total:
            inverse = np.empty_like(self.order)
            inverse[self.order] = np.arange(self.order.size)
            return frozen(inverse)
        # Placing whole fragments takes half the time, unless many short ones have to be sorted.
        sizes, by_start = self.ends - self.starts, np.argsort(self.starts)
        places = (np.cumsum(sizes) - sizes)[by_start]
        return frozen(arange_ranges(places, places + sizes[by_start]))

    @cached_property
    def owners(self) -> IntArray:
        """`[total]` the rank that holds each token of the packed stream."""
        return frozen(np.repeat(np.arange(self.cp_size), self.token_counts)[self.inverse_order])

    def located(self, tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Returns for each given token of the packed stream the rank that holds it, and its row there.

        It searches fragments: tables such as `owners` take memory for every token of the stream.

        Raises:
            ArgumentError: tokens that are no integers, or outside of the stream.
        """
        tokens, (starts, ranks, rows) = self.packing.checked_tokens(tokens), self._by_start
        number = np.searchsorted(starts, tokens, side="right") - 1
        return ranks[number], rows[number] + tokens - starts[number]

    @cached_property
    def _by_start(self) -> tuple[IntArray, IntArray, IntArray]:
        """Start, rank and first row of each fragment, in stream order."""
        sizes, ranks = self.ends - self.starts, np.repeat(np.arange(self.cp_size), np.diff(self.fragment_offsets))
        before = np.cumsum(self.token_counts) - self.token_counts
        rows = np.cumsum(sizes) - sizes - before[ranks]
        order = np.argsort(self.starts)
        return self.starts[order], ranks[order], rows[order]

    @cached_property
    def in_stream_order(self) -> bool:
        """True if the ranks' tokens, rank after rank, are the packed stream itself."""
        return bool((self.starts[1:] == self.ends[:-1]).all())  # every token is held, so the first starts at 0

    def positions(self, rank: int) -> IntArray:
        """`[row_counts[rank]]` position of each row inside its document, for rotary phases; 0 in pad rows."""
        tokens, branches = self.tokens(rank), self.packing.branches
        if branches is not None:
            return self._padded(branches.positions_of(tokens), rank, 0)
        return self._padded(tokens - self.packing.cu_seqlens[self.packing.documents_of(tokens)], rank, 0)

    def document_ids(self, rank: int) -> IntArray:
        """`[row_counts[rank]]` document of each row; -1 in pad rows.

        Raises:
            ArgumentError: documents that branch, where a token may be in several.
        """
        remedy = "packing.documents_of(layout.tokens(rank)) gives the tree of each token."
        self.packing.refuse_branches("layout", self, "no numbers of documents", remedy)
        return self._padded(self.packing.documents_of(self.tokens(rank)), rank, -1)

    def labels(
        self, tokens: Array, rank: int, *, shift: int = 1, ignore_index: int = IGNORE_INDEX
    ) -> tuple[Array, BoolArray]:
        """Returns the labels of one rank: for each row the token `shift` places later in the same document.

        Args:
            tokens: `[total]` token ids of the packed stream, integers (numpy or torch, on the host).
            shift: 1 for the next token; k for the k-th head of multi-token prediction.

        Returns:
            `labels` `[row_counts[rank]]` with `ignore_index` where the document has no such token and in pad rows,
            and the loss mask `[row_counts[rank]]`, true where there is a label.

        Raises:
            ArgumentError: documents that branch, where a token may have several next ones.
        """
        remedy = "In a tree a token may have several next tokens: shard_batch has a label for each."
        self.packing.refuse_branches("layout", self, "shard_batch", remedy)
        shift = min(checked_integer("shift", shift, 1), self.packing.total)  # so that no sum of places overflows
        ignore_index = checked_integer("ignore_index", ignore_index, -(2**63))
        self._check_stream(tokens, integral=True)
        held = self.tokens(rank)
        has_label = held + shift < self.packing.cu_seqlens[self.packing.documents_of(held) + 1]
        labels = widen_for(ignore_index, take(tokens, np.where(has_label, held + shift, held)))
        labels[~has_label] = ignore_index
        return append_rows(labels, int(self.pad_rows[rank]), ignore_index), self._padded(has_label, rank, False)

    def shard(self, tokens: Array, rank: int, *, pad_value: float = 0) -> Array:
        """Returns one rank's rows of a tensor over the packed stream.

        Args:
            tokens: `[total, ...]`, numpy or torch.
            pad_value: the value of pad rows, a number that the tensor's type can hold.

        Returns:
            `[row_counts[rank], ...]`, a copy.
        """
        self._check_stream(tokens)
        check_fill("pad_value", pad_value, tokens)
        return append_rows(take(tokens, self.tokens(rank)), int(self.pad_rows[rank]), pad_value)

    def unshard(self, shards: Sequence[Array]) -> Array:
        """Returns the packed stream `[total, ...]` from every rank's rows; the inverse of `shard`, without pad rows."""
        check_shards(shards, self.row_counts.tolist())
        held = [shard[: int(count)] for shard, count in zip(shards, self.token_counts, strict=True)]
        return take(concatenate(held), self.inverse_order)

    def _padded(self, values: NDArray, rank: int, fill: Any) -> NDArray:
        pad = int(self.pad_rows[rank])
        return np.concatenate([values, np.full(pad, fill, dtype=values.dtype)]) if pad else values

    def _check_stream(self, tokens: Any, *, integral: bool = False) -> None:
        allowed = f"the {self.packing.total} tokens of the packed stream"
        check_array("tokens", tokens, self.packing.total, allowed, integral=integral, packing=self.packing)

    def _checked_rank(self, rank: int) -> int:
        return checked_integer("rank", rank, 0, self.cp_size - 1)

    @property
    def value(self) -> tuple[Any, ...]:
        """A tuple that is equal for equal layouts of one packing, and refers to none of them."""
        return (
            self.cp_size,
            self.align,
            self.min_rows,
            self.starts.tobytes(),
            self.ends.tobytes(),
            self.fragment_offsets.tobytes(),
        )

    def describe(self) -> list[str]:
        """Returns the layout's value, and its documents', as lines of text."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.starts, self.ends, self.fragment_offsets):
            digest.update(array.tobytes())
        lengths = hashlib.blake2b(self.packing.value, digest_size=8)
        return [
            f"documents: {self.packing!r} #{lengths.hexdigest()}",
            f"layout: cp_size {self.cp_size}, align {self.align}, at least {self.min_rows} rows #{digest.hexdigest()}",
            f"tokens per rank: {self.token_counts.tolist()}",
        ]

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Layout) and self.packing == other.packing and self.value == other.value
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.packing, self.value))

    def __repr__(self) -> str:
        return (
            f"Layout({self.packing!r}, cp_size={self.cp_size}, align={self.align}, "
            f"{self.starts.size} fragments, {self.token_counts.min()} to {self.token_counts.max()} tokens a rank)"
        )


def _served_before(rank: NDArray, first: NDArray, count: NDArray, cp_size: int) -> NDArray:
    """Counts the ranks `0 .. rank - 1` that are among the `count` ranks served in turn, cyclically from `first` on."""
    last = first + count
    return np.clip(rank, first, last) - first + np.minimum(rank, np.maximum(last - cp_size, 0))


def _checked_cp_size(cp_size: int) -> int:
    return checked_integer("cp_size", cp_size, 1, MAX_CP_SIZE)
