"""The head exchange as a differentiable step: pack, one collective, unpack, in either direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.pack import (
    Geometry,
    pack_heads,
    pack_tokens,
    section_columns,
    unpack_heads,
    unpack_tokens,
)
from megatron_cp.executor.groups import RankGroup, as_rank_group


def to_heads(exchange: Exchange, group: RankGroup, *tensors: Tensor) -> list[Tensor]:
    """From this rank's tokens and all heads to all tokens and this rank's heads.

    Args:
        exchange: what changes places; its layout has as many ranks as `group`.
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
    exchange, group = _of_node(exchange, as_rank_group(group, exchange.layout.cp_size))
    at = _geometry(exchange, group, tensors)
    if exchange.is_local:
        lead = tensors[0].shape[:-1]
        rows = [tensor.flatten(0, -2) for tensor in tensors]
        blocks = exchange.sections.blocks
        return [
            columns.view(*lead, block.num_heads, block.head_dim)
            for columns, block in zip(section_columns(rows, exchange), blocks, strict=True)
        ]
    return list(_HeadExchange.apply(at, group, [tensor.shape[-1] for tensor in tensors], True, *tensors))


def to_tokens(exchange: Exchange, group: RankGroup, *sections: Tensor) -> list[Tensor]:
    """From all tokens and this rank's heads to this rank's tokens and all heads: the adjoint of `to_heads`.

    Args:
        sections: for each section of the exchange `[T, h, d]` or `[T, b, h, d]`.

    Returns:
        for each section `[t, f]` or `[t, b, f]`, pad rows zero. A head that several ranks return is summed.
    """
    exchange, group = _of_node(exchange, as_rank_group(group, exchange.layout.cp_size))
    blocks = exchange.sections.blocks
    if len(sections) != len(blocks):
        raise ArgumentError(
            "sections", f"{len(sections)} tensors", f"{len(blocks)}: {[block.name for block in blocks]}"
        )
    batch = sections[0].shape[1] if sections[0].ndim == 4 else None
    at = Geometry(exchange, group.rank, tuple(section.dtype for section in sections), batch, sections[0].device)
    lead = (exchange.layout.packing.total,) if batch is None else (exchange.layout.packing.total, batch)
    for block, section in zip(blocks, sections, strict=True):
        expected = (*lead, block.heads_on(group.rank), block.head_dim)
        if section.shape != expected:
            raise ArgumentError(f"section {block.name!r}", tuple(section.shape), f"{expected}")
    if exchange.is_local:
        return [section.flatten(-2) for section in sections]
    return list(_HeadExchange.apply(at, group, [block.width for block in blocks], False, *sections))


def _of_node(exchange: Exchange, group: RankGroup) -> tuple[Exchange, RankGroup]:
    """The exchange within this rank's node, and the ranks of that node."""
    first = group.rank - group.rank % exchange.degree
    return exchange.of_node(first // exchange.degree), group.part(range(first, first + exchange.degree))


class _HeadExchange(torch.autograd.Function):
    """Both directions: the backward of one is the other, so direction is data."""

    @staticmethod
    def forward(ctx: Any, at: Geometry, group: RankGroup, widths: list[int], to_heads: bool, *tensors: Tensor) -> Any:
        ctx.exchange = (at, group, widths, to_heads)
        return tuple(_move(at, group, widths, to_heads, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        at, group, widths, to_heads = ctx.exchange
        return None, None, None, None, *_move(at, group, widths, not to_heads, gradients)


def _move(at: Geometry, group: RankGroup, widths: list[int], to_heads: bool, tensors: Any) -> list[Tensor]:
    token_side, head_side = at.token_side_splits, at.head_side_splits
    if to_heads:
        return unpack_heads(_collective(group, pack_tokens(tensors, at), token_side, head_side), at)
    return unpack_tokens(_collective(group, pack_heads(tensors, at), head_side, token_side), at, widths)


def _collective(group: RankGroup, sent: Tensor, sent_splits: list[int], received_splits: list[int]) -> Tensor:
    received = sent.new_empty(sum(received_splits))
    group.all_to_all(received, sent, received_splits, sent_splits)
    return received


def _geometry(exchange: Exchange, group: RankGroup, tensors: tuple[Tensor, ...]) -> Geometry:
    if not tensors:
        raise ArgumentError("tensors", (), "at least one")
    rows = int(exchange.layout.row_counts[group.rank])
    lead = tensors[0].shape[:-1]
    for number, tensor in enumerate(tensors):
        if tensor.ndim not in (2, 3) or tensor.shape[:-1] != lead or tensor.shape[0] != rows:
            raise ArgumentError(
                f"tensors[{number}]",
                f"shape {tuple(tensor.shape)}",
                f"[{rows}, f] or [{rows}, b, f] on rank {group.rank}",
            )
    starts = [tensor.new_empty(0, tensor.shape[-1]) for tensor in tensors]
    dtypes = tuple(columns.dtype for columns in section_columns(starts, exchange))
    return Geometry(exchange, group.rank, dtypes, lead[1] if len(lead) == 2 else None, tensors[0].device)
