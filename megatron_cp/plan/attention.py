"""`Attend`: the keys that meet each query, and the transfers of keys and queries. Pure data; no torch in here.

The ranks of a plan form a grid: rank = kv_rank * ulysses_degree + head_rank. The ranks of one `kv_rank` have exchanged
heads: each holds its share of the heads, for all tokens of these ranks. The ranks of one `head_rank` hold the same
heads of different tokens. Keys and values travel between them, from one `kv_rank` to another, in *stages*: a flow
transfers rows, the tiles between them and the own queries are computed, and in backward another flow transfers the
gradients of these rows.

    p2p          stage s has the keys of the KV rank s places before, passed on from neighbour to neighbour
    all_gather   one stage for each head chunk: all keys, in one collective
    exact        one stage for each head chunk: the keys that own queries see and no others, in one collective
    exact_by_host    as exact, in two collectives: a key crosses to each other host once, and goes on from there
    tiled        own queries and own keys; then, for each head chunk, the other tiles that a rank was assigned: keys of
                 other ranks, and queries of other ranks, whose partial results are sent back and merged by the owner

A rank merges the partial results of stages, and never those of head chunks, which are different heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from megatron_cp.exchange.codec import Codec
from megatron_cp.exchange.sections import HeadPartition
from megatron_cp.layout import Layout, Mask
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.bands import areas, ranges_met, ranges_seen_by_ranks
from megatron_cp.layout.memo import Memo, remembered
from megatron_cp.layout.tiles import Tiles, bands_of_held_keys, bands_of_ranks
from megatron_cp.plan.attention_program import AttentionProgram, Stage, Start, attention_program
from megatron_cp.plan.flows import ByHost, Fetch, PassOn, Return, RowFlow, owned_fragments
from megatron_cp.plan.head_chunks import HeadChunk, cut_heads
from megatron_cp.plan.latent import Latent
from megatron_cp.plan.payloads import Payload, RowSizes
from megatron_cp.plan.selection import Selection, travelling_features
from megatron_cp.plan.tile_assignment import AssignedTiles, TiledWork

_MOST_BANDS = 2**18  # bands of one KV rank that are remembered for all its stages: 12 MiB
_MOST_FRAGMENTS = 2**13  # fragments of the KV ranks that are cut out of a mask in one pass


@dataclass(frozen=True)
class Attend(Memo):
    """The tiles of an attention and the transfers that feed them, for every rank.

    Attributes:
        queries, keys: the ranks that hold each token, by `kv_rank`.
        partition: the heads of each `head_rank`.
        kv_schedule: one of `SCHEDULES`; on one `kv_rank` all are the same, since nothing travels.
        head_dim, value_head_dim: features of a key and of a value head, as the kernel takes them.
        hosts: for exact_by_host, the host of each `kv_rank`; else empty.
        latent: the latents from which keys and values are made; None for keys and values that are given.
        head_chunks: the number of parts into which a rank's key/value heads are cut, where keys are fetched.
        tiled: the ranks that compute each tile; None if the rank that holds the queries does.
        selection: the keys that queries choose among those that the mask shows; None if they attend to all.
        codec: the coding of keys and values that travel; None if they keep their type.
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
    latent: Latent | None = None
    hosts: tuple[int, ...] = ()
    selection: Selection | None = None
    codec: Codec | None = None

    def coded_bytes(self, item_size: int) -> int:
        """Returns the bytes of a coded key and its value, of elements of `item_size`; 0 where they keep their type."""
        return 0 if self.codec is None else self.codec.row_bytes(self.key_features, item_size)

    @property
    def key_features(self) -> tuple[int, int]:
        """Features of a key and of a value head as they travel."""
        latent = None if self.latent is None or not self.latent.travels else self.latent[:2]
        return travelling_features(self.head_dim, self.value_head_dim, latent, self.selection)

    @property
    def out_features(self) -> int:
        """Features of an output head: those of latents where queries choose among them."""
        return self.value_head_dim if self.latent is None or self.selection is None else self.latent.rank

    @property
    def latent_mode(self) -> str:
        """The mode of latents, one of `LATENT_MODES`; "" without latents, or where queries choose among them."""
        return "" if self.latent is None or self.selection is not None else self.latent.mode

    @cached_property
    def num_kv_ranks(self) -> int:
        return self.queries.cp_size

    @property
    def num_head_ranks(self) -> int:
        return len(self.partition.heads)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of forward, in order, the same for every head chunk."""
        return self._stages(forward=True)

    @cached_property
    def backward_stages(self) -> tuple[Stage, ...]:
        """The stages of backward, in order; they differ from forward's only where tiles are assigned."""
        return self.stages if self.tiled is None else self._stages(forward=False)

    def stages_in(self, *, forward: bool) -> tuple[Stage, ...]:
        return self.stages if forward else self.backward_stages

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """The distinct stages of both directions."""
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
        """True if ranks fetch the keys that they need rather than all of them."""
        return any(isinstance(stage.keys, Fetch) and not stage.keys.equal_shares for stage in self.all_stages)

    def assigned_tiles(self, *, forward: bool) -> AssignedTiles:
        """The tiles that were assigned in one direction, with the layouts of queries and keys."""
        assert self.tiled is not None
        assignment = self.tiled.forward if forward else self.tiled.backward
        return self.memo(("assigned tiles", assignment), lambda: AssignedTiles(assignment, self.queries, self.keys))

    def moves_queries(self, *, forward: bool) -> bool:
        """True if queries are sent to other ranks in one direction."""
        return any(stage.remote_queries is not None for stage in self.stages_in(forward=forward))

    @cached_property
    def num_stages(self) -> int:
        """Stages of forward, whose partial results are merged for each head."""
        return len(self.stages)

    @cached_property
    def key_gradients_return(self) -> bool:
        """True if the gradients of fetched keys are returned to their owners, which sum them."""
        return any(isinstance(stage.gradients, Return) for stage in self.backward_stages)

    @remembered
    def program(self, *, forward: bool) -> AttentionProgram:
        """Returns the instructions of one direction, the same on every rank."""
        return attention_program(self.stages_in(forward=forward), self.head_chunks, forward=forward)

    def transfers(self, *, forward: bool) -> list[tuple[Payload, RowFlow]]:
        """Returns what travels in one direction, for each head chunk."""
        starts = [do for do in self.program(forward=forward) if type(do) is Start]
        return [(do.payload, do.flow) for do in starts if do.part.chunk == 0]

    def chunks(self, head_rank: int) -> list[HeadChunk]:
        """Returns a rank's heads in as many chunks as every other rank has; some may be empty."""
        return self._chunks[head_rank]

    @cached_property
    def _chunks(self) -> list[list[HeadChunk]]:
        # Not in the memo, which the attentions of several chunks of heads share.
        return [cut_heads(self.partition, rank, self.head_chunks) for rank in range(self.num_head_ranks)]

    def tiles(self, kv_rank: int, stage: Stage) -> Tiles:
        """Returns the tiles between the queries of a KV rank and the keys of a stage."""
        return self.memo(("tiles", kv_rank, stage.number, stage.directions), lambda: self._tiles(kv_rank, stage))

    def remote_tiles(self, kv_rank: int, stage: Stage) -> Tiles:
        """Returns the tiles between remote queries on a KV rank and the keys of a stage."""
        key = "remote tiles", kv_rank, stage.number, stage.directions
        return self.memo(key, lambda: self._remote_tiles(kv_rank, stage))

    @staticmethod
    def _remote_tiles(kv_rank: int, stage: Stage) -> Tiles:
        assert stage.assigned is not None
        assert stage.remote_queries is not None
        assert stage.keys is not None
        bands = stage.assigned.remote_tiles(kv_rank)
        return Tiles(
            bands[np.lexsort((bands[:, 2], bands[:, 0]))],
            stage.remote_queries.tokens(kv_rank),
            stage.keys.tokens(kv_rank),
        )

    def call_tiles(self, kv_rank: int, stage: Stage) -> Tiles:
        """Returns the tiles of a kernel call, cropped to the rows from the first that is used to the last.

        The first stage keeps all queries, since those that see no key are written too.
        """
        tiles = self.tiles(kv_rank, stage)
        return tiles.cropped_keys if stage.is_first else tiles.cropped

    def area(self, kv_rank: int, *, forward: bool = True) -> int:
        """Returns the number of (query, key) pairs that a KV rank computes: of its queries, or as assigned."""
        if self.tiled is None:
            return self._seen.areas[kv_rank]
        return (self.tiled.forward if forward else self.tiled.backward).areas[kv_rank]

    def collectives(self, *, forward: bool) -> int:
        """Returns the number of transfers that each rank starts in one direction."""
        return len([do for do in self.program(forward=forward) if type(do) is Start])

    def bytes_sent(self, item_size: int, *, forward: bool) -> IntArray:
        """Returns `[ranks]` bytes that each rank sends to others, for elements of `item_size` bytes."""
        return self._bytes(self._rows_sent(forward=forward), item_size)

    def bytes_needed(self, item_size: int, *, forward: bool) -> IntArray:
        """Returns `bytes_sent` of a schedule that sends each key to the KV ranks that see it and to no other.

        With assigned tiles, and where keys cross between hosts once, it is `bytes_sent` itself.
        """
        if self.tiled is not None or self.hosts:
            return self.bytes_sent(item_size, forward=forward)
        return self._bytes(self._rows_needed(forward=forward), item_size)

    def _bytes(self, rows: dict[Payload, IntArray], item_size: int) -> IntArray:
        total = np.zeros(self.num_kv_ranks * self.num_head_ranks, dtype=np.int64)
        for payload, count in rows.items():
            widths = [self.row_bytes(payload, head_rank, item_size) for head_rank in range(self.num_head_ranks)]
            total += np.outer(count, widths).ravel()
        return total

    def row_bytes(self, payload: Payload, head_rank: int, item_size: int, chunk: HeadChunk | None = None) -> int:
        """Returns the bytes of a row in a message, of one of a rank's head chunks or of all together."""
        chunks, sizes = self.chunks(head_rank) if chunk is None else [chunk], self._row_sizes(item_size)
        return sum(payload.row_bytes(sizes, each.heads.stop - each.heads.start, each.num_groups) for each in chunks)

    @remembered
    def _row_sizes(self, item_size: int) -> RowSizes:
        coded = self.coded_bytes(item_size)
        return RowSizes(self.head_dim, self.value_head_dim, sum(self.key_features), item_size, coded)

    @remembered
    def _rows_sent(self, *, forward: bool) -> dict[Payload, IntArray]:
        """Returns, for each kind of rows, the rows that each KV rank sends."""
        found: dict[Payload, IntArray] = {}
        transfers = self.transfers(forward=forward)
        for kind in Payload:
            sent = [flow.rows_sent_by_ranks() for payload, flow in transfers if payload is kind]
            if sent:
                found[kind] = np.sum(sent, axis=0)
        return found

    @remembered
    def _rows_needed(self, *, forward: bool) -> dict[Payload, IntArray]:
        """Returns the rows of keys that each KV rank sends to those that see them, and in backward their gradients."""
        found = {Payload.KEYS: self.needed.rows_sent_by_ranks()}
        return found if forward else found | {Payload.KEY_GRADIENTS: Return(self.needed).rows_sent_by_ranks()}

    def describe(self) -> list[str]:
        """The step's value as lines of text, except for the queries' layout and mask, which are the plan's."""
        keys = [] if self.keys == self.queries else [f"keys {line}" for line in self.keys.describe()]
        tiles = list[str]()
        if self.tiled is not None:
            digests = f"{self.tiled.forward.digest} forward, {self.tiled.backward.digest} backward"
            tiles.append(f"tiles assigned by {digests}")
        heads, groups = self.partition.heads, self.partition.groups
        shape = f"head sizes {self.head_dim} and {self.value_head_dim}, heads {heads} of {groups}"
        if self.latent is not None:
            shape += f", latents of {self.latent.shared} and {self.latent.rank}"
            shape += f" by {self.latent_mode}" if self.latent_mode else ""
        if self.hosts:
            shape += f", hosts {self.hosts}"
        if self.selection is not None:
            shape += f", {self.selection.describe()}"
        if self.codec is not None:
            shape += f", keys coded as {self.codec.name}"
        return [
            f"attend by {self.kv_schedule}, {self.num_kv_ranks} KV ranks, {self.head_chunks} chunks, {shape}",
            *keys,
            *tiles,
        ]

    @property
    def needed(self) -> Fetch:
        """The flow that sends each KV rank the keys that its queries see, and no others."""
        description = f"the keys that own queries see, of {self.num_kv_ranks} ranks, {_in_chunks(self.head_chunks)}"
        return self.memo(("needed",), lambda: Fetch(self.keys, self._seen.keys, description))

    @property
    def _seen(self) -> SeenKeys:
        """A separate object, so that flows need not refer to the step that remembers them: cycles keep memory alive."""
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
        if stage.local is not None:
            return stage.local.local_tiles(kv_rank)
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
        """Returns a KV rank's bands over each KV rank's key rows, and where those of each begin.

        If there are too many bands, returns the bands over the stream of keys and None.
        """
        bands = self.bands_of_kv_rank(kv_rank)
        if self.count_bands(kv_rank)[0] > _MOST_BANDS:
            return bands, None
        return bands_of_ranks(bands, self.keys, range(self.keys.cp_size), queries=False)

    def count_bands(self, kv_rank: int) -> tuple[int, int]:
        """Estimates the bands that a KV rank computes in all stages, and those it would have with all keys at once.

        A CPU kernel is called once for each band; a CUDA kernel has one segment for each. Bands are counted without
        being made: a ring over fragments of single tokens has one for every visible pair.
        """
        bands = self.bands_of_kv_rank(kv_rank)
        if self.num_stages == 1:
            return len(bands), len(bands)
        edges, _ = owned_fragments(self.keys)
        _, met = ranges_met(bands, edges[:-1], edges[1:], queries=False)
        return int(met.sum()), len(bands)

    def bands_of_kv_rank(self, kv_rank: int) -> IntArray:
        """The bands of a KV rank's queries, in local rows, over the stream of keys; or those it was assigned."""
        return self._seen.bands(kv_rank) if self.tiled is None else self.tiled.forward.rank_bands(kv_rank)

    def bands_of_kv_ranks(self) -> tuple[IntArray, IntArray]:
        """The bands `[n, 6]` of all KV ranks' queries, and `[n]` the KV rank of each."""
        return self._seen.all_bands

    def share_seen(self, other: Attend) -> None:
        """Takes over the visible keys from an attention with the same mask, queries and keys."""
        assert (self.mask, self.queries, self.keys) == (other.mask, other.queries, other.keys)
        self.memo(("seen",), lambda: other._seen)
        self.needed.share_memo(other.needed)
        if self.hosts == other.hosts:
            mine, theirs = self.stages[0].keys, other.stages[0].keys
            if isinstance(mine, ByHost) and isinstance(theirs, ByHost):
                mine.share_tables(theirs)


# -- what queries see ----------------------------------------------------------------------------------------------


class SeenKeys(Memo):
    """The visible part of a mask by KV rank, computed for blocks of neighbouring KV ranks, which takes little longer
    than one.
    """

    def __init__(self, mask: Mask, queries: Layout) -> None:
        self.mask, self.queries = mask, queries
        self.block = max(1, _MOST_FRAGMENTS * queries.cp_size // max(queries.starts.size, 1))

    def bands(self, kv_rank: int) -> IntArray:
        """The bands of a KV rank's queries, numbered by local row, over the stream of keys."""
        bands, offsets = self._bands(kv_rank // self.block)
        return bands[slice(*offsets[kv_rank % self.block :][:2])]

    def keys(self, kv_rank: int) -> tuple[IntArray, IntArray]:
        """The keys that a KV rank's queries see, as ranges of the stream."""
        block = kv_rank // self.block
        starts, ends, offsets = self.memo(("keys", block), lambda: ranges_seen_by_ranks(*self._bands(block)))
        own = slice(*offsets[kv_rank % self.block :][:2])
        return starts[own], ends[own]

    @cached_property
    def areas(self) -> list[int]:
        """The number of visible (query, key) pairs of each KV rank."""
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
        """Returns the bands of a block of KV ranks, and the offsets of each rank's."""
        first = block * self.block
        ranks = range(first, min(first + self.block, self.queries.cp_size))
        make = partial(bands_of_ranks, self.mask.bands, self.queries, ranks, queries=True)
        return self.memo(("bands", block), make)


# -- how keys travel -------------------------------------------------------------------------------------------------


def _in_chunks(count: int) -> str:
    return f"in {count} {'chunk' if count == 1 else 'chunks'} of heads"


def _ring(step: Attend, _: bool) -> tuple[Stage, ...]:
    """Passes blocks of keys from rank to rank; their gradients follow one stage behind and end at the owner."""
    return tuple(
        Stage(hops, PassOn(step.keys, hops) if hops else None, PassOn(step.keys, hops + 1))
        for hops in range(step.num_kv_ranks)
    )


def _gather_all(step: Attend, _: bool) -> tuple[Stage, ...]:
    everything = np.array([0]), np.array([step.keys.packing.total])
    description = f"all keys gathered from {step.num_kv_ranks} ranks, {_in_chunks(step.head_chunks)}"
    fetch = Fetch(step.keys, lambda _: everything, description, equal_shares=True)
    return (Stage(0, fetch, Return(fetch)),)


def _fetch_needed(step: Attend, _: bool) -> tuple[Stage, ...]:
    return (Stage(0, step.needed, Return(step.needed)),)


def _fetch_by_host(step: Attend, forward: bool) -> tuple[Stage, ...]:
    if len(set(step.hosts)) in (0, 1, step.num_kv_ranks):  # one host, or no host of several KV ranks
        return _fetch_needed(step, forward)
    flow = step.memo(("by host", step.hosts), lambda: ByHost(step.needed, step.hosts))
    return (Stage(0, flow, Return(flow)),)


def _assigned(step: Attend, forward: bool) -> tuple[Stage, ...]:
    """Computes local tiles first, which need no message, while rows of other ranks are on their way."""
    work = step.tiled
    assert work is not None
    directions = (True, True) if work.forward == work.backward else (forward, not forward)
    tiles = step.assigned_tiles(forward=forward)
    return step.memo(("assigned", directions), lambda: _stages_of_tiles(step, tiles, directions))


def _stages_of_tiles(step: Attend, tiles: AssignedTiles, directions: tuple[bool, bool]) -> tuple[Stage, ...]:
    local, part = Stage(0, None, None, local=tiles, directions=directions), tiles.far_part
    if part is None:
        return (local,)
    description = f"tiles of a mask assigned to {step.num_kv_ranks} ranks, {_in_chunks(step.head_chunks)}"
    keys = Fetch(step.keys, part.wanted_keys, description)
    remote_queries = None if part.remote is None else Fetch(step.queries, part.wanted_queries, "queries of those tiles")
    return local, Stage(1, keys, Return(keys), remote_queries, part, directions=directions)


SCHEDULES: dict[str, Callable[[Attend, bool], tuple[Stage, ...]]] = {
    "p2p": _ring, "all_gather": _gather_all, "exact": _fetch_needed, "tiled": _assigned,
    "exact_by_host": _fetch_by_host,
}  # fmt: skip
