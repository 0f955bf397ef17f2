"""`AttentionWalk`: what the executor will do for the softmax of a plan. No torch in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.attention import Attend, Stage
from megatron_cp.plan.flows import Fetch, PassOn
from megatron_cp.plan.payload import SUMMED
from megatron_cp.planner.predict.kernels import (
    StageSeconds,
    seconds_of_calls,
    shapes_of,
    stage_seconds,
)
from megatron_cp.planner.predict.program import Edges
from megatron_cp.planner.predict.walk_base import WalkBase


class _Back(NamedTuple):
    """What goes back to the owners of fetched rows."""

    flow: Fetch
    name: str
    chunk: int
    key: int


class AttentionWalk(WalkBase):
    """The stages of attention, in the executor's order."""

    # -- softmax attention --------------------------------------------------------------------------------------------

    def _attend(self, step: Attend) -> None:
        flow = step.stages[-1].keys
        if step.tiled is not None:
            self._attend_tiled(step)
        elif flow is None:
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

    def _across(self, step: Attend, counts: IntArray, chunk: int, row: IntArray | None = None) -> Edges:
        """Rows from each KV rank to each, as the messages between ranks of equal head rank.

        Args:
            row: `[degree]` bytes of a row, or more of the like; those of keys if None.
        """
        size = self.degree
        of_kv = np.arange(step.num_kv_ranks)
        senders, readers = (x.ravel() for x in np.meshgrid(of_kv, of_kv, indexing="ij"))
        row = self._row_bytes(step, chunk) if row is None else row
        parts = [
            (senders * size + head, readers * size + head, counts[senders, readers] * int(row[head]))
            for head in range(size)
        ]
        return Edges.of(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _attend_fetched(self, step: Attend, flow: Fetch) -> None:
        counts, chunks = flow.split_counts.counts, range(step.head_chunks)
        sent = np.full_like(counts, flow.longest) if flow.equal_shares else counts
        row, reordered = self._rows_of_chunks(step), flow.puts_in_order[self.kv_ranks]
        returned_in_order = flow.arrive_in_order[self.kv_ranks]
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
            self._copy("order keys", wanted * reordered)
            self._attend_stage(step, step.stages[0], self._stage_seconds(step, chunk))
            if not self.is_forward:
                if back is not None:
                    self._returned(back, packed, row[chunk - 1])
                self._copy("order gradients", wanted * ~returned_in_order)
                back = self._start("gradients of keys and values", self._across(step, counts.T, chunk))
        if back is not None:
            self._returned(back, packed, row[step.head_chunks - 1])

    # -- tiles that are assigned one by one ---------------------------------------------------------------------------

    def _attend_tiled(self, step: Attend) -> None:
        home, *stages = step.stages_in(forward=self.is_forward)
        order = [(stage, chunk) for stage in stages for chunk in range(step.head_chunks)]
        coming = self._start_tiles(step, *order[0]) if order else (0, 0)
        assert home.local is not None
        for chunk in range(step.head_chunks):
            self._tiles(step, home.local.local_tiles, chunk, "at home")
        visits, back = list[_Back](), None
        for number, (stage, chunk) in enumerate(order):
            assert stage.assigned is not None
            assert isinstance(stage.keys, Fetch)
            arriving = coming
            self._wait(arriving[0])
            if number + 1 < len(order):
                coming = self._start_tiles(step, *order[number + 1])
            self._in_order(step, stage.keys, "keys", chunk)
            if stage.remote_queries is not None:
                assert stage.assigned.remote is not None
                self._wait(arriving[1])
                self._in_order(step, stage.remote_queries, self._names[0], chunk)
                self._tiles(step, stage.assigned.remote, chunk, "remote queries")
                while visits:
                    self._came_back(step, visits.pop())
                visits.append(self._go_back(step, stage.remote_queries, self._names[1], chunk))
            self._tiles(step, stage.assigned.own, chunk, "far keys", merges=True)
            if not self.is_forward:
                if back is not None:
                    self._came_back(step, back)
                back = self._go_back(step, stage.keys, "gradients of keys", chunk)
        for each in [*visits, *([] if back is None else [back])]:
            self._came_back(step, each)

    @property
    def _names(self) -> tuple[str, str]:
        """Of rows that visit, and of what is made of them."""
        return (
            ("remote queries", "results")
            if self.is_forward
            else ("remote queries and gradients", "gradients of remote queries")
        )

    def _start_tiles(self, step: Attend, stage: Stage, chunk: int) -> tuple[int, int]:
        """The keys, and the queries that visit; the same key twice where none do."""
        assert isinstance(stage.keys, Fetch)
        self._packed(step, stage.keys, "keys", chunk)
        first = self._start("keys and values", self._rows_across(step, stage.keys, "keys", chunk))
        if stage.remote_queries is None:
            return first, first
        name = self._names[0]
        self._packed(step, stage.remote_queries, name, chunk)
        return first, self._start(name, self._rows_across(step, stage.remote_queries, name, chunk))

    def _go_back(self, step: Attend, flow: Fetch, name: str, chunk: int) -> _Back:
        self._in_order(step, flow, name, chunk)
        edges = self._rows_across(step, flow, name, chunk, back=True)
        return _Back(flow, name, chunk, self._start(name, edges))

    def _tiles(
        self, step: Attend, bands: Callable[[int], IntArray], chunk: int, name: str, *, merges: bool = False
    ) -> None:
        shapes = shapes_of([map(bands, range(step.num_kv_ranks))], self.hardware.tile)
        parts = [step.chunks(rank)[chunk] for rank in range(self.degree)]
        heads = np.array([part.heads.stop - part.heads.start for part in parts])[self.head_ranks]
        seconds = seconds_of_calls(
            step, shapes, self.hardware, self.item, self.kv_ranks, heads, forward=self.is_forward
        )
        self.program.work(f"attend {name}", "kernel", seconds[0])
        if merges:
            size = step.value_head_dim if self.is_forward else step.head_dim
            rows = shapes.rows[0][self.kv_ranks] * heads
            self._copy("merge", rows * size * max(self.item, 4) * (3 if self.is_forward else 1))

    def _widths_of(self, step: Attend, name: str, chunk: int) -> IntArray:
        """`[degree]` bytes of a row on its way."""
        return np.array(
            [step.row_bytes(name, rank, self.item, step.chunks(rank)[chunk]) for rank in range(self.degree)]
        )

    def _rows_across(self, step: Attend, flow: Fetch, name: str, chunk: int, *, back: bool = False) -> Edges:
        counts = flow.split_counts.counts
        return self._across(step, counts.T if back else counts, chunk, self._widths_of(step, name, chunk))

    def _packed(self, step: Attend, flow: Fetch, name: str, chunk: int) -> None:
        rows = flow.split_counts.counts.sum(axis=1)[self.kv_ranks]
        self._copy(f"pack {name}", rows * self._widths_of(step, name, chunk)[self.head_ranks])

    def _in_order(self, step: Attend, flow: Fetch, name: str, chunk: int) -> None:
        """The copy that puts rows in order, of ranks where they are not."""
        jumbled = np.array([not flow.arrives_in_order(rank) for rank in range(step.num_kv_ranks)])
        rows = (flow.split_counts.counts.sum(axis=0) * jumbled)[self.kv_ranks]
        self._copy(f"order {name}", rows * self._widths_of(step, name, chunk)[self.head_ranks])

    def _came_back(self, step: Attend, back: _Back) -> None:
        """The wait for what others made of own rows, which is added to what this rank has."""
        flow, name, chunk, key = back
        self._wait(key)
        rows = flow.split_counts.counts.sum(axis=1)[self.kv_ranks]
        width = self._widths_of(step, name, chunk)[self.head_ranks]
        wider = 1 if name in SUMMED else max(4 // self.item, 1)
        self._copy(f"add {name}", rows * width * wider * (3 if self.is_forward else 1))

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
