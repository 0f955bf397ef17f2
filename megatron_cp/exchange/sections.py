"""`Sections`: the feature axis as named blocks of heads, and the heads that each rank computes. No torch in here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout.memo import Memo

ROW_ALIGNMENT = 16  # bytes: the widest access of a GPU thread, and the pointer alignment that attention kernels require
SCALE_SIZE = 4  # bytes of a float32

HeadRange = tuple[int, int]


@dataclass(frozen=True)
class HeadPartition:
    """The heads that each rank computes: consecutive query heads, and the key/value heads that those read.

    `heads[r]` and `groups[r]` are half-open ranges. For a linear layer read "value heads" for heads and "key heads" for
    groups: the sharing is the same. `parent` is set if these are a chunk of each rank's heads.
    """

    heads: tuple[HeadRange, ...]
    groups: tuple[HeadRange, ...]
    parent: HeadPartition | None = None

    @cached_property
    def heads_per_group(self) -> int:
        partition = self.parent or self
        return max(hi for _, hi in partition.heads) // max(hi for _, hi in partition.groups)

    @property
    def most_groups(self) -> int:
        """The largest number of groups of a rank, which is the largest number of head chunks."""
        return max(hi - lo for lo, hi in self.groups)

    def chunk(self, number: int, count: int) -> HeadPartition:
        """Returns chunk `number` of `count` of each rank's heads: whole groups, at most one more or less."""
        if count == 1:
            return self
        groups = tuple(
            (lo + (hi - lo) * number // count, lo + (hi - lo) * (number + 1) // count) for lo, hi in self.groups
        )
        size = self.heads_per_group
        # Clips a group that ranks share to the rank's own heads.
        heads = tuple(
            (min(max(lo, first * size), hi), min(max(lo, last * size), hi))
            for (lo, hi), (first, last) in zip(self.heads, groups, strict=True)
        )
        return HeadPartition(heads, groups, parent=self)

    @property
    def idle_ranks(self) -> int:
        return sum(hi == lo for lo, hi in self.heads)

    @property
    def replicated(self) -> bool:
        """True if some group is read on more than one rank, so that its gradient is a sum over ranks."""
        return sum(hi - lo for lo, hi in self.groups) > max(hi for _, hi in self.groups)


def partition_heads(num_heads: int, num_groups: int, cp_size: int) -> HeadPartition:
    """Assigns `num_heads` heads, `num_heads / num_groups` to a group, to `cp_size` ranks in order.

    Assigns whole groups if there are at least as many groups as ranks. With fewer groups, ranks are assigned to groups,
    so that no rank reads two, unless single heads give the busiest rank less to do.
    """
    num_heads = checked_integer("num_heads", num_heads, 1)
    num_groups = checked_integer("num_groups", num_groups, 1)
    if num_heads % num_groups:
        raise ArgumentError("num_groups", num_groups, f"a divisor of the {num_heads} heads")
    per_group = num_heads // num_groups
    if num_groups >= cp_size:
        groups = _even_cuts(num_groups, cp_size)
        return HeadPartition(tuple((lo * per_group, hi * per_group) for lo, hi in groups), groups)

    plain = _even_cuts(num_heads, cp_size)
    aligned = tuple(
        (group * per_group + lo, group * per_group + hi)
        for group, (first, last) in enumerate(_even_cuts(cp_size, num_groups))
        for lo, hi in _even_cuts(per_group, last - first)
    )
    heads = aligned if _largest(aligned) <= _largest(plain) else plain
    return HeadPartition(heads, tuple((lo // per_group, -(-hi // per_group)) for lo, hi in heads))


HeadRun = tuple[slice, slice]


def head_runs(partition: HeadPartition, rank: int) -> list[HeadRun]:
    """Returns a rank's query heads and the key/value heads they read, in runs of one ratio, as slices of its heads.

    There is one run if whole groups were assigned; several if a rank's heads begin or end inside a group.
    """
    heads_per_group = partition.heads_per_group
    (first_head, last_head), (first_group, last_group) = partition.heads[rank], partition.groups[rank]
    runs: list[HeadRun] = []
    for group in range(first_group, last_group):
        lo = max(group * heads_per_group, first_head) - first_head
        hi = min((group + 1) * heads_per_group, last_head) - first_head
        if hi <= lo:
            continue
        own = group - first_group
        if runs:
            heads, groups = runs[-1]
            if (heads.stop - heads.start) == (hi - lo) * (groups.stop - groups.start):
                runs[-1] = (slice(heads.start, hi), slice(groups.start, own + 1))
                continue
        runs.append((slice(lo, hi), slice(own, own + 1)))
    return runs


_RANGES_ALLOWED = "one range of heads a rank, both ends never falling, that cover every head"


@dataclass(frozen=True)
class Section:
    """A named block of heads on the feature axis.

    Attributes:
        name: the usual symbol (`q`, `k`, `v`, `beta`, ...).
        num_heads: heads in the block, over all ranks.
        head_dim: features of one head.
        ranges: for each rank the half-open range of heads that it computes. Both ends never fall from rank to rank;
            ranges of neighbours may overlap, if a head is computed on several ranks.
        exact: True if it is never coded in messages: a recurrence multiplies it up over the tokens.
    """

    name: str
    num_heads: int
    head_dim: int
    ranges: tuple[HeadRange, ...]
    exact: bool = False

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def heads_on(self, rank: int) -> int:
        lo, hi = self.ranges[rank]
        return hi - lo

    def renumbered(self) -> Section:
        """Returns the block without the heads that no rank computes."""
        numbers = sorted({head for lo, hi in self.ranges for head in range(lo, hi)})
        places = {head: place for place, head in enumerate(numbers)}
        ranges, end = [], 0
        for lo, hi in self.ranges:
            first = places[lo] if hi > lo else end
            end = first + hi - lo
            ranges.append((first, end))
        return replace(self, num_heads=len(numbers), ranges=tuple(ranges))

    @property
    def replicated(self) -> bool:
        """True if some head is computed on more than one rank."""
        return sum(hi - lo for lo, hi in self.ranges) > self.num_heads


@dataclass(frozen=True)
class HeadCopy:
    """The position of one section's heads in the messages of ranks `first_rank .. last_rank - 1`, the same in all.

    One strided copy moves them: rank `first_rank + i` takes `num_heads` heads from `first_head + i * head_step` on. The
    first `shared_heads` of them are also in the message of a lower rank: on the way back they are added. The scales of
    a coded section's heads begin `scales` bytes from the start of a message row.
    """

    section: int
    first_rank: int
    last_rank: int
    first_head: int
    head_step: int
    num_heads: int
    shared_heads: int
    offset: int  # bytes from the start of a message row
    scales: int | None = None

    @property
    def num_ranks(self) -> int:
        return self.last_rank - self.first_rank


@dataclass(frozen=True)
class RowFormat:
    """The byte layout of one token in the messages of each rank, with every section aligned to `ROW_ALIGNMENT`.

    Attributes:
        row_bytes: for each rank, the bytes of one token in messages to (or from) it.
        row_starts: for each rank, the bytes of one token in the messages of all lower ranks.
        offsets: `[rank][section]` byte offset of each section inside the row.
        scales: `[rank][section]` byte offset of its scales, behind all sections; None if it is not coded.
        blocks, parents: the sections, and those of which they are a chunk: the same ones if they are none.
    """

    row_bytes: tuple[int, ...]
    row_starts: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    scales: tuple[tuple[int | None, ...], ...]
    blocks: tuple[Section, ...]
    parents: tuple[Section, ...]

    @cached_property
    def head_copies(self) -> tuple[HeadCopy, ...]:
        """The fewest copies that fill or empty the messages of all ranks, in rank order within a section."""
        return tuple(head_copy for index in range(len(self.blocks)) for head_copy in self._copies_of(index))

    def _copies_of(self, section: int) -> list[HeadCopy]:
        """Returns the copies of one section: neighbouring ranks with equal messages share one."""
        runs: list[HeadCopy] = []
        seen = 0  # heads below this one are in the message of some lower rank, perhaps in another chunk
        for rank, (lo, hi) in enumerate(self.blocks[section].ranges):
            if hi > lo:
                shared = min(max(0, seen - lo), hi - lo)
                places = self.offsets[rank][section], self.scales[rank][section]
                alone = HeadCopy(section, rank, rank + 1, lo, 0, hi - lo, shared, *places)
                joined = self._joined(runs[-1], alone) if runs else None
                if joined:
                    runs[-1] = joined
                else:
                    runs.append(alone)
            seen = max(seen, self.parents[section].ranges[rank][1])
        return runs

    def _joined(self, run: HeadCopy, next_rank: HeadCopy) -> HeadCopy | None:
        """Returns `run` with one more rank, or None if the next rank's message differs."""
        step = next_rank.first_head - run.first_head - (run.num_ranks - 1) * run.head_step
        alike = (
            run.last_rank == next_rank.first_rank
            and run.num_heads == next_rank.num_heads
            and (run.offset, run.scales) == (next_rank.offset, next_rank.scales)
            and self.row_bytes[run.first_rank] == self.row_bytes[next_rank.first_rank]
            and run.shared_heads == next_rank.shared_heads == 0
            and (run.num_ranks == 1 or run.head_step == step)
        )
        return replace(run, last_rank=next_rank.last_rank, head_step=step) if alike else None


@dataclass(frozen=True)
class Sections(Memo):
    """The feature axis of a head exchange: blocks of heads that travel together in one message.

    `parent` is set if these are a chunk of each rank's heads: blocks are then as wide as the parent's, and ranges cover
    a part.
    """

    blocks: tuple[Section, ...]
    parent: Sections | None = None

    def __post_init__(self) -> None:
        for block in self.blocks if self.parent is None else ():
            before = (0, 0)
            for lo, hi in block.ranges:
                if not before[0] <= lo <= before[1] <= hi:
                    raise ArgumentError("ranges", block.ranges, _RANGES_ALLOWED, f"Given for section {block.name!r}.")
                before = (lo, hi)
            if before[1] != block.num_heads or len(block.ranges) != self.cp_size:
                raise ArgumentError("ranges", block.ranges, _RANGES_ALLOWED, f"Given for section {block.name!r}.")

    @property
    def cp_size(self) -> int:
        return len(self.blocks[0].ranges)

    @property
    def width(self) -> int:
        return sum(block.width for block in self.blocks)

    @property
    def replicated(self) -> bool:
        """True if some head is computed on more than one rank."""
        return any(block.replicated for block in self.blocks)

    def chunk(self, partition: HeadPartition, number: int, count: int) -> Sections:
        """Returns chunk `number` of `count` of each rank's heads, cut like the `partition` that assigned them."""
        if count == 1:
            return self
        part = partition.chunk(number, count)
        blocks = (replace(b, ranges=part.groups if b.ranges == partition.groups else part.heads) for b in self.blocks)
        return Sections(tuple(blocks), parent=self)

    def renumbered(self) -> Sections:
        """Returns the blocks without the heads that no rank computes: the sections of a chunk by itself."""
        return Sections(tuple(block.renumbered() for block in self.blocks))

    def row_format(
        self, item_sizes: Sequence[int], alignment: int = ROW_ALIGNMENT, coded: Sequence[bool] | None = None
    ) -> RowFormat:
        """Returns the byte layout of a token's heads in the messages, for elements of `item_sizes[section]` bytes.

        A section that is `coded` takes one byte an element, and `SCALE_SIZE` more a head.
        """
        coded = (False,) * len(self.blocks) if coded is None else tuple(coded)
        key = "row format", tuple(item_sizes), alignment, coded
        return self.memo(key, lambda: self._make_row_format(item_sizes, alignment, coded))

    def _make_row_format(self, item_sizes: Sequence[int], alignment: int, coded: Sequence[bool]) -> RowFormat:
        heads_of_ranks = list(zip(*([hi - lo for lo, hi in block.ranges] for block in self.blocks), strict=True))
        rows = {heads: self._rank_row(heads, item_sizes, alignment, coded) for heads in set(heads_of_ranks)}
        offsets, scales, row_bytes = zip(*(rows[heads] for heads in heads_of_ranks), strict=True)
        row_starts = tuple(itertools.accumulate(row_bytes, initial=0))[:-1]
        return RowFormat(row_bytes, row_starts, offsets, scales, self.blocks, (self.parent or self).blocks)

    def _rank_row(
        self, heads: tuple[int, ...], item_sizes: Sequence[int], alignment: int, coded: Sequence[bool]
    ) -> tuple[tuple[int, ...], tuple[int | None, ...], int]:
        """Returns the offsets, the scales and the bytes for a rank with the given number of heads of each block."""
        starts, places, end = [], list[int | None](), 0
        for block, count, size, is_coded in zip(self.blocks, heads, item_sizes, coded, strict=True):
            starts.append(end)
            end += _round_up(count * block.head_dim * (1 if is_coded else size), alignment)
        # Scales are adjacent, since each would otherwise be padded to the alignment.
        end = _round_up(end, SCALE_SIZE) if any(coded) else end
        for count, is_coded in zip(heads, coded, strict=True):
            places.append(end if is_coded else None)
            end += count * SCALE_SIZE if is_coded else 0
        return tuple(starts), tuple(places), _round_up(end, alignment)


def _even_cuts(count: int, parts: int) -> tuple[HeadRange, ...]:
    """Splits `count` into `parts` consecutive ranges whose sizes differ by at most one, the larger ones first."""
    size, more = divmod(count, parts)
    starts = [part * size + min(part, more) for part in range(parts + 1)]
    return tuple(itertools.pairwise(starts))


def _largest(ranges: Sequence[HeadRange]) -> int:
    return max(hi - lo for lo, hi in ranges)


def _round_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
