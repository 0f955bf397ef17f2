"""`workload_of`: turns a plan into a `Workload`: the executor's operations on all ranks, from the same data.

It walks over the programs that the executor runs. Transfers have the bytes and the order of the executor. Times of
local work come from `Hardware`'s rates: attention by the tiles with a visible pair, linear layers by products, all else
by the bytes that are written. No torch in here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.layout.array_types import FloatArray, IntArray
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.attention_program import (
    ComputeOwn,
    ComputeRemote,
    Instruction,
    MergeRows,
    Order,
    PackRows,
    Start,
    Wait,
)
from megatron_cp.plan.flows import ByHost, Fetch, PassOn, Return, RowFlow
from megatron_cp.plan.layer_program import Local, Move
from megatron_cp.plan.payloads import Payload
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import Compute, LocalStep
from megatron_cp.plan.transport import num_rounds
from megatron_cp.planner.predict.hardware import Hardware, Rates
from megatron_cp.planner.predict.kernel_times import (
    attention_seconds,
    convolution_seconds,
    copy_seconds,
    rule_seconds,
    scan_seconds,
    seconds_of_calls,
    shapes_of,
)
from megatron_cp.planner.predict.workload import Edges, Seconds, Workload

_AT_A_TIME = 4  # rounds that the pairwise transport has in flight
_NAMES = {
    Payload.KEYS: "keys and values",
    Payload.KEY_GRADIENTS: "gradients of keys and values",
    Payload.KEY_GRADIENT_SUMS: "gradients of keys and values",
}


def workload_of(plan: Plan, rates: Rates, hosts: tuple[int, ...] = ()) -> Workload:
    """Returns the workload of one direction of a layer, without its projections.

    Args:
        plan: the plan of the layer.
        rates: those of a rank in this direction; backward recomputes nothing beyond what kernels do themselves.
        hosts: the host of each rank, since a collective of equal shares crosses each network card once for a host; one
            host if there are none.
    """
    return _Walk(plan, rates, hosts).layer()


class _Walk:
    """A walk over a plan's programs that builds their workload."""

    def __init__(self, plan: Plan, rates: Rates, hosts: tuple[int, ...]) -> None:
        self.plan, self.rates = plan, rates
        self.hardware, self.item, self.is_forward = rates
        self.workload = Workload.on(self.hardware, plan.cp_size)
        self.gathers_over = gathers_over_hosts(plan, self.hardware, hosts)
        self.second_hops: dict[int, tuple[str, Edges]] = {}
        self.degree = plan.ulysses_degree
        self.ranks = np.arange(plan.cp_size)
        self.kv_ranks, self.head_ranks = self.ranks // self.degree, self.ranks % self.degree
        self.next_ranks = (self.ranks + self.degree) % plan.cp_size  # the next rank of a ring

    def layer(self) -> Workload:
        keys = dict[tuple[int, int], int]()  # transfers under way, by their step and part
        for do in self.plan.program(forward=self.is_forward):
            match do:
                case Local(steps, chunk):
                    for step in steps:
                        self._compute(step, chunk or 0)
                case Move(step) if not step.exchange.is_local:
                    self._exchange(do, keys)
        return self.workload

    def _compute(self, step: LocalStep, chunk: int) -> None:
        match step:
            case Compute(name):
                self._linear_work(name)
            case Halo():
                self._halo(step)
            case Scan():
                self._scan(step)
            case Attend():
                self._attend(self.plan.chunk_attend(chunk))

    # -- transfers and copies ------------------------------------------------------------------------------------------

    def _start(self, name: str, edges: Edges, *, shares: bool = False, is_second: bool = False) -> int:
        """Starts a transfer by the plan's transport; returns the key to wait for it.

        Args:
            shares: every receiver gets the same bytes from a sender.
            is_second: the plan itself sends in two hops, and this is the second one.
        """
        transport = self.plan.transport
        hosts = transport.hosts or (self.gathers_over if shares else ())
        if hosts:
            first, second = _host_hops(edges, np.array(hosts), shares=shares)
            key = self.workload.start(name, first)
            if transport.hosts or second.senders.size:
                self.second_hops[key] = name, second
            return key
        rounds = num_rounds(self.degree if self.degree > 1 else self.plan.cp_size)
        starts = 1 if transport.name == "collective" else max(1, rounds // _AT_A_TIME)
        return self.workload.start(name, edges, starts, is_second=is_second)

    def _wait(self, key: int) -> None:
        """Waits for a transfer; a hierarchical transport starts its second hop after the first has arrived."""
        self.workload.wait(key)
        if key in self.second_hops:
            name, edges = self.second_hops.pop(key)
            self.workload.wait(self.workload.start(f"{name}, within hosts", edges, is_second=True))

    def _copy(self, name: str, nbytes: IntArray | Seconds, exchange: Exchange | None = None) -> None:
        """Adds work that writes so many bytes; a codec reads and writes once more."""
        passes = 2.0 if exchange is not None and exchange.codec is not None else 1.0
        self.workload.work(name, "copy", copy_seconds(self.hardware, nbytes, passes))

    # -- head exchanges -----------------------------------------------------------------------------------------------

    def _rows(self, exchange: Exchange, part: int) -> IntArray:
        """Returns `[degree]` the bytes of a token in the message to each head rank."""

        def make() -> IntArray:
            sizes = [self.item] * len(exchange.sections.blocks)
            return np.array(exchange.row_bytes(part, sizes), dtype=np.int64)

        found: IntArray = exchange.memo(("rows of parts", part, self.item), make)
        return found

    def _edges(self, exchange: Exchange, part: int) -> Edges:
        nbytes = np.outer(exchange.layout.token_counts, self._rows(exchange, part)).ravel()
        return Edges.from_messages(*self._pairs_of_heads, nbytes)

    @cached_property
    def _pairs_of_heads(self) -> tuple[IntArray, IntArray]:
        """`[ranks * degree]` each rank and each of those with which it exchanges heads."""
        others = self.ranks.reshape(-1, 1, self.degree)
        readers = np.broadcast_to(others, (len(others), self.degree, self.degree))
        return np.repeat(self.ranks, self.degree), readers.ravel()

    def _exchange(self, do: Move, keys: dict[tuple[int, int], int]) -> None:
        exchange, side = do.step.exchange, "tokens" if do.to_heads == do.starts else "heads"
        as_they_lie = side == "heads" and exchange.layout.in_stream_order and exchange.codec is None
        for part in do.parts:
            if not do.starts:
                self._wait(keys[id(do.step), part])
                continue
            if not as_they_lie or not self.plan.attend:
                self._copy(f"pack {side}", self._bytes_on(side, exchange, part), exchange)
            edges = self._edges(exchange, part)
            name, edges = ("to heads", edges) if do.to_heads else ("to tokens", edges.reversed())
            keys[id(do.step), part] = self._start(name, edges)
        if not do.starts and not as_they_lie:
            moved = sum((self._bytes_on(side, exchange, part) for part in do.parts), np.zeros(1, dtype=np.int64))
            self._copy(f"unpack {side}", moved, exchange)

    def _bytes_on(self, side: str, exchange: Exchange, part: int) -> IntArray:
        """Returns `[ranks]` the bytes of a message: own tokens, or all tokens of a KV rank and the own heads."""
        tokens, rows = exchange.layout.token_counts, self._rows(exchange, part)
        if side == "tokens":
            return tokens * rows.sum()
        return tokens.reshape(-1, self.degree).sum(axis=1)[self.kv_ranks] * rows[self.head_ranks]

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attend(self, step: Attend) -> None:
        self._row_widths: dict[tuple[Payload, int], IntArray] = {}
        keys = dict[int, int]()
        coded = _CodedRows(step) if step.coded_bytes(self.item) else None
        if coded is not None:  # own keys, coded in forward alone, and decoded
            own = self._bytes(step, step.keys.token_counts, Payload.KEY_GRADIENTS, 0) * step.head_chunks
            self._copy("code keys", own * (2 if self.is_forward else 1))
        chunks = dict[int, tuple[FloatArray, IntArray]]()  # seconds of the stages of each head chunk, and its queries
        for do in step.program(forward=self.is_forward):
            if coded is not None and (rows := coded.decoded_by(do)) is not None:
                self._copy("decode keys", self._bytes(step, rows, Payload.KEY_GRADIENTS, do.part.chunk))
            match do:
                case PackRows(payload=payload, flow=flow):
                    rows = step.keys.token_counts if flow is None else _message_rows(step, flow, "sent")
                    self._copy(f"pack {payload.value}", self._bytes(step, rows, payload, do.part.chunk))
                case Start(payload=payload, flow=flow):
                    keys[do.buffer] = self._start_rows(step, flow, payload, do.part.chunk)
                case Wait():
                    self._wait(keys.pop(do.buffer))
                case Order(payload=payload, flow=flow):
                    fetch = flow.fetch if isinstance(flow, Return) else flow
                    moved = ~fetch.arrive_in_order if isinstance(flow, Return) else fetch.puts_in_order
                    rows = fetch.split_counts.counts.sum(axis=0) * moved
                    self._copy(f"order {payload.value}", self._bytes(step, rows, payload, do.part.chunk))
                case ComputeOwn() if step.tiled is not None:
                    self._compute_assigned(step, do)
                case ComputeOwn():
                    stage, chunk = do.part
                    if chunk not in chunks:
                        heads = self._heads(step, chunk)
                        seconds = attention_seconds(step, self.rates, self.kv_ranks, heads)
                        chunks[chunk] = seconds, step.queries.token_counts[self.kv_ranks] * heads
                    seconds, rows = chunks[chunk]
                    self.workload.work(f"attend stage {stage.number}", "kernel", seconds[stage.number])
                    if not stage.is_first:
                        self._copy_merged(step, rows)
                case ComputeRemote():
                    assert do.part.stage.assigned is not None
                    assert do.part.stage.assigned.remote is not None
                    self._tiles(step, do.part.stage.assigned.remote, do.part.chunk, "remote queries")
                case MergeRows():
                    self._merge(step, do)

    def _start_rows(self, step: Attend, flow: RowFlow, payload: Payload, chunk: int) -> int:
        name, widths = _NAMES.get(payload, payload.value), self._widths_of(step, payload, chunk)
        if isinstance(flow, PassOn):
            rows = flow.rows_sent_by_ranks()[self.kv_ranks]
            return self.workload.start(
                name,
                Edges.from_messages(self.ranks, self.next_ranks, rows * widths[self.head_ranks]),
                overlap=self.rates.pick(self.hardware.ring),
                host=self.hardware.host[1],
            )
        assert isinstance(flow, Fetch | Return)
        counts, shares = flow.split_counts.counts, isinstance(flow, Fetch) and flow.equal_shares
        if shares:
            assert isinstance(flow, Fetch)
            counts = np.full_like(counts, flow.longest)
        is_second = isinstance(flow.fetch if isinstance(flow, Return) else flow, ByHost)
        return self._start(name, self._row_edges(step, counts, widths), shares=shares, is_second=is_second)

    def _compute_assigned(self, step: Attend, do: ComputeOwn) -> None:
        stage = do.part.stage
        if stage.local is not None:
            self._tiles(step, stage.local.local_tiles, do.part.chunk, "own keys")
        elif stage.assigned is not None:
            self._tiles(step, stage.assigned.own, do.part.chunk, "far keys", merges=True)

    def _merge(self, step: Attend, do: MergeRows) -> None:
        """Prices the addition of returned rows: three passes where partial outputs are merged."""
        tokens, chunk, payload = step.keys.token_counts, do.part.chunk, do.payload
        if do.flow is not None:
            rows, passes = _message_rows(step, do.flow, "received"), 3 if payload is Payload.PARTIALS else 1
            if payload is Payload.KEY_GRADIENTS and do.flow.fetch.equal_shares:
                rows = np.full(step.num_kv_ranks, do.flow.fetch.longest)  # as in the calibration of machines
            wider = 1 if payload.is_summed else max(4 // self.item, 1)
            self._copy(f"add {payload.value}", self._bytes(step, rows, payload, chunk) * wider * passes)
        elif do.target is None:
            self._copy("own gradients", self._bytes(step, tokens, Payload.KEY_GRADIENTS, chunk))
        else:
            held = _rows_of_stage(step, do.part.stage.number)
            self._copy("sum gradients", self._bytes(step, held, payload, chunk))

    def _tiles(
        self, step: Attend, bands: Callable[[int], IntArray], chunk: int, name: str, *, merges: bool = False
    ) -> None:
        shapes = shapes_of([map(bands, range(step.num_kv_ranks))], self.hardware.tile)
        heads = self._heads(step, chunk)
        seconds = seconds_of_calls(step, shapes, self.rates, self.kv_ranks, heads)
        self.workload.work(f"attend {name}", "kernel", seconds[0])
        if merges:
            self._copy_merged(step, shapes.rows[0][self.kv_ranks] * heads)

    def _heads(self, step: Attend, chunk: int) -> IntArray:
        """Returns `[ranks]` the query heads of each rank in a head chunk."""
        parts = [step.chunks(rank)[chunk] for rank in range(self.degree)]
        return np.array([part.heads.stop - part.heads.start for part in parts])[self.head_ranks]

    def _copy_merged(self, step: Attend, rows: IntArray) -> None:
        """Adds the merge of a later stage's result, in backward of its gradients, of so many rows of one head."""
        size = step.value_head_dim if self.is_forward else step.head_dim
        self._copy("merge", rows * size * max(self.item, 4) * (3 if self.is_forward else 1))

    def _widths_of(self, step: Attend, payload: Payload, chunk: int) -> IntArray:
        """Returns `[degree]` bytes of a row in a message."""
        found = self._row_widths.get((payload, chunk))
        if found is None:
            found = self._row_widths[payload, chunk] = np.array(
                [step.row_bytes(payload, rank, self.item, step.chunks(rank)[chunk]) for rank in range(self.degree)]
            )
        return found

    def _bytes(self, step: Attend, rows: IntArray, payload: Payload, chunk: int) -> IntArray:
        """Returns `[ranks]` bytes of `[kv ranks]` rows."""
        return rows[self.kv_ranks] * self._widths_of(step, payload, chunk)[self.head_ranks]

    def _row_edges(self, step: Attend, counts: IntArray, widths: IntArray) -> Edges:
        """Returns rows from each KV rank to each as messages between ranks of equal head rank."""
        senders, readers = np.divmod(np.arange(counts.size), step.num_kv_ranks)
        heads = np.arange(self.degree)[:, None]
        nbytes = widths[:, None] * counts.ravel()
        return Edges.from_messages(
            (senders * self.degree + heads).ravel(), (readers * self.degree + heads).ravel(), nbytes.ravel()
        )

    # -- linear layers ------------------------------------------------------------------------------------------------

    @property
    def _computed_tokens(self) -> IntArray:
        """`[ranks]` the tokens that a rank computes: its own, or those of all ranks with which it exchanged heads."""
        counts = self.plan.layout.token_counts
        if self.plan.recurrent_steps:
            return counts
        return counts.reshape(-1, self.degree).sum(axis=1)[self.kv_ranks]

    @property
    def _widths(self) -> IntArray:
        """`[ranks]` the features that a rank computes in all head chunks."""
        blocks = self.plan.sections.blocks
        return np.array(
            [sum(block.heads_on(rank) * block.head_dim for block in blocks) for rank in range(self.degree)]
        )[self.head_ranks]

    @property
    def _rule_host(self) -> float:
        """The seconds of a device's host to issue the kernels of the rule."""
        return self.hardware.host[2] * (1 if self.is_forward else 2)

    def _linear_work(self, name: str) -> None:
        plan = self.plan
        if name == "rule":
            seconds = rule_seconds(plan, self.rates, chunks=plan.head_chunks)
            self.workload.work("rule", "kernel", seconds, host=self._rule_host)
            return
        if name == "conv":
            seconds = convolution_seconds(plan, self.rates, self._computed_tokens, chunks=plan.head_chunks)
            self.workload.work("conv", "kernel", seconds)
            return
        passes = 0.25 * (1 if self.is_forward else 3) / plan.head_chunks
        self._copy(name, (self._computed_tokens * self._widths * self.item).astype(np.float64) * passes)

    def _halo(self, step: Halo) -> None:
        if not self.is_forward:  # the gradients of other ranks' rows are known after the convolution
            self._linear_work("conv")
        if step.crosses:
            counts = step.split_counts.counts if self.is_forward else step.split_counts.counts.T
            self._copy("pack halo", counts.sum(axis=1) * step.channels * self.item)
            self._wait(self._start("halo", Edges.from_counts(counts * step.channels * self.item)))
        if self.is_forward:
            self._linear_work("conv")

    def _scan(self, step: Scan) -> None:
        local = rule_seconds(self.plan, self.rates)
        self.workload.work("maps", "kernel", scan_seconds(self.plan, step, self.rates))
        if step.crosses:
            counts, width = step.split_counts(forward=self.is_forward).counts, max(self.item, 4)
            sent = np.full_like(counts, step.share(forward=self.is_forward)) if step.gathers else counts
            key = self._start("states of segments", Edges.from_counts(sent * width), shares=step.gathers)
            self.workload.work("rule, before states", "kernel", local / 2, host=self._rule_host)
            self._wait(key)
            self._copy("fold states", counts.sum(axis=0) * width)
            self.workload.work("rule, after states", "kernel", local / 2)
        else:
            self.workload.work("rule", "kernel", local, host=self._rule_host)


def _message_rows(step: Attend, flow: Fetch | Return, which: str) -> IntArray:
    """Returns the rows that each KV rank packs, or receives, for a flow."""
    if isinstance(flow, Fetch) and flow.equal_shares:
        return np.full(step.num_kv_ranks, flow.longest * (1 if which == "sent" else flow.size))
    return flow.split_counts.counts.sum(axis=1 if which == "sent" else 0)


def _rows_of_stage(step: Attend, hops: int) -> IntArray:
    """Returns the key rows that each KV rank has in a stage of a ring."""
    return step.keys.token_counts[(np.arange(step.num_kv_ranks) - hops) % step.num_kv_ranks]


class _CodedRows:
    """Follows the buffers of coded keys of an attention, each decoded where the first of its tiles are computed."""

    def __init__(self, step: Attend) -> None:
        self.step, self._rows = step, dict[int, IntArray]()

    def decoded_by(self, do: Instruction) -> IntArray | None:
        """Returns the rows that each KV rank decodes in an instruction, which is the next of the program."""
        match do:
            case Wait(payload=Payload.KEYS, flow=PassOn(hops=hops)):
                self._rows[do.buffer] = _rows_of_stage(self.step, hops)
            case Wait(payload=Payload.KEYS, flow=Fetch() as flow):
                self._rows[do.buffer] = _message_rows(self.step, flow, "received")
            case ComputeOwn(keys=int() as keys) | ComputeRemote(keys=keys):
                return self._rows.pop(keys, None)  # none for the own block of a ring, and after remote queries
        return None


def gathers_over_hosts(plan: Plan, hardware: Hardware, hosts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the hosts over which the backend gathers equal shares in two hops, nothing where it does not.

    Devices' backend sends a share to each other host once, over rings or trees of hosts. What CPUs' backend does is in
    the measured numbers of its links.
    """
    one_by_one = hardware.cores or plan.transport.name != "collective" or len(set(hosts)) < 2
    return () if one_by_one else hosts


def _host_hops(edges: Edges, hosts: IntArray, *, shares: bool) -> tuple[Edges, Edges]:
    """Splits messages into the two hops of a hierarchical transport.

    The first hop is a message to each other host, to the rank of the same place there, which forwards it in the second.

    Args:
        hosts: the host of each rank.
        shares: receivers of a host get the same bytes, which travel once.
    """
    sizes, by_host = np.bincount(hosts), np.argsort(hosts, kind="stable")
    first_of_host = np.cumsum(sizes) - sizes
    place = np.empty(hosts.size, dtype=np.int64)
    place[by_host] = np.arange(hosts.size) - np.repeat(first_of_host, sizes)
    far = hosts[edges.senders] != hosts[edges.receivers]
    senders, receivers, nbytes = edges.senders[far], edges.receivers[far], edges.nbytes[far]
    there = hosts[receivers]
    proxy = by_host[first_of_host[there] + place[senders] % sizes[there]]
    pairs, pair_of_edge = np.unique(senders * hosts.size + proxy, return_inverse=True)
    together = np.zeros(pairs.size, dtype=np.int64)
    (np.maximum if shares else np.add).at(together, pair_of_edge, nbytes)
    first = Edges(
        np.concatenate([edges.senders[~far], pairs // hosts.size]),
        np.concatenate([edges.receivers[~far], pairs % hosts.size]),
        np.concatenate([edges.nbytes[~far], together]),
    )
    return first, Edges.from_messages(proxy, receivers, nbytes)
