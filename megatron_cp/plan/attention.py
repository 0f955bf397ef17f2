"""`Attend`: how the keys and values of a softmax attention reach the queries. Pure data; no torch in here.

The ranks of a plan form a grid: rank = kv_rank * ulysses_degree + head_rank. The ranks of one `kv_rank` have exchanged
heads: each holds its share of the heads, for all tokens of these ranks. The ranks of one `head_rank` hold the same
heads of different tokens. Keys and values travel between them, from one `kv_rank` to another, in *stages*:

    p2p          stage s brings the keys of the KV rank s places before, passed on from neighbour to neighbour
    all_gather   one stage a head chunk: all keys, in one collective
    exact        one stage a head chunk: the keys that the own queries see and no others, in one collective

A rank merges the partial results of stages, and never those of head chunks, which are different heads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from megatron_cp.exchange.sections import HeadPartition, head_runs
from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.layout import Layout, Mask
from megatron_cp.layout.bands import area
from megatron_cp.layout.layout import arange_ranges
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.packing import IntArray
from megatron_cp.layout.tiles import Tiles, bands_of_held_keys, bands_of_keys, bands_of_queries, ranges_seen

SCHEDULES = ("p2p", "all_gather", "exact")


@dataclass(frozen=True)
class HeadChunk:
    """Some of a rank's heads, whose keys travel together.

    Attributes:
        heads, groups: the query heads and the key/value heads, as ranges of the rank's own.
        runs: query heads and the key/value heads that they read, counted within the chunk, in runs of one ratio.
    """

    heads: slice
    groups: slice
    runs: tuple[tuple[slice, slice], ...]

    @property
    def num_groups(self) -> int:
        return self.groups.stop - self.groups.start


@dataclass(frozen=True, eq=False)
class Gathering:
    """One KV rank's half of bringing keys to where they are seen: rows go out, arrive, and are put in stream order.

    Attributes:
        send_rows: rows of the own keys, grouped by the KV rank that they go to, the own KV rank included.
        send_counts, recv_counts: `[kv_ranks]` rows to and from each KV rank.
        arrange: the received row that belongs in each place of the stream order; None where they arrive in it.
        returned: its inverse: the place in stream order of each received row; None likewise.
        tokens: `[sum(recv_counts)]` place in the packed stream of the keys, rising.
    """

    send_rows: IntArray
    send_counts: IntArray
    recv_counts: IntArray
    arrange: IntArray | None
    returned: IntArray | None
    tokens: IntArray


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

    @property
    def num_kv_ranks(self) -> int:
        return self.queries.cp_size

    @property
    def num_head_ranks(self) -> int:
        return len(self.partition.heads)

    @property
    def num_stages(self) -> int:
        """Partial results that are merged for each head."""
        return self.num_kv_ranks if self.kv_schedule == "p2p" else 1

    def chunks(self, head_rank: int) -> list[HeadChunk]:
        """A rank's heads in as many chunks as every other rank has; some may be empty."""
        return self.memo(
            ("chunks", self.partition, head_rank), lambda: _chunks(self.partition, head_rank, self.head_chunks)
        )

    def source(self, kv_rank: int, stage: int) -> int:
        """The KV rank whose keys stage `stage` of a rotation brings to `kv_rank`."""
        return (kv_rank - stage) % self.num_kv_ranks

    def tiles(self, kv_rank: int, stage: int = 0) -> Tiles:
        """What the queries of a KV rank see among the keys that a stage brings."""
        return self.memo(("tiles", kv_rank, stage), lambda: self._tiles(kv_rank, stage))

    def area(self, kv_rank: int) -> int:
        """The number of visible (query, key) pairs of a KV rank's queries."""
        return area(self._bands_of(kv_rank))

    def gathering(self, kv_rank: int) -> Gathering:
        """What a KV rank sends and receives where keys are gathered."""
        return self.memo(("gathering", kv_rank), lambda: self._gathering(kv_rank))

    @property
    def split_counts(self) -> SplitCounts:
        """Where keys are gathered, their rows from each KV rank to each, a KV rank's own among them."""
        return self.memo(("split counts",), self._make_split_counts)

    def _make_split_counts(self) -> SplitCounts:
        if self.kv_schedule == "all_gather":
            return SplitCounts(np.repeat(self.keys.token_counts[:, None], self.num_kv_ranks, axis=1))
        return SplitCounts(self._seen_rows)

    def collectives(self, *, forward: bool) -> int:
        """What each rank starts in one direction."""
        if self.num_kv_ranks == 1:
            return 0
        keys, gradients = (
            (self.num_kv_ranks - 1, self.num_kv_ranks) if self.kv_schedule == "p2p" else (self.head_chunks,) * 2
        )
        return keys if forward else keys + gradients

    def bytes_sent(self, rank: int, item_size: int, *, forward: bool) -> int:
        """Bytes that a rank sends to others, for elements of `item_size` bytes.

        A rotation sends gradients in at least fp32, since it sums on the way.
        """
        kv_rank, row = rank // self.num_head_ranks, self._row(rank)
        if self.num_kv_ranks == 1:
            return 0
        counts = self.keys.token_counts
        if self.kv_schedule == "p2p":
            # Every block but the one that stays here at the end passes; every block's gradients pass on their way home.
            keys = sum(int(counts[self.source(kv_rank, stage)]) for stage in range(self.num_kv_ranks - 1))
            return row * (keys * item_size + (0 if forward else int(counts.sum()) * max(item_size, 4)))
        if self.kv_schedule == "all_gather":
            # Shares are as long as the longest; gradients go back without what was added.
            keys, gradients = int(counts.max()) * (self.num_kv_ranks - 1), int(counts.sum() - counts[kv_rank])
        else:
            keys, gradients = int(self.needed_rows[kv_rank].sum()), int(self.needed_rows[:, kv_rank].sum())
        return row * item_size * (keys if forward else keys + gradients)

    def bytes_needed(self, rank: int, item_size: int, *, forward: bool) -> int:
        """`bytes_sent` of a schedule that sends each key to the KV ranks that see it and to no other."""
        kv_rank = rank // self.num_head_ranks
        keys, gradients = int(self.needed_rows[kv_rank].sum()), int(self.needed_rows[:, kv_rank].sum())
        return self._row(rank) * item_size * (keys if forward else keys + gradients)

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
    def needed_rows(self) -> IntArray:
        """`[kv_ranks, kv_ranks]` keys of each owner that queries of each other reader see."""
        return self._seen_rows - np.diag(np.diag(self._seen_rows))

    @property
    def _seen_rows(self) -> IntArray:
        """Likewise, a KV rank's own keys among them."""
        return self.memo(("seen rows",), self._count_seen_rows)

    def _count_seen_rows(self) -> IntArray:
        _, owner = self._pieces
        counts = np.zeros((self.num_kv_ranks, self.num_kv_ranks), dtype=np.int64)
        for reader in range(self.num_kv_ranks):
            taken = self._taken(*ranges_seen(self._bands_of(reader)))
            counts[:, reader] = np.bincount(owner, weights=taken, minlength=self.num_kv_ranks)
        return counts

    def _taken(self, starts: IntArray, ends: IntArray) -> IntArray:
        """How many keys of each piece lie in ranges of the stream."""
        edges, _ = self._pieces
        return _covered(edges[1:], starts, ends) - _covered(edges[:-1], starts, ends)

    def arrives_in_order(self, kv_rank: int) -> bool:
        """Whether the keys that are gathered for a KV rank, one owner's after the other's, are in stream order."""
        owners = self._pieces[1][self._taken(*self._gathered(kv_rank)) > 0]
        return bool((owners[1:] >= owners[:-1]).all())

    @property
    def _pieces(self) -> tuple[IntArray, IntArray]:
        """The fragments of all keys in stream order: `[n + 1]` edges, and the KV rank that holds each."""
        return self.memo(("pieces",), self._make_pieces)

    def _make_pieces(self) -> tuple[IntArray, IntArray]:
        starts = np.sort(self.keys.starts)
        return np.append(starts, self.keys.packing.total), self.keys.located(starts)[0]

    def _tiles(self, kv_rank: int, stage: int) -> Tiles:
        rotates = self.kv_schedule == "p2p" or self.num_kv_ranks == 1
        k_tokens = self.keys.tokens(self.source(kv_rank, stage)) if rotates else self.gathering(kv_rank).tokens
        return Tiles(self.bands(kv_rank, stage), self.queries.tokens(kv_rank), k_tokens)

    def bands(self, kv_rank: int, stage: int = 0) -> IntArray:
        """The bands of a stage's tiles, without a table of their tokens."""
        bands = self._bands_of(kv_rank)
        if self.kv_schedule == "p2p" or self.num_kv_ranks == 1:
            return bands_of_held_keys(bands, self.keys, self.source(kv_rank, stage))
        return bands_of_keys(bands, *self._gathered(kv_rank))

    def count_bands(self, kv_rank: int) -> tuple[int, int]:
        """About how many bands a KV rank computes in all stages, and how many if it had all its keys at once.

        A kernel of the CPU is called for each, one of CUDA has a segment for each. Counted, not made: a ring over
        fragments of single tokens has one for every pair that is visible.
        """
        bands = self._bands_of(kv_rank)
        if self.kv_schedule != "p2p":
            return len(bands), len(bands)
        edges, _ = self._pieces
        met = np.searchsorted(edges[:-1], bands[:, 3]) - np.searchsorted(edges[1:], bands[:, 2], side="right")
        return int(met.sum()), len(bands)

    def _bands_of(self, kv_rank: int) -> IntArray:
        """The mask of a KV rank's queries, in their rows, over the stream of keys."""
        return self.memo(("bands", kv_rank), lambda: bands_of_queries(self.mask.bands, self.queries, kv_rank))

    def _gathered(self, kv_rank: int) -> tuple[IntArray, IntArray]:
        """The keys that are gathered for a KV rank, as ranges of the stream in rising order."""
        if self.kv_schedule == "all_gather":
            return np.array([0]), np.array([self.keys.packing.total])
        return self.memo(("seen", kv_rank), lambda: ranges_seen(self._bands_of(kv_rank)))

    def _rows_within(self, kv_rank: int, starts: IntArray, ends: IntArray) -> IntArray:
        """The rows of a KV rank's keys that lie in rising ranges of the stream, in stream order."""
        lo, hi = self.keys.fragment_offsets[kv_rank : kv_rank + 2]
        local_starts, local_ends = self.keys.starts[lo:hi], self.keys.ends[lo:hi]
        first_rows = np.cumsum(local_ends - local_starts) - (local_ends - local_starts)
        order = np.argsort(local_starts, kind="stable")
        local_starts, local_ends, first_rows = local_starts[order], local_ends[order], first_rows[order]
        # Every own fragment meets `count` ranges from `lowest` on.
        lowest = np.searchsorted(ends, local_starts, side="right")
        count = np.maximum(np.searchsorted(starts, local_ends, side="left") - lowest, 0)
        piece = np.repeat(np.arange(order.size), count)
        met = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(lowest, count)
        shift = first_rows[piece] - local_starts[piece]
        return arange_ranges(
            np.maximum(local_starts[piece], starts[met]) + shift, np.minimum(local_ends[piece], ends[met]) + shift
        )

    def _owners(self, starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The tokens of ranges of the stream of keys, with the KV rank that holds each and its row there."""
        tokens = arange_ranges(starts, ends)
        places = self.keys.inverse_order[tokens]
        lasts = np.cumsum(self.keys.token_counts)
        owners = np.searchsorted(lasts, places, side="right")
        return tokens, owners, places - (lasts - self.keys.token_counts)[owners]

    def _gathering(self, kv_rank: int) -> Gathering:
        tokens, owners, _ = self._owners(*self._gathered(kv_rank))
        by_owner = np.argsort(owners, kind="stable")
        in_order = bool((by_owner[1:] > by_owner[:-1]).all())
        arrange = np.empty_like(by_owner)
        arrange[by_owner] = np.arange(by_owner.size)
        send_rows = [self._rows_within(kv_rank, *self._gathered(reader)) for reader in range(self.num_kv_ranks)]
        return Gathering(
            send_rows=np.concatenate(send_rows),
            send_counts=np.array([rows.size for rows in send_rows]),
            recv_counts=np.bincount(owners, minlength=self.num_kv_ranks),
            arrange=None if in_order else arrange,
            returned=None if in_order else by_owner,
            tokens=tokens,
        )


def _covered(places: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """How many tokens before each place lie in disjoint ranges that rise."""
    if not starts.size:
        return np.zeros_like(places)
    before = np.concatenate([[0], np.cumsum(ends - starts)])
    index = np.searchsorted(starts, places, side="right")  # ranges that begin at or before the place
    return before[index] - np.maximum(ends[index - 1] - places, 0) * (index > 0)


def _chunks(partition: HeadPartition, head_rank: int, count: int) -> list[HeadChunk]:
    runs = head_runs(partition, head_rank)
    first, last = partition.groups[head_rank]
    cuts = [(last - first) * chunk // count for chunk in range(count + 1)]
    return [_chunk(runs, lo, hi) for lo, hi in itertools.pairwise(cuts)]


def _chunk(runs: list[tuple[slice, slice]], lo: int, hi: int) -> HeadChunk:
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
        return HeadChunk(slice(0, 0), slice(lo, hi), ())
    start = parts[0][0].start
    within = tuple((_moved(heads, -start), _moved(groups, -lo)) for heads, groups in parts)
    return HeadChunk(slice(start, parts[-1][0].stop), slice(lo, hi), within)


def _moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)
