"""Predicts the seconds of a layer's kernels on each rank, by the rates of `Hardware`. No torch in here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from megatron_cp.layout.array_types import FloatArray, IntArray
from megatron_cp.layout.bands import areas_of_boxes, cut_columns, ranges_met, sum_of_clipped, tight
from megatron_cp.layout.segments import Segments
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.flows import PassOn, owned_fragments
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.plan import Plan
from megatron_cp.plan.recurrence import Scan
from megatron_cp.planner.predict.hardware import Hardware, Rates
from megatron_cp.planner.predict.workload import Seconds

CHUNK = 64  # tokens of one chunk of a chunked kernel
_MOST_PIECES = 500_000  # of bands between ranks; above, a ring's stages are assumed to be equal
_PIECES_AT_ONCE = 2**13  # fit in a cache while they are counted


class StageShapes(NamedTuple):
    """The sizes of an attention's kernel calls, each `[stages, kv_ranks]`.

    Attributes:
        pairs: visible (query, key) pairs.
        cut: invisible pairs in tiles that an edge of the mask cuts; the kernel computes them all the same.
        rows: queries of all bands.
        bands: the number of bands.
        tiles: tiles of queries, rounded up for each band.
        padding: pairs of the tiles beyond a band's queries and keys; a device computes them, a core does not.
    """

    pairs: IntArray
    cut: IntArray
    rows: IntArray
    bands: IntArray
    tiles: IntArray
    padding: IntArray


def stage_shapes(step: Attend, tile: int) -> StageShapes:
    """Returns the sizes of every stage's calls, for a kernel with tiles of so many queries and keys."""
    if step.num_stages == 1:
        return _whole_shapes(step, tile)
    found: StageShapes = step.memo(("stage shapes", tile), lambda: _stage_shapes(step, tile))
    return found


def _whole_shapes(step: Attend, tile: int) -> StageShapes:
    """Returns the sizes of one call for all keys. All schemes of a degree share them, as they share what is seen."""

    def make() -> StageShapes:
        (bands, ranks), size = step.bands_of_kv_ranks(), step.num_kv_ranks
        columns, blocks = np.ascontiguousarray(bands.T), range(0, len(bands), _PIECES_AT_ONCE)
        cut = ((columns[:, at : at + _PIECES_AT_ONCE], ranks[at : at + _PIECES_AT_ONCE]) for at in blocks)
        return _summed(cut, 1, size, tile)

    found: StageShapes = step.needed.memo(("whole shapes", tile), make)
    return found


def _stage_shapes(step: Attend, tile: int) -> StageShapes:
    size, stages = step.num_kv_ranks, step.num_stages
    if not isinstance(step.stages[-1].keys, PassOn):
        return shapes_of(((step.bands(rank, stage) for rank in range(size)) for stage in step.stages), tile)
    bands, ranks = step.bands_of_kv_ranks()
    edges, owners = owned_fragments(step.keys)
    _, met = ranges_met(bands, edges[:-1], edges[1:], queries=False)
    if int(met.sum()) > _MOST_PIECES:
        whole = _whole_shapes(step, tile)
        return StageShapes(*(np.broadcast_to(-(-each // stages), (stages, size)) for each in whole))
    before = np.cumsum(met) - met
    blocks = np.searchsorted(before, np.arange(0, int(met.sum()), _PIECES_AT_ONCE)).tolist()

    def cut(lo: int, hi: int) -> tuple[IntArray, IntArray]:
        pieces, number, origin = cut_columns(bands[lo:hi], edges[:-1], edges[1:], queries=False)
        rank = ranks[lo:hi][origin]
        return pieces, (rank - owners[number]) % size * size + rank

    return _summed(itertools.starmap(cut, itertools.pairwise([*blocks, len(bands)])), stages, size, tile)


def _summed(blocks: Iterable[tuple[IntArray, IntArray]], stages: int, size: int, tile: int) -> StageShapes:
    """Returns the sums of bands, which come as `[6, n]` in blocks, each with the stage and KV rank as one number."""
    found = np.zeros((len(StageShapes._fields), stages * size), dtype=np.int64)
    for columns, place in blocks:
        for row, weights in zip(found, _shapes(columns, tile), strict=True):
            row += _sums(place, weights, row.size)
    return StageShapes(*found.reshape(-1, stages, size))


def _sums(place: IntArray, weights: IntArray, size: int) -> IntArray:
    """Returns `[size]` the sum of the weights at each place, less than 2**53."""
    return np.bincount(place, weights.astype(np.float64), minlength=size).astype(np.int64)


def _shapes(columns: IntArray, tile: int) -> tuple[IntArray, ...]:
    """Returns `[n]` each field of `StageShapes` for bands as `[6, n]`; their tiles begin at the first query and key."""
    q0, q1, k0, k1, lo, hi = columns
    rows, keys = q1 - q0, k1 - k0
    is_whole = (q1 + lo <= k0 + 1) & (q0 + hi >= k1 - 1) & (rows > 0) & (keys > 0) & ((rows | keys) < 2**31)
    others = np.flatnonzero(~is_whole)  # through which an edge of the mask runs: they take several times as long
    if others.size == rows.size:
        return _shapes_with_edges(columns, tile)
    pairs, tiles = rows * keys, -(-rows // tile)
    padding = tiles * -(-keys // tile) * tile**2 - pairs
    found = pairs, np.zeros_like(rows), rows, np.ones_like(rows), tiles, padding
    if others.size:
        for field, values in zip(found, _shapes_with_edges(columns[:, others], tile), strict=True):
            field[others] = values
    return found


def _shapes_with_edges(columns: IntArray, tile: int) -> tuple[IntArray, ...]:
    """Returns `_shapes` of any bands.

    A tile of queries computes the tiles of keys from its first query's first key to its last query's last key. Both
    rise by one from tile to tile, within the band's box.
    """
    boxes = tight(columns)
    pairs = areas_of_boxes(boxes)
    q0, q1, k0, k1, lo, hi = boxes
    rows, last = q1 - q0, (k1 - k0 - 1) // tile
    tiles = -(-rows // tile)
    first, end = np.maximum(lo + q0 - k0, -rows), np.minimum(hi + q0 - k0, k1 - k0 - 1)  # the keys of query 0
    ends = sum_of_clipped((tile - 1 + end) // tile, np.maximum(tiles - 1, 0), last)
    ends += np.minimum(last, (rows - 1 + end) // tile)  # of the last tile, which may have fewer queries
    offset = first // tile
    begins = tiles * offset + tiles * (tiles - 1) // 2 - sum_of_clipped(offset, tiles, np.zeros_like(offset))
    computed = (ends - begins + tiles) * tile**2 * (rows > 0)
    inside = np.minimum(computed, rows * (k1 - k0))
    return pairs, inside - pairs, rows, (rows > 0).astype(np.int64), tiles, computed - inside


def attention_seconds(step: Attend, rates: Rates, kv_ranks: IntArray, heads: IntArray) -> FloatArray:
    """Returns `[stages, ranks]` the seconds of the kernel.

    Args:
        step: the attention.
        rates: those of a rank in one direction.
        kv_ranks, heads: `[ranks]` the KV rank and the number of query heads of each.
    """
    return seconds_of_calls(step, stage_shapes(step, rates.hardware.tile), rates, kv_ranks, heads)


def shapes_of(calls: Iterable[Iterable[IntArray]], tile: int) -> StageShapes:
    """Returns the sizes of kernel calls, from the bands of each KV rank in each call."""
    found = [[[part.sum() for part in _shapes(each.T, tile)] for each in ranks] for ranks in calls]
    return StageShapes(*np.moveaxis(np.array(found, dtype=np.int64), -1, 0))


def seconds_of_calls(
    step: Attend, shapes: StageShapes, rates: Rates, kv_ranks: IntArray, heads: IntArray
) -> FloatArray:
    """Returns `[calls, ranks]` the seconds of calls of given sizes; see `attention_seconds`."""
    hardware, forward = rates.hardware, rates.forward
    row = hardware.row_seconds((step.head_dim + step.value_head_dim) // 2, forward=forward)
    of_ranks = StageShapes(*(each[:, kv_ranks] for each in shapes))
    found = seconds_of_shapes(of_ranks, pair_rate(step, rates), row, hardware, heads, forward=forward)
    if step.latent_mode:  # of all calls of a rank together
        seconds = _latent_seconds(step, rates, kv_ranks, heads)
        areas = np.array([step.area(rank, forward=forward) for rank in range(step.num_kv_ranks)])
        found = found + seconds * of_ranks.pairs / np.maximum(areas[kv_ranks], 1)
    return found


def seconds_of_shapes(
    shapes: StageShapes, rate: float, row: float, hardware: Hardware, heads: IntArray, *, forward: bool
) -> FloatArray:
    """Returns the seconds of calls whose sizes and heads have the same shape.

    Args:
        shapes: the sizes.
        rate: pairs of a query and a key that are computed in a second.
        row: seconds of a query and head in addition.
        hardware: the other rates.
        heads: query heads.
        forward: the direction.
    """
    computed = (shapes.pairs + shapes.cut + (0 if hardware.cores else shapes.padding)) * heads
    work = computed / rate + row * shapes.rows * heads
    short = 1 + hardware.units / np.maximum(shapes.tiles * heads, 1)
    bands = hardware.band[0 if forward else 1] * shapes.bands
    found: FloatArray = (computed > 0) * (work * short + hardware.call + bands)
    return found


def _latent_seconds(step: Attend, rates: Rates, kv_ranks: IntArray, heads: IntArray) -> Seconds:
    """Returns `[ranks]` the seconds of the products by the up-projection, and of the copies beside them.

    Latents that travel are expanded on every rank that sees them, once more in backward. Own latents are expanded, and
    own queries and results multiplied, once. Backward has two products for each of forward.
    """
    assert step.latent is not None
    (shared, rank, made, mode), (hardware, item_size, forward) = step.latent, rates
    rows, products, copied = step.keys.token_counts, 1 if forward else 2, made + shared
    if mode == "expand":
        products = 1 if forward else 3
        copied = step.head_dim + (0 if forward else made)
        if step.num_kv_ranks > 1:
            rows = step.needed.split_counts.counts.sum(axis=0)
    elif mode == "absorb":
        rows, copied = step.queries.token_counts, step.head_dim * (2 if forward else 4)
    rows = rows[kv_ranks]
    rate = hardware.matrix / (1 + hardware.matrix_rows / np.maximum(rows, 1)) / rates.slower
    of_head = 2 * rank * made * products / rate + copied * item_size / hardware.copy
    found: Seconds = np.asarray(rows * heads * of_head, dtype=np.float64)
    return found


def pair_rate(step: Attend, rates: Rates) -> float:
    """Returns the (query, key) pairs of one head that the kernel computes in a second.

    Forward has two products of the head sizes; backward has five, since it computes scores again.
    """
    size, value = step.head_dim, step.value_head_dim
    operations = 2 * (size + value) if rates.forward else 2 * (3 * size + 2 * value)
    rate = rates.hardware.attention_rate((size + value) // 2, forward=rates.forward) / rates.slower
    return rate / operations


def copy_seconds(hardware: Hardware, nbytes: IntArray | Seconds, passes: float = 1.0) -> Seconds:
    """Returns `[ranks]` the seconds to write so many bytes in so many passes."""
    written: Seconds = np.asarray(nbytes, dtype=np.float64)
    found: Seconds = (written > 0) * (written * passes / hardware.copy + hardware.launch)
    return found


def rule_products(plan: Plan) -> float:
    """Returns the multiply-adds of the chunked rule for one step and head, forward."""
    kind = KINDS[plan.kind]
    if not kind.has_state:
        return float(plan.conv_width)
    keys, values = _rule_sizes(plan)
    rule = CHUNK * (keys + values) + 2 * keys * values
    if kind.is_dense:
        rule += CHUNK * (keys + (keys + values) // 2) + keys * values
    return float(rule)


def _rule_sizes(plan: Plan) -> tuple[int, int]:
    """Returns the head sizes of the sections that serve as keys and values."""
    kind, sizes = KINDS[plan.kind], {block.name: block.head_dim for block in plan.sections.blocks}
    return sizes[kind.keys], sizes[kind.values]


def rule_rate(plan: Plan, rates: Rates) -> float:
    """Returns the multiply-adds a second of a layer's chunked rule."""
    kind, size = KINDS[plan.kind].measured_rule, sum(_rule_sizes(plan)) // 2
    return rates.hardware.rule_rate(kind, size, forward=rates.forward) / rates.slower


def chunked_tokens(plan: Plan) -> IntArray:
    """Returns `[ranks]` the steps of a rank's chunks; the last chunk of each piece of a document is padded."""
    steps = plan.steps_a_token

    def found() -> IntArray:
        layout = plan.layout
        if not plan.recurrent_steps:
            return np.full(plan.cp_size, (-(-layout.packing.run_lengths * steps // CHUNK) * CHUNK).sum())
        segments = Segments.from_layout(layout)
        filled = -(-(segments.end - segments.start) * steps // CHUNK) * CHUNK
        return np.bincount(segments.rank, filled, minlength=plan.cp_size).astype(np.int64)

    tokens: IntArray = plan.memo(("chunked tokens",), found)
    return tokens


def longest_chains(plan: Plan) -> IntArray:
    """Returns `[ranks]` the steps of the longest piece of a document on each rank, in whole chunks."""
    steps = plan.steps_a_token

    def found() -> IntArray:
        layout = plan.layout
        if not plan.recurrent_steps:
            return np.full(plan.cp_size, -(-layout.packing.run_lengths.max(initial=0) * steps // CHUNK) * CHUNK)
        segments, longest = Segments.from_layout(layout), np.zeros(plan.cp_size, dtype=np.int64)
        np.maximum.at(longest, segments.rank, -(-(segments.end - segments.start) * steps // CHUNK) * CHUNK)
        return longest

    tokens: IntArray = plan.memo(("longest chains",), found)
    return tokens


def rule_seconds(plan: Plan, rates: Rates, *, chunks: int = 1) -> Seconds:
    """Returns `[ranks]` the seconds of the chunked rule for a rank's tokens and heads, or one of several head chunks.

    Args:
        chunks: parts of the heads, each with a call of its own.
    """
    hardware, _, forward = rates
    heads = np.array([hi - lo for lo, hi in plan.partition.heads])[np.arange(plan.cp_size) % plan.ulysses_degree]
    products = chunked_tokens(plan) * heads * rule_products(plan) * (1 if forward else 2) / chunks
    kind, size = KINDS[plan.kind].measured_rule, sum(_rule_sizes(plan)) // 2
    chain = hardware.chain_seconds(kind, size, forward=forward) * rates.slower
    taken = products / rule_rate(plan, rates) + longest_chains(plan) * chain
    floor = hardware.rule_floor * (1 if forward else 2)
    host_seconds = hardware.rule_host_seconds(kind, size)
    found: Seconds = (products > 0) * (np.maximum(taken, floor) + host_seconds)
    return found


def convolution_seconds(plan: Plan, rates: Rates, tokens: IntArray, *, chunks: int = 1) -> Seconds:
    """Returns `[ranks]` the seconds of the causal convolution for so many tokens, or one of several head chunks."""
    blocks = plan.sections.blocks
    convolved = blocks[: KINDS[plan.kind].num_convolved(len(blocks))]
    channels = np.array(
        [sum(block.heads_on(rank) * block.head_dim for block in convolved) for rank in range(plan.ulysses_degree)]
    )[np.arange(plan.cp_size) % plan.ulysses_degree]
    elements = tokens * channels / chunks
    rate = rates.pick(rates.hardware.convolution) / rates.slower
    found: Seconds = (elements > 0) * (elements / rate + rates.hardware.launch)
    return found


def scan_products(plan: Plan, step: Scan, *, forward: bool) -> Seconds:
    """Returns `[ranks]` the multiply-adds of the maps of segments whose document continues before and after."""
    kind, segments = KINDS[plan.kind], step.segments
    middle = segments.past & segments.future
    tokens = np.bincount(segments.rank, (segments.end - segments.start) * middle, minlength=plan.cp_size)
    keys, values = step.key_dim, step.value_dim
    walk = keys * values * (2 if kind.is_dense else 1) + (2 * keys * keys if kind.is_dense and forward else 0)
    found: Seconds = tokens * step.heads * float(walk * plan.steps_a_token)
    return found


def scan_seconds(plan: Plan, step: Scan, rates: Rates) -> Seconds:
    """Returns `[ranks]` the seconds of the maps of `scan_products`."""
    found: Seconds = scan_products(plan, step, forward=rates.forward) / rule_rate(plan, rates)
    return found
