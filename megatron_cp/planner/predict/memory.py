"""`peak_bytes`: the most memory that an attention's tensors take at a time on one rank, from its plan alone.

No torch in here: a plan says it all, so that a batch can be judged before anything is allocated.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.split_counts import SPARE, rounded
from megatron_cp.plan.attention import Attend, Stage
from megatron_cp.plan.flows import MessageRows, Return
from megatron_cp.plan.head_chunks import HeadChunk
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan

MERGING = 4  # numbers for each query and head while partial results are merged
LSE = 4  # bytes at least of a log-sum-exp, and of whatever is summed


def peak_bytes(plan: Plan, rank: int, item_size: int, *, forward: bool) -> int:
    """Bytes of all tensors that `attention` has alive at its worst moment, beyond its inputs q, k and v.

    Counted are outputs, what forward saves for backward, and in backward (beyond the output's gradient) all of that
    again and the gradients. Not counted are what a kernel or a transport allocates for itself, index tables, which are
    made once a batch, a learned sink, what coding takes, and the group's buffers, which all layers share: see
    `buffer_bytes`. With a batch axis all of it is as many times as much.

    In elements of `item_size` bytes, or of `acc_bytes = max(item_size, 4)` where marked `w`; `t` own rows of queries,
    `s` of keys, `h` query and `g` key/value heads, `d` and `v` their sizes, all of the rank where heads were exchanged:

        out = t h v     lse = h t (w)     dq = t h d     block(n) = n g (d + v)

        at home     forward     out + lse
                    backward    out + lse + dq + block(s)
        p2p         forward     out (w) + lse + the stage's part: out (w) + 5 lse of the rows that see a key; at the end
                                out again if w is wider
                    backward    out + lse + dq + block(s) + dq (w) if w is wider + the part dq (w)
        gathering   forward     out + lse
                    backward    out + lse + dq + block(s) + block(s) (w) + where w is wider the keys, or the values, of
                                a chunk that come back from one KV rank (w)
        a2a         forward     the rank's q, k, v; the above; and out once more, of own tokens
                    backward    likewise, with out's gradient on its way in, and dq and block(s) on their way back

    Where heads are exchanged in chunks, the above holds for each in turn: its q, k and v are there from the beginning
    if they arrive in stream order, and its gradients to the end if they go in place.
    """
    assert plan.attend is not None
    kv_rank, head_rank = divmod(rank, plan.ulysses_degree)
    chunks = [_Local(plan.attend_of(chunk), kv_rank, head_rank, item_size) for chunk in range(plan.head_chunks)]
    moves = list(_moves(plan, rank, item_size))
    return _forward(chunks, moves) if forward else _backward(chunks, moves)


def buffer_bytes(plan: Plan, rank: int, item_size: int) -> int:
    """Bytes of the buffers that a rank's group makes for the messages of one step, forward and backward.

    Other layers share them. What a hierarchical transport stages is not counted. Which message borrows which buffer is
    worked out for head exchanges alone (within a fifth), and not for what else there is (within a half).
    With a batch axis all of it is as many times as much.

    Counted are the messages of head exchanges, both ways; beside them in the terms of `peak_bytes`, at the worst moment

        p2p         forward     the blocks of two stages
                    backward    those, and three gradients (w) of blocks: own, on the way here, on the way on
        gathering   forward     of each of two head chunks: what is sent, what is received and, where it does not arrive
                                in stream order, the same in order
                    backward    those, and of two chunks: the gradients of what was received, those in the order in
                                which they go, and those that come back

    and of a chunkwise linear layer what is sent and received of its halo and its maps. What is sent in an all-gather is
    as long as the longest share, what is received that times the number of KV ranks.
    """
    messages = _across_heads(plan, rank, item_size)
    return messages + _along_keys(plan, rank, item_size) + _along_segments(plan, rank, item_size)


def _across_heads(plan: Plan, rank: int, item_size: int) -> int:
    """Of head exchanges: what `Buffers` makes for one step, forward and backward."""
    pool = _Pool()
    for forward in (True, False):
        moves = [move for move in plan.exchanges(forward=forward) if not move[0].is_local]
        leading, trailing = ([exchange for exchange, to_heads in moves if to_heads == way] for way in (True, False))
        chunks = list(range(plan.head_chunks) if moves else ())[:: 1 if forward else -1]
        arriving = {
            chunk: [
                pool.acquire(_messages(plan, exchange, chunk, rank, item_size, to_heads=True)) for exchange in leading
            ]
            for chunk in chunks
        }
        leaving = []
        for chunk in chunks:
            pool.release(arriving[chunk])
            leaving += [
                pool.acquire(_messages(plan, exchange, chunk, rank, item_size, to_heads=False)) for exchange in trailing
            ]
        pool.release(leaving)
    return sum(pool.capacities)


def _messages(plan: Plan, exchange: Exchange, part: int, rank: int, item_size: int, *, to_heads: bool) -> list[int]:
    """Bytes of what a part of an exchange receives and sends in buffers."""
    kv_rank, head_rank = divmod(rank, exchange.degree)
    layout, blocks = exchange.within(kv_rank).layout, exchange.sections.blocks
    sizes = [item_size] * len(blocks)
    rows = exchange.row_format(part, sizes).row_bytes
    tokens, heads = int(layout.token_counts[head_rank]) * sum(rows), layout.packing.total * rows[head_rank]
    as_it_lies = layout.in_stream_order and not any(exchange.coded(sizes))
    if to_heads:
        return [tokens] if as_it_lies else [heads, tokens]
    # Attention writes the gradients of what came in one message as one, and a section alone lies like a message
    # unless that has gaps.
    (block, *others) = exchange.parts[part].blocks
    alone = not others and rows[head_rank] == block.heads_on(head_rank) * block.head_dim * item_size
    as_it_lies &= alone or (plan.attend is not None and not exchange.section_major)
    return [tokens] if as_it_lies else [tokens, heads]


class _Pool:
    """What `Buffers` does, in numbers."""

    def __init__(self) -> None:
        self.capacities: list[int] = []  # in the order in which they were made
        self._free: list[int] = []

    def acquire(self, sizes: list[int]) -> list[int]:
        """The numbers of the buffers that messages of these sizes take, one after the other."""
        taken = []
        for capacity in map(rounded, sizes):
            fitting = [number for number in self._free if capacity <= self.capacities[number] <= SPARE * capacity]
            if fitting:
                self._free.remove(min(fitting))
                taken.append(min(fitting))
            else:
                taken.append(len(self.capacities))
                self.capacities.append(capacity)
        return taken

    def release(self, taken: list[list[int]]) -> None:
        """Takes them back."""
        self._free += itertools.chain(*taken)


def _along_keys(plan: Plan, rank: int, item_size: int) -> int:
    if plan.attend is None:
        return 0
    kv_rank, head_rank = divmod(rank, plan.ulysses_degree)
    return max(
        _Local(plan.attend_of(chunk), kv_rank, head_rank, item_size).messages() for chunk in range(plan.head_chunks)
    )


def _along_segments(plan: Plan, rank: int, item_size: int) -> int:
    sizes: list[int] = []
    for step in plan.recurrent_steps:
        match step:
            case Halo(channels=channels):
                tables = step.tables(rank)
                sizes += [rounded(rows.size * channels * item_size) for rows in (tables.places, tables.send_rows)]
            case Scan() if step.crosses:
                # Maps and their adjoints go to other ranks, and a buffer for the ones may be too small for the others.
                ways = [step.split_counts(forward=forward) for forward in (True, False)]
                sent, back = (
                    Counter(rounded(sum(n) * max(item_size, LSE)) for n in (way.sent_by(rank), way.received_by(rank)))
                    for way in ways
                )
                sizes += (sent | back).elements()
    return sum(sizes)


@dataclass(frozen=True)
class _Move:
    """One head exchange on one rank, in bytes.

    Attributes:
        to_heads: the direction; the other one goes back by the same sizes.
        tokens: all heads of the own tokens.
        summed: what sums of shared heads take beside it.
        heads: of each chunk, the own heads of all tokens.
        in_order: heads are used where they arrive, and leave from where they were written.
    """

    to_heads: bool
    tokens: int
    summed: int
    heads: tuple[int, ...]
    in_order: bool


def _moves(plan: Plan, rank: int, item_size: int) -> list[_Move]:
    """The exchanges of a plan, in order."""
    return [
        _move(exchange, rank, item_size, to_heads=to_heads)
        for exchange, to_heads in plan.exchanges(forward=True)
        if not exchange.is_local
    ]


def _move(exchange: Exchange, rank: int, item_size: int, *, to_heads: bool) -> _Move:
    kv_rank, head_rank = divmod(rank, exchange.degree)
    exchange, blocks = exchange.within(kv_rank), exchange.sections.blocks
    layout, sizes = exchange.layout, [item_size] * len(blocks)
    num_tokens, shared = int(layout.token_counts[head_rank]), [block.width for block in blocks if block.replicated]
    return _Move(
        to_heads=to_heads,
        tokens=int(layout.row_counts[head_rank]) * exchange.sections.width * item_size,
        summed=num_tokens * sum(shared) * LSE if item_size < LSE else 0,
        heads=tuple(layout.packing.total * part.row_format(sizes).row_bytes[head_rank] for part in exchange.parts),
        in_order=layout.in_stream_order and not any(exchange.coded(sizes)),
    )


def _forward(chunks: list[_Local], moves: list[_Move]) -> int:
    inbound, outbound = ([move for move in moves if move.to_heads == way] for way in (True, False))
    live, moments = sum(sum(move.heads) for move in inbound if move.in_order), []
    for number, local in enumerate(chunks):
        live += sum(move.heads[number] for move in inbound if not move.in_order)
        moments += [live, *(live + moment for moment in local.forward())]
        live += local.out + local.lse
    return max(*moments, *(live + move.tokens + move.summed for move in outbound), 0)


def _backward(chunks: list[_Local], moves: list[_Move]) -> int:
    inbound, outbound = ([move for move in moves if move.to_heads == way] for way in (True, False))
    output, saved = sum(move.tokens for move in outbound), sum(sum(move.heads) for move in inbound)
    live = output + saved + sum(local.out + local.lse for local in chunks)
    live += sum(sum(move.heads) for move in outbound if move.in_order)
    moments = [live]
    for number, local in reversed(list(enumerate(chunks))):
        live += sum(move.heads[number] for move in outbound if not move.in_order)
        # Gradients lie to each other as their inputs do: where those are one message, so are they, and go as they lie.
        gradients = inbound[0].heads[number] if len(inbound) == 1 else local.dq + local.keys
        moments += [live + gradients + moment for moment in local.backward()]
        live -= sum(move.heads[number] for move in moves) + local.out + local.lse
        live += gradients if len(inbound) == 1 and inbound[0].in_order else 0
    live = output
    for move in reversed(inbound):
        moments.append(live + move.tokens + move.summed)
        live += move.tokens
    return max(moments)


@dataclass(frozen=True)
class _Local:
    """The attention of one rank's heads, in bytes."""

    step: Attend
    kv_rank: int
    head_rank: int
    item: int

    @property
    def acc_bytes(self) -> int:
        return max(self.item, LSE)

    @cached_property
    def heads(self) -> int:
        lo, hi = self.step.partition.heads[self.head_rank]
        return hi - lo

    @cached_property
    def groups(self) -> int:
        lo, hi = self.step.partition.groups[self.head_rank]
        return hi - lo

    @cached_property
    def rows(self) -> int:
        return int(self.step.queries.row_counts[self.kv_rank])

    @property
    def out(self) -> int:
        return self.rows * self.heads * self.step.value_head_dim * self.item

    @property
    def lse(self) -> int:
        return self.rows * self.heads * self.acc_bytes

    @property
    def dq(self) -> int:
        return self.rows * self.heads * self.step.head_dim * self.item

    @property
    def keys(self) -> int:
        return self.block(int(self.step.keys.row_counts[self.kv_rank]), self.groups, self.item)

    def block(self, rows: int, groups: int, item: int) -> int:
        return rows * groups * (self.step.head_dim + self.step.value_head_dim) * item

    def forward(self) -> list[int]:
        """Moments of the loop, the output and its lse included."""
        if self.step.num_stages == 1:
            return [self.out + self.lse]
        base, row = self.out // self.item * self.acc_bytes + self.lse, self.step.value_head_dim + 1 + MERGING
        parts = [rows * self._most_heads * row * self.acc_bytes for rows in self._later_rows]
        return [base + most for most in (*parts, self.out if self.acc_bytes > self.item else 0)]

    def backward(self) -> list[int]:
        """Moments of the loop, beyond the gradients of q, k and v."""
        row = self.step.head_dim * self.acc_bytes
        is_wider, moments, total = self.acc_bytes > self.item, [0], 0
        if self.step.num_stages > 1:
            total = int(self.step.queries.token_counts[self.kv_rank]) * self.heads * row if is_wider else 0
            moments += [total + rows * self._most_heads * row for rows in self._later_rows]
        for stage in self.step.stages:
            flow = stage.gradients
            if isinstance(flow, Return):
                # What comes back is added to sums of the own keys' gradients, in their type.
                sums = self._block_of(self.kv_rank, self.acc_bytes)
                most, chunks = max(flow.fetch.split_counts.sent_by(self.kv_rank)), self.step.chunks(self.head_rank)
                width = max(self.step.head_dim, self.step.value_head_dim) * self.acc_bytes if is_wider else 0
                moments += [total + sums + most * chunk.num_groups * width for chunk in chunks]
        if self.step.num_stages > 1 and isinstance(self.step.stages[0].gradients, Return):
            # The sums are made when the first gradients are back: after the second stage, whose part they never meet.
            heads = (chunk.heads.stop - chunk.heads.start for chunk in self.step.chunks(self.head_rank))
            parts = [rows * count * row for count in heads for rows in self._later_rows]
            moments += [total + sums + part for part in parts[1:]]
        return moments

    def _block_of(self, kv_rank: int, item: int) -> int:
        return self.block(int(self.step.keys.token_counts[kv_rank]), self.groups, item)

    @property
    def _most_heads(self) -> int:
        """Query heads of the chunk that has most."""
        return max(chunk.heads.stop - chunk.heads.start for chunk in self.step.chunks(self.head_rank))

    @property
    def _later_rows(self) -> list[int]:
        """Queries that see a key of each stage after the first."""
        stages = (self.step.bands(self.kv_rank, stage) for stage in self.step.stages[1:])
        return [int(bands[:, 1].max() - bands[:, 0].min()) if len(bands) else 0 for bands in stages]

    def messages(self) -> int:
        """Bytes of the buffers that the loop has at its worst moment: in backward, than which forward has no more.

        A walk in the order of `KeyTransfers`: while a stage is computed, the next one's rows and the gradients of the
        one before are under way.
        """
        order = [(stage, chunk) for chunk in self.step.chunks(self.head_rank) for stage in self.step.stages]
        if order[0][0].gradients is None:
            return 0
        live = _Live()
        coming = self._coming(*order[0])
        live.take(coming.sent + coming.received)
        passed_on = returning = 0
        for number, (stage, chunk) in enumerate(order):
            live.free(coming.sent + passed_on)
            here, is_last = coming, number + 1 == len(order)
            if not is_last:
                coming = self._coming(*order[number + 1])
                live.take(coming.sent + coming.received)
            if here.ordered:
                live.take(here.ordered)
                live.free(here.received)
            made, ordered, received = self._gradients(stage, chunk)
            live.take(made)
            live.free(returning)
            if ordered:
                live.take(ordered)
                live.free(made)
            live.take(received)
            returning = (ordered or made) + received
            passed_on = 0 if is_last or not coming.passes_on else here.at_hand
            live.free(here.at_hand - passed_on)
        return live.most

    def _coming(self, stage: Stage, chunk: HeadChunk) -> _Coming:
        """What brings the keys of a stage. Own rows are packed, to be passed on."""
        local = MessageRows(None, int(self.step.keys.token_counts[self.kv_rank]), None)
        rows = local if stage.keys is None else stage.keys.message_rows(self.kv_rank)
        sent, received, ordered = (self._buffer(count, chunk, self.item) for count in rows)
        return _Coming(sent, received, ordered, passes_on=rows.sent is None)

    def _gradients(self, stage: Stage, chunk: HeadChunk) -> tuple[int, int, int]:
        """Bytes of a stage's gradients: as they are made, in the order in which they go, and of what comes for them."""
        assert stage.gradients is not None
        local = int(self.step.keys.token_counts[self.kv_rank])
        keys = MessageRows(None, local, None) if stage.keys is None else stage.keys.message_rows(self.kv_rank)
        made = keys.received if keys.ordered is None else keys.ordered
        rows, item = stage.gradients.message_rows(self.kv_rank), stage.gradients.item_size(self.item)
        made, ordered, received = (self._buffer(count, chunk, item) for count in (made, rows.sent, rows.received))
        return made, ordered, received

    def _buffer(self, rows: int | None, chunk: HeadChunk, item: int) -> int:
        return 0 if rows is None else rounded(self.block(rows, chunk.num_groups, item))


@dataclass(frozen=True)
class _Coming:
    """Bytes of the buffers that bring the keys of a stage, as `MessageRows` has them."""

    sent: int
    received: int
    ordered: int
    passes_on: bool

    @property
    def at_hand(self) -> int:
        return self.ordered or self.received


class _Live:
    """Bytes alive now, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, size: int) -> None:
        """More is alive."""
        self.now += size
        self.most = max(self.most, self.now)

    def free(self, size: int) -> None:
        """Less is alive."""
        self.now -= size
