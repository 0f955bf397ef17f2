"""`HeadChunk`: a part of a rank's heads, whose keys travel together. No torch in here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron_cp.exchange.sections import HeadPartition, head_runs


@dataclass(frozen=True)
class HeadChunk:
    """A part of a rank's heads, whose keys travel together.

    Attributes:
        heads, groups: ranges of the query heads and of the key/value heads, numbered within the rank.
        runs: query heads and the key/value heads that they read, numbered within the chunk, in runs of one ratio.
        first_head: the first query head, numbered in the layer.
        number: the position of the chunk, from 0.
    """

    heads: slice
    groups: slice
    runs: tuple[tuple[slice, slice], ...]
    first_head: int
    number: int = 0

    @property
    def num_groups(self) -> int:
        return self.groups.stop - self.groups.start


def cut_heads(partition: HeadPartition, head_rank: int, count: int) -> list[HeadChunk]:
    """Cuts a rank's heads into `count` chunks with nearly equal numbers of key/value heads; some may be empty."""
    runs = head_runs(partition, head_rank)
    first, last = partition.groups[head_rank]
    cuts = [(last - first) * chunk // count for chunk in range(count + 1)]
    first_of_rank = partition.heads[head_rank][0]
    return [_chunk(runs, lo, hi, first_of_rank, number) for number, (lo, hi) in enumerate(itertools.pairwise(cuts))]


def _chunk(runs: list[tuple[slice, slice]], lo: int, hi: int, first_of_rank: int, number: int) -> HeadChunk:
    """Returns the chunk of groups `[lo, hi)`, from runs that are cut where the chunk begins and ends."""
    parts = []
    for heads, groups in runs:
        first, last = max(groups.start, lo), min(groups.stop, hi)
        if first >= last:
            continue
        ratio = (heads.stop - heads.start) // (groups.stop - groups.start)
        begin = heads.start + (first - groups.start) * ratio
        parts.append((slice(begin, begin + (last - first) * ratio), slice(first, last)))
    if not parts:
        return HeadChunk(slice(0, 0), slice(lo, hi), (), first_of_rank, number)
    start = parts[0][0].start
    within = tuple((_moved(heads, -start), _moved(groups, -lo)) for heads, groups in parts)
    return HeadChunk(slice(start, parts[-1][0].stop), slice(lo, hi), within, first_of_rank + start, number)


def _moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)
