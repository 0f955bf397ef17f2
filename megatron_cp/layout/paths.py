"""Masks along the paths of documents that branch."""

from __future__ import annotations

import numpy as np

from megatron_cp.layout import bands as band
from megatron_cp.layout.branches import Branches
from megatron_cp.layout.packing import IntArray


def bands_along_paths(branches: Branches, bands: IntArray) -> IntArray:
    """Returns the bands of the packed stream, `[n, 6]`, that give every path what `bands` give one document.

    Args:
        bands: a mask of one document as long as the longest path, in which no query sees later keys.
    """
    runs = branches.runs
    ends = runs.positions + runs.stops - runs.starts
    run, ancestor = runs.paths()
    # From positions in the path to tokens of the stream, of queries and of keys.
    queries, keys = ((runs.starts - runs.positions)[of] for of in (run, ancestor))
    pieces = [band.NO_BANDS]
    for first, last, first_key, last_key, lo, hi in bands.tolist():
        q0, q1 = np.maximum(runs.positions[run], first), np.minimum(ends[run], last)
        k0, k1 = np.maximum(runs.positions[ancestor], first_key), np.minimum(ends[ancestor], last_key)
        met = (q0 < q1) & (k0 < k1)
        boxes = np.stack([q0, q1, k0, k1, np.full_like(q0, lo), np.full_like(q0, hi)], axis=1)[met]
        pieces.append(band.moved(boxes, queries[met], keys[met]))
    return np.concatenate(pieces)
