"""`AttentionWalk`: prices the instructions of an attention's program. No torch in here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.by_host import ByHost
from megatron_cp.plan.flows import Fetch, PassOn, Return, RowFlow
from megatron_cp.plan.payloads import Payload
from megatron_cp.plan.program import Compute, ComputeRemote, Instruction, Merge, Order, Pack, Start, Wait
from megatron_cp.planner.predict.kernels import StageSeconds, seconds_of_calls, shapes_of, stage_seconds
from megatron_cp.planner.predict.program import Edges
from megatron_cp.planner.predict.walk_base import WalkBase

_NAMES = {
    Payload.KEYS: "keys and values",
    Payload.KEY_GRADIENTS: "gradients of keys and values",
    Payload.KEY_GRADIENT_SUMS: "gradients of keys and values",
}


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
            case Compute(keys=int() as keys) | ComputeRemote(keys=keys):
                return self._rows.pop(keys, None)  # none for the own block of a ring, and after remote queries
        return None


class AttentionWalk(WalkBase):
    """A walk over the softmax of a plan, in the order of its program."""

    def _attend(self, step: Attend) -> None:
        self._row_widths: dict[tuple[Payload, int], IntArray] = {}
        keys = dict[int, int]()
        coded = _CodedRows(step) if step.coded_bytes(self.item) else None
        if coded is not None:  # own keys, coded in forward alone, and decoded
            own = self._bytes(step, step.keys.token_counts, Payload.KEY_GRADIENTS, 0) * step.head_chunks
            self._copy("code keys", own * (2 if self.is_forward else 1))
        seconds = dict[int, StageSeconds]()
        for do in step.program(forward=self.is_forward):
            if coded is not None and (rows := coded.decoded_by(do)) is not None:
                self._copy("decode keys", self._bytes(step, rows, Payload.KEY_GRADIENTS, do.part.chunk))
            match do:
                case Pack(payload=payload, flow=flow):
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
                case Compute() if step.tiled is not None:
                    self._compute_assigned(step, do)
                case Compute():
                    if do.part.chunk not in seconds:
                        seconds[do.part.chunk] = stage_seconds(
                            self.plan, step, do.part.chunk, self.hardware, self.item, forward=self.is_forward
                        )
                    stage, priced = do.part.stage, seconds[do.part.chunk]
                    self.program.work(f"attend stage {stage.number}", "kernel", priced.kernels[stage.number])
                    if not stage.is_first:
                        self.program.work("merge", "copy", priced.merge)
                case ComputeRemote():
                    assert do.part.stage.assigned is not None
                    assert do.part.stage.assigned.remote is not None
                    self._tiles(step, do.part.stage.assigned.remote, do.part.chunk, "remote queries")
                case Merge():
                    self._merge(step, do)

    def _start_rows(self, step: Attend, flow: RowFlow, payload: Payload, chunk: int) -> int:
        name, widths = _NAMES.get(payload, payload.value), self._widths_of(step, payload, chunk)
        if isinstance(flow, PassOn):
            rows = flow.rows_sent_by_ranks()[self.kv_ranks]
            return self.program.start(
                name,
                Edges.from_messages(self.ranks, self.next_ranks, rows * widths[self.head_ranks]),
                overlap=self.hardware.ring[0 if self.is_forward else 1],
                host=self.hardware.host[1],
            )
        assert isinstance(flow, Fetch | Return)
        counts, shares = flow.split_counts.counts, isinstance(flow, Fetch) and flow.equal_shares
        if shares:
            assert isinstance(flow, Fetch)
            counts = np.full_like(counts, flow.longest)
        is_second = isinstance(flow.fetch if isinstance(flow, Return) else flow, ByHost)
        return self._start(name, self._row_edges(step, counts, widths), shares=shares, is_second=is_second)

    def _compute_assigned(self, step: Attend, do: Compute) -> None:
        stage = do.part.stage
        if stage.local is not None:
            self._tiles(step, stage.local.local_tiles, do.part.chunk, "own keys")
        elif stage.assigned is not None:
            self._tiles(step, stage.assigned.own, do.part.chunk, "far keys", merges=True)

    def _merge(self, step: Attend, do: Merge) -> None:
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
