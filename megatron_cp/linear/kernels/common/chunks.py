"""Cuts the tokens of a rank into chunks, and orders the chunks for the recurrence of the state.

A whole document of at most `SHORT[-1]` tokens is one chunk, of the least width of `SHORT` that holds it, and has no
state: padded to `CHUNK` tokens, a document of one token would cost as much as one of 64. Every other piece is cut into
chunks of `CHUNK` tokens. The last chunk of a piece is padded with tokens that change nothing.

All pieces of one class take their steps together: step i computes chunk i of every piece that has one, longest pieces
first, so that a step is one slice of the chunks. The classes differ in when a state is known (see `LocalScan`):

    single   no past and no future        first    no past, a future
    middle   a past and a future          last     a past, no future
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.layout.packing import IntArray, Packing
from megatron_cp.layout.segments import BoolArray
from megatron_cp.linear.kernels.base import LinearCall

CHUNK = 64
SHORT = (4, 16)  # widths; with less than 4 the matrices of a chunk would not begin at cache lines: see `chunked.py`


@dataclass(frozen=True)
class PieceClass:
    """Pieces of documents that step through their chunks together.

    Attributes:
        pieces: numbers of the pieces, the longest first.
        steps: the slice of the chunks that each step computes: its start and its number of pieces.
    """

    pieces: list[int]
    steps: list[tuple[int, int]]


class TokenChunks:
    """The chunks of one rank's tokens, class after class.

    Attributes:
        width: tokens of a chunk.
        num_known: number of chunks of the classes single and first, whose pieces begin with a state of zero.
        slots, sources: the slot of each token, and the token of each slot.
        begins: where pieces follow each other in one recurrence, `[num_chunks]` bools, True for the first chunk of a
            piece, before which the state is zero. None where pieces have states of their own.
    """

    single: PieceClass
    first: PieceClass
    middle: PieceClass
    last: PieceClass
    begins: Tensor | None = None
    width: int = CHUNK

    def __init__(
        self, packing: Packing, past: BoolArray, future: BoolArray, device: torch.device, width: int = CHUNK
    ) -> None:
        self.width = width
        counts = -(-packing.lengths // width)
        chunk_of: list[IntArray] = []  # for each piece, in the order of the classes, the chunk of each step
        order: list[IntArray] = []
        start = 0
        for name, has_past, has_future in (
            ("single", False, False), ("first", False, True), ("middle", True, True), ("last", True, False),
        ):  # fmt: skip
            members = np.flatnonzero((past == has_past) & (future == has_future) & (counts > 0))
            members = members[np.argsort(-counts[members], kind="stable")]
            longest = int(counts[members[0]]) if members.size else 0
            active = np.searchsorted(-counts[members], -np.arange(longest), side="left")
            starts = start + np.cumsum(active) - active
            setattr(self, name, PieceClass(members.tolist(), list(zip(starts.tolist(), active.tolist(), strict=True))))
            order.append(members)
            chunk_of += [starts[: counts[piece]] + number for number, piece in enumerate(members.tolist())]
            start += int(active.sum())
            if not has_past:
                self.num_known = start
        self.num_chunks = start
        slots, sources = _slots(packing, np.concatenate(order), counts, chunk_of, start, width)
        self.slots, self.sources = on_device(slots, device), on_device(sources, device)

    def split(self, x: Tensor) -> Tensor:
        """Splits `[T, h, d]` into `[n, h, C, d]`, padded with zeros: a key and a log decay of zero change nothing."""
        filled = _Rechunk.apply(x, self.slots, self.sources, True)
        return filled.unflatten(0, (self.num_chunks, self.width)).transpose(1, 2).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """Undoes `split`."""
        return _Rechunk.apply(x.transpose(1, 2).flatten(0, 1), self.slots, self.sources, False)


def fixed_chunks(packing: Packing, *, continued: bool = False) -> dict[str, NDArray]:
    """Returns the tables of `FixedChunks` by name; shapes depend on the numbers of tokens and documents only.

    With `continued`, the first document continues one of another rank.
    """
    counts = -(-packing.lengths // CHUNK)
    num_chunks = packing.total // CHUNK + packing.num_documents
    first = np.cumsum(counts) - counts
    positions = packing.positions()
    slots = np.repeat(first, packing.lengths) * CHUNK + positions
    sources = np.full(num_chunks * CHUNK, packing.total)
    sources[slots] = np.arange(packing.total)
    begins = np.zeros(num_chunks, dtype=bool)
    begins[first[packing.lengths > 0]] = True  # chunks that a packing does not have leave the last state as it is
    begins[0] &= not continued
    return {"slots": slots.astype(np.int32), "sources": sources.astype(np.int32), "begins": begins}


class FixedChunks(TokenChunks):
    """The chunks of documents one after another, a step each, as many for every pack, for CUDA graphs.

    Args:
        tables: the tables of `fixed_chunks`, on a device.
        past, future: True if other ranks have tokens of the stream before these, and after them.
    """

    def __init__(self, tables: Mapping[str, Tensor], *, past: bool = False, future: bool = False) -> None:
        self.slots, self.sources, self.begins = tables["slots"], tables["sources"], tables["begins"]
        self.num_chunks = len(self.begins)
        self.num_known = 0 if past else self.num_chunks
        self.single = self.first = self.middle = self.last = PieceClass([], [])
        whole = PieceClass([0], [(number, 1) for number in range(self.num_chunks)])
        setattr(self, ("middle" if future else "last") if past else "first" if future else "single", whole)


def _slots(
    packing: Packing, order: IntArray, counts: IntArray, chunk_of: list[IntArray], num_chunks: int, width: int
) -> tuple[IntArray, IntArray]:
    """Returns the slot of each token, and the token of each slot, which is the number of tokens for empty slots."""
    offset = np.zeros(counts.size, dtype=np.int64)  # where each piece's chunks are in the table
    offset[order] = np.cumsum(counts[order]) - counts[order]
    table: NDArray[np.int64] = np.concatenate(chunk_of) if chunk_of else np.zeros(0, dtype=np.int64)
    positions = packing.positions()
    piece = np.repeat(np.arange(counts.size), packing.lengths)
    slots = table[offset[piece] + positions // width] * width + positions % width
    sources = np.full(num_chunks * width, packing.total)
    sources[slots] = np.arange(packing.total)
    return slots, sources


class Parts:
    """The tokens of one rank in parts, in each of which chunks have one width.

    Attributes:
        chunks: the chunks of each part, which count its own tokens. Those of the last part are `CHUNK` wide, and alone
            may have states before and after them.
        spans: for each part, its range of the tokens in the order of the parts.
        order, inverse: the token at each place of that order, and the place of each token; None if it is the given one.
    """

    def __init__(self, call: LinearCall) -> None:
        lengths = call.packing.lengths
        none = np.zeros(lengths.size, dtype=bool)
        past, future = (none, none) if call.segments is None else (call.segments.past, call.segments.future)
        widths = np.append(SHORT, CHUNK)
        kind = np.where(past | future, len(SHORT), np.searchsorted(SHORT, lengths))
        self.chunks, self.spans, start = list[TokenChunks](), list[tuple[int, int]](), 0
        for number, width in enumerate(widths.tolist()):
            members = np.flatnonzero((kind == number) & (lengths > 0))
            if members.size or width == CHUNK:
                packing = Packing(lengths[members] if members.size else [0])
                own = (past[members], future[members]) if members.size else (none[:1], none[:1])
                self.chunks.append(TokenChunks(packing, *own, call.device, width))
                self.spans.append((start, start + packing.total))
                start += packing.total
        order = np.argsort(np.repeat(kind, lengths), kind="stable")
        self.order = self.inverse = None
        if (np.diff(order) < 0).any():
            self.order, self.inverse = on_device(order, call.device), on_device(np.argsort(order), call.device)

    @classmethod
    def from_call(cls, call: LinearCall) -> Parts:
        """Returns the parts of a call, which are made once for all layers of a batch."""
        found: Parts = call.packing.memo(("chunks", call.device, call.segments is None), lambda: cls(call))
        return found

    def in_order(self, x: Tensor) -> Tensor:
        """Brings tokens into the order of the parts."""
        return x if self.order is None else _Rechunk.apply(x, self.order, self.inverse, False)

    def join(self, parts: list[Tensor]) -> Tensor:
        """Joins the tokens of all parts, and undoes `in_order`."""
        found = torch.cat(parts) if len(parts) > 1 else parts[0]
        return found if self.order is None else _Rechunk.apply(found, self.inverse, self.order, False)


class _Rechunk(torch.autograd.Function):
    """Moves tokens to chunk slots or back. The gradient of one is the other, so that both are gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, sources: Tensor, split: bool) -> Tensor:
        ctx.tables = (slots, sources, split)
        return _rechunked(x, slots, sources, split)

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        slots, sources, split = ctx.tables
        return _rechunked(gradients[0], slots, sources, not split), None, None, None


def _rechunked(x: Tensor, slots: Tensor, sources: Tensor, split: bool) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, sources) if split else x.index_select(0, slots)
