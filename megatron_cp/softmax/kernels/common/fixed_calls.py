"""Bands as calls of the same shapes for every pack, for CUDA graphs: a pack changes what stands in tables, and no more.

Every document has the same bands in the same order, those of a pack of one document: its *pattern*. So one call serves
the bands of one window of all documents, by as many segments as there may be documents, of which some are empty. The
last document only fills up the pack: its rows are in every call, where rows are counted, and in no segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.packing import IntArray
from megatron_cp.softmax.kernels.common.partials import Cover, Rows
from megatron_cp.softmax.kernels.common.varlen_calls import (
    Axis,
    DeviceAxis,
    DeviceCalls,
    Segments,
    Window,
    is_tall,
    limits_of,
    rounds_of,
)

_REFUSED = "masks in which every document has the same bands, each of them full, causal or a window"
_REMEDY = "Plan this layer eagerly, outside of GraphTables."


@dataclass(frozen=True)
class Pattern:
    """The bands of each document.

    Attributes:
        windows: of each band.
        rounds: for each window, of each of its bands the round of its queries, and of its keys.
        longest: for each window, tokens of the longest segment of queries, and of keys.
        covers: how the rounds of all calls cover queries, and keys.
    """

    windows: tuple[Window, ...]
    rounds: dict[Window, tuple[IntArray, IntArray]]
    longest: dict[Window, tuple[int, int]]
    covers: tuple[Cover, Cover]

    @classmethod
    def of(cls, bands: IntArray, num_queries: int, num_keys: int) -> Pattern:
        """The pattern of the one document of a pack.

        Raises:
            ArgumentError: a mask that one window a band cannot say.
        """
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
            for found, axis in zip(parts, (Axis.of(*axis) for axis in axes), strict=True):
                found += [axis.rows[places] for places in axis.rounds]
        covers = Cover.of(parts[0], num_queries), Cover.of(parts[1], num_keys)
        return cls(windows, rounds, longest, covers)


class FixedCalls:
    """The calls of one pack.

    Args:
        bands: of the pack, those of the document that fills it up last.
        pattern: of its documents.
        num_documents: those that have tokens, the one that fills up left out.
        capacity: documents of any pack.
        num_queries, num_keys: rows.

    Raises:
        ArgumentError: bands of another pattern.
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
        self._axes: dict[Window, tuple[_FixedAxis, _FixedAxis]] = {}
        hidden = np.ones(num_queries, dtype=bool), np.ones(num_keys, dtype=bool)
        for window, (of_queries, of_keys) in pattern.rounds.items():
            own = bands[[w == window for w in windows]]
            count = pattern.windows.count(window)
            sizes = (num_documents * count, capacity * count)
            axes = (
                _FixedAxis(own[:, 0], own[:, 1], of_queries, *sizes, num_queries),
                _FixedAxis(own[:, 2], own[:, 3], of_keys, *sizes, num_keys),
            )
            for unseen, axis in zip(hidden, axes, strict=True):
                unseen[axis.rows[: axis.offsets[-1]]] = False
            self._axes[window] = axes
        self._hidden = hidden

    def check_documents(
        self, bands: IntArray, documents: IntArray, documents_of: Callable[[IntArray], IntArray], q_tokens: IntArray,
        k_tokens: IntArray,
    ) -> None:  # fmt: skip
        """Refuses bands that are not, document after document, of that document alone.

        Raises:
            ArgumentError: the mask is not the same in every document.
        """
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
        """What stands on the device, by name; the same names, shapes and types for every pack."""
        found: dict[str, NDArray] = {"hidden queries": self._hidden[0], "hidden keys": self._hidden[1]}
        for number, axes in enumerate(self._axes.values()):
            for name, axis in zip(("queries", "keys"), axes, strict=True):
                found |= {f"{name} {number} {what}": table for what, table in axis.tables().items()}
        return found

    def on_device(self, tables: Mapping[str, Tensor]) -> DeviceCalls:
        """The calls, with the tables that `tables` named."""
        firsts = [iter(cover.is_first) for cover in self._pattern.covers]
        calls = []
        for number, (window, axes) in enumerate(self._axes.items()):
            of_device = [
                axis.on_device(
                    {what: tables[f"{name} {number} {what}"] for what in axis.tables()}, longest,
                    [next(first) for _ in range(axis.num_rounds)],
                )
                for name, axis, longest, first in zip(
                    ("queries", "keys"), axes, self._pattern.longest[window], firsts, strict=True
                )
            ]  # fmt: skip
            calls.append(Segments(window, *of_device))
        return DeviceCalls(calls, *self._pattern.covers, (tables["hidden queries"], tables["hidden keys"]))


class _FixedAxis:
    """One axis of a call: see `Axis`, with as many segments as any pack has.

    Args:
        starts, ends: of the segments, document after document.
        rounds: of the segments of one document.
        num_segments: those that are not the last document's.
        capacity: segments of any pack.
        num_rows: of the axis.
    """

    def __init__(
        self, starts: IntArray, ends: IntArray, rounds: IntArray, num_segments: int, capacity: int, num_rows: int
    ) -> None:
        axis = Axis.of(starts, ends) if len(starts) else None
        self.rows = axis.rows if axis is not None else np.zeros(0, dtype=np.int64)
        filled = axis.offsets[: num_segments + 1] if axis is not None else np.zeros(1, dtype=np.int64)
        self.offsets = np.concatenate([filled, np.full(capacity - num_segments, filled[-1])])
        self.num_rounds = int(rounds.max()) + 1
        number = np.repeat(np.tile(rounds, len(starts) // len(rounds)), ends - starts)
        self._places = [np.flatnonzero(number == n) for n in range(self.num_rounds)]
        # Of every pack, or of none: rows lie in the order of documents, and all of them are there or some are left out.
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
        rows: Rows = everything if self._whole else tables["rows"]
        rounds: list[tuple[Rows, Rows, bool]]
        if self.num_rounds == 1:
            rounds = [(everything, rows, is_first[0])]
        else:
            rounds = [
                (tables[f"places {number}"], tables[f"targets {number}"], first)
                for number, first in enumerate(is_first)
            ]
        return DeviceAxis(rows, tables["offsets"], longest, rounds)


def _check_windows(bands: IntArray, windows: tuple[Window, ...]) -> None:
    """Refuses bands that do not say what their window says."""
    reach = np.stack([bands[:, 3] - bands[:, 2], bands[:, 1] - bands[:, 0]]) - 1  # limits that hide nothing
    limits, wanted = np.stack(limits_of(bands)), np.array(windows).T
    suits = (limits == wanted) | ((limits < 0) & ((wanted < 0) | (wanted >= reach)))
    if not suits.all():
        raise ArgumentError("mask", "one whose documents see different windows", _REFUSED, _REMEDY)
