"""Turns bands into calls of a variable-length flash attention: segments of rows under one window.

Segment s of a call has queries `q_offsets[s]` to `q_offsets[s + 1]` and keys `k_offsets[s]` to `k_offsets[s + 1]`.
Windows are aligned to a segment's last query and key, as in flash-attn: of `q` queries and `k` keys, query i sees key
j where

    i + (k - q) - left <= j <= i + (k - q) + right

so that all documents of a self-attention, wherever they are cut, have the window of their mask. -1 is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megatron_cp.exchange.device import on_device
from megatron_cp.layout import bands as band
from megatron_cp.layout.packing import IntArray
from megatron_cp.softmax.kernels.base import Tiles
from megatron_cp.softmax.kernels.common.sums import Cover, RowIndex

WindowLimits = tuple[int, int]  # left, right


@dataclass(frozen=True)
class SegmentAxis:
    """The queries or the keys of a call.

    Attributes:
        rows: `[n]`, the row of q (or of k and v) at each position of the call.
        offsets: `[segments + 1]`, the position where each segment begins, and the end of the last.
        rounds: the positions, split so that no row is repeated within a round, whose results can then be written in
            any order.
    """

    rows: IntArray
    offsets: IntArray
    rounds: tuple[IntArray, ...]

    @classmethod
    def from_ranges(cls, starts: IntArray, ends: IntArray) -> SegmentAxis:
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
    """A call: segments under one window."""

    window: WindowLimits
    queries: SegmentAxis
    keys: SegmentAxis


def segment_calls(bands: IntArray) -> list[SegmentCall]:
    """Returns calls that together cover tight bands. Every query of a segment sees a key."""
    bands = _windowed(bands)
    windows = _windows(bands)
    calls = []
    for window in dict.fromkeys(windows):
        q0, q1, k0, k1 = bands[[w == window for w in windows]].T[:4]
        calls.append(SegmentCall(window, SegmentAxis.from_ranges(q0, q1), SegmentAxis.from_ranges(k0, k1)))
    return calls


def _windowed(bands: IntArray) -> IntArray:
    """Returns bands with the same pairs, each of which a window can express.

    flash-attn treats a limit of at least the longest segment's keys as none, which is right only if a segment with a
    limit has not many more queries than keys. Bands that have are cut where their edges bend; the pieces have no
    limit, or enough keys.
    """
    left, right = limits_of(bands)
    tall = is_tall(bands) & ((left >= 0) | (right >= 0))
    return np.concatenate([bands[~tall], band.canonical(bands[tall])])


def is_tall(bands: IntArray) -> IntArray:
    """Returns `[n]` bools: True for bands with many more queries than keys."""
    q0, q1, k0, k1 = bands.T[:4]
    return q1 - q0 - 1 > k1 - k0


def limits_of(bands: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the left and the right limits of the bands, `[n]` each; -1 where a limit hides no pair."""
    q0, q1, k0, k1, lo, hi = bands.T
    left, right = k1 - q1 - lo, hi - (k1 - q1)
    return np.where(left < k1 - k0 - 1, left, -1), np.where(right < q1 - q0 - 1, right, -1)


def _windows(bands: IntArray) -> list[WindowLimits]:
    """Chooses a window for each band, greedily so that few windows differ.

    A limit that hides no pair of a band fits it, so documents shorter than a window share a call with longer ones.
    """
    limits = np.stack(limits_of(bands), axis=1)
    reach = np.stack([bands[:, 3] - bands[:, 2], bands[:, 1] - bands[:, 0]], axis=1) - 1  # limits that hide no pair
    tall = is_tall(bands)
    windows: list[WindowLimits] = [(-1, -1)] * len(bands)
    found: dict[WindowLimits, None] = {}
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
    """Returns `[n]`, the round of each range: ranges of a round are disjoint, and rounds are as few as possible."""
    rounds, order = np.zeros(len(starts), dtype=np.int64), np.argsort(starts, kind="stable")
    if (starts[order][1:] >= ends[order][:-1]).all():
        return rounds  # true of every mask with one band a document
    free_from: list[int] = []  # for each round, the end of its last range
    for number in order.tolist():
        start, end = int(starts[number]), int(ends[number])
        chosen = next((n for n, free in enumerate(free_from) if free <= start), len(free_from))
        free_from[chosen : chosen + 1] = [end]
        rounds[number] = chosen
    return rounds


@dataclass(frozen=True)
class DeviceAxis:
    """A `SegmentAxis` on a device.

    Attributes:
        rows: the rows to gather; a slice, and so a view, where they are in the call's order already.
        offsets: int32 `[segments + 1]`.
        longest: rows of the longest segment.
        rounds: for each round, its positions in the call, their rows, and True if no earlier part has any of them.
    """

    rows: RowIndex
    offsets: torch.Tensor
    longest: int
    rounds: list[tuple[RowIndex, RowIndex, bool]]


@dataclass(frozen=True)
class DeviceSegments:
    """A `SegmentCall` on a device: the arguments of an operator."""

    window: WindowLimits
    queries: DeviceAxis
    keys: DeviceAxis

    @property
    def is_causal(self) -> bool:
        return self.window == (-1, 0)

    @cached_property
    def keywords(self) -> dict[str, Any]:
        """Arguments for the segments and their window, by flash-attn's names."""
        return {
            "cu_seqlens_q": self.queries.offsets, "cu_seqlens_k": self.keys.offsets,
            "max_seqlen_q": self.queries.longest, "max_seqlen_k": self.keys.longest,
            "window_size_left": self.window[0], "window_size_right": self.window[1],
        }  # fmt: skip


@dataclass(frozen=True)
class DeviceCalls:
    """All calls for tiles on a device, and the cover of each axis by their rounds.

    Attributes:
        hidden: bools `[num_queries]` and `[num_keys]`, True for rows that are in a call but in no segment, whose
            results are undefined; None where there are none.
    """

    calls: list[DeviceSegments]
    queries: Cover
    keys: Cover
    hidden: tuple[torch.Tensor, torch.Tensor] | None = None


def device_calls(tiles: Tiles, device: torch.device) -> DeviceCalls:
    """Returns the calls of `tiles` with their tables on `device`, which are made once."""
    if isinstance(tiles, LoadedTiles):
        return tiles.calls
    return tiles.memo(("segments", device), lambda: _make_calls(tiles, device))


class LoadedTiles(Tiles):
    """Tiles whose calls are in memory that holds one pack after another: never cropped, so that all have one size."""

    def __init__(self, tiles: Tiles, calls: DeviceCalls) -> None:
        super().__init__(tiles.bands, tiles.q_tokens, tiles.k_tokens)
        self.calls = calls

    @cached_property
    def query_rows(self) -> slice:
        return slice(0, len(self.q_tokens))

    @cached_property
    def key_rows(self) -> slice:
        return slice(0, len(self.k_tokens))

    @property
    def cropped(self) -> Tiles:
        return self

    @property
    def cropped_keys(self) -> Tiles:
        return self


def _make_calls(tiles: Tiles, device: torch.device) -> DeviceCalls:
    calls = segment_calls(tiles.bands)
    covers = [
        Cover.from_parts([axis.rows[places] for axis in axes for places in axis.rounds], num_rows)
        for axes, num_rows in (
            ([call.queries for call in calls], len(tiles.q_tokens)),
            ([call.keys for call in calls], len(tiles.k_tokens)),
        )
    ]
    q_first, k_first = (iter(cover.is_first) for cover in covers)
    return DeviceCalls(
        [
            DeviceSegments(call.window, _axis(call.queries, q_first, device), _axis(call.keys, k_first, device))
            for call in calls
        ],
        covers[0],
        covers[1],
    )


def _axis(axis: SegmentAxis, is_first: Iterator[bool], device: torch.device) -> DeviceAxis:
    rounds = [(_rows(places, device), _rows(axis.rows[places], device), next(is_first)) for places in axis.rounds]
    return DeviceAxis(_rows(axis.rows, device), on_device(axis.offsets, device), axis.longest, rounds)


def _rows(rows: IntArray, device: torch.device) -> RowIndex:
    """Returns consecutive rows as a slice, other rows as an index."""
    first, last = int(rows[0]), int(rows[-1])
    if np.array_equal(rows, np.arange(first, last + 1)):
        return slice(first, last + 1)
    return on_device(rows, device, torch.int64)
