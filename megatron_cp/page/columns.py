"""Packs numbers as compact text: base64 of the smallest type that holds them."""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

# Names that the scripts know (`numbers` in base.js), in the order in which they are tried.
_INTEGERS = {"u1": 1 << 8, "u2": 1 << 16, "u4": 1 << 32}
_SPARSE = (
    0.25  # a matrix with a smaller share of entries is sent as places and values: fewer bytes, and not close to it
)
TICKS = (1 << 32) - 1  # times are multiples of the whole span over this: finer than float32, in as many bytes

Column = tuple[str, str]


def packed(values: NDArray) -> Column:
    """Returns the name of an array's type and base64 of its bytes, little-endian.

    Whole numbers from 0 to 2**32 - 1 are kept exactly, in the smallest type that holds all of them. Others become
    float32, or float64 if float32 cannot hold them.
    """
    kept = np.ascontiguousarray(values).ravel()
    lowest, highest = (kept.min(), kept.max()) if kept.size else (0, 0)
    is_whole = kept.dtype.kind in "iu" or bool((kept == np.floor(kept)).all())
    fitting = [name for name, limit in _INTEGERS.items() if is_whole and lowest >= 0 and highest < limit]
    most = np.finfo(np.float32).max
    name = fitting[0] if fitting else "f4" if max(abs(lowest), abs(highest)) <= most else "f8"
    return name, base64.b64encode(kept.astype(f"<{name}").tobytes()).decode()


def packed_times(starts: NDArray, ends: NDArray) -> dict[str, object]:
    """Returns times as whole numbers of ticks, and the length of a tick.

    Returns:
        origin, tick: in that unit; start, end: columns. A time is `origin + tick * number`.
    """
    origin = float(starts.min()) if starts.size else 0.0
    span = float(ends.max()) - origin if ends.size else 0.0
    tick = span / TICKS if span > 0 else 1.0
    numbers = [np.minimum(np.rint((times - origin) / tick), TICKS).astype(np.uint32) for times in (starts, ends)]
    return {"origin": origin, "tick": tick, "start": packed(numbers[0]), "end": packed(numbers[1])}


def packed_matrix(matrix: NDArray) -> dict[str, object]:
    """Returns a square matrix with its size: all of its values, or the places and values of those that are not zero."""
    places = np.flatnonzero(matrix)
    if places.size < _SPARSE * matrix.size:
        return {"size": len(matrix), "places": packed(places), "values": packed(matrix.ravel()[places])}
    return {"size": len(matrix), "values": packed(matrix)}
