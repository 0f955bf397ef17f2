"""`program_of`: turns a plan into a `Program`: the executor's operations on all ranks, from the same data.

Transfers have the bytes and the order of the executor. Times of local work come from `Hardware`'s rates:
attention by visible pairs and by the tiles that a mask cuts, linear layers by products, all else by the bytes that are
written. No torch in here.
"""

from __future__ import annotations

import numpy as np

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Halo, Scan
from megatron_cp.plan.steps import Compute, ToHeads, ToTokens
from megatron_cp.planner.predict.hardware import Hardware
from megatron_cp.planner.predict.kernels import convolution_seconds, rule_seconds, scan_seconds
from megatron_cp.planner.predict.program import Edges, Program
from megatron_cp.planner.predict.walk_attention import AttentionWalk


def program_of(plan: Plan, hardware: Hardware, item_size: int, *, forward: bool) -> Program:
    """Returns the program of one direction of a layer, without its projections.

    Args:
        plan: the plan of the layer.
        hardware: rates of a rank.
        item_size: bytes of an element.
        forward: the direction; backward recomputes nothing beyond what kernels do themselves.
    """
    walk = _Walk(plan, hardware, item_size, forward=forward)
    return walk.forward() if forward else walk.backward()


class _Walk(AttentionWalk):
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
            self._arrived_at_tokens(exchange, [chunk_keys[number] for chunk_keys in returning])
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

    def _to_heads(self, exchange: Exchange) -> dict[int, int]:
        """Starts all parts, in the order in which they are waited for; returns the key of each."""
        keys = {}
        for part in range(len(exchange.parts)) if self.is_forward else reversed(range(len(exchange.parts))):
            self._copy("pack tokens", exchange.layout.token_counts * self._rows(exchange, part).sum(), exchange)
            keys[part] = self._start("to heads", self._edges(exchange, part))
        return keys

    def _head_side(self, exchange: Exchange, part: int) -> IntArray:
        """Returns `[ranks]` the bytes of all tokens of a KV rank and the own heads."""
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

    def _linear_work(self, name: str, chunk: int) -> None:
        plan = self.plan
        if name == "rule":
            seconds = rule_seconds(plan, self.hardware, self.item, forward=self.is_forward, chunks=plan.head_chunks)
            self.program.work("rule", "kernel", seconds)
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
            self._linear_work("conv", 0)
        if step.crosses:
            counts = step.split_counts.counts if self.is_forward else step.split_counts.counts.T
            self._copy("pack halo", counts.sum(axis=1) * step.channels * self.item)
            self._wait(self._start("halo", self._count_edges(counts * step.channels * self.item)))
        if self.is_forward:
            self._linear_work("conv", 0)

    def _scan(self, step: Scan) -> None:
        local = rule_seconds(self.plan, self.hardware, self.item, forward=self.is_forward)
        self.program.work(
            "maps", "kernel", scan_seconds(self.plan, step, self.hardware, self.item, forward=self.is_forward)
        )
        if step.crosses:
            counts = step.split_counts(forward=self.is_forward).counts
            key = self._start("states of segments", self._count_edges(counts * max(self.item, 4)))
            self.program.work("rule, before states", "kernel", local / 2)
            self._wait(key)
            self._copy("fold states", counts.sum(axis=0) * max(self.item, 4))
            self.program.work("rule, after states", "kernel", local / 2)
        else:
            self.program.work("rule", "kernel", local)

    def _count_edges(self, nbytes: IntArray) -> Edges:
        senders, readers = (x.ravel() for x in np.meshgrid(self.ranks, self.ranks, indexing="ij"))
        return Edges.from_messages(senders, readers, nbytes[senders, readers])
