"""`Attend`: which keys meet which queries, and how they get there. Pure data; no torch in here.

The ranks of a plan form a grid: rank = kv_rank * ulysses_degree + head_rank. The ranks of one `kv_rank` have exchanged
heads: each holds its share of the heads, for all tokens of these ranks. The ranks of one `head_rank` hold the same
heads of different tokens. Keys and values travel between them, from one `kv_rank` to another, in *stages*: a flow
brings rows, the tiles between them and the own queries are computed, and in backward another flow takes the gradients
of these rows on.

    p2p          stage s has the keys of the KV rank s places before, passed on from neighbour to neighbour
    all_gather   one stage a head chunk: all keys, in one collective
    exact        one stage a head chunk: the keys that the own queries see and no others, in one collective

A rank merges the partial results of stages, and never those of head chunks, which are different heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from megatron_cp.exchange.sections import HeadPartition, head_runs
from megatron_cp.layout import Layout, Mask
from megatron_cp.layout.bands import areas
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.packing import IntArray
from megatron_cp.layout.tiles import Tiles, bands_of_held_keys, bands_of_ranks, ranges_seen_by_ranks
from megatron_cp.plan.flows import Fetch, KeyFlow, PassOn, Return, RowFlow, pieces_of

_MOST_FRAGMENTS = 2**13  # of KV ranks whose queries are cut out of a mask in one pass
_MOST_BANDS = 2**18  # of one KV rank that are kept for all its stages: 12 MiB


@dataclass(frozen=True)
class HeadChunk:
    """Some of a rank's heads, whose keys travel together.

    Attributes:
        heads, groups: the query heads and the key/value heads, as ranges of the rank's own.
        runs: query heads and the key/value heads that they read, counted within the chunk, in runs of one ratio.
        first_head: the number in the layer of the first query head.
        number: of the chunk, from 0.
    """

    heads: slice
    groups: slice
    runs: tuple[tuple[slice, slice], ...]
    first_head: int
    number: int = 0

    @property
    def num_groups(self) -> int:
        return self.groups.stop - self.groups.start


@dataclass(frozen=True, eq=False)
class Stage:
    """Tiles that a rank computes with the keys that it has at one time.

    Attributes:
        number: of the stage, from 0; results of later ones are merged into those of the first.
        keys: how these keys come; None for the own rows, as they stand.
        gradients: in backward, how the gradients of these keys go on; None for own rows, which they are written to.
    """

    number: int
    keys: KeyFlow | None
    gradients: RowFlow | None

    @property
    def is_first(self) -> bool:
        """Whether nothing has been computed before."""
        return self.number == 0


@dataclass(frozen=True)
class Attend(Memo):
    """The tiles of an attention and the transfers that feed them, for every rank.

    Attributes:
        mask: which keys a query sees.
        queries, keys: who holds which tokens, by `kv_rank`.
        partition: the heads of each `head_rank`.
        kv_schedule: one of `SCHEDULES`; on one `kv_rank` all are the same, since nothing travels.
        head_dim, value_head_dim: features of a key and of a value head.
        head_chunks: into how many parts the key/value heads of a rank are cut, for `all_gather` and `exact`.
    """

    mask: Mask
    queries: Layout
    keys: Layout
    partition: HeadPartition
    kv_schedule: str
    head_dim: int
    value_head_dim: int
    head_chunks: int = 1

    @cached_property
    def num_kv_ranks(self) -> int:
        return self.queries.cp_size

    @property
    def num_head_ranks(self) -> int:
        return len(self.partition.heads)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """In order, the same for every head chunk, forward and backward."""
        if self.num_kv_ranks == 1:
            return (Stage(0, None, None),)
        stages = SCHEDULES[self.kv_schedule](self)
        own_first, flows = stages[0].keys is None, {type(stage.keys) for stage in stages if stage.keys is not None}
        assert len(flows) == 1, "the keys of all stages come by flows of one class"
        assert not own_first or flows != {Fetch}, "where keys are fetched, own rows are fetched too"
        assert all(stage.keys is not None for stage in stages[1:]), "own rows, as they stand, come first"
        return stages

    @cached_property
    def key_flow(self) -> type[KeyFlow] | None:
        """The class of what brings keys, one for all stages; None where all stages have the own rows, as they stand."""
        return next((type(stage.keys) for stage in self.stages if stage.keys is not None), None)

    @property
    def fetches_ranges(self) -> bool:
        """Whether ranks fetch the keys that they need, and not all of them."""
        return any(isinstance(stage.keys, Fetch) and not stage.keys.equal_shares for stage in self.stages)

    @cached_property
    def returns_gradients(self) -> bool:
        """Whether gradients of keys go to other ranks."""
        return any(stage.gradients is not None for stage in self.stages)

    @cached_property
    def num_stages(self) -> int:
        """Partial results that are merged for each head."""
        return len(self.stages)

    def flows(self, *, forward: bool) -> list[RowFlow]:
        """What travels in one direction, for each head chunk."""
        found = [flow for stage in self.stages for flow in (stage.keys, None if forward else stage.gradients)]
        return [flow for flow in found if flow is not None]

    def chunks(self, head_rank: int) -> list[HeadChunk]:
        """A rank's heads in as many chunks as every other rank has; some may be empty."""
        return self._chunks[head_rank]

    @cached_property
    def _chunks(self) -> list[list[HeadChunk]]:
        # No memo: the attentions of several chunks of heads share that.
        return [_chunks(self.partition, rank, self.head_chunks) for rank in range(self.num_head_ranks)]

    def tiles(self, kv_rank: int, stage: Stage) -> Tiles:
        """What the queries of a KV rank see among the keys of a stage."""
        return self.memo(self.tiles_key(kv_rank, stage), lambda: self._tiles(kv_rank, stage))

    @staticmethod
    def tiles_key(kv_rank: int, stage: Stage) -> tuple[Any, ...]:
        """Under which an attention remembers them."""
        return "tiles", kv_rank, stage.number

    def call_tiles(self, kv_rank: int, stage: Stage) -> Tiles:
        """What a kernel is called with: the tiles between the rows from the first that counts to the last.

        In the first stage of all queries, since those that see no key are written too.
        """
        tiles = self.tiles(kv_rank, stage)
        return tiles.cropped_keys if stage.is_first else tiles.cropped

    def area(self, kv_rank: int) -> int:
        """The number of visible (query, key) pairs of a KV rank's queries."""
        return self._seen.areas[kv_rank]

    def collectives(self, *, forward: bool) -> int:
        """What each rank starts in one direction."""
        return self.head_chunks * len(self.flows(forward=forward))

    def bytes_sent(self, rank: int, item_size: int, *, forward: bool) -> int:
        """Bytes that a rank sends to others, for elements of `item_size` bytes."""
        return self._row(rank) * self._bytes_along_keys(item_size, forward=forward)[rank // self.num_head_ranks]

    def bytes_sent_by_ranks(self, item_size: int, *, forward: bool) -> list[int]:
        """`bytes_sent` of all ranks."""
        rows = [self._row(rank) for rank in range(self.num_head_ranks)]
        return [row * size for size in self._bytes_along_keys(item_size, forward=forward) for row in rows]

    def bytes_needed(self, rank: int, item_size: int, *, forward: bool) -> int:
        """`bytes_sent` of a schedule that sends each key to the KV ranks that see it and to no other."""
        return self._row(rank) * item_size * self._rows_needed(forward=forward)[rank // self.num_head_ranks]

    def _bytes_along_keys(self, item_size: int, *, forward: bool) -> list[int]:
        """For each KV rank the bytes that it sends, for each element of a token's keys and values."""

        def make() -> list[int]:
            flows = self.flows(forward=forward)
            sent = [flow.rows_sent_by_ranks() * flow.item_size(item_size) for flow in flows]
            return sum(sent, np.zeros(self.num_kv_ranks, dtype=np.int64)).tolist()

        return self.memo(("bytes along keys", item_size, forward), make)

    def _rows_needed(self, *, forward: bool) -> list[int]:
        """For each KV rank the rows of keys that other KV ranks see, and in backward those whose gradients it sends."""

        def make() -> list[int]:
            rows = self.needed.rows_sent_by_ranks()
            return (rows if forward else rows + Return(self.needed).rows_sent_by_ranks()).tolist()

        return self.memo(("rows needed", forward), make)

    def describe(self) -> list[str]:
        """The step's value, but for queries' layout and mask, which are the plan's."""
        keys = [] if self.keys == self.queries else [f"keys {line}" for line in self.keys.describe()]
        heads, groups = self.partition.heads, self.partition.groups
        shape = f"head sizes {self.head_dim} and {self.value_head_dim}, heads {heads} of {groups}"
        return [
            f"attend by {self.kv_schedule}, {self.num_kv_ranks} KV ranks, {self.head_chunks} chunks, {shape}",
            *keys,
        ]

    def _row(self, rank: int) -> int:
        """Elements of one token's keys and values on a rank."""
        lo, hi = self.partition.groups[rank % self.num_head_ranks]
        return (hi - lo) * (self.head_dim + self.value_head_dim)

    @property
    def needed(self) -> Fetch:
        """The keys that each KV rank's queries see, and no others."""
        words = f"the keys that own queries see, of {self.num_kv_ranks} ranks, in {self.head_chunks} chunks of heads"
        return self.memo(("needed",), lambda: Fetch(self.keys, self._seen.keys, words))

    @property
    def _seen(self) -> _Seen:
        """By itself, so that flows need not refer to the step that remembers them: a circle is memory kept."""
        return self.memo(("seen",), lambda: _Seen(self.mask, self.queries))

    def _tiles(self, kv_rank: int, stage: Stage) -> Tiles:
        q_tokens = self.memo(("query tokens", kv_rank), lambda: self.queries.tokens(kv_rank))
        if stage.keys is not None:
            k_tokens = stage.keys.tokens(kv_rank)
        else:
            k_tokens = q_tokens if self.keys is self.queries else self.keys.tokens(kv_rank)
        return Tiles(self.bands(kv_rank, stage), q_tokens, k_tokens)

    def bands(self, kv_rank: int, stage: Stage) -> IntArray:
        """The bands of a stage's tiles, without a table of their tokens."""
        source = kv_rank if stage.keys is None else stage.keys.source(kv_rank)
        if source is None:
            assert stage.keys is not None
            return stage.keys.bands(self.bands_of_kv_rank(kv_rank), kv_rank)
        bands, offsets = self.memo(("bands of ranks' keys", kv_rank), lambda: self._bands_of_all_keys(kv_rank))
        if offsets is None:
            return bands_of_held_keys(bands, self.keys, source)
        return bands[offsets[source] : offsets[source + 1]]

    def _bands_of_all_keys(self, kv_rank: int) -> tuple[IntArray, IntArray | None]:
        """The bands of a KV rank's queries over each KV rank's rows of keys, and where those of each begin.

        Where they are many, the bands over the stream of keys and None.
        """
        bands = self.bands_of_kv_rank(kv_rank)
        if self.count_bands(kv_rank)[0] > _MOST_BANDS:
            return bands, None
        return bands_of_ranks(bands, self.keys, range(self.keys.cp_size), queries=False)

    def count_bands(self, kv_rank: int) -> tuple[int, int]:
        """About how many bands a KV rank computes in all stages, and how many if it had all its keys at once.

        A kernel of the CPU is called for each, one of CUDA has a segment for each. Counted, not made: a ring over
        fragments of single tokens has one for every pair that is visible.
        """
        bands = self.bands_of_kv_rank(kv_rank)
        if self.num_stages == 1:
            return len(bands), len(bands)
        edges, _ = pieces_of(self.keys)
        met = np.searchsorted(edges[:-1], bands[:, 3]) - np.searchsorted(edges[1:], bands[:, 2], side="right")
        return int(met.sum()), len(bands)

    def bands_of_kv_rank(self, kv_rank: int) -> IntArray:
        """The mask of a KV rank's queries, in their rows, over the stream of keys."""
        return self._seen.bands(kv_rank)

    def bands_of_kv_ranks(self) -> tuple[IntArray, IntArray]:
        """`bands_of_kv_rank` of all of them, and `[n]` the KV rank of each."""
        return self._seen.all_bands

    def share_seen(self, other: Attend) -> None:
        """Takes what queries see from an attention of the same mask, queries and keys, however these travel there."""
        assert (self.mask, self.queries, self.keys) == (other.mask, other.queries, other.keys)
        self.remember(("seen",), other._seen)
        self.needed.share_memo(other.needed)


class _Seen(Memo):
    """What the queries of each KV rank see, made for neighbouring KV ranks at once, which takes little more time."""

    def __init__(self, mask: Mask, queries: Layout) -> None:
        self.mask, self.queries = mask, queries
        self.block = max(1, _MOST_FRAGMENTS * queries.cp_size // max(queries.starts.size, 1))

    def bands(self, kv_rank: int) -> IntArray:
        """In rows of the queries, over the stream of keys."""
        bands, offsets = self._bands(kv_rank // self.block)
        return bands[slice(*offsets[kv_rank % self.block :][:2])]

    def keys(self, kv_rank: int) -> tuple[IntArray, IntArray]:
        """The keys that are seen, as ranges of the stream."""
        block = kv_rank // self.block
        starts, ends, offsets = self.memo(("keys", block), lambda: ranges_seen_by_ranks(*self._bands(block)))
        own = slice(*offsets[kv_rank % self.block :][:2])
        return starts[own], ends[own]

    @cached_property
    def areas(self) -> list[int]:
        """For each KV rank the (query, key) pairs that are seen."""
        found = list[int]()
        for block in range(-(-self.queries.cp_size // self.block)):
            bands, offsets = self._bands(block)
            before = np.concatenate([[0], np.cumsum(areas(bands))])
            found += map(int, np.diff(before[offsets]))
        return found

    @cached_property
    def all_bands(self) -> tuple[IntArray, IntArray]:
        """The bands of all KV ranks, and `[n]` the KV rank of each."""
        blocks = [self._bands(block) for block in range(-(-self.queries.cp_size // self.block))]
        counts = np.concatenate([np.diff(offsets) for _, offsets in blocks])
        return np.concatenate([bands for bands, _ in blocks]), np.repeat(np.arange(counts.size), counts)

    def _bands(self, block: int) -> tuple[IntArray, IntArray]:
        """Of a block of KV ranks, with where those of each begin."""
        first = block * self.block
        ranks = range(first, min(first + self.block, self.queries.cp_size))
        make = partial(bands_of_ranks, self.mask.bands, self.queries, ranks, queries=True)
        return self.memo(("bands", block), make)


# -- how keys travel -------------------------------------------------------------------------------------------------


def _ring(step: Attend) -> tuple[Stage, ...]:
    """Blocks of keys pass from rank to rank; their gradients follow one stage behind, and end at home."""
    return tuple(
        Stage(hops, PassOn(step.keys, hops) if hops else None, PassOn(step.keys, hops + 1, sums=True))
        for hops in range(step.num_kv_ranks)
    )


def _gather_all(step: Attend) -> tuple[Stage, ...]:
    everything = np.array([0]), np.array([step.keys.packing.total])
    words = f"all keys gathered from {step.num_kv_ranks} ranks, in {step.head_chunks} chunks of heads"
    fetch = Fetch(step.keys, lambda _: everything, words, equal_shares=True)
    return (Stage(0, fetch, Return(fetch)),)


def _fetch_needed(step: Attend) -> tuple[Stage, ...]:
    return (Stage(0, step.needed, Return(step.needed)),)


SCHEDULES: dict[str, Callable[[Attend], tuple[Stage, ...]]] = {
    "p2p": _ring, "all_gather": _gather_all, "exact": _fetch_needed,
}  # fmt: skip


# -- head chunks -----------------------------------------------------------------------------------------------------


def _chunks(partition: HeadPartition, head_rank: int, count: int) -> list[HeadChunk]:
    runs = head_runs(partition, head_rank)
    first, last = partition.groups[head_rank]
    cuts = [(last - first) * chunk // count for chunk in range(count + 1)]
    first_of_rank = partition.heads[head_rank][0]
    return [_chunk(runs, lo, hi, first_of_rank, number) for number, (lo, hi) in enumerate(itertools.pairwise(cuts))]


def _chunk(runs: list[tuple[slice, slice]], lo: int, hi: int, first_of_rank: int, number: int) -> HeadChunk:
    """The heads of groups `[lo, hi)`, from runs that are cut where the chunk begins and ends."""
    parts = []
    for heads, groups in runs:
        first, last = max(groups.start, lo), min(groups.stop, hi)
        if first >= last:
            continue
        ratio = (heads.stop - heads.start) // (groups.stop - groups.start)
        begin = heads.start + (first - groups.start) * ratio
        parts.append((slice(begin, begin + (last - first) * ratio), slice(first, last)))
    if not parts:
        return HeadChunk(slice(0, 0), slice(lo, hi), (), first_of_rank, number)
    start = parts[0][0].start
    within = tuple((_moved(heads, -start), _moved(groups, -lo)) for heads, groups in parts)
    return HeadChunk(slice(start, parts[-1][0].stop), slice(lo, hi), within, first_of_rank + start, number)


def _moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)
