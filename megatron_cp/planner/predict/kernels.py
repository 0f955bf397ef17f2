"""Seconds that the kernels of a layer take on each rank, by `Hardware`'s rates. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from megatron_cp.layout.bands import areas, cut
from megatron_cp.layout.packing import IntArray
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
        rows: queries of all bands, each of which cuts a tile of keys where its band ends.
        bands: how many there are.
    """

    pairs: IntArray
    rows: IntArray
    bands: IntArray


def stage_shapes(step: Attend) -> StageShapes:
    """Those of every stage."""
    found: StageShapes = step.memo(("stage shapes",), lambda: _stage_shapes(step))
    return found


def _stage_shapes(step: Attend) -> StageShapes:
    ranks, stages = range(step.num_kv_ranks), step.num_stages
    bands = [step.bands_of_kv_rank(rank) for rank in ranks]
    of_ranks = shapes_of(bands)
    if stages == 1:
        return StageShapes(*(each[None] for each in of_ranks))
    if sum(step.count_bands(rank)[0] for rank in ranks) > _MOST_PIECES:
        return StageShapes(*(np.broadcast_to(-(-each // stages), (stages, len(each))) for each in of_ranks))
    found = np.zeros((3, stages, step.num_kv_ranks), dtype=np.int64)
    edges, owners = pieces_of(step.keys)
    for rank, each in zip(ranks, bands, strict=True):
        pieces, number = cut(each, edges[:-1], edges[1:], queries=False)
        hops = (rank - owners[number]) % step.num_kv_ranks
        for row, weights in enumerate((areas(pieces), pieces[:, 1] - pieces[:, 0], None)):
            found[row, :, rank] = np.bincount(hops, weights, minlength=stages)
    return StageShapes(*found)


def attention_seconds(
    step: Attend, stage: Stage, hardware: Hardware, item_size: int, *, forward: bool
) -> Callable[[IntArray, IntArray], Seconds]:
    """A function of `[ranks]` KV ranks and query heads: seconds of a stage's kernel on each.

    Two products of the head sizes forward; five backward, which computes scores again. Of a tile that a mask cuts
    half is computed for nothing, so each band's queries have half a tile of keys more.
    """
    number = stage.number if stage.keys is None or isinstance(stage.keys, PassOn) else 0
    shapes = StageShapes(*(each[number] for each in stage_shapes(step)))
    return seconds_of_calls(step, shapes, hardware, item_size, forward=forward)


def shapes_of(bands: Iterable[IntArray]) -> StageShapes:
    """Those of one kernel call on each KV rank, from its bands: each `[kv_ranks]`."""
    found = [[areas(each).sum(), (each[:, 1] - each[:, 0]).sum(), len(each)] for each in bands]
    return StageShapes(*np.array(found, dtype=np.int64).T)


def seconds_of_calls(
    step: Attend, shapes: StageShapes, hardware: Hardware, item_size: int, *, forward: bool
) -> Callable[[IntArray, IntArray], Seconds]:
    """`attention_seconds` of kernel calls of these shapes, each `[kv_ranks]`."""
    pairs, rows, bands = shapes
    computed = pairs + np.minimum(rows * (hardware.tile / 2), pairs)
    size, value = step.head_dim, step.value_head_dim
    each = 2 * (size + value) if forward else 2 * (3 * size + 2 * value)
    rate = hardware.attention_rate((size + value) // 2, forward=forward) / hardware.slower(item_size)
    tiles = -(-rows // hardware.tile)

    def seconds(kv_ranks: IntArray, heads: IntArray) -> Seconds:
        work, units = computed[kv_ranks] * heads, tiles[kv_ranks] * heads
        short = 1 + hardware.units / np.maximum(units, 1)
        calls = hardware.call + hardware.band * bands[kv_ranks]
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


def rule_seconds(
    plan: Plan, hardware: Hardware, item_size: int, tokens: IntArray, *, forward: bool, chunks: int = 1
) -> Seconds:
    """`[ranks]` seconds of the chunked rule for so many tokens and a rank's heads, or one of several chunks of them.

    Args:
        tokens: `[ranks]` that each computes.
        chunks: parts of the heads, each with a call of its own.
    """
    heads = np.array([hi - lo for rank in range(plan.cp_size) for lo, hi in (plan.heads_of(rank),)])
    products = tokens * heads * rule_products(plan) * (1 if forward else 2) / chunks
    taken = products / hardware.rule[0 if forward else 1] * hardware.slower(item_size)
    floor = hardware.rule_floor * (1 if forward else 2)
    found: Seconds = (products > 0) * np.maximum(taken, floor)
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
    rate = hardware.rule[0 if forward else 1] / hardware.slower(item_size)
    found: Seconds = scan_products(plan, step, forward=forward) / rate
    return found
