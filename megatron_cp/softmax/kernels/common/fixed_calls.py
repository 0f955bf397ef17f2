"""Turns bands into calls whose shapes are the same for every pack, for CUDA graphs: packs differ in tables only.

Every document has the same bands in the same order, the *pattern*: the bands of a pack of one document. So one call
computes the bands of one window of all documents. It has as many segments as a pack may have documents, of which some
are empty. The last document only pads the pack: its rows are counted in every call, but are in no segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.packing import IntArray
from megatron_cp.softmax.kernels.common.sums import Cover, RowIndex
from megatron_cp.softmax.kernels.common.varlen_calls import (
    DeviceAxis,
    DeviceCalls,
    DeviceSegments,
    SegmentAxis,
    WindowLimits,
    is_tall,
    limits_of,
    rounds_of,
)

_REFUSED = "masks in which every document has the same bands, each of them full, causal or a window"
_REMEDY = "Plan this layer eagerly, outside of GraphTables."


@dataclass(frozen=True)
class Pattern:
    """The bands that every document has.

    Attributes:
        windows: the window of each band.
        rounds: for each window, the rounds of its bands' queries and of their keys, `[bands of the window]` each.
        longest: for each window, the number of tokens in the longest segment of queries and of keys.
        covers: the cover of queries and that of keys by the rounds of all calls.
    """

    windows: tuple[WindowLimits, ...]
    rounds: dict[WindowLimits, tuple[IntArray, IntArray]]
    longest: dict[WindowLimits, tuple[int, int]]
    covers: tuple[Cover, Cover]

    @classmethod
    def from_bands(cls, bands: IntArray, num_queries: int, num_keys: int) -> Pattern:
        """Returns the pattern of a pack of one document."""
        left, right = limits_of(bands)
        if (is_tall(bands) & ((left >= 0) | (right >= 0))).any():
            raise ArgumentError("mask", "one whose queries see fewer keys than there are", _REFUSED, _REMEDY)
        windows = tuple(zip(left.tolist(), right.tolist(), strict=True))
        rounds, longest = {}, {}
        parts: tuple[list[IntArray], list[IntArray]] = ([], [])
        for window in dict.fromkeys(windows):
            own = bands[[each == window for each in windows]]
            axes = (own[:, 0], own[:, 1]), (own[:, 2], own[:, 3])
            rounds[window] = (rounds_of(*axes[0]), rounds_of(*axes[1]))
            longest[window] = (int((axes[0][1] - axes[0][0]).max()), int((axes[1][1] - axes[1][0]).max()))
            for found, axis in zip(parts, (SegmentAxis.from_ranges(*axis) for axis in axes), strict=True):
                found += [axis.rows[places] for places in axis.rounds]
        covers = Cover.from_parts(parts[0], num_queries), Cover.from_parts(parts[1], num_keys)
        return cls(windows, rounds, longest, covers)


class FixedCalls:
    """The calls of one pack, whose bands follow the pattern; those of the padding document are last.

    `num_documents` have tokens, without the padding document; `capacity` is the most that any pack has.
    """

    def __init__(
        self, bands: IntArray, pattern: Pattern, num_documents: int, capacity: int, num_queries: int, num_keys: int
    ) -> None:
        self._pattern = pattern
        each = len(pattern.windows)
        if len(bands) % each or len(bands) < num_documents * each:
            raise ArgumentError("mask", f"one of {len(bands)} bands for {num_documents} documents", _REFUSED, _REMEDY)
        windows = pattern.windows * (len(bands) // each)
        _check_windows(bands[: num_documents * each], windows[: num_documents * each])
        self._axes: dict[WindowLimits, tuple[_FixedAxis, _FixedAxis]] = {}
        hidden = np.ones(num_queries, dtype=bool), np.ones(num_keys, dtype=bool)
        for window, (query_rounds, key_rounds) in pattern.rounds.items():
            own = bands[[w == window for w in windows]]
            count = pattern.windows.count(window)
            sizes = (num_documents * count, capacity * count)
            axes = (
                _FixedAxis(own[:, 0], own[:, 1], query_rounds, *sizes, num_queries),
                _FixedAxis(own[:, 2], own[:, 3], key_rounds, *sizes, num_keys),
            )
            for unseen, axis in zip(hidden, axes, strict=True):
                unseen[axis.rows[: axis.offsets[-1]]] = False
            self._axes[window] = axes
        self._hidden = hidden

    def check_documents(
        self, bands: IntArray, documents: IntArray, documents_of: Callable[[IntArray], IntArray], q_tokens: IntArray,
        k_tokens: IntArray,
    ) -> None:  # fmt: skip
        """Refuses bands that reach over the edges of their document."""
        owners = np.repeat(documents, len(self._pattern.windows))
        own = bands[: len(owners)]
        edges = (q_tokens[own[:, 0]], q_tokens[own[:, 1] - 1], k_tokens[own[:, 2]], k_tokens[own[:, 3] - 1])
        if any((documents_of(tokens) != owners).any() for tokens in edges):
            raise ArgumentError("mask", "one whose bands are not each document's own", _REFUSED, _REMEDY)
        for window, axes in self._axes.items():
            for axis, longest in zip(axes, self._pattern.longest[window], strict=True):
                if np.diff(axis.offsets).max() > longest:
                    raise ArgumentError("mask", "one that sees more in some documents", _REFUSED, _REMEDY)

    def tables(self) -> dict[str, NDArray]:
        """Returns the tables for the device by name, with the same names, shapes and types for every pack."""
        found: dict[str, NDArray] = {"hidden queries": self._hidden[0], "hidden keys": self._hidden[1]}
        for number, axes in enumerate(self._axes.values()):
            for name, axis in zip(("queries", "keys"), axes, strict=True):
                found |= {f"{name} {number} {what}": table for what, table in axis.tables().items()}
        return found

    def on_device(self, tables: Mapping[str, Tensor]) -> DeviceCalls:
        """Returns the calls, given the device's copies of `tables()`."""
        firsts = [iter(cover.is_first) for cover in self._pattern.covers]
        calls = []
        for number, (window, axes) in enumerate(self._axes.items()):
            device_axes = [
                axis.on_device(
                    {what: tables[f"{name} {number} {what}"] for what in axis.tables()}, longest,
                    [next(first) for _ in range(axis.num_rounds)],
                )
                for name, axis, longest, first in zip(
                    ("queries", "keys"), axes, self._pattern.longest[window], firsts, strict=True
                )
            ]  # fmt: skip
            calls.append(DeviceSegments(window, *device_axes))
        return DeviceCalls(calls, *self._pattern.covers, (tables["hidden queries"], tables["hidden keys"]))


class _FixedAxis:
    """A `SegmentAxis` of a call with `capacity` segments, of which the padding document's are not filled.

    `rounds` are those of the segments of one document.
    """

    def __init__(
        self, starts: IntArray, ends: IntArray, rounds: IntArray, num_segments: int, capacity: int, num_rows: int
    ) -> None:
        axis = SegmentAxis.from_ranges(starts, ends) if len(starts) else None
        self.rows = axis.rows if axis is not None else np.zeros(0, dtype=np.int64)
        filled = axis.offsets[: num_segments + 1] if axis is not None else np.zeros(1, dtype=np.int64)
        self.offsets = np.concatenate([filled, np.full(capacity - num_segments, filled[-1])])
        self.num_rounds = int(rounds.max()) + 1
        number = np.repeat(np.tile(rounds, len(starts) // len(rounds)), ends - starts)
        self._places = [np.flatnonzero(number == n) for n in range(self.num_rounds)]
        # This is the same for every pack: rows are in the order of documents, and the pattern has all of them or not.
        self._whole = len(self.rows) == num_rows and np.array_equal(self.rows, np.arange(num_rows))

    def tables(self) -> dict[str, NDArray]:
        found: dict[str, NDArray] = {"offsets": self.offsets.astype(np.int32)}
        if not self._whole:
            found["rows"] = self.rows
        if self.num_rounds > 1:
            for number, places in enumerate(self._places):
                found |= {f"places {number}": places, f"targets {number}": self.rows[places]}
        return found

    def on_device(self, tables: Mapping[str, Tensor], longest: int, is_first: list[bool]) -> DeviceAxis:
        everything = slice(0, len(self.rows))
        rows: RowIndex = everything if self._whole else tables["rows"]
        rounds: list[tuple[RowIndex, RowIndex, bool]]
        if self.num_rounds == 1:
            rounds = [(everything, rows, is_first[0])]
        else:
            rounds = [
                (tables[f"places {number}"], tables[f"targets {number}"], first)
                for number, first in enumerate(is_first)
            ]
        return DeviceAxis(rows, tables["offsets"], longest, rounds)


def _check_windows(bands: IntArray, windows: tuple[WindowLimits, ...]) -> None:
    """Refuses bands whose limits differ from those of their window."""
    reach = np.stack([bands[:, 3] - bands[:, 2], bands[:, 1] - bands[:, 0]]) - 1  # limits that hide nothing
    limits, wanted = np.stack(limits_of(bands)), np.array(windows).T
    suits = (limits == wanted) | ((limits < 0) & ((wanted < 0) | (wanted >= reach)))
    if not suits.all():
        raise ArgumentError("mask", "one whose documents see different windows", _REFUSED, _REMEDY)
