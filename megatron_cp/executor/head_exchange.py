"""The head exchange as differentiable steps: pack, transport, unpack; in both directions, and in parts of the heads.

Starting a part does not block; the other side waits for it. So with several parts, one travels while another is
computed:

    to heads     token side: pack and start every part      head side, part by part: wait, unpack
    to tokens    head side, part by part: pack, start       token side: wait for every part, unpack

Backward is the other direction between the same sides. Autograd runs the newest step first, which mirrors the order:
the token side starts the gradients of every part at once, and each part's own start while the next is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry, geometry_of
from megatron_cp.exchange.messages import (
    keeps_message,
    pack_heads,
    pack_tokens,
    section_columns,
    unpack_heads,
    unpack_tokens,
)
from megatron_cp.executor.communicator import Communicator, over
from megatron_cp.executor.groups import Pending, RankGroup
from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.executor.trace import NO_RANGE, profiling

_NAMES = ("to_tokens", "to_heads")  # of the directions, in ranges of a profiler


def to_heads(exchange: Exchange, group: RankGroup | Communicator, *tensors: Tensor) -> list[Tensor]:
    """Moves tensors from this rank's tokens with all heads to all tokens with this rank's heads.

    Args:
        exchange: the sections that change places, all heads together; its layout has as many ranks as `group`.
        tensors: `[t, f]` (packed THD) or `[t, b, f]` (SBHD), t being the layout's rows of this rank, pad rows included.
            Their features, laid end to end, are the sections of the exchange in order: q, k and v may be three
            tensors or one. Types may differ from tensor to tensor; all travel in one message.

    Returns:
        for each section `[T, h, d]` or `[T, b, h, d]`, T being all tokens in stream order and h this rank's heads of
        the section. Views of one buffer where the exchange crosses ranks. The gradient of a head that several ranks
        hold is summed.

    Raises:
        ArgumentError: tensors that do not fit the layout or the sections.
    """
    inbound = ToHeadsInParts(exchange, group)
    inbound.start(*tensors, alone=True)
    return inbound.finish()


def to_tokens(exchange: Exchange, group: RankGroup | Communicator, *sections: Tensor) -> list[Tensor]:
    """Moves tensors from all tokens with this rank's heads to this rank's tokens with all heads; adjoint of `to_heads`.

    Args:
        sections: for each section of the exchange `[T, h, d]` or `[T, b, h, d]`.

    Returns:
        for each section `[t, f]` or `[t, b, f]`, pad rows zero. A head that several ranks return is summed.
    """
    back = ToTokensInParts(exchange, group)
    back.start(0, *sections)
    return back.finish()


class _MoveInParts:
    """A differentiable move of one exchange, whose parts start and finish separately. It is used once."""

    def __init__(self, exchange: Exchange, group: RankGroup | Communicator) -> None:
        comm = over(group)
        if comm.size != exchange.layout.cp_size:
            allowed = f"the {exchange.layout.cp_size} ranks that the plan is for"
            raise ArgumentError("group", f"{comm.size} ranks", allowed)
        first = comm.rank - comm.rank % exchange.degree
        # Heads are exchanged among the ranks of one `kv_rank`.
        self._exchange = exchange.subgroup(first // exchange.degree)
        self._comm = comm.part(range(first, first + exchange.degree))
        self._in_flight: InFlightExchange | None = None
        # Between the start and the end of a part autograd sees an order token: an empty tensor that keeps the order of
        # steps. A move whose only part starts and finishes in one autograd function needs none.
        self._order_tokens: Sequence[Tensor] = ()


class ToHeadsInParts(_MoveInParts):
    """`to_heads` in parts: call `start`, then `finish` for each part in order.

    Attributes:
        num_parts: the number of parts, set by `start`.
    """

    num_parts = 1

    def start(self, *tensors: Tensor, alone: bool = False) -> None:
        """Starts every part of `tensors`, which are those of `to_heads`.

        Args:
            alone: no other work is done before `finish` of the first part, so that nothing needs to start earlier.
        """
        at = _geometry(self._exchange, self._comm, tensors)
        self._tensors = tensors
        if self._exchange.is_local:
            return
        in_flight = InFlightExchange(at, self._comm, [tensor.shape[-1] for tensor in tensors])
        self._in_flight, self.num_parts = in_flight, in_flight.num_parts
        if not alone or self.num_parts > 1:
            self._order_tokens, self._tensors = _StartParts.apply(in_flight, True, range(self.num_parts), *tensors), ()

    def finish(self, part: int = 0) -> list[Tensor]:
        """Waits for one part, and returns its sections as `to_heads` does."""
        if self._exchange.is_local:
            return _without_transfer(self._exchange, self._tensors)
        if not self._order_tokens:
            return list(_MoveWhole.apply(self._in_flight, True, *self._tensors))
        return list(_FinishParts.apply(self._in_flight, True, (part,), self._order_tokens[part]))


class ToTokensInParts(_MoveInParts):
    """`to_tokens` in parts: call `start` for each part in order, then `finish`."""

    def start(self, part: int, *sections: Tensor) -> None:
        """Starts one part: for each section `[T, h, d]` or `[T, b, h, d]`, h being this rank's heads in that part.

        The only part of an exchange is also waited for, since no other work is left to overlap with it.
        """
        exchange = self._exchange
        if len(sections) != len(exchange.sections.blocks):
            names = [block.name for block in exchange.sections.blocks]
            raise ArgumentError("sections", f"{len(sections)} tensors", f"{len(names)}: {names}")
        batch = sections[0].shape[1] if sections[0].ndim == 4 else None
        dtypes = tuple([section.dtype for section in sections])
        at = geometry_of(exchange, self._comm.rank, dtypes, batch, sections[0].device, self._comm.tables)
        for view, section, block in zip(at.parts[part].table_views, sections, exchange.sections.blocks, strict=True):
            if section.shape != view.shape:
                raise ArgumentError(f"section {block.name!r}", tuple(section.shape), f"{view.shape}")
        if exchange.is_local:
            self._moved = [section.flatten(-2) for section in sections]
            return
        if self._in_flight is None:
            self._in_flight = InFlightExchange(at, self._comm, [block.width for block in exchange.sections.blocks])
        if self._in_flight.num_parts == 1:
            self._moved = list(_MoveWhole.apply(self._in_flight, False, *sections))
        else:
            self._order_tokens = [*self._order_tokens, *_StartParts.apply(self._in_flight, False, (part,), *sections)]

    def finish(self) -> list[Tensor]:
        """Waits for every part, and returns the tensors that `to_tokens` returns."""
        if not self._order_tokens:
            return self._moved
        return list(_FinishParts.apply(self._in_flight, False, range(len(self._order_tokens)), *self._order_tokens))


# Forward runs an instruction of the layer's program, `Move(..., to_heads, starts, parts)`, and backward its adjoint.


class _StartParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, in_flight: InFlightExchange, to_heads: bool, parts: Sequence[int], *tensors: Tensor) -> Any:
        ctx.adjoint = in_flight, not to_heads, parts[::-1]
        in_flight.start(to_heads, parts, tensors, forward=True)
        return tuple([tensors[0].new_empty(0) for _ in parts])

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *order_tokens: Tensor) -> Any:
        in_flight, to_heads, parts = ctx.adjoint
        return None, None, None, *in_flight.finish(to_heads, parts, forward=False)


class _FinishParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, in_flight: InFlightExchange, to_heads: bool, parts: Sequence[int], *order_tokens: Tensor
    ) -> Any:
        ctx.adjoint, ctx.dtypes = (in_flight, not to_heads, parts[::-1]), [each.dtype for each in order_tokens]
        if not to_heads:
            # A checkpoint recomputes until it has what was saved. It must come this far: no part may stay under way.
            ctx.save_for_backward(*order_tokens)
        return tuple(in_flight.finish(to_heads, parts, forward=True))

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, (in_flight, to_heads, parts) = ctx.saved_tensors, ctx.adjoint
        in_flight.start(to_heads, parts, gradients, forward=False)
        return None, None, None, *[gradients[0].new_empty(0, dtype=dtype) for dtype in ctx.dtypes]


class _MoveWhole(torch.autograd.Function):
    """Both at once, of the only part."""

    @staticmethod
    def forward(ctx: Any, in_flight: InFlightExchange, to_heads: bool, *tensors: Tensor) -> Any:
        ctx.adjoint = in_flight, not to_heads
        in_flight.start(to_heads, (0,), tensors, forward=True)
        return tuple(in_flight.finish(to_heads, (0,), forward=True))

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        in_flight, to_heads = ctx.adjoint
        in_flight.start(to_heads, (0,), gradients, forward=False)
        return None, None, *in_flight.finish(to_heads, (0,), forward=False)


def _without_transfer(exchange: Exchange, tensors: Sequence[Tensor]) -> list[Tensor]:
    lead = tensors[0].shape[:-1]
    rows = [tensor.flatten(0, -2) for tensor in tensors]
    return [
        columns.view(*lead, block.num_heads, block.head_dim)
        for columns, block in zip(section_columns(rows, exchange), exchange.sections.blocks, strict=True)
    ]


class InFlightExchange:
    """The messages of one exchange that are under way on one rank, in forward and later in backward."""

    def __init__(self, at: Geometry, comm: Communicator, widths: list[int]) -> None:
        self.comm, self.widths = comm, widths
        self.at = (at.gradients, at)  # indexed by `forward`
        self.num_parts = len(at.parts)
        self.under_way: dict[int, tuple[Pending, Tensor, Tensor]] = {}  # by part; the tensors are sent and received

    def start(self, to_heads: bool, parts: Sequence[int], tensors: Sequence[Tensor], *, forward: bool) -> None:
        """Packs and starts parts in one direction."""
        for part in parts:
            with self._traced(_NAMES[to_heads], part, forward=forward) if profiling() else NO_RANGE:
                at = self.at[forward].parts[part]
                if to_heads:
                    received = self.comm.acquire(at.head_side_bytes, at.device, kept=keeps_message(at))
                    sent = pack_tokens(tensors, at, self.comm.buffers)
                else:
                    received = self.comm.acquire(at.token_side_bytes, at.device)
                    sent = pack_heads(tensors, at, self.comm.buffers)
                split_counts = at.split_counts(to_heads=to_heads)
                pending = self.comm.start_all_to_all(received, sent, split_counts, at.steps[to_heads])
                self.under_way[part] = pending, sent, received

    def finish(self, to_heads: bool, parts: Sequence[int], *, forward: bool) -> list[Tensor]:
        """Waits for parts, in the order in which they were started.

        Returns the sections of one part, or the tensors of the token side from all parts.
        """
        for part in parts:
            pending, sent, _ = self.under_way[part]
            with self._traced(f"{_NAMES[to_heads]} wait", part, forward=forward) if profiling() else NO_RANGE:
                pending.wait()
            self.comm.release(sent)
        messages = [self.under_way.pop(part)[2] for part in sorted(parts)]
        one = parts[0] if to_heads else None
        with self._traced(f"{_NAMES[to_heads]} unpack", one, forward=forward) if profiling() else NO_RANGE:
            at = self.at[forward]
            tensors = (
                unpack_tokens(messages, at, self.widths) if one is None else unpack_heads(messages[0], at.parts[one])
            )
        self.comm.release(*messages)
        return tensors

    def _traced(self, step: str, part: int | None, *, forward: bool) -> record_function:
        """Returns the range of a step of one part, or of all parts if `part` is None."""
        at = self.at[forward] if part is None else self.at[forward].parts[part]
        names = ",".join(block.name for block in at.exchange.sections.blocks)
        chunk = (0, 1) if part is None else (part, self.num_parts)
        return self.comm.traced(step, names, forward=forward, chunk=chunk)


def _geometry(exchange: Exchange, comm: Communicator, tensors: tuple[Tensor, ...]) -> Geometry:
    if not tensors:
        raise ArgumentError("tensors", (), "at least one")
    rank, lead, kinds = comm.rank, tensors[0].shape[:-1], []
    rows = exchange.layout.row_counts[rank]
    for number, tensor in enumerate(tensors):
        if tensor.ndim not in (2, 3) or tensor.shape[:-1] != lead or lead[0] != rows:
            raise ArgumentError(
                f"tensors[{number}]", f"shape {tuple(tensor.shape)}", f"[{rows}, f] or [{rows}, b, f] on rank {rank}"
            )
        kinds.append((tensor.shape[-1], tensor.dtype))

    def make() -> tuple[torch.dtype, ...]:
        return tuple(columns.dtype for columns in section_columns([x.flatten(0, -2) for x in tensors], exchange))

    dtypes = exchange.memo(tuple(kinds), make)
    batch = lead[1] if len(lead) == 2 else None
    return geometry_of(exchange, rank, dtypes, batch, tensors[0].device, comm.tables)
