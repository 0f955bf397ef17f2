"""Tiles assigned at random, where a planner would: what runs and predicts them must take any assignment."""

from functools import partial

import numpy as np

from megatron_cp.layout.bands import cut
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.plan.tile_assignment import TileAssignment, TiledWork

TILED = tuple(name for name, scheme in SCHEMES.items() if scheme.assigns_tiles)
_CUTS = 7  # of queries, and of keys


def assign_at_random(monkeypatch, seed=0):
    """Every plan has random tiles, others forward than backward, until the test ends."""
    monkeypatch.setattr("megatron_cp.planner.request.assigned_tiles", partial(random_work, seed=seed))


def assign_all_to(monkeypatch, rank):
    """Makes one rank compute everything, for all others, until the test ends."""

    def assigned(step, *_):
        found = of_ranks(step.mask.bands, np.full(len(step.mask.bands), rank), step.num_kv_ranks)
        return TiledWork(found, found)

    monkeypatch.setattr("megatron_cp.planner.request.assigned_tiles", assigned)


def random_work(step, *_, seed=0):
    """Makes two random assignments of an attention's tiles, in place of `assigned_tiles`."""
    return TiledWork(random_assignment(step, 2 * seed), random_assignment(step, 2 * seed + 1))


def random_assignment(step, seed):
    """The mask cut at random places of queries and keys; a random rank computes each piece."""
    random, ranks = np.random.default_rng(seed), step.num_kv_ranks
    bands, _ = cut(step.mask.bands, *_ranges(step.queries.packing.total, random), queries=True)
    bands, _ = cut(bands, *_ranges(step.keys.packing.total, random), queries=False)
    return of_ranks(bands, random.integers(0, ranks, len(bands)), ranks)


def at_query_owners(step):
    """Assigns to each rank the tiles of its own queries."""
    starts, ends, ranks = [], [], []
    for rank in range(step.num_kv_ranks):
        own = slice(*step.queries.fragment_offsets[rank : rank + 2])
        starts += step.queries.starts[own].tolist()
        ends += step.queries.ends[own].tolist()
        ranks += [rank] * (own.stop - own.start)
    order = np.argsort(starts)
    bands, number = cut(step.mask.bands, np.array(starts)[order], np.array(ends)[order], queries=True)
    return of_ranks(bands, np.array(ranks)[order][number], step.num_kv_ranks)


def of_ranks(bands, ranks, count):
    """An assignment of each band to a rank."""
    order = np.argsort(ranks, kind="stable")
    return TileAssignment(bands[order], np.searchsorted(ranks[order], np.arange(count + 1)))


def _ranges(total, random):
    edges = np.unique(np.concatenate([[0, total], random.integers(0, total + 1, _CUTS)]))
    return edges[:-1], edges[1:]
