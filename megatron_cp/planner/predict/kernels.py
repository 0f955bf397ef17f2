"""Seconds that the kernels of a layer take on each rank, by `Hardware`'s rates. No torch in here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp.layout.bands import areas, cut_up
from megatron_cp.layout.packing import IntArray
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.flows import pieces_of
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Scan
from megatron_cp.planner.predict.hardware import Hardware
from megatron_cp.planner.predict.program import Seconds

CHUNK = 64  # tokens that a chunked kernel takes at once
_MOST_PIECES = 500_000  # of bands between ranks, beyond which a ring's stages are taken to be alike
_PIECES_AT_ONCE = 2**14  # that stay in a cache while they are counted


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
    size, stages = step.num_kv_ranks, step.num_stages
    bands, ranks = step.bands_of_kv_ranks()
    edges, owners = pieces_of(step.keys)
    met = np.searchsorted(edges[:-1], bands[:, 3]) - np.searchsorted(edges[1:], bands[:, 2], side="right")
    if stages == 1 or int(met.sum()) > _MOST_PIECES:
        rows = np.bincount(ranks, bands[:, 1] - bands[:, 0], minlength=size).astype(np.int64)
        at_once = np.array([step.area(rank) for rank in range(size)]), rows, np.bincount(ranks, minlength=size)
        return StageShapes(*(np.broadcast_to(-(-each // stages), (stages, size)) for each in at_once))
    found = np.zeros((3, stages * size))
    before = np.cumsum(met) - met
    blocks = np.searchsorted(before, np.arange(0, int(met.sum()), _PIECES_AT_ONCE)).tolist()
    for lo, hi in itertools.pairwise([*blocks, len(bands)]):
        pieces, number, origin = cut_up(bands[lo:hi], edges[:-1], edges[1:], queries=False)
        rank = ranks[lo:hi][origin]
        place = (rank - owners[number]) % size * size + rank
        for row, weights in zip(found, (areas(pieces), pieces[:, 1] - pieces[:, 0], None), strict=True):
            row += np.bincount(place, weights, minlength=row.size)
    return StageShapes(*found.astype(np.int64).reshape(3, stages, size))


def attention_seconds(
    step: Attend, hardware: Hardware, item_size: int, kv_ranks: IntArray, heads: IntArray, *, forward: bool
) -> NDArray[np.float64]:
    """`[stages, ranks]` seconds of the kernel.

    Args:
        step: the attention.
        hardware: rates of a rank.
        item_size: bytes of an element.
        kv_ranks, heads: `[ranks]` the KV rank and the number of query heads of each.
        forward: the direction.

    Two products of the head sizes forward; five backward, which computes scores again. Of a tile that a mask cuts
    half is computed for nothing, so each band's queries have half a tile of keys more.
    """
    return seconds_of_calls(step, stage_shapes(step), hardware, item_size, kv_ranks, heads, forward=forward)


def shapes_of(calls: Iterable[Iterable[IntArray]]) -> StageShapes:
    """Those of kernel calls, from the bands of each KV rank in each."""
    found = [[[areas(each).sum(), (each[:, 1] - each[:, 0]).sum(), len(each)] for each in ranks] for ranks in calls]
    return StageShapes(*np.moveaxis(np.array(found, dtype=np.int64), -1, 0))


def seconds_of_calls(
    step: Attend, shapes: StageShapes, hardware: Hardware, item_size: int, kv_ranks: IntArray, heads: IntArray, *,
    forward: bool,
) -> NDArray[np.float64]:  # fmt: skip
    """`attention_seconds` of calls of other shapes than the stages'."""
    pairs, rows, bands = shapes
    computed = pairs + np.minimum(rows * (hardware.tile / 2), pairs)
    size, value = step.head_dim, step.value_head_dim
    each = 2 * (size + value) if forward else 2 * (3 * size + 2 * value)
    rate = hardware.attention_rate((size + value) // 2, forward=forward) / hardware.slower(item_size)
    tiles = -(-rows // hardware.tile)
    work, units = computed[:, kv_ranks] * heads, tiles[:, kv_ranks] * heads
    short = 1 + hardware.units / np.maximum(units, 1)
    calls = hardware.call + hardware.band * bands[:, kv_ranks]
    found: NDArray[np.float64] = (work > 0) * (work * each / rate * short + calls)
    return found


class StageSeconds(NamedTuple):
    """What the stages of a chunk of heads take on each rank.

    Attributes:
        kernels: `[stages, ranks]` of attention's kernel.
        merge: `[ranks]` of taking a later stage's part into what there is.
    """

    kernels: NDArray[np.float64]
    merge: Seconds


def stage_seconds(
    plan: Plan, step: Attend, chunk: int, hardware: Hardware, item_size: int, *, forward: bool
) -> StageSeconds:
    """Those of one chunk of the heads of an attention of a plan, in one direction."""
    degree, ranks = plan.ulysses_degree, np.arange(plan.cp_size)
    parts = [step.chunks(rank)[chunk] for rank in range(degree)]
    heads, kv_ranks = np.array([part.heads.stop - part.heads.start for part in parts])[ranks % degree], ranks // degree
    kernels = attention_seconds(step, hardware, item_size, kv_ranks, heads, forward=forward)
    rows = step.queries.token_counts[kv_ranks] * heads
    size = step.value_head_dim if forward else step.head_dim
    written = rows * size * max(item_size, 4) * (3 if forward else 1)
    return StageSeconds(kernels, copy_seconds(hardware, written))


def copy_seconds(hardware: Hardware, nbytes: IntArray | Seconds, passes: float = 1.0) -> Seconds:
    """`[ranks]` seconds of work that writes so many bytes, so many times."""
    written: Seconds = np.asarray(nbytes, dtype=np.float64)
    found: Seconds = (written > 0) * (written * passes / hardware.copy + hardware.launch)
    return found


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
