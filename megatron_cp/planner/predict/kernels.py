"""Seconds that the kernels of a layer take on each rank, by `Hardware`'s rates. No torch in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_cp.layout.bands import areas, cut, tight_boxes
from megatron_cp.layout.packing import IntArray
from megatron_cp.layout.segments import Segments
from megatron_cp.plan.attention import Attend, Stage
from megatron_cp.plan.flows import PassOn, pieces_of
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Scan
from megatron_cp.planner.predict.hardware import Hardware
from megatron_cp.planner.predict.program import Seconds

CHUNK = 64  # tokens that a chunked kernel takes at once
_MOST_PIECES = 500_000  # of bands between ranks, beyond which a ring's stages are taken to be alike


class StageShapes(NamedTuple):
    """What the kernel calls of an attention are like, each `[stages, kv_ranks]`.

    Attributes:
        pairs: visible (query, key) pairs.
        cut: pairs of tiles that an edge of the mask cuts, which are computed for nothing.
        rows: queries of all bands.
        bands: how many there are.
    """

    pairs: IntArray
    cut: IntArray
    rows: IntArray
    bands: IntArray


def stage_shapes(step: Attend, tile: int) -> StageShapes:
    """Those of every stage, for a kernel that takes so many queries and keys at once."""
    found: StageShapes = step.memo(("stage shapes", tile), lambda: _stage_shapes(step, tile))
    return found


def _stage_shapes(step: Attend, tile: int) -> StageShapes:
    ranks, stages = range(step.num_kv_ranks), step.num_stages
    bands = [step.bands_of_kv_rank(rank) for rank in ranks]
    if stages == 1 or sum(step.count_bands(rank)[0] for rank in ranks) > _MOST_PIECES:
        of_ranks = [np.array([part.sum() for part in _shapes(each, tile)]) for each in bands]
        totals = -(-np.array(of_ranks).T // stages)
        return StageShapes(*(np.broadcast_to(each, (stages, len(each))) for each in totals))
    found = np.zeros((4, stages, step.num_kv_ranks), dtype=np.int64)
    edges, owners = pieces_of(step.keys)
    for rank, each in zip(ranks, bands, strict=True):
        pieces, number = cut(each, edges[:-1], edges[1:], queries=False)
        hops = (rank - owners[number]) % step.num_kv_ranks
        for row, weights in enumerate(_shapes(pieces, tile)):
            found[row, :, rank] = np.bincount(hops, weights, minlength=stages)
    return StageShapes(*found)


def _shapes(bands: IntArray, tile: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """`[n]` of each band: see `StageShapes`. Only where an edge runs through a band does it cut tiles: half of each."""
    pairs = areas(bands)
    q0, q1, k0, k1, lo, hi = tight_boxes(bands).T
    rows = q1 - q0
    late, early = np.clip(k1 - 1 - hi - q0, 0, rows), np.clip(q1 - 1 + lo - k0, 0, rows)
    wasted = sum(edge * np.minimum(edge, tile) // 2 for edge in (late, early))
    return pairs, np.minimum(wasted, pairs), rows, (rows > 0).astype(np.int64)


def attention_seconds(
    step: Attend, stage: Stage, hardware: Hardware, item_size: int, *, forward: bool
) -> Callable[[IntArray, IntArray], Seconds]:
    """A function of `[ranks]` KV ranks and query heads: seconds of a stage's kernel on each.

    Two products of the head sizes forward; five backward, which computes scores again.
    """
    number = stage.number if stage.keys is None or isinstance(stage.keys, PassOn) else 0
    pairs, wasted, rows, bands = (each[number] for each in stage_shapes(step, hardware.tile))
    computed, way = pairs + wasted, 0 if forward else 1
    size, value = step.head_dim, step.value_head_dim
    each = 2 * (size + value) if forward else 2 * (3 * size + 2 * value)
    rate = hardware.attention_rate((size + value) // 2, forward=forward) / hardware.slower(item_size)
    tiles = -(-rows // hardware.tile)

    def seconds(kv_ranks: IntArray, heads: IntArray) -> Seconds:
        work, units = computed[kv_ranks] * heads, tiles[kv_ranks] * heads
        short = 1 + hardware.units / np.maximum(units, 1)
        calls = hardware.call + hardware.band[way] * bands[kv_ranks] + hardware.row[way] * rows[kv_ranks] * heads
        found: Seconds = (work > 0) * (work * each / rate * short + calls)
        return found

    return seconds


def rule_products(plan: Plan) -> float:
    """Multiply-adds of the chunked rule for one token and head, forward."""
    kind = KINDS[plan.kind]
    if not kind.has_state:
        return float(plan.conv_width)
    blocks = {block.name: block for block in plan.sections.blocks}
    keys, values = (blocks[name].head_dim for name in (kind.keys, kind.values))
    rule = CHUNK * (keys + values) + 2 * keys * values
    if kind.is_dense:
        rule += CHUNK * (keys + (keys + values) // 2) + keys * values
    return float(rule)


def chunked_tokens(plan: Plan) -> IntArray:
    """`[ranks]` tokens of the chunks that a rank computes: the last one of each piece of a document is filled up."""

    def found() -> IntArray:
        layout = plan.layout
        if not plan.recurrent_steps:
            return np.full(plan.cp_size, (-(-layout.packing.lengths // CHUNK) * CHUNK).sum())
        segments = Segments.of(layout)
        filled = -(-(segments.end - segments.start) // CHUNK) * CHUNK
        return np.bincount(segments.rank, filled, minlength=plan.cp_size).astype(np.int64)

    tokens: IntArray = plan.memo(("chunked tokens",), found)
    return tokens


def rule_seconds(plan: Plan, hardware: Hardware, item_size: int, *, forward: bool, chunks: int = 1) -> Seconds:
    """`[ranks]` seconds of the chunked rule for a rank's tokens and heads, or one of several chunks of them.

    Args:
        chunks: parts of the heads, each with a call of its own.
    """
    heads = np.array([hi - lo for rank in range(plan.cp_size) for lo, hi in (plan.heads_of(rank),)])
    products = chunked_tokens(plan) * heads * rule_products(plan) * (1 if forward else 2) / chunks
    kind = KINDS[plan.kind].rule
    taken = products / hardware.rule_rate(kind, forward=forward) * hardware.slower(item_size)
    floor = hardware.rule_floor * (1 if forward else 2)
    found: Seconds = (products > 0) * (np.maximum(taken, floor) + hardware.beside_rule(kind))
    return found


def convolution_seconds(
    plan: Plan, hardware: Hardware, item_size: int, tokens: IntArray, *, forward: bool, chunks: int = 1
) -> Seconds:
    """`[ranks]` seconds of the causal convolution of so many tokens and a rank's heads, or one of several chunks."""
    convolved = plan.sections.blocks[: KINDS[plan.kind].convolved]
    channels = np.array(
        [sum(block.heads_on(rank) * block.head_dim for block in convolved) for rank in range(plan.ulysses_degree)]
    )[np.arange(plan.cp_size) % plan.ulysses_degree]
    elements = tokens * channels / chunks
    rate = hardware.convolution[0 if forward else 1] / hardware.slower(item_size)
    found: Seconds = (elements > 0) * (elements / rate + hardware.launch)
    return found


def scan_products(plan: Plan, step: Scan, *, forward: bool) -> Seconds:
    """`[ranks]` multiply-adds of the maps of segments that a document goes on before and after."""
    kind, segments = KINDS[plan.kind], step.segments
    middle = segments.past & segments.future
    tokens = np.bincount(segments.rank, (segments.end - segments.start) * middle, minlength=plan.cp_size)
    keys, values = step.key_dim, step.value_dim
    walk = keys * values * (2 if kind.is_dense else 1)
    found: Seconds = tokens * step.heads * float(walk + (2 * keys * keys if kind.is_dense and forward else 0))
    return found


def scan_seconds(plan: Plan, step: Scan, hardware: Hardware, item_size: int, *, forward: bool) -> Seconds:
    """`[ranks]` seconds of those maps."""
    rate = hardware.rule_rate(KINDS[plan.kind].rule, forward=forward) / hardware.slower(item_size)
    found: Seconds = scan_products(plan, step, forward=forward) / rate
    return found
