"""`peak_bytes` and `buffer_bytes`: the peak memory of an attention on one rank, computed from its plan alone.

No torch in here: a batch can be judged before anything is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.split_counts import SPARE, rounded
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.attention_program import Allocate, Order, PackRows, Release, Stage, Start
from megatron_cp.plan.flows import Fetch, PassOn, Return, RowFlow, first_hop
from megatron_cp.plan.head_chunks import HeadChunk
from megatron_cp.plan.layer_program import Local, Move
from megatron_cp.plan.payloads import Payload
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import ToHeads, ToTokens

MERGING = 3  # log-sum-exps for each query and head while partial results are merged: old, new, and the weight
PLACE = 8  # bytes of the index of an element
LSE = 4  # the fewest bytes of a log-sum-exp and of any sum


def peak_bytes(plan: Plan, rank: int, item_size: int, *, forward: bool) -> int:
    """Returns the peak bytes of the tensors that `attention` keeps alive, beyond its inputs q, k and v.

    Counts outputs, the tensors that forward saves for backward, and in backward (beyond the output's gradient) all of
    these and the gradients; with a codec of keys also own codes and decoded keys, and those of a stage. Does not count
    the allocations of kernels and transports, index tables, which are made once a batch, a learned sink, the other
    tensors of a codec, and the group's buffers, which all layers share: see `buffer_bytes`. A batch axis multiplies all
    of it.

    In elements of `item_size` bytes, or of `acc_bytes = max(item_size, 4)` where marked `w`; `t` own rows of queries,
    `s` of keys, `h` query and `g` key/value heads, `d` and `v` their sizes, all of the rank where heads were exchanged:

        out = t h v     lse = h t (w)     dq = t h d     block(n) = n g (d + v)

        own keys    forward     out + lse
                    backward    out + lse + dq + block(s)
        p2p         forward     out (w) + lse + the stage's part: out (w) + 5 lse of the rows that see a key; at the end
                                out again if w is wider
                    backward    out + lse + dq + block(s) + dq (w) if w is wider + the part dq (w)
        gathering   forward     out + lse
                    backward    out + lse + dq + block(s) + block(s) (w) + where w is wider the keys, or the values, of
                                a chunk that come back from one KV rank (w)
        tiled       forward     out (w) + lse + most of: as p2p the part of a later stage; the same of the results that
                                one KV rank returns; lse of a chunk's remote queries; at the end out again if w is
                                wider
                    backward    out + lse + dq + block(s) + dq (w) if w is wider + t h row sums (w) + block(s) (w) and
                                most of: a stage's part dq (w); of a chunk's remote queries dq (w) if w is wider,
                                out (w) and lse; where w is wider the results that one KV rank returns (w), or keys
                                that come back as above. Where keys are seen by own and by remote queries, all of
                                them (w) if w is wider, and beside the part dq (w) the block of those that own
                                queries see (w)
        a2a         forward     the rank's q, k, v; the above; and out once more, of own tokens
                    backward    the same, with out's gradient on its way in, and dq and block(s) on their way back

    For tiled this assumes a kernel with unrounded partial results; other kernels need a narrower out of remote queries,
    and no dq beside it.

    Where heads are exchanged in chunks, the above holds for each in turn: its q, k and v are alive from the beginning
    if they arrive in stream order, and its gradients until the end if they are sent from where they were written.
    """
    assert plan.attend is not None
    kv_rank, head_rank = divmod(rank, plan.ulysses_degree)
    chunks = [_RankBytes(plan.chunk_attend(chunk), kv_rank, head_rank, item_size) for chunk in range(plan.head_chunks)]
    moves = {
        id(step): _bytes_of_exchange(step.exchange, rank, item_size, to_heads=isinstance(step, ToHeads))
        for step in plan.steps
        if isinstance(step, ToHeads | ToTokens) and not step.exchange.is_local
    }
    inbound, outbound = ([move for move in moves.values() if move.to_heads == leads] for leads in (True, False))
    # Gradients have the form of their inputs: if those are one message, so are gradients, and are sent as they are.
    message = inbound[0] if len(inbound) == 1 else None
    held = sum(local.held_for_latents(plan.out.head_dim, forward=forward, moved=bool(moves)) for local in chunks)
    held += sum(local.held_for_codes for local in chunks)
    live, moments = held, [held]
    if not forward:
        live += sum(move.tokens for move in outbound) + sum(sum(move.heads) for move in inbound)
        live += sum(local.out + local.lse for local in chunks)
    for do in plan.program(forward=forward):
        if isinstance(do, Local):
            chunk = do.chunk or 0
            local, made = chunks[chunk], chunks[chunk].out + chunks[chunk].lse
            gradients = 0 if forward else message.heads[chunk] if message else local.dq + local.keys
            of_keys = local.latents(plan.out.head_dim, forward=forward) + local.decoded
            of_loop = local.forward() if forward else local.backward()
            moments += [live + gradients + of_keys + moment for moment in of_loop]
            live += made if forward else -made - sum(move.heads[chunk] for move in moves.values())
            live += gradients if message and message.in_order else 0
        elif isinstance(do, Move) and (move := moves.get(id(do.step))):
            if do.to_heads and do.starts == move.in_order:
                live += sum(move.heads[part] for part in do.parts)
            elif not do.to_heads and not do.starts:
                live -= sum(move.heads) if move is message and move.in_order else 0
                moments.append(live + move.tokens + move.summed)
                live += move.tokens
    return max(moments)


def buffer_bytes(plan: Plan, rank: int, item_size: int) -> int:
    """Returns the bytes of the buffers that a rank's group makes for the messages of one step, forward and backward.

    Other layers share them. The staging of a hierarchical transport is not counted. The reuse of buffers is followed
    message by message for softmax attention and head exchanges (within a fifth), and not for the messages of chunkwise
    linear layers (within a half). A batch axis multiplies all of it.

    Counts the messages of head exchanges, both ways; besides, in the terms of `peak_bytes`, at the worst moment

        p2p         forward     the blocks of two stages
                    backward    those, and three gradients (w) of blocks: own, on the way in, on the way out
        gathering   forward     for each of two head chunks: the sent rows, the received rows and, where they do not
                                arrive in stream order, these in order
                    backward    those, and for two chunks: the gradients of received rows, these in the order in which
                                they are sent, and the gradients that return
        tiled       forward     as gathering, of keys and of remote queries; and for two chunks: the results of remote
                                queries (w), these in the order in which they are sent, and the results that return
                    backward    the same, where out's gradient, lse (w) and row sums (w) travel with remote queries,
                                and their gradients return

    and for a chunkwise linear layer the sent and received parts of its halo and its maps. The sent part of an
    all-gather is as long as the longest share, the received part that times the number of KV ranks.
    """
    return _pool_bytes(plan, rank, item_size) + _segment_bytes(plan, rank, item_size)


def _pool_bytes(plan: Plan, rank: int, item_size: int) -> int:
    """Returns the bytes that `Buffers` makes for head exchanges and attention, in one forward and one backward."""
    pool, (kv_rank, head_rank) = _Pool(), divmod(rank, plan.ulysses_degree)
    for forward in (True, False):
        taken = dict[tuple[int, int], list[int]]()
        for do in plan.program(forward=forward):
            match do:
                case Local(_, chunk) if plan.attend is not None:
                    attend = plan.chunk_attend(chunk or 0)
                    _walk_buffers(attend, kv_rank, head_rank, item_size, pool, forward=forward)
                case Move(step, to_heads, starts, parts) if not step.exchange.is_local:
                    for key in [(id(step), part) for part in parts]:
                        if starts:
                            sizes = _message_bytes(plan, step.exchange, key[1], rank, item_size, to_heads=to_heads)
                            taken[key] = [pool.acquire(size) for size in sizes]
                        else:
                            pool.release(taken[key])
    return sum(pool.capacities)


class _Pool:
    """The pool of `Buffers`, in numbers: it counts as `Buffers` allocates.

    Attributes:
        capacities: the capacity of each buffer, in the order in which they were made.
    """

    def __init__(self) -> None:
        self.capacities: list[int] = []
        self._free: list[int] = []

    def acquire(self, size: int) -> int:
        """Returns the number of the buffer that a message of so many bytes takes."""
        capacity = rounded(size)
        fitting = [number for number in self._free if capacity <= self.capacities[number] <= SPARE * capacity]
        if fitting:
            self._free.remove(min(fitting))
            return min(fitting)
        self.capacities.append(capacity)
        return len(self.capacities) - 1

    def release(self, taken: Iterable[int]) -> None:
        """Marks buffers as free."""
        self._free += taken


def _walk_buffers(step: Attend, kv_rank: int, head_rank: int, item_size: int, pool: _Pool, *, forward: bool) -> None:
    """Acquires and releases in a pool the buffers of one direction of an attention on one rank."""
    chunks, taken = step.chunks(head_rank), dict[int, int]()

    def acquire(rows: int, payload: Payload, chunk: int) -> int:
        return pool.acquire(rows * step.row_bytes(payload, head_rank, item_size, chunks[chunk]))

    def usable_rows(flow: RowFlow | None) -> int:
        if flow is None:
            return int(step.keys.token_counts[kv_rank])
        rows = flow.message_rows(kv_rank)
        return rows.received if rows.ordered is None else rows.ordered

    for do in step.program(forward=forward):
        match do:
            case PackRows(payload=payload, flow=Return() as flow):
                taken[do.buffer] = acquire(sum(flow.split_counts.sent_by(kv_rank)), payload, do.part.chunk)
            case PackRows(payload=payload, flow=flow):
                rows = usable_rows(None) if flow is None else flow.message_rows(kv_rank).sent
                assert rows is not None
                taken[do.buffer] = acquire(rows, payload, do.part.chunk)
            case Start(payload=payload, flow=flow):
                taken[do.buffer] = acquire(flow.message_rows(kv_rank).received, payload, do.part.chunk)
            case Allocate(payload=payload, flow=flow):
                taken[do.buffer] = acquire(usable_rows(flow), payload, do.part.chunk)
            case Order(payload=payload, flow=flow) if flow.order_table(kv_rank) is not None:
                rows = usable_rows(flow) if isinstance(flow, Fetch) else flow.message_rows(kv_rank).sent
                assert rows is not None
                ordered = acquire(rows, payload, do.part.chunk)
                pool.release([taken[do.buffer]])
                taken[do.buffer] = ordered
            case Release():
                pool.release([taken.pop(do.buffer)])


def _message_bytes(
    plan: Plan, exchange: Exchange, part: int, rank: int, item_size: int, *, to_heads: bool
) -> list[int]:
    """Returns the bytes of the buffers that a part of an exchange receives and sends in."""
    kv_rank, head_rank = divmod(rank, exchange.degree)
    layout, blocks = exchange.subgroup(kv_rank).layout, exchange.sections.blocks
    sizes = [item_size] * len(blocks)
    rows = exchange.row_format(part, sizes).row_bytes
    tokens, heads = int(layout.token_counts[head_rank]) * sum(rows), layout.packing.total * rows[head_rank]
    as_it_lies = layout.in_stream_order and not any(exchange.coded(sizes))
    if to_heads:
        return [tokens] if as_it_lies else [heads, tokens]
    # Attention writes the gradients of q, k and v in the form of a message if they came in one. A single section has
    # that form unless the message has gaps.
    (block, *others) = exchange.parts[part].blocks
    has_gaps = rows[head_rank] != block.heads_on(head_rank) * block.head_dim * item_size
    as_it_lies &= plan.attend is not None and plan.kv_layout == plan.layout if others else not has_gaps
    return [tokens] if as_it_lies else [tokens, heads]


def _segment_bytes(plan: Plan, rank: int, item_size: int) -> int:
    sizes: list[int] = []
    for step in plan.recurrent_steps:
        match step:
            case Halo(channels=channels):
                tables = step.tables(rank)
                sizes += [rounded(rows.size * channels * item_size) for rows in (tables.places, tables.send_rows)]
            case Scan() if step.crosses:
                # Maps and their adjoints go to different ranks; a buffer of the former may be too small for the latter.
                sent, back = (
                    Counter(rounded(n * max(item_size, LSE)) for n in step.buffer_sizes(rank, forward=forward))
                    for forward in (True, False)
                )
                sizes += (sent | back).elements()
    return sum(sizes)


@dataclass(frozen=True)
class _ExchangeBytes:
    """The bytes of a head exchange on a rank.

    Attributes:
        to_heads: the direction; the gradients take the other one, with the same sizes.
        tokens: all heads of the own tokens.
        summed: additional bytes for the sums of shared heads.
        heads: the own heads of all tokens, for each chunk.
        in_order: heads are used where they arrive, and sent from where they were written.
    """

    to_heads: bool
    tokens: int
    summed: int
    heads: tuple[int, ...]
    in_order: bool


def _bytes_of_exchange(exchange: Exchange, rank: int, item_size: int, *, to_heads: bool) -> _ExchangeBytes:
    kv_rank, head_rank = divmod(rank, exchange.degree)
    exchange, blocks = exchange.subgroup(kv_rank), exchange.sections.blocks
    layout, sizes = exchange.layout, [item_size] * len(blocks)
    num_tokens, shared = int(layout.token_counts[head_rank]), [block.width for block in blocks if block.replicated]
    return _ExchangeBytes(
        to_heads=to_heads,
        tokens=int(layout.row_counts[head_rank]) * exchange.sections.width * item_size,
        summed=num_tokens * sum(shared) * LSE if item_size < LSE else 0,
        heads=tuple(layout.packing.total * part.row_format(sizes).row_bytes[head_rank] for part in exchange.parts),
        in_order=layout.in_stream_order and not any(exchange.coded(sizes)),
    )


@dataclass(frozen=True)
class _RankBytes:
    """The bytes of the attention of a rank's heads."""

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
        return rows * groups * sum(self.step.key_features) * item

    @property
    def held_for_codes(self) -> int:
        """The bytes of own codes, and of the own keys that are decoded from them."""
        coded = self.step.coded_bytes(self.item)
        rows = int(self.step.keys.row_counts[self.kv_rank]) if coded else 0
        return rows * self.groups * (coded + sum(self.step.key_features) * self.item)

    @property
    def decoded(self) -> int:
        """The bytes of the keys of a stage and a chunk of heads, decoded."""
        if not self.step.coded_bytes(self.item):
            return 0
        rows, most = [0], max(chunk.num_groups for chunk in self._chunks)
        for flow in (stage.keys for stage in self.step.all_stages):
            if isinstance(flow, Fetch):
                rows.append(flow.message_rows(self.kv_rank).received)
            elif isinstance(flow, PassOn):
                rows.append(flow.rows_received(self.kv_rank))
        return self.block(max(rows), most, self.item)

    def held_for_latents(self, value_dim: int, *, forward: bool, moved: bool) -> int:
        """Returns the bytes that are made of own latents or queries before the loop, and kept.

        Args:
            value_dim: features of the result.
            forward: the direction.
            moved: True where heads are exchanged, of which backward keeps those that arrived.
        """
        if self.step.latent_mode == "absorb":
            return self.rows * self.heads * self.step.head_dim * self.item
        if self.step.latent_mode != "heads" or (moved and not forward):
            return 0
        assert self.step.latent is not None
        features = self.step.latent.made + self.step.head_dim + (value_dim if moved else 0)  # values that are sent
        return int(self.step.keys.row_counts[self.kv_rank]) * self.heads * features * self.item

    def latents(self, value_dim: int, *, forward: bool) -> int:
        """Returns the bytes that the loop makes of latents, in backward also of gradients, beside what is held."""
        if self.step.latent is None or not self.step.latent_mode or not self.step.latent.travels:
            return 0
        _, rank, own, mode = self.step.latent
        key, value = self.step.head_dim, self.step.value_head_dim
        seen = max(_size(self.step.tiles(self.kv_rank, stage).key_rows) for stage in self.step.stages)
        if mode == "absorb":
            if forward:  # keys, and after the loop the result
                return max(seen * key, self.rows * self.heads * value_dim) * self.item
            return (seen * key + self.rows * self.heads * value) * self.item + seen * (key + value) * self.acc_bytes
        made = seen * self.heads * (own + key) * self.item
        if forward:
            return made
        gradients = seen * self.heads * ((key + value) * self.acc_bytes + own * self.item)
        return made + gradients + self.heads * own * rank * self.acc_bytes

    def forward(self) -> list[int]:
        """Returns the bytes at each moment of forward's loop, including the output and its lse."""
        if self.step.num_stages == 1:
            return [self.out + self.lse]
        base = self.out // self.item * self.acc_bytes + self.lse
        rows = [*self._later_rows(forward=True), *self._returned_rows()]
        parts = [self._merge_bytes(count) for count in rows]
        parts += [
            sum(stage.remote_queries.split_counts.received_by(self.kv_rank)) * self._most_heads * self.acc_bytes
            for stage in self.step.stages
            if stage.remote_queries is not None
        ]
        return [base + most for most in (*parts, self.out if self.acc_bytes > self.item else 0)]

    def _merge_bytes(self, rows: int) -> int:
        """Returns the bytes of so many queries' partial results and their merge, with heads padded to cache lines."""
        padded = (rows // 16 + 1) * 16 if rows else 0
        return (rows * (self.step.value_head_dim + 2) + padded * MERGING) * self._most_heads * self.acc_bytes

    def backward(self) -> list[int]:
        """Returns the bytes at each moment of backward's loop, beyond the gradients of q, k and v."""
        stages, row = self.step.backward_stages, self.step.head_dim * self.acc_bytes
        moments, total, parts = [0], 0, self._later_rows(forward=False)
        if len(stages) > 1:
            total = self._own_rows * self.heads * row if self.is_wider else 0
            if self.step.moves_queries(forward=False):
                # Row sums of own outputs are alive during the whole loop.
                total += self._own_rows * self.heads * self.acc_bytes
                moments.append(total + _eighth(self._own_rows) * self.heads * self.step.value_head_dim * self.acc_bytes)
        # Returned gradients are added to sums of the own keys' gradients, in the type of the sums. A first stage of own
        # keys writes to these sums.
        sums = self._block_of(self.kv_rank, self.acc_bytes) if self._returns else 0
        starts_local = stages[0].keys is None
        before = sums if starts_local else 0
        moments += [total + before + count * self._most_heads * row for count in parts]
        for stage in stages:
            if isinstance(stage.gradients, Return):
                fetch, chunks = stage.gradients.fetch, self._chunks
                width = max(self.step.head_dim, self.step.value_head_dim) * self.acc_bytes if self.is_wider else 0
                # What a rank forwards is summed in a buffer: with one chunk, before there are sums of own keys.
                for hop, live in ((first_hop(fetch), sums), (fetch, before if len(chunks) == 1 else sums)):
                    most = max(hop.split_counts.sent_by(self.kv_rank))
                    moments += [total + live + most * chunk.num_groups * width for chunk in chunks]
            if stage.remote_queries is not None:
                remote = (most for chunk in self._chunks for most in self._remote_moments(stage, chunk))
                moments += [total + sums + most for most in remote]
        if self._returns and not starts_local:
            # The sums are made when the first gradients have returned: after the second part, which is freed by then.
            beside = parts if len(self._chunks) > 1 else parts[1:]
            moments += [total + sums + _size(chunk.heads) * rows * row for chunk in self._chunks for rows in beside]
        return moments

    def _remote_moments(self, stage: Stage, chunk: HeadChunk) -> list[int]:
        """Returns the bytes at each moment of a stage with remote queries, in backward."""
        assert stage.remote_queries is not None
        assert isinstance(stage.keys, Fetch)
        heads, head_dim, value_head_dim = _size(chunk.heads), self.step.head_dim, self.step.value_head_dim
        remote_rows = sum(stage.remote_queries.split_counts.received_by(self.kv_rank))
        own, remote = self.step.tiles(self.kv_rank, stage), self.step.remote_tiles(self.kv_rank, stage)
        both = bool(len(own.bands) and len(remote.bands))
        rows = sum(stage.keys.split_counts.received_by(self.kv_rank))
        keys = self.block(rows, chunk.num_groups, self.acc_bytes) if both and self.is_wider else 0
        # For remote queries: gradients before they are rounded, a substitute for outputs, and then the log-sum-exp.
        columns = (head_dim if self.is_wider else 0) + value_head_dim
        made = keys + remote_rows * heads * columns * self.acc_bytes
        moments = [
            made + remote_rows * heads * self.acc_bytes,
            made + _eighth(remote_rows) * heads * (value_head_dim * self.item + PLACE),
        ]
        # Returned gradients are widened.
        returned = max(stage.remote_queries.split_counts.sent_by(self.kv_rank)) * heads * head_dim * self.acc_bytes
        moments.append(keys + (returned if self.is_wider else 0))
        if both:
            part = self.block(_size(own.key_rows), chunk.num_groups, self.acc_bytes)
            moments.append(keys + part + _size(own.query_rows) * heads * head_dim * self.acc_bytes)
        return moments

    def _block_of(self, kv_rank: int, item: int) -> int:
        return self.block(int(self.step.keys.token_counts[kv_rank]), self.groups, item)

    @property
    def is_wider(self) -> bool:
        """Sums have a wider type than their terms."""
        return self.acc_bytes > self.item

    @property
    def _own_rows(self) -> int:
        return int(self.step.queries.token_counts[self.kv_rank])

    @property
    def _returns(self) -> bool:
        """Gradients of keys return to their owner, which sums them."""
        return any(isinstance(stage.gradients, Return) for stage in self.step.backward_stages)

    @property
    def _chunks(self) -> list[HeadChunk]:
        return self.step.chunks(self.head_rank)

    @property
    def _most_heads(self) -> int:
        """The query heads of the largest chunk."""
        return max(_size(chunk.heads) for chunk in self._chunks)

    def _later_rows(self, *, forward: bool) -> list[int]:
        """Returns, for each stage after the first, the queries that see a key of it."""
        stages = (self.step.bands(self.kv_rank, stage) for stage in self.step.stages_in(forward=forward)[1:])
        return [int(bands[:, 1].max() - bands[:, 0].min()) if len(bands) else 0 for bands in stages]

    def _returned_rows(self) -> list[int]:
        """Returns, for each stage of forward with remote queries, the most own queries whose results a rank returns."""
        flows = (stage.remote_queries for stage in self.step.stages if stage.remote_queries is not None)
        return [max(flow.split_counts.sent_by(self.kv_rank)) for flow in flows]


def _size(part: slice) -> int:
    return part.stop - part.start


def _eighth(rows: int) -> int:
    return -(-rows // 8)
