"""Bands as calls of a variable-length flash attention: segments of rows under one window, and the rounds they add in.

Segment s of a call has queries `q_offsets[s]` to `q_offsets[s + 1]` and keys likewise. Windows are counted from a
segment's last corner, as in flash-attn: of `q` queries and `k` keys, query i sees key j where

    i + (k - q) - left <= j <= i + (k - q) + right

so that all documents of a self-attention, cut anywhere, have the window of their mask. -1 is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_cp.exchange.device import on_device
from megatron_cp.layout import bands as band
from megatron_cp.layout.packing import IntArray
from megatron_cp.softmax.kernels.base import Tiles
from megatron_cp.softmax.kernels.common.partials import Cover, Rows

Window = tuple[int, int]  # left, right


@dataclass(frozen=True)
class Axis:
    """One axis of a call.

    Attributes:
        rows: `[n]` the row of q (or of k and v) in each place of the call.
        offsets: where each segment begins, and the end of the last.
        rounds: places, split so that no row is twice in a round: what each round yields can be written in any order.
    """

    rows: IntArray
    offsets: IntArray
    rounds: tuple[IntArray, ...]

    @classmethod
    def of(cls, starts: IntArray, ends: IntArray) -> Axis:
        lengths = ends - starts
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        number = np.repeat(rounds_of(starts, ends), lengths)
        return cls(rows, offsets, tuple(np.flatnonzero(number == n) for n in range(number.max() + 1)))

    @property
    def longest(self) -> int:
        return int(np.diff(self.offsets).max())


@dataclass(frozen=True)
class SegmentCall:
    """One call: segments under one window."""

    window: Window
    queries: Axis
    keys: Axis


def segment_calls(bands: IntArray) -> list[SegmentCall]:
    """The calls that together see what tight bands see; no query of a segment sees nothing."""
    bands = _windowed(bands)
    windows = _windows(bands)
    calls = []
    for window in dict.fromkeys(windows):
        q0, q1, k0, k1 = bands[[w == window for w in windows]].T[:4]
        calls.append(SegmentCall(window, Axis.of(q0, q1), Axis.of(k0, k1)))
    return calls


def _windowed(bands: IntArray) -> IntArray:
    """The same pairs in bands that a window can say.

    flash-attn takes a limit of at least the longest segment's keys for none, and none on the right for a limit of so
    many: right only where a segment with a limit has not many more queries than keys. Other bands are cut at their
    bends, which leaves no limit or enough keys.
    """
    left, right = limits_of(bands)
    tall = is_tall(bands) & ((left >= 0) | (right >= 0))
    return np.concatenate([bands[~tall], band.canonical(bands[tall])])


def is_tall(bands: IntArray) -> IntArray:
    """`[n]` bool: bands with many more queries than keys."""
    q0, q1, k0, k1 = bands.T[:4]
    return q1 - q0 - 1 > k1 - k0


def limits_of(bands: IntArray) -> tuple[IntArray, IntArray]:
    """`[n]` the left and the right limit of each band, -1 where it hides nothing."""
    q0, q1, k0, k1, lo, hi = bands.T
    left, right = k1 - q1 - lo, hi - (k1 - q1)
    return np.where(left < k1 - k0 - 1, left, -1), np.where(right < q1 - q0 - 1, right, -1)


def _windows(bands: IntArray) -> list[Window]:
    """A window for each band, as few different ones as a greedy choice finds.

    A limit that hides nothing of a band suits it: documents shorter than a window run with those that are longer.
    """
    limits = np.stack(limits_of(bands), axis=1)
    reach = np.stack([bands[:, 3] - bands[:, 2], bands[:, 1] - bands[:, 0]], axis=1) - 1  # limits that hide nothing
    tall = is_tall(bands)
    windows: list[Window] = [(-1, -1)] * len(bands)
    found: dict[Window, None] = {}
    for number in np.argsort((limits < 0).sum(axis=1), kind="stable").tolist():
        own = tuple(limits[number].tolist())
        if not tall[number]:
            fits = (w for w in found if all(map(_suits, w, own, reach[number].tolist())))
            own = next(fits, own)
            found[own] = None
        windows[number] = own
    return windows


def _suits(limit: int, own: int, reach: int) -> bool:
    return limit == own or (own < 0 and limit >= reach)


def rounds_of(starts: IntArray, ends: IntArray) -> IntArray:
    """`[n]` the round of each range, so that ranges of one round are disjoint; as few rounds as that takes."""
    rounds, order = np.zeros(len(starts), dtype=np.int64), np.argsort(starts, kind="stable")
    if (starts[order][1:] >= ends[order][:-1]).all():
        return rounds  # as in any mask with one band a document
    free_from: list[int] = []  # for each round, the end of its last range
    for number in order.tolist():
        start, end = int(starts[number]), int(ends[number])
        chosen = next((n for n, free in enumerate(free_from) if free <= start), len(free_from))
        free_from[chosen : chosen + 1] = [end]
        rounds[number] = chosen
    return rounds


@dataclass(frozen=True)
class DeviceAxis:
    """An `Axis` on a device.

    Attributes:
        rows: what to gather; a slice, hence a view, where the rows lie as the call wants them.
        offsets: int32.
        longest: of the segments.
        rounds: for each round, its places in the call, the rows that they are, and whether no part before has any.
    """

    rows: Rows
    offsets: torch.Tensor
    longest: int
    rounds: list[tuple[Rows, Rows, bool]]


@dataclass(frozen=True)
class Segments:
    """A `SegmentCall` on a device: what an operator is called with."""

    window: Window
    queries: DeviceAxis
    keys: DeviceAxis

    @property
    def is_causal(self) -> bool:
        return self.window == (-1, 0)


@dataclass(frozen=True)
class DeviceCalls:
    """All calls of some tiles on a device, and how their rounds cover the axes.

    Attributes:
        hidden: where calls take rows that no segment has, whose results are whatever stood there: `[num_queries]` and
            `[num_keys]` bool, true for those.
    """

    calls: list[Segments]
    queries: Cover
    keys: Cover
    hidden: tuple[torch.Tensor, torch.Tensor] | None = None


def on_one_device(tiles: Tiles, device: torch.device) -> DeviceCalls:
    """The calls of `tiles` with their tables on `device`, made once."""
    return tiles.memo(calls_key(device), lambda: _placed(tiles, device))


def calls_key(device: torch.device) -> tuple[str, torch.device]:
    """Under which tiles keep their calls."""
    return "segments", device


def _placed(tiles: Tiles, device: torch.device) -> DeviceCalls:
    calls = segment_calls(tiles.bands)
    covers = [
        Cover.of([axis.rows[places] for axis in axes for places in axis.rounds], num_rows)
        for axes, num_rows in (
            ([call.queries for call in calls], len(tiles.q_tokens)),
            ([call.keys for call in calls], len(tiles.k_tokens)),
        )
    ]
    q_first, k_first = (iter(cover.is_first) for cover in covers)
    return DeviceCalls(
        [
            Segments(call.window, _axis(call.queries, q_first, device), _axis(call.keys, k_first, device))
            for call in calls
        ],
        covers[0],
        covers[1],
    )


def _axis(axis: Axis, is_first: Iterator[bool], device: torch.device) -> DeviceAxis:
    rounds = [(_rows(places, device), _rows(axis.rows[places], device), next(is_first)) for places in axis.rounds]
    return DeviceAxis(_rows(axis.rows, device), on_device(axis.offsets, device), axis.longest, rounds)


def _rows(rows: IntArray, device: torch.device) -> Rows:
    """Rows that follow each other as a slice, others as an index."""
    first, last = int(rows[0]), int(rows[-1])
    if np.array_equal(rows, np.arange(first, last + 1)):
        return slice(first, last + 1)
    return on_device(rows, device, torch.int64)
