"""`program_of`: what the executor will do for a plan, walked over the same data, as a `Program` of all ranks.

Transfers have the bytes and the order of the executor's own. Times of local work come from `Hardware`'s rates:
attention by visible pairs and by the tiles that a mask cuts, linear layers by products, everything else by the bytes
that it writes. No torch in here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.attention import Attend, Stage
from megatron_cp.plan.flows import Fetch, PassOn
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import Compute, ToHeads, ToTokens
from megatron_cp.plan.transport import num_rounds
from megatron_cp.planner.predict.hardware import Hardware
from megatron_cp.planner.predict.kernels import (
    StageSeconds,
    convolution_seconds,
    copy_seconds,
    rule_seconds,
    scan_seconds,
    stage_seconds,
)
from megatron_cp.planner.predict.program import Edges, Program, Seconds

_AT_A_TIME = 4  # rounds that the pairwise transport has under way


def program_of(plan: Plan, hardware: Hardware, item_size: int, *, forward: bool) -> Program:
    """One direction of a layer, without its projections.

    Args:
        plan: of the layer.
        hardware: rates of a rank.
        item_size: bytes of an element.
        forward: the direction; backward recomputes nothing but what kernels do themselves.
    """
    walk = _Walk(plan, hardware, item_size, forward=forward)
    return walk.forward() if forward else walk.backward()


class _Walk:
    def __init__(self, plan: Plan, hardware: Hardware, item_size: int, *, forward: bool) -> None:
        self.plan, self.hardware, self.item, self.is_forward = plan, hardware, item_size, forward
        self.program = Program(plan.cp_size, collective=hardware.collective, transfer=hardware.transfer)
        self.second_hops: dict[int, tuple[str, Edges]] = {}
        self.degree = plan.ulysses_degree
        self.ranks = np.arange(plan.cp_size)
        self.kv_ranks, self.head_ranks = self.ranks // self.degree, self.ranks % self.degree
        self.after = (self.ranks + self.degree) % plan.cp_size  # in a ring

    # -- the steps, in the executor's order ----------------------------------------------------------------------------

    def forward(self) -> Program:
        plan = self.plan
        inbound = [step.exchange for step in plan.steps if isinstance(step, ToHeads) and not step.exchange.is_local]
        arriving = [(exchange, self._to_heads(exchange)) for exchange in inbound]
        leaving: list[int] = []
        back = plan.steps[-1].exchange if isinstance(plan.steps[-1], ToTokens) else None
        for chunk in range(plan.head_chunks):
            for exchange, keys in arriving:
                self._arrived_at_heads(exchange, chunk, keys[chunk])
            for step in plan.steps:
                self._computed(step, chunk)
            if back is not None and not back.is_local:
                leaving.append(self._to_tokens(back, chunk))
        if back is not None:
            self._arrived_at_tokens(back, leaving)
        return self.program

    def backward(self) -> Program:
        plan, returning = self.plan, []
        inbound = [step.exchange for step in plan.steps if isinstance(step, ToHeads) and not step.exchange.is_local]
        back = plan.steps[-1].exchange if isinstance(plan.steps[-1], ToTokens) else None
        exchanged = back is not None and not back.is_local
        keys = self._to_heads(back) if exchanged and back is not None else {}
        for chunk in reversed(range(plan.head_chunks)):
            if exchanged and back is not None:
                self._arrived_at_heads(back, chunk, keys[chunk])
            for step in reversed(plan.steps):
                self._computed(step, chunk)
            returning.append([self._to_tokens(exchange, chunk) for exchange in reversed(inbound)])
        for number, exchange in enumerate(reversed(inbound)):
            self._arrived_at_tokens(exchange, [of_chunk[number] for of_chunk in returning])
        return self.program

    def _computed(self, step: object, chunk: int) -> None:
        match step:
            case ToHeads() | ToTokens():
                return
            case Compute(name):
                self._linear_work(name, chunk)
            case Halo():
                self._halo(step)
            case Scan():
                self._scan(step)
            case Attend():
                self._attend(self.plan.attend_of(chunk))

    # -- head exchanges -----------------------------------------------------------------------------------------------

    def _rows(self, exchange: Exchange, part: int) -> IntArray:
        """`[degree]` bytes of a token in the message to each head rank."""
        sizes = [self.item] * len(exchange.sections.blocks)
        return np.array(exchange.row_bytes(part, sizes), dtype=np.int64)

    def _edges(self, exchange: Exchange, part: int) -> Edges:
        rows, tokens = self._rows(exchange, part), exchange.layout.token_counts
        senders = np.repeat(self.ranks, self.degree)
        readers = np.tile(np.arange(self.degree), self.plan.cp_size)
        return Edges.of(senders, senders - senders % self.degree + readers, tokens[senders] * rows[readers])

    def _to_heads(self, exchange: Exchange) -> dict[int, int]:
        """The key of each part, which leave in the order in which they are waited for."""
        keys = {}
        for part in range(len(exchange.parts)) if self.is_forward else reversed(range(len(exchange.parts))):
            self._copy("pack tokens", exchange.layout.token_counts * self._rows(exchange, part).sum(), exchange)
            keys[part] = self._start("to heads", self._edges(exchange, part))
        return keys

    def _head_side(self, exchange: Exchange, part: int) -> IntArray:
        """`[ranks]` bytes of all tokens of a KV rank and the own heads."""
        tokens = exchange.layout.token_counts.reshape(-1, self.degree).sum(axis=1)
        return tokens[self.kv_ranks] * self._rows(exchange, part)[self.head_ranks]

    def _arrived_at_heads(self, exchange: Exchange, part: int, key: int) -> None:
        self._wait(key)
        if not exchange.layout.in_stream_order or exchange.codec is not None:
            self._copy("unpack heads", self._head_side(exchange, part), exchange)

    def _to_tokens(self, exchange: Exchange, part: int) -> int:
        if not exchange.layout.in_stream_order or exchange.codec is not None or not self.plan.attend:
            self._copy("pack heads", self._head_side(exchange, part), exchange)
        return self._start("to tokens", self._edges(exchange, part).reversed())

    def _arrived_at_tokens(self, exchange: Exchange, keys: list[int]) -> None:
        for key in keys:
            self._wait(key)
        rows = sum(self._rows(exchange, part).sum() for part in range(len(exchange.parts)))
        if not exchange.is_local:
            self._copy("unpack tokens", exchange.layout.token_counts * rows, exchange)

    def _start(self, name: str, edges: Edges, *, shares: bool = False) -> int:
        """By the plan's transport.

        Args:
            shares: every receiver gets the same bytes of a sender.
        """
        transport = self.plan.transport
        if transport.hosts:
            first, second = _by_hosts(edges, np.array(transport.hosts), shares=shares)
            key = self.program.start(name, first)
            self.second_hops[key] = name, second
            return key
        rounds = num_rounds(self.degree if self.degree > 1 else self.plan.cp_size)
        return self.program.start(name, edges, 1 if transport.name == "collective" else max(1, rounds // _AT_A_TIME))

    def _wait(self, key: int) -> None:
        """Until a transfer has arrived; over hosts, the second hop begins when the first has been waited for."""
        self.program.wait(key)
        if key in self.second_hops:
            name, edges = self.second_hops.pop(key)
            self.program.wait(self.program.start(f"{name}, within hosts", edges))

    def _copy(self, name: str, nbytes: IntArray | Seconds, exchange: Exchange | None = None) -> None:
        """Work that writes so many bytes: coding reads and writes once more."""
        passes = 2.0 if exchange is not None and exchange.codec is not None else 1.0
        self.program.work(name, "copy", copy_seconds(self.hardware, nbytes, passes))

    # -- softmax attention --------------------------------------------------------------------------------------------

    def _attend(self, step: Attend) -> None:
        flow = step.stages[-1].keys
        if flow is None:
            for chunk in range(step.head_chunks):
                self._attend_stage(step, step.stages[0], self._stage_seconds(step, chunk))
        elif isinstance(flow, Fetch):
            self._attend_fetched(step, flow)
        else:
            self._attend_ring(step)

    def _groups(self, step: Attend, chunk: int) -> IntArray:
        """`[ranks]` key/value heads of a rank in a chunk."""
        return np.array([step.chunks(rank)[chunk].num_groups for rank in range(self.degree)])[self.head_ranks]

    def _row_bytes(self, step: Attend, chunk: int) -> IntArray:
        """`[ranks]` bytes of a token's keys and values."""
        return self._groups(step, chunk) * (step.head_dim + step.value_head_dim) * self.item

    def _stage_seconds(self, step: Attend, chunk: int) -> StageSeconds:
        return stage_seconds(self.plan, step, chunk, self.hardware, self.item, forward=self.is_forward)

    def _attend_stage(self, step: Attend, stage: Stage, seconds: StageSeconds) -> None:
        self.program.work(f"attend stage {stage.number}", "kernel", seconds.kernels[stage.number])
        if not stage.is_first:
            self.program.work("merge", "copy", seconds.merge)

    def _across(self, step: Attend, counts: IntArray, chunk: int) -> Edges:
        """Rows from each KV rank to each, as the messages between ranks of equal head rank."""
        size = self.degree
        of_kv = np.arange(step.num_kv_ranks)
        senders, readers = (x.ravel() for x in np.meshgrid(of_kv, of_kv, indexing="ij"))
        row = self._row_bytes(step, chunk)
        parts = [
            (senders * size + head, readers * size + head, counts[senders, readers] * int(row[head]))
            for head in range(size)
        ]
        return Edges.of(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _attend_fetched(self, step: Attend, flow: Fetch) -> None:
        counts, chunks = flow.split_counts.counts, range(step.head_chunks)
        sent = np.full_like(counts, flow.longest) if flow.equal_shares else counts
        row, in_order = self._rows_of_chunks(step), flow.arrive_in_order[self.kv_ranks]
        packed = sent.sum(axis=1) if not flow.equal_shares else np.full(step.num_kv_ranks, flow.longest)
        back: int | None = None

        def start(chunk: int) -> int:
            self._copy("pack keys", packed[self.kv_ranks] * row[chunk])
            edges = self._across(step, sent, chunk)
            return self._start("keys and values", edges, shares=flow.equal_shares)

        coming = start(0)
        for chunk in chunks:
            self._wait(coming)
            if chunk + 1 < step.head_chunks:
                coming = start(chunk + 1)
            wanted = counts.sum(axis=0)[self.kv_ranks] * row[chunk]
            self._copy("order keys", wanted * ~in_order)
            self._attend_stage(step, step.stages[0], self._stage_seconds(step, chunk))
            if not self.is_forward:
                if back is not None:
                    self._returned(back, packed, row[chunk - 1])
                self._copy("order gradients", wanted * ~in_order)
                back = self._start("gradients of keys and values", self._across(step, counts.T, chunk))
        if back is not None:
            self._returned(back, packed, row[step.head_chunks - 1])

    def _rows_of_chunks(self, step: Attend) -> list[IntArray]:
        return [self._row_bytes(step, chunk) for chunk in range(step.head_chunks)]

    def _returned(self, key: int, rows: IntArray, row: IntArray) -> None:
        self._wait(key)
        self._copy("sum gradients", rows[self.kv_ranks] * row * max(4 // self.item, 1))

    def _attend_ring(self, step: Attend) -> None:
        row, tokens, seconds = self._row_bytes(step, 0), step.keys.token_counts, self._stage_seconds(step, 0)
        wide = row * max(4 // self.item, 1)
        self._copy("pack keys", tokens[self.kv_ranks] * row)
        coming: int | None = None
        gradient: int | None = None
        for number, stage in enumerate(step.stages):
            if coming is not None:
                self.program.wait(coming)
            following = step.stages[number + 1] if number + 1 < len(step.stages) else None
            if following is not None:
                assert isinstance(following.keys, PassOn)
                coming = self.program.start("keys and values", self._passed(step, following.keys, row))
            self._attend_stage(step, stage, seconds)
            if self.is_forward or stage.gradients is None:
                continue
            assert isinstance(stage.gradients, PassOn)
            if gradient is not None:
                self.program.wait(gradient)
                self._copy("sum gradients", tokens[(self.kv_ranks - number) % step.num_kv_ranks] * wide)
            gradient = self.program.start("gradients of keys and values", self._passed(step, stage.gradients, wide))
        if gradient is not None:
            self.program.wait(gradient)
            self._copy("own gradients", tokens[self.kv_ranks] * row)

    def _passed(self, step: Attend, flow: PassOn, row: IntArray) -> Edges:
        rows = flow.rows_sent_by_ranks()[self.kv_ranks]
        return Edges.of(self.ranks, self.after, rows * row)

    # -- linear layers ------------------------------------------------------------------------------------------------

    @property
    def _tokens_at_hand(self) -> IntArray:
        """`[ranks]` tokens that a rank computes: its own, or all of those with which it exchanged heads."""
        counts = self.plan.layout.token_counts
        if self.plan.recurrent_steps:
            return counts
        return counts.reshape(-1, self.degree).sum(axis=1)[self.kv_ranks]

    @property
    def _widths(self) -> IntArray:
        """`[ranks]` features that a rank computes in all head chunks."""
        blocks = self.plan.sections.blocks
        return np.array(
            [sum(block.heads_on(rank) * block.head_dim for block in blocks) for rank in range(self.degree)]
        )[self.head_ranks]

    def _linear_work(self, name: str, chunk: int) -> None:
        plan = self.plan
        if name == "rule":
            seconds = rule_seconds(plan, self.hardware, self.item, forward=self.is_forward, chunks=plan.head_chunks)
            self.program.work("rule", "kernel", seconds)
            return
        if name == "conv":
            seconds = convolution_seconds(
                plan, self.hardware, self.item, self._tokens_at_hand, forward=self.is_forward, chunks=plan.head_chunks
            )
            self.program.work("conv", "kernel", seconds)
            return
        passes = 0.25 * (1 if self.is_forward else 3) / plan.head_chunks
        self._copy(name, (self._tokens_at_hand * self._widths * self.item).astype(np.float64) * passes)

    def _halo(self, step: Halo) -> None:
        if not self.is_forward:  # what a convolution wants of other ranks is known after it
            self._linear_work("conv", 0)
        if step.crosses:
            counts = step.split_counts.counts if self.is_forward else step.split_counts.counts.T
            self._copy("pack halo", counts.sum(axis=1) * step.channels * self.item)
            self._wait(self._start("halo", self._of_counts(counts * step.channels * self.item)))
        if self.is_forward:
            self._linear_work("conv", 0)

    def _scan(self, step: Scan) -> None:
        local = rule_seconds(self.plan, self.hardware, self.item, forward=self.is_forward)
        self.program.work(
            "maps", "kernel", scan_seconds(self.plan, step, self.hardware, self.item, forward=self.is_forward)
        )
        if step.crosses:
            counts = step.split_counts(forward=self.is_forward).counts
            key = self._start("states of segments", self._of_counts(counts * max(self.item, 4)))
            self.program.work("rule, before states", "kernel", local / 2)
            self._wait(key)
            self._copy("fold states", counts.sum(axis=0) * max(self.item, 4))
            self.program.work("rule, after states", "kernel", local / 2)
        else:
            self.program.work("rule", "kernel", local)

    def _of_counts(self, nbytes: IntArray) -> Edges:
        senders, readers = (x.ravel() for x in np.meshgrid(self.ranks, self.ranks, indexing="ij"))
        return Edges.of(senders, readers, nbytes[senders, readers])


def _by_hosts(edges: Edges, hosts: IntArray, *, shares: bool) -> tuple[Edges, Edges]:
    """One message to each other host, to the rank of the same place there, and from it to whom it is for.

    Args:
        hosts: of each rank.
        shares: receivers of a host get the same bytes, which travel once.
    """
    of_host = [np.flatnonzero(hosts == host) for host in range(int(hosts.max()) + 1)]
    place = np.zeros(hosts.size, dtype=np.int64)
    for ranks in of_host:
        place[ranks] = np.arange(ranks.size)
    far = hosts[edges.senders] != hosts[edges.receivers]
    senders, receivers, nbytes = edges.senders[far], edges.receivers[far], edges.nbytes[far]
    proxy = np.array(
        [
            of_host[hosts[to]][place[rank] % of_host[hosts[to]].size]
            for rank, to in zip(senders, receivers, strict=True)
        ],
        dtype=np.int64,
    )
    pairs, of_pair = np.unique(senders * hosts.size + proxy, return_inverse=True)
    together = np.zeros(pairs.size, dtype=np.int64)
    (np.maximum if shares else np.add).at(together, of_pair, nbytes)
    first = Edges(
        np.concatenate([edges.senders[~far], pairs // hosts.size]),
        np.concatenate([edges.receivers[~far], pairs % hosts.size]),
        np.concatenate([edges.nbytes[~far], together]),
    )
    return first, Edges.of(proxy, receivers, nbytes)


def transfers_of(program: Program, rank: int) -> Iterator[tuple[str, dict[int, int], dict[int, int]]]:
    """What one rank starts, in order: the name, the bytes to each other rank, and those from each."""
    for start in program.transfers:
        edges = start.edges
        sent, received = edges.senders == rank, edges.receivers == rank
        yield (
            start.name, _by_peer(edges.receivers[sent], edges.nbytes[sent]),
            _by_peer(edges.senders[received], edges.nbytes[received]),
        )  # fmt: skip


def _by_peer(peers: IntArray, nbytes: IntArray) -> dict[int, int]:
    found: dict[int, int] = {}
    for peer, count in zip(peers.tolist(), nbytes.tolist(), strict=True):
        found[peer] = found.get(peer, 0) + count
    return found
