"""`program_of`: turns a plan into a `Program`: the executor's operations on all ranks, from the same data.

Transfers have the bytes and the order of the executor. Times of local work come from `Hardware`'s rates:
attention by the tiles with a visible pair, linear layers by products, all else by the bytes that are
written. No torch in here.
"""

from __future__ import annotations

import numpy as np

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.layer_program import Local, Move
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import Compute, LocalStep
from megatron_cp.planner.predict.hardware import Hardware
from megatron_cp.planner.predict.kernels import convolution_seconds, rule_seconds, scan_seconds
from megatron_cp.planner.predict.program import Edges, Program
from megatron_cp.planner.predict.walk_attention import AttentionWalk


def program_of(
    plan: Plan, hardware: Hardware, item_size: int, *, forward: bool, hosts: tuple[int, ...] = ()
) -> Program:
    """Returns the program of one direction of a layer, without its projections.

    Args:
        plan: the plan of the layer.
        hardware: rates of a rank.
        item_size: bytes of an element.
        forward: the direction; backward recomputes nothing beyond what kernels do themselves.
        hosts: the host of each rank; one host if there are none.
    """
    return _Walk(plan, hardware, item_size, forward=forward, hosts=hosts).layer()


class _Walk(AttentionWalk):
    def layer(self) -> Program:
        keys = dict[tuple[int, int], int]()  # transfers under way, by their step and part
        for do in self.plan.program(forward=self.is_forward):
            match do:
                case Local(steps, chunk):
                    for step in steps:
                        self._compute(step, chunk or 0)
                case Move(step) if not step.exchange.is_local:
                    self._exchange(do, keys)
        return self.program

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

    # -- head exchanges -----------------------------------------------------------------------------------------------

    def _rows(self, exchange: Exchange, part: int) -> IntArray:
        """Returns `[degree]` the bytes of a token in the message to each head rank."""
        sizes = [self.item] * len(exchange.sections.blocks)
        return np.array(exchange.row_bytes(part, sizes), dtype=np.int64)

    def _edges(self, exchange: Exchange, part: int) -> Edges:
        rows, tokens = self._rows(exchange, part), exchange.layout.token_counts
        senders = np.repeat(self.ranks, self.degree)
        readers = np.tile(np.arange(self.degree), self.plan.cp_size)
        return Edges.from_messages(senders, senders - senders % self.degree + readers, tokens[senders] * rows[readers])

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
            seconds = rule_seconds(plan, self.hardware, self.item, forward=self.is_forward, chunks=plan.head_chunks)
            self.program.work("rule", "kernel", seconds, host=self._rule_host)
            return
        if name == "conv":
            seconds = convolution_seconds(
                plan, self.hardware, self.item, self._computed_tokens, forward=self.is_forward, chunks=plan.head_chunks
            )
            self.program.work("conv", "kernel", seconds)
            return
        passes = 0.25 * (1 if self.is_forward else 3) / plan.head_chunks
        self._copy(name, (self._computed_tokens * self._widths * self.item).astype(np.float64) * passes)

    def _halo(self, step: Halo) -> None:
        if not self.is_forward:  # the gradients of other ranks' rows are known after the convolution
            self._linear_work("conv")
        if step.crosses:
            counts = step.split_counts.counts if self.is_forward else step.split_counts.counts.T
            self._copy("pack halo", counts.sum(axis=1) * step.channels * self.item)
            self._wait(self._start("halo", self._count_edges(counts * step.channels * self.item)))
        if self.is_forward:
            self._linear_work("conv")

    def _scan(self, step: Scan) -> None:
        local = rule_seconds(self.plan, self.hardware, self.item, forward=self.is_forward)
        self.program.work(
            "maps", "kernel", scan_seconds(self.plan, step, self.hardware, self.item, forward=self.is_forward)
        )
        if step.crosses:
            counts, width = step.split_counts(forward=self.is_forward).counts, max(self.item, 4)
            sent = np.full_like(counts, step.share(forward=self.is_forward)) if step.gathers else counts
            key = self._start("states of segments", self._count_edges(sent * width), shares=step.gathers)
            self.program.work("rule, before states", "kernel", local / 2, host=self._rule_host)
            self._wait(key)
            self._copy("fold states", counts.sum(axis=0) * width)
            self.program.work("rule, after states", "kernel", local / 2)
        else:
            self.program.work("rule", "kernel", local, host=self._rule_host)

    def _count_edges(self, nbytes: IntArray) -> Edges:
        senders, readers = (x.ravel() for x in np.meshgrid(self.ranks, self.ranks, indexing="ij"))
        return Edges.from_messages(senders, readers, nbytes[senders, readers])
