"""Schedules whose keys come in two fetches, with own keys before them or not: those here have one fetch."""

import numpy as np

from megatron_cp.plan import schemes
from megatron_cp.plan.attention import SCHEDULES
from megatron_cp.plan.attention_program import Stage
from megatron_cp.plan.flows import Fetch, Return
from megatron_cp.planner import capabilities


def add_halves(monkeypatch):
    """Makes `halves` a scheme, until the test ends."""
    _add(monkeypatch, "halves", in_halves)


def add_by_distance(monkeypatch):
    """Makes `by_distance` a scheme, until the test ends."""
    _add(monkeypatch, "by_distance", by_distance)


def _add(monkeypatch, name, schedule):
    assert name not in schemes.SCHEMES
    monkeypatch.setitem(SCHEDULES, name, schedule)
    monkeypatch.setitem(schemes.SCHEMES, name, schemes.Scheme(name, "", False, True, name, True))
    row = capabilities.Capability("scheme", name, True, "")
    monkeypatch.setattr(capabilities, "CAPABILITIES", (*capabilities.CAPABILITIES, row))


def in_halves(step, forward):
    """Fetches the keys of the first KV ranks, and then those of the others."""
    halves = (lambda owners, _, first=first: (owners < step.num_kv_ranks // 2) == first for first in (True, False))
    fetches = [Fetch(step.keys, keys_of(step, chosen), "half of the keys") for chosen in halves]
    return tuple(Stage(number, fetch, Return(fetch)) for number, fetch in enumerate(fetches))


def by_distance(step, forward):
    """Computes own keys first, then fetches those of the ranks before and after, and then all others."""

    def near(owners, rank):
        return np.isin(owners, [(rank - 1) % step.num_kv_ranks, (rank + 1) % step.num_kv_ranks]) & (owners != rank)

    def far(owners, rank):
        return ~near(owners, rank) & (owners != rank)

    fetches = [Fetch(step.keys, keys_of(step, chosen), "keys by distance") for chosen in (near, far)]
    return Stage(0, None, None), *(Stage(number, fetch, Return(fetch)) for number, fetch in enumerate(fetches, 1))


def keys_of(step, chosen):
    """Returns, for a fetch, the keys that a rank sees and whose owners `chosen(owners, rank)` picks."""
    seen, owners = step.needed, np.repeat(np.arange(step.num_kv_ranks), step.keys.token_counts)[step.keys.inverse_order]

    def wanted(rank):
        starts, ends = seen.wanted(rank)
        mine = np.zeros(len(owners), dtype=bool)
        for start, end in zip(starts, ends, strict=True):
            mine[start:end] = True
        inside = mine & chosen(owners, rank)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(int)))
        return edges[::2], edges[1::2]

    return wanted
