"""`attention_program`: the stages of an attention as instructions over numbered buffers, equal on every rank.

The executor runs a program, the simulator prices it, and the memory estimate follows its buffers: each is a walk over
the same tuple. The rows of a rank, and whether they must be put in order, are looked up in the instruction's flow. This
module imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_cp.plan.flows import ByHost, Fetch, KeyFlow, PassOn, Return, RowFlow, first_hop
from megatron_cp.plan.payloads import Payload
from megatron_cp.plan.tile_assignment import AssignedTiles, TilePart


@dataclass(frozen=True, eq=False)
class Stage:
    """Tiles that a rank computes with the keys that are available at one time.

    Attributes:
        number: the stage, from 0; results of later stages are merged into those of the first.
        keys: the flow of the keys; None for a rank's own rows.
        gradients: in backward, the flow of the gradients of these keys; None for own rows.
        remote_queries: the flow of other ranks' queries that see these keys; None if there are none.
        assigned: the tiles of this stage; None if own queries compute all that they see among these keys.
        local: the assignment whose tiles of own queries and own keys are computed here.
        directions: whether forward and backward have this stage; they differ only where tiles are assigned.
    """

    number: int
    keys: KeyFlow | None
    gradients: RowFlow | None
    remote_queries: Fetch | None = None
    assigned: TilePart | None = None
    local: AssignedTiles | None = None
    directions: tuple[bool, bool] = (True, True)

    @property
    def is_first(self) -> bool:
        """True if nothing has been computed before."""
        return self.number == 0

    @cached_property
    def results(self) -> Return | None:
        """The flow that returns partial results of remote queries to their owners."""
        return None if self.remote_queries is None else Return(self.remote_queries)


class StageChunk(NamedTuple):
    """A stage of one head chunk."""

    stage: Stage
    chunk: int


# Every instruction names its `part`, the stage and head chunk that it belongs to. Instructions are never changed. They
# are not frozen, since making a frozen one takes a call for each field, and a ring of many ranks has many.


@dataclass(eq=False, slots=True)
class PackRows:
    """Copies own rows, or those of another buffer, into a new buffer, in the type in which they travel.

    Attributes:
        buffer: number of the new buffer.
        flow: selects the rows that are sent; None for all own rows, `Return` for all rows of `source`.
        source: the other buffer; None for own rows.
    """

    part: StageChunk
    buffer: int
    payload: Payload
    flow: Fetch | Return | None
    source: int | None = None


@dataclass(eq=False, slots=True)
class Start:
    """Starts a transfer from a buffer into a new one, which must not be read before `Wait`.

    Attributes:
        source, buffer: the buffers of the sent and of the received rows.
        flow: the rows that go to each rank.
    """

    part: StageChunk
    source: int
    buffer: int
    payload: Payload
    flow: RowFlow


@dataclass(eq=False, slots=True)
class Wait:
    """Waits until the rows of a transfer are in `buffer`, and its source may be written again."""

    part: StageChunk
    buffer: int
    payload: Payload
    flow: RowFlow


@dataclass(eq=False, slots=True)
class Order:
    """Replaces a buffer by a copy with its rows in the order of the flow, on ranks that need it.

    Fetched rows are put in stream order. Returned rows are put in the order of their owners.
    """

    part: StageChunk
    buffer: int
    payload: Payload
    flow: Fetch | Return


@dataclass(eq=False, slots=True)
class Allocate:
    """Takes an uninitialised buffer with as many rows as another buffer.

    Attributes:
        buffer: number of the new buffer.
        like: the other buffer; None for as many rows as `flow` receives.
        flow: the flow of the rows of `like`; None if they are own rows.
    """

    part: StageChunk
    buffer: int
    payload: Payload
    like: int | None
    flow: Fetch | PassOn | None


@dataclass(eq=False, slots=True)
class ComputeOwn:
    """Computes a stage's tiles of own queries and merges the results with those of earlier stages.

    Attributes:
        keys: the buffer of the keys; None for the own keys.
        gradients: in backward, the buffer for the gradients of these keys; None for the own keys' gradients.
        adds: in backward, `gradients` already holds those of remote queries.
    """

    part: StageChunk
    keys: int | None
    gradients: int | None = None
    adds: bool = False


@dataclass(eq=False, slots=True)
class ComputeRemote:
    """Computes a stage's tiles of other ranks' queries.

    Attributes:
        results: the buffer for partial outputs, or in backward for the gradients of the queries.
        gradients: in backward, the buffer for the gradients of the keys.
    """

    part: StageChunk
    keys: int
    queries: int
    results: int
    gradients: int | None = None


@dataclass(eq=False, slots=True)
class MergeRows:
    """Merges received rows with this rank's own rows or with a buffer.

    Attributes:
        buffer: the received rows.
        payload: the kind of rows: partial outputs are merged by their log-sum-exps, gradients are added.
        flow: maps received rows to own rows or those of `target`, in the order of ranks; None in a ring.
        target: the buffer that they are added to, or with a flow their sums are written to; None for the own rows.
    """

    part: StageChunk
    buffer: int
    payload: Payload
    flow: Return | None
    target: int | None = None


@dataclass(eq=False, slots=True)
class Release:
    """Returns a buffer to the pool or the transport."""

    part: StageChunk
    buffer: int


Instruction = PackRows | Start | Wait | Order | Allocate | ComputeOwn | ComputeRemote | MergeRows | Release
AttentionProgram = tuple[Instruction, ...]


def attention_program(stages: tuple[Stage, ...], head_chunks: int, *, forward: bool) -> AttentionProgram:
    """Returns the instructions of one direction, in the order in which every rank runs them."""
    flows = {type(stage.keys) for stage in stages if stage.keys is not None}
    if not flows:
        return tuple(ComputeOwn(StageChunk(stages[0], chunk), None) for chunk in range(head_chunks))
    builder = _Builder(forward=forward)
    return tuple(builder.ring(stages) if flows == {PassOn} else builder.fetched(stages, head_chunks))


class _Builder:
    """Numbers the buffers of one program."""

    def __init__(self, *, forward: bool) -> None:
        self.forward = forward
        self._numbers = itertools.count()
        self._returns: dict[Payload, tuple[StageChunk, int, int, Return]] = {}  # in flight: sent and received buffers

    def ring(self, stages: tuple[Stage, ...]) -> list[Instruction]:
        """Passes blocks of keys on while each is computed; their gradients follow one stage later, up to the owner."""
        program = list[Instruction]()  # a list, since a ring of many ranks has many
        add, parts = program.append, [StageChunk(stage, 0) for stage in stages]
        block, sent = next(self._numbers), None
        returning: tuple[int, int] | None = None
        add(PackRows(parts[0], block, Payload.KEYS, None))
        for part, following in itertools.pairwise([*parts, None]):
            assert part is not None
            if sent is not None:
                assert type(part.stage.keys) is PassOn
                add(Wait(part, block, Payload.KEYS, part.stage.keys))
                add(Release(part, sent))
            here, sent = block, block
            if following is not None:
                assert type(following.stage.keys) is PassOn
                block = next(self._numbers)
                add(Start(following, here, block, Payload.KEYS, following.stage.keys))
            if self.forward:
                add(ComputeOwn(part, here))
            else:
                assert type(part.stage.gradients) is PassOn
                gradient = next(self._numbers)
                keys = part.stage.keys
                assert keys is None or type(keys) is PassOn
                add(Allocate(part, gradient, Payload.KEY_GRADIENT_SUMS, here, keys))
                add(ComputeOwn(part, here, gradient))
                if returning is not None:
                    self._arrive(program, part, *returning, target=gradient)
                arriving = next(self._numbers)
                add(Start(part, gradient, arriving, Payload.KEY_GRADIENT_SUMS, part.stage.gradients))
                returning = gradient, arriving
            if following is None:
                add(Release(part, here))
        if returning is not None:
            self._arrive(program, parts[-1], *returning, target=None)
        return program

    @staticmethod
    def _arrive(program: list[Instruction], part: StageChunk, sent: int, received: int, target: int | None) -> None:
        assert type(part.stage.gradients) is PassOn
        program += [
            Wait(part, received, Payload.KEY_GRADIENT_SUMS, part.stage.gradients),
            Release(part, sent),
            MergeRows(part, received, Payload.KEY_GRADIENT_SUMS, None, target),
            Release(part, received),
        ]

    def fetched(self, stages: tuple[Stage, ...], chunks: int) -> Iterator[Instruction]:
        """Fetches the rows of a stage and head chunk while the previous one is computed.

        Stages of own keys are computed for all heads while the first rows travel. Returned rows are merged just before
        the next return of their kind starts, so that at most two are in memory.
        """
        local, fetching = list[StageChunk](), list[StageChunk]()
        for stage in stages:
            (local if stage.keys is None else fetching).extend(StageChunk(stage, chunk) for chunk in range(chunks))
        starts, arriving = self._start(fetching[0])
        yield from starts
        yield from (ComputeOwn(part, None) for part in local)
        for part, following in itertools.pairwise([*fetching, None]):
            assert part is not None
            stage, flow = part.stage, part.stage.keys
            assert isinstance(flow, Fetch)
            (sent, keys), queries = arriving[0], arriving[1:]
            hop = first_hop(flow)
            yield Wait(part, keys, Payload.KEYS, hop)
            yield Release(part, sent)
            if hop is not flow:  # before the next chunk's first hop, which is longer
                held, sent, keys = keys, next(self._numbers), next(self._numbers)
                yield PackRows(part, sent, Payload.KEYS, flow, held)
                yield Release(part, held)
                yield Start(part, sent, keys, Payload.KEYS, flow)
            if following is not None:
                starts, arriving = self._start(following)
                yield from starts
            if hop is not flow:
                yield Wait(part, keys, Payload.KEYS, flow)
                yield Release(part, sent)
            yield Order(part, keys, Payload.KEYS, flow)
            gradient = None
            if not self.forward:
                assert isinstance(stage.gradients, Return)
                gradient = next(self._numbers)
                yield Allocate(part, gradient, Payload.KEY_GRADIENTS, keys, flow)
            for queries_sent, remote in queries:
                yield from self._compute_remote(part, keys, queries_sent, remote, gradient)
            yield ComputeOwn(part, keys, gradient, adds=bool(queries) and gradient is not None)
            if gradient is not None:
                assert isinstance(stage.gradients, Return)
                yield from self._merge_returned(Payload.KEY_GRADIENTS)
                if hop is not flow:
                    gradient = yield from self._sum_within_host(part, gradient, stage.gradients, hop)
                back = stage.gradients if hop is flow else Return(hop)
                yield from self._return(part, gradient, Payload.KEY_GRADIENTS, back)
            yield Release(part, keys)
        yield from self._merge_returned(Payload.PARTIALS if self.forward else Payload.QUERY_GRADIENTS)
        yield from self._merge_returned(Payload.KEY_GRADIENTS)

    def _start(self, part: StageChunk) -> tuple[list[Instruction], list[tuple[int, int]]]:
        """Returns the instructions that fetch keys and remote queries, and the sent and received buffers of each."""
        assert isinstance(part.stage.keys, Fetch)
        flows = [(Payload.KEYS, first_hop(part.stage.keys))]
        if part.stage.remote_queries is not None:
            flows.append(
                (Payload.QUERIES if self.forward else Payload.QUERIES_AND_GRADIENTS, part.stage.remote_queries)
            )
        instructions, buffers = list[Instruction](), [(next(self._numbers), next(self._numbers)) for _ in flows]
        for (payload, flow), (sent, received) in zip(flows, buffers, strict=True):
            instructions += [PackRows(part, sent, payload, flow), Start(part, sent, received, payload, flow)]
        return instructions, buffers

    def _compute_remote(
        self, part: StageChunk, keys: int, sent: int, queries: int, gradient: int | None
    ) -> Iterator[Instruction]:
        flow, back = part.stage.remote_queries, part.stage.results
        assert flow is not None
        assert back is not None
        coming, returned = Payload.QUERIES, Payload.PARTIALS
        if not self.forward:
            coming, returned = Payload.QUERIES_AND_GRADIENTS, Payload.QUERY_GRADIENTS
        yield Wait(part, queries, coming, flow)
        yield Release(part, sent)
        yield Order(part, queries, coming, flow)
        results = next(self._numbers)
        yield Allocate(part, results, returned, queries, flow)
        yield ComputeRemote(part, keys, queries, results, gradient)
        yield Release(part, queries)
        yield from self._merge_returned(returned)
        yield from self._return(part, results, returned, back)

    def _sum_within_host(
        self, part: StageChunk, made: int, flow: Return, hop: Fetch
    ) -> Generator[Instruction, None, int]:
        """Sums gradients of the rows that a rank sent on within its host; returns the buffer of the rounded sums."""
        received, sums, rounded = (next(self._numbers) for _ in range(3))
        yield Order(part, made, Payload.KEY_GRADIENTS, flow)
        yield Start(part, made, received, Payload.KEY_GRADIENTS, flow)
        yield Wait(part, received, Payload.KEY_GRADIENTS, flow)
        yield Release(part, made)
        yield Allocate(part, sums, Payload.KEY_GRADIENT_SUMS, None, hop)
        yield MergeRows(part, received, Payload.KEY_GRADIENTS, flow, sums)
        yield Release(part, received)
        yield PackRows(part, rounded, Payload.KEY_GRADIENTS, Return(hop), sums)
        yield Release(part, sums)
        return rounded

    def _return(self, part: StageChunk, made: int, payload: Payload, flow: Return) -> Iterator[Instruction]:
        received = next(self._numbers)
        if not isinstance(part.stage.keys, ByHost):
            yield Order(part, made, payload, flow)
        yield Start(part, made, received, payload, flow)
        self._returns[payload] = part, made, received, flow

    def _merge_returned(self, payload: Payload) -> Iterator[Instruction]:
        if payload not in self._returns:
            return
        part, sent, received, flow = self._returns.pop(payload)
        yield Wait(part, received, payload, flow)
        yield Release(part, sent)
        yield MergeRows(part, received, payload, flow)
        yield Release(part, received)
