"""A scheme whose keys come in two fetches: those here have one, and what runs and predicts them takes more."""

import numpy as np

from megatron_cp.plan import schemes
from megatron_cp.plan.attention import SCHEDULES
from megatron_cp.plan.flows import Fetch, Return
from megatron_cp.plan.stage import Stage
from megatron_cp.planner import capabilities


def add_halves(monkeypatch):
    """Makes `halves` a scheme, until the test ends."""
    assert "halves" not in schemes.SCHEMES
    monkeypatch.setitem(SCHEDULES, "halves", in_halves)
    monkeypatch.setitem(schemes.SCHEMES, "halves", schemes.Scheme("halves", "", False, True, "halves", True))
    row = capabilities.Capability("scheme", "halves", True, "")
    monkeypatch.setattr(capabilities, "CAPABILITIES", (*capabilities.CAPABILITIES, row))


def in_halves(step, forward):
    """The keys of the first KV ranks, and then those of the others, each fetched in one collective."""
    seen = step.needed

    def half(first):
        owners = np.repeat(np.arange(step.num_kv_ranks), step.keys.token_counts)[step.keys.inverse_order]
        chosen = (owners < step.num_kv_ranks // 2) == first

        def wanted(rank):
            starts, ends = seen.wanted(rank)
            mine = np.zeros(len(owners) + 1, dtype=bool)
            for start, end in zip(starts, ends, strict=True):
                mine[start:end] = True
            edges = np.flatnonzero(np.diff(np.concatenate([[False], mine[:-1] & chosen, [False]]).astype(int)))
            return edges[::2], edges[1::2]

        return wanted

    fetches = [Fetch(step.keys, half(first), "half of the keys") for first in (True, False)]
    return tuple(Stage(number, fetch, Return(fetch)) for number, fetch in enumerate(fetches))
