"""`fewer_keys`: compares shares of the packed stream by the keys that ranks send and receive."""

from __future__ import annotations

import numpy as np

from megatron_cp.layout.balance import CLOSE, Fragments, Work, most_work
from megatron_cp.layout.bands import cut, ranges_seen_by_ranks
from megatron_cp.layout.packing import IntArray


def fewer_keys(shares: list[Fragments], others: list[list[Fragments]], work: Work, bands: IntArray) -> list[Fragments]:
    """Returns those of the shares whose busiest rank sends or receives fewest keys; less even ones are left out.

    Two in a thousand of the busiest rank's work, the tolerance of a share, count as nothing.
    """
    most = (1 + 2 * CLOSE) * most_work(shares, work)
    even = [each for each in others if most_work(each, work) <= most]
    return min([shares, *even], key=lambda each: most_keys_moved(bands, each)) if even else shares


def most_keys_moved(bands: IntArray, shares: list[Fragments]) -> int:
    """Returns the most keys that a rank receives or sends if each goes once to every other rank that sees it."""
    owners = np.repeat(np.arange(len(shares)), [len(fragments) for fragments in shares])
    starts, ends = np.array([fragment for fragments in shares for fragment in fragments]).T
    order = np.argsort(starts)
    pieces, number = cut(bands, starts[order], ends[order], queries=True)
    ranks = owners[order][number]
    by_rank = np.argsort(ranks, kind="stable")
    edges = np.searchsorted(ranks[by_rank], np.arange(len(shares) + 1))
    first, last, offsets = ranges_seen_by_ranks(pieces[by_rank], edges)
    readers = np.repeat(np.arange(len(shares)), np.diff(offsets))

    def by_owner(apart: int) -> IntArray:
        """Counts the keys of each rank that are seen, once for each rank; by itself alone if ranks lie apart."""
        seen = [np.sort(each + readers * apart) for each in (first, last)]
        before, after = (_overlap(each + owners * apart, *seen) for each in (starts, ends))
        return np.bincount(owners, after - before, minlength=len(shares)).astype(np.int64)

    own = by_owner(int(ends.max()))
    received = np.bincount(readers, last - first, minlength=len(shares)).astype(np.int64)
    return int(max((by_owner(0) - own).max(), (received - own).max()))


def _overlap(places: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """Returns how many places before each one lie in ranges, counted once for each range, from their sorted edges."""
    found = np.zeros_like(places)
    for sign, edges in ((1, starts), (-1, ends)):
        count = edges.searchsorted(places)
        found += sign * (count * places - np.concatenate([[0], np.cumsum(edges)])[count])
    return found
