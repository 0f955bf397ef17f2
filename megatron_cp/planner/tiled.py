"""Who computes which tile of a mask. No torch in here."""

from __future__ import annotations

import numpy as np

from megatron_cp.plan.assignment import TileAssignment
from megatron_cp.plan.attention import Attend, TiledWork


def assigned(step: Attend) -> TiledWork:
    """The assignment of an attention's tiles, forward and backward."""

    found = [np.zeros((0, 6), np.int64)]
    for rank in range(step.num_kv_ranks):
        own = slice(*step.queries.fragment_offsets[rank : rank + 2])
        order = np.argsort(step.queries.starts[own])
        from megatron_cp.layout.bands import cut

        found.append(
            cut(step.mask.bands, step.queries.starts[own][order], step.queries.ends[own][order], queries=True)[0]
        )
    offsets = np.cumsum([len(x) for x in found])
    a = TileAssignment(np.concatenate(found), offsets)
    return TiledWork(a, a)
