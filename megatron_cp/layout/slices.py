"""Slices of a mask as users write them: ranges of queries and keys, and a kind of edge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout.bands import UNBOUNDED
from megatron_cp.layout.packing import IntArray

Slice: TypeAlias = tuple[int, int, int, int, str]  # q_start, q_end, k_start, k_end, kind
# The bounds of a query's keys besides the slice's box: a lower bound, an upper bound.
_SLICE_KINDS = {"full": (False, False), "causal": (False, True), "inverse_causal": (True, False), "both": (True, True)}


def checked_slices(slices: Iterable[Slice], queries: int, keys: int) -> IntArray:
    """Returns a band, `[n, 6]`, for each slice after checking it."""
    allowed = f"(q_start, q_end, k_start, k_end, kind) with a kind of {', '.join(_SLICE_KINDS)}"
    if not isinstance(slices, Iterable) or isinstance(slices, Mapping):
        raise ArgumentError("slices", slices, f"several of {allowed}")
    rows = []
    for number, given in enumerate(slices):
        try:
            *ends, kind = given
            q0, q1, k0, k1 = (checked_integer("end", end, -(2**63)) for end in ends)
            bounds = _SLICE_KINDS[kind]
        except (TypeError, ValueError, KeyError):
            raise ArgumentError(f"slices[{number}]", given, allowed) from None
        if not (0 <= q0 <= q1 <= queries and 0 <= k0 <= k1 <= keys):
            inside = f"rising ranges within {queries} queries and {keys} keys"
            raise ArgumentError(f"slices[{number}]", given, inside)
        rows.append((q0, q1, k0, k1, *bounds))
    bands = np.array(rows, dtype=np.int64).reshape(-1, 6)
    from_first, to_last = bands[:, 4:].T.astype(bool)
    bands[:, 4] = np.where(from_first, bands[:, 2] - bands[:, 0], -UNBOUNDED)
    bands[:, 5] = np.where(to_last, bands[:, 3] - bands[:, 1], UNBOUNDED)
    return bands
