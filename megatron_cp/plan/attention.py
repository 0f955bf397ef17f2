"""`Attend`: which keys meet which queries, and how they get there. Pure data; no torch in here.

The ranks of a plan form a grid: rank = kv_rank * ulysses_degree + head_rank. The ranks of one `kv_rank` have exchanged
heads: each holds its share of the heads, for all tokens of these ranks. The ranks of one `head_rank` hold the same
heads of different tokens. Keys and values travel between them, from one `kv_rank` to another, in *stages*: a flow
brings rows, the tiles between them and the own queries are computed, and in backward another flow takes the gradients
of these rows on.

    p2p          stage s has the keys of the KV rank s places before, passed on from neighbour to neighbour
    all_gather   one stage a head chunk: all keys, in one collective
    exact        one stage a head chunk: the keys that the own queries see and no others, in one collective
    tiled        own queries and own keys; then, a head chunk at a time, what else a rank was assigned: keys of other
                 ranks, and queries of other ranks that visit it, whose partial results go home and are merged there

A rank merges the partial results of stages, and never those of head chunks, which are different heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_cp.exchange.sections import HeadPartition
from megatron_cp.layout import Layout, Mask
from megatron_cp.layout.memo import Memo
from megatron_cp.layout.packing import IntArray
from megatron_cp.layout.tiles import Tiles, bands_of_held_keys, bands_of_ranks
from megatron_cp.plan.assignment import AssignedTiles, TiledWork
from megatron_cp.plan.flows import Fetch, PassOn, Return, RowFlow, pieces_of
from megatron_cp.plan.head_chunks import HeadChunk, cut_heads
from megatron_cp.plan.payloads import Payload, RowSizes
from megatron_cp.plan.program import Program, Start, attention_program
from megatron_cp.plan.seen_keys import SeenKeys
from megatron_cp.plan.stage import Stage

_MOST_BANDS = 2**18  # of one KV rank that are kept for all its stages: 12 MiB


@dataclass(frozen=True)
class Attend(Memo):
    """The tiles of an attention and the transfers that feed them, for every rank.

    Attributes:
        mask: which keys a query sees.
        queries, keys: who holds which tokens, by `kv_rank`.
        partition: the heads of each `head_rank`.
        kv_schedule: one of `SCHEDULES`; on one `kv_rank` all are the same, since nothing travels.
        head_dim, value_head_dim: features of a key and of a value head.
        head_chunks: into how many parts the key/value heads of a rank are cut, where keys are fetched.
        tiled: who computes which tile, where that is not the rank that holds the queries.
    """

    mask: Mask
    queries: Layout
    keys: Layout
    partition: HeadPartition
    kv_schedule: str
    head_dim: int
    value_head_dim: int
    head_chunks: int = 1
    tiled: TiledWork | None = None

    @cached_property
    def num_kv_ranks(self) -> int:
        return self.queries.cp_size

    @property
    def num_head_ranks(self) -> int:
        return len(self.partition.heads)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Of forward, in order, the same for every head chunk."""
        return self._stages(forward=True)

    @cached_property
    def backward_stages(self) -> tuple[Stage, ...]:
        """Of backward, in order: those of forward but where tiles are assigned one by one."""
        return self.stages if self.tiled is None else self._stages(forward=False)

    def stages_of(self, *, forward: bool) -> tuple[Stage, ...]:
        """Of one direction."""
        return self.stages if forward else self.backward_stages

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """Of both directions, each once."""
        return tuple(dict.fromkeys((*self.stages, *self.backward_stages)))

    def _stages(self, *, forward: bool) -> tuple[Stage, ...]:
        if self.num_kv_ranks == 1:
            return (Stage(0, None, None),)
        stages = SCHEDULES[self.kv_schedule](self, forward)
        flows = {type(stage.keys) for stage in stages if stage.keys is not None}
        assert len(flows) <= 1, "the keys of all stages come by flows of one class"
        assert all(stage.keys is not None for stage in stages[1:]), "own rows, as they stand, come first"
        return stages

    @property
    def fetches_ranges(self) -> bool:
        """Whether ranks fetch the keys that they need, and not all of them."""
        return any(isinstance(stage.keys, Fetch) and not stage.keys.equal_shares for stage in self.all_stages)

    def assigned_tiles(self, *, forward: bool) -> AssignedTiles:
        """The tiles that were assigned in one direction, beside who holds what."""
        assert self.tiled is not None
        assignment = self.tiled.forward if forward else self.tiled.backward
        return self.memo(("assigned tiles", assignment), lambda: AssignedTiles(assignment, self.queries, self.keys))

    def with_tiles(self, tiled: TiledWork) -> Attend:
        """The same attention with tiles in other rounds, whose pieces are not made again."""
        found = replace(self, tiled=tiled)
        pieces = [("assigned tiles", assignment) for assignment in (tiled.forward, tiled.backward)]
        for key in (*pieces, ("seen",), ("needed",)):
            if self.remembers(key):
                found.remember(key, self.recall(key))
        return found

    def moves_queries(self, *, forward: bool) -> bool:
        """Whether queries visit other ranks in one direction."""
        return any(stage.visitors is not None for stage in self.stages_of(forward=forward))

    @cached_property
    def num_stages(self) -> int:
        """Stages of forward: partial results of own queries that are merged for each head."""
        return len(self.stages)

    @cached_property
    def key_gradients_return(self) -> bool:
        """True where fetched keys' gradients go back to their owners, who sum them."""
        return any(isinstance(stage.gradients, Return) for stage in self.backward_stages)

    def program(self, *, forward: bool) -> Program:
        """Returns what every rank does in one direction, in order."""
        return self.memo(
            ("program", forward),
            lambda: attention_program(self.stages_of(forward=forward), self.head_chunks, forward=forward),
        )

    def transfers(self, *, forward: bool) -> list[tuple[Payload, RowFlow]]:
        """Returns what travels in one direction, for each head chunk."""
        starts = (do for do in self.program(forward=forward) if isinstance(do, Start))
        return [(do.payload, do.flow) for do in starts if do.part.chunk == 0]

    def chunks(self, head_rank: int) -> list[HeadChunk]:
        """A rank's heads in as many chunks as every other rank has; some may be empty."""
        return self._chunks[head_rank]

    @cached_property
    def _chunks(self) -> list[list[HeadChunk]]:
        # No memo: the attentions of several chunks of heads share that.
        return [cut_heads(self.partition, rank, self.head_chunks) for rank in range(self.num_head_ranks)]

    def tiles(self, kv_rank: int, stage: Stage) -> Tiles:
        """What the queries of a KV rank see among the keys of a stage."""
        return self.memo(self.tiles_key(kv_rank, stage), lambda: self._tiles(kv_rank, stage))

    @staticmethod
    def tiles_key(kv_rank: int, stage: Stage) -> tuple[Any, ...]:
        """Under which an attention remembers them."""
        return "tiles", kv_rank, stage.number, stage.directions

    def visiting_tiles(self, kv_rank: int, stage: Stage) -> Tiles:
        """What the queries that visit a KV rank see among the keys of a stage."""
        key = ("visiting", *self.tiles_key(kv_rank, stage))
        return self.memo(key, lambda: self._visiting_tiles(kv_rank, stage))

    @staticmethod
    def _visiting_tiles(kv_rank: int, stage: Stage) -> Tiles:
        assert stage.assigned is not None
        assert stage.visitors is not None
        assert stage.keys is not None
        bands = stage.assigned.visiting_tiles(kv_rank)
        return Tiles(
            bands[np.lexsort((bands[:, 2], bands[:, 0]))], stage.visitors.tokens(kv_rank), stage.keys.tokens(kv_rank)
        )

    def call_tiles(self, kv_rank: int, stage: Stage) -> Tiles:
        """What a kernel is called with: the tiles between the rows from the first that counts to the last.

        In the first stage of all queries, since those that see no key are written too.
        """
        tiles = self.tiles(kv_rank, stage)
        return tiles.cropped_keys if stage.is_first else tiles.cropped

    def area(self, kv_rank: int, *, forward: bool = True) -> int:
        """The number of visible (query, key) pairs that a KV rank computes: of its queries, or as assigned."""
        if self.tiled is None:
            return self._seen.areas[kv_rank]
        return (self.tiled.forward if forward else self.tiled.backward).areas[kv_rank]

    def collectives(self, *, forward: bool) -> int:
        """What each rank starts in one direction."""
        return sum(isinstance(do, Start) for do in self.program(forward=forward))

    def bytes_sent(self, item_size: int, *, forward: bool) -> IntArray:
        """`[ranks]` bytes that each rank sends to others, for elements of `item_size` bytes."""
        return self._bytes(self._rows_sent(forward=forward), item_size)

    def bytes_needed(self, item_size: int, *, forward: bool) -> IntArray:
        """`bytes_sent` of a schedule that sends each key to the KV ranks that see it and to no other.

        Where tiles are assigned one by one, of this assignment.
        """
        if self.tiled is not None:
            return self.bytes_sent(item_size, forward=forward)
        return self._bytes({Payload.KEYS: self._rows_needed(forward=forward)}, item_size)

    def _bytes(self, rows: dict[Payload, IntArray], item_size: int) -> IntArray:
        """Of rows of some kinds that each KV rank sends."""
        total = np.zeros(self.num_kv_ranks * self.num_head_ranks, dtype=np.int64)
        for payload, count in rows.items():
            widths = [self.row_bytes(payload, head_rank, item_size) for head_rank in range(self.num_head_ranks)]
            total += np.outer(count, widths).ravel()
        return total

    def row_bytes(self, payload: Payload, head_rank: int, item_size: int, chunk: HeadChunk | None = None) -> int:
        """Returns the bytes of a row in a message, of one of a rank's head chunks or of all together."""
        chunks = self.chunks(head_rank) if chunk is None else [chunk]
        sizes = RowSizes(self.head_dim, self.value_head_dim, item_size)
        return sum(payload.row_bytes(sizes, each.heads.stop - each.heads.start, each.num_groups) for each in chunks)

    def _rows_sent(self, *, forward: bool) -> dict[Payload, IntArray]:
        """Returns, for each kind of rows, the rows that each KV rank sends."""

        def make() -> dict[Payload, IntArray]:
            found: dict[Payload, IntArray] = {}
            for payload, flow in self.transfers(forward=forward):
                rows = flow.rows_sent_by_ranks()
                found[payload] = found[payload] + rows if payload in found else rows
            return found

        return self.memo(("rows sent", forward), make)

    def _rows_needed(self, *, forward: bool) -> IntArray:
        """For each KV rank the rows of keys that other KV ranks see, and in backward those whose gradients it sends."""

        def make() -> IntArray:
            rows = self.needed.rows_sent_by_ranks()
            return rows if forward else rows + Return(self.needed).rows_sent_by_ranks()

        return self.memo(("rows needed", forward), make)

    def describe(self) -> list[str]:
        """The step's value, but for queries' layout and mask, which are the plan's."""
        keys = [] if self.keys == self.queries else [f"keys {line}" for line in self.keys.describe()]
        heads, groups = self.partition.heads, self.partition.groups
        shape = f"head sizes {self.head_dim} and {self.value_head_dim}, heads {heads} of {groups}"
        return [
            f"attend by {self.kv_schedule}, {self.num_kv_ranks} KV ranks, {self.head_chunks} chunks, {shape}",
            *keys,
            *self._describe_tiles(),
        ]

    def _describe_tiles(self) -> list[str]:
        if self.tiled is None:
            return []
        digests = f"{self.tiled.forward.digest} forward, {self.tiled.backward.digest} backward"
        forward, backward = self.tiled.rounds
        return [f"tiles assigned by {digests}, in {forward} and {backward} rounds"]

    @property
    def needed(self) -> Fetch:
        """The keys that each KV rank's queries see, and no others."""
        words = f"the keys that own queries see, of {self.num_kv_ranks} ranks, in {self.head_chunks} chunks of heads"
        return self.memo(("needed",), lambda: Fetch(self.keys, self._seen.keys, words))

    @property
    def _seen(self) -> SeenKeys:
        """By itself, so that flows need not refer to the step that remembers them: a circle is memory kept."""
        return self.memo(("seen",), lambda: SeenKeys(self.mask, self.queries))

    def _tiles(self, kv_rank: int, stage: Stage) -> Tiles:
        q_tokens = self.memo(("query tokens", kv_rank), lambda: self.queries.tokens(kv_rank))
        if stage.keys is not None:
            k_tokens = stage.keys.tokens(kv_rank)
        else:
            k_tokens = q_tokens if self.keys is self.queries else self.keys.tokens(kv_rank)
        return Tiles(self.bands(kv_rank, stage), q_tokens, k_tokens)

    def bands(self, kv_rank: int, stage: Stage) -> IntArray:
        """The bands of a stage's tiles of own queries, without a table of their tokens."""
        if stage.home is not None:
            return stage.home.at_home(kv_rank)
        if stage.assigned is not None:
            return stage.assigned.own_tiles(kv_rank)
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
        """The mask of a KV rank's queries, in their rows, over the stream of keys; or what it was assigned."""
        return self._seen.bands(kv_rank) if self.tiled is None else self.tiled.forward.of_rank(kv_rank)

    def bands_of_kv_ranks(self) -> tuple[IntArray, IntArray]:
        """`bands_of_kv_rank` of all of them, and `[n]` the KV rank of each."""
        return self._seen.all_bands

    def share_seen(self, other: Attend) -> None:
        """Takes what queries see from an attention of the same mask, queries and keys, however these travel there."""
        assert (self.mask, self.queries, self.keys) == (other.mask, other.queries, other.keys)
        self.remember(("seen",), other._seen)
        self.needed.share_memo(other.needed)


# -- how keys travel -------------------------------------------------------------------------------------------------


def _ring(step: Attend, _: bool) -> tuple[Stage, ...]:
    """Blocks of keys pass from rank to rank; their gradients follow one stage behind, and end at home."""
    return tuple(
        Stage(hops, PassOn(step.keys, hops) if hops else None, PassOn(step.keys, hops + 1))
        for hops in range(step.num_kv_ranks)
    )


def _gather_all(step: Attend, _: bool) -> tuple[Stage, ...]:
    everything = np.array([0]), np.array([step.keys.packing.total])
    words = f"all keys gathered from {step.num_kv_ranks} ranks, in {step.head_chunks} chunks of heads"
    fetch = Fetch(step.keys, lambda _: everything, words, equal_shares=True)
    return (Stage(0, fetch, Return(fetch)),)


def _fetch_needed(step: Attend, _: bool) -> tuple[Stage, ...]:
    return (Stage(0, step.needed, Return(step.needed)),)


def _assigned(step: Attend, forward: bool) -> tuple[Stage, ...]:
    """What is at hand needs no message: it is computed while the first rows are on their way."""
    work = step.tiled
    assert work is not None
    alike = work.forward == work.backward and len(set(work.rounds)) == 1
    directions = (True, True) if alike else (forward, not forward)
    rounds = work.rounds[0 if forward else 1]
    return step.memo(
        ("assigned", rounds, directions),
        lambda: tuple(_stages_of_tiles(step, step.assigned_tiles(forward=forward), rounds, directions)),
    )


def _stages_of_tiles(
    step: Attend, tiles: AssignedTiles, rounds: int, directions: tuple[bool, bool]
) -> Iterator[Stage]:  # fmt: skip
    yield Stage(0, None, None, home=tiles, directions=directions)
    words = f"tiles of a mask assigned to {step.num_kv_ranks} ranks, in {step.head_chunks} chunks of heads"
    for number, part in enumerate(tiles.parts(rounds), start=1):
        keys = Fetch(step.keys, part.wanted_keys, words)
        visitors = None if part.visiting is None else Fetch(step.queries, part.wanted_queries, "queries of those tiles")
        yield Stage(number, keys, Return(keys), visitors, part, directions=directions)


SCHEDULES: dict[str, Callable[[Attend, bool], tuple[Stage, ...]]] = {
    "p2p": _ring, "all_gather": _gather_all, "exact": _fetch_needed, "tiled": _assigned,
}  # fmt: skip
