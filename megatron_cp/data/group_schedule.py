"""Deals the documents of a global batch to groups of ranks, each document to as few as are fast.

`group_batches` gives each rank as many microbatches as it needs, and `group_microbatches` all ranks the same number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_cp.data.even import Cost, check_cost, checked_lengths
from megatron_cp.data.pieces import best_fit
from megatron_cp.errors import ArgumentError, as_number, checked_integer
from megatron_cp.layout.packing import IntArray

# Time limits for a document, as multiples of the ideal step: they decide the number of ranks that it is spread over.
_TARGETS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.35, 1.5, 2.0, math.inf)


@dataclass(frozen=True)
class GroupBatch:
    """A microbatch of some ranks.

    Attributes:
        ranks: the neighbouring ranks that hold it.
        documents: indices into the lengths.
        seconds: its duration, in the unit of the cost.
    """

    ranks: range
    documents: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class GroupSchedule:
    """A step over ranks in groups. Every rank runs its batches in the given order.

    Attributes:
        batches: in an order without deadlock.
        seconds: the duration of the step, including waits for others of a group.
        bound: lower bound for every schedule of whole documents in groups, see `group_batches`.
        ideal: the duration if all work is spread evenly and without messages.
    """

    batches: tuple[GroupBatch, ...]
    seconds: float
    bound: float
    ideal: float

    def of_rank(self, rank: int) -> list[GroupBatch]:
        """Returns the batches of a rank, in order."""
        return [batch for batch in self.batches if rank in batch.ranks]


@dataclass(frozen=True)
class _Problem:
    """The input of a schedule; `works` are each document's seconds on one rank."""

    lengths: IntArray
    works: tuple[float, ...]
    ranks: int
    tokens_per_rank: int
    exchange: float

    def seconds(self, document: int, size: int) -> float:
        """Returns the duration of a document over `size` ranks."""
        sends = self.exchange * int(self.lengths[document]) * (size - 1) / size
        return (self.works[document] + sends) / size

    def fewest(self, document: int) -> int:
        """Returns the fewest ranks that have room for a document."""
        return -(-int(self.lengths[document]) // self.tokens_per_rank)

    def size_within(self, document: int, target: float) -> int:
        """Returns the fewest ranks that finish a document in time; all ranks if none do."""
        sizes = range(self.fewest(document), self.ranks + 1)
        return next((size for size in sizes if self.seconds(document, size) <= target), self.ranks)

    @property
    def ideal(self) -> float:
        """The duration of a step if all work is spread evenly and without messages."""
        return sum(self.works) / self.ranks

    def choices(self, share: float, smallest: int = 1) -> set[tuple[int, ...]]:
        """Returns numbers of ranks of each document to try, which finish it within multiples of `share` seconds.

        Also with every shared document over all ranks, where no rank ever waits.
        """
        documents = range(len(self.lengths))
        found = {tuple(max(smallest, self.size_within(n, target * share)) for n in documents) for target in _TARGETS}
        return found | {tuple(self.ranks if size > smallest else smallest for size in sizes) for sizes in found}


def group_batches(
    lengths: Iterable[int], *, ranks: int, tokens_per_rank: int, cost: Cost, exchange: float = 0.0
) -> GroupSchedule:
    """Deals the documents of a global batch to microbatches of groups of ranks, of any size, so that the step is short.

    A document is spread over the fewest ranks that hold it and finish it within a target; groups are placed where their
    ranks are free the earliest, the largest first. Documents that one rank holds go, longest work first, to the rank
    with the least work so far (Graham 1969), and there into packs. Several targets are tried; the shortest step is
    taken. The result depends on the arguments alone, so that every rank finds the same.

    `bound` is the greater of two: all work on all ranks, with the messages of documents that do not fit one rank; and
    the document that takes longest even over its best number of ranks.

    Args:
        lengths: `[documents]` tokens of each document, from 1 to `ranks * tokens_per_rank`.
        ranks: the job's data- and context-parallel ranks together.
        tokens_per_rank: the most tokens of a microbatch on a rank.
        cost: its `token` and `pair` are a document's seconds on one rank, as in a `PackCost`.
        exchange: seconds that a rank needs to exchange a token of a document that it shares with others; a rank of s
            exchanges (s - 1) / s of its tokens.

    Raises:
        ArgumentError: lengths outside these, or numbers that are none.

    Example:
        >>> from megatron_cp.planner.predict.pack_cost import PackCost
        >>> schedule = group_batches([8, 2, 2, 1, 1], ranks=3, tokens_per_rank=4, cost=PackCost(0, 1, 0), exchange=1)
        >>> [(list(batch.ranks), batch.documents, batch.seconds) for batch in schedule.batches]
        [([0, 1], (0,), 6.0), ([2], (1, 2), 4.0), ([2], (3, 4), 2.0)]
        >>> schedule.seconds, schedule.bound
        (6.0, 6.0)
    """
    problem = _checked(lengths, ranks, tokens_per_rank, cost, exchange)
    options = itertools.product(sorted(problem.choices(problem.ideal)), (False, True))
    known = [_scheduled(problem, sizes, by_time=by_time) for sizes, by_time in options]
    return _shortest(problem, known)


def group_microbatches(
    lengths: Iterable[int],
    *,
    ranks: int,
    microbatches: int,
    tokens_per_rank: int,
    cost: Cost,
    exchange: float = 0.0,
    smallest: int = 1,
    barrier: bool = False,
) -> GroupSchedule:
    """Deals the documents of a global batch to groups of ranks, where every rank runs the same number of microbatches.

    Microbatch k of every rank runs at the same time, and its groups are all ranks, side by side. So it suits pipeline
    stages, shared experts, and schedules that count microbatches, for which `group_batches` has no order. As there, a
    document goes to the fewest ranks that hold it and finish it within a target, several targets are tried, and the
    shortest step is taken. Documents that the smallest group can hold fill the other groups, longest work first, each
    where it ends the earliest. A group without a document goes to a neighbour. The result depends on the arguments
    alone.

    Args:
        lengths: `[documents]` tokens of each document, from 1 to `ranks * tokens_per_rank`; at least one for each
            microbatch.
        ranks: the job's data- and context-parallel ranks together.
        microbatches: the number of microbatches of every rank.
        tokens_per_rank: the most tokens of a microbatch on a rank.
        cost: as in `group_batches`.
        exchange: as in `group_batches`.
        smallest: the fewest ranks of a group.
        barrier: True if all ranks wait for each other in every microbatch, as with shared experts.

    Returns:
        The schedule. `batches` has those of the first microbatch first, and `of_rank` has one for each microbatch.

    Raises:
        ArgumentError: lengths outside these, numbers that are none, or documents for which no such schedule was found,
            since they do not fit, or hardly.

    Example:
        >>> from megatron_cp.planner.predict.pack_cost import PackCost
        >>> options = {"ranks": 3, "microbatches": 2, "tokens_per_rank": 5, "cost": PackCost(0, 1, 0), "exchange": 1}
        >>> found = group_microbatches([8, 4, 3, 3, 2, 2, 2], **options)
        >>> [(list(batch.ranks), batch.documents) for batch in found.batches]
        [([0, 1], (0,)), ([2], (2, 6)), ([0], (4, 5)), ([1], (3,)), ([2], (1,))]
    """
    problem = _checked(lengths, ranks, tokens_per_rank, cost, exchange)
    microbatches = checked_integer("microbatches", microbatches, 1)
    smallest = checked_integer("smallest", smallest, 1)
    if smallest > ranks:
        raise ArgumentError("smallest", smallest, f"from 1 to {ranks}, the number of ranks")
    if microbatches > len(problem.lengths):
        raise ArgumentError("microbatches", microbatches, f"at most {len(problem.lengths)}, one for each document")
    choices = problem.choices(problem.ideal / microbatches, smallest)
    choices.add((ranks,) * len(problem.lengths))  # which wastes no room
    known = [_in_microbatches(problem, sizes, microbatches, smallest, barrier) for sizes in sorted(choices)]
    found = [schedule for schedule in known if schedule is not None]
    if not found:
        allowed = f"room for {int(problem.lengths.sum())} tokens in {microbatches} microbatches of {ranks} ranks"
        raise ArgumentError("tokens_per_rank", tokens_per_rank, allowed, "Documents are not cut: leave more room.")
    return _shortest(problem, found)


def _checked(lengths: Iterable[int], ranks: int, tokens_per_rank: int, cost: Cost, exchange: float) -> _Problem:
    ranks = checked_integer("ranks", ranks, 1)
    tokens_per_rank = checked_integer("tokens_per_rank", tokens_per_rank, 1)
    check_cost(cost)
    if not 0 <= as_number(exchange) < math.inf:
        raise ArgumentError("exchange", exchange, "a finite number of at least 0")
    found = checked_lengths(lengths)
    wrong = [length for length in found.tolist() if not 1 <= length <= ranks * tokens_per_rank]
    if wrong:
        raise ArgumentError("lengths", wrong[0], f"from 1 to {ranks * tokens_per_rank}, what all ranks hold together")
    works = tuple(cost.token * length + cost.pair * length * length for length in found.tolist())
    return _Problem(found, works, ranks, tokens_per_rank, float(exchange))


def _shortest(problem: _Problem, schedules: Iterable[tuple[list[GroupBatch], float]]) -> GroupSchedule:
    batches, seconds = min(schedules, key=lambda one: one[1])
    return GroupSchedule(tuple(batches), seconds, _bound(problem), problem.ideal)


def _bound(problem: _Problem) -> float:
    documents = range(len(problem.lengths))
    # A document over two ranks sends half of its tokens.
    sent = sum(problem.exchange * int(n) / 2 for n in problem.lengths if n > problem.tokens_per_rank)
    longest = max(
        min(problem.seconds(one, size) for size in range(problem.fewest(one), problem.ranks + 1)) for one in documents
    )
    return max((sum(problem.works) + sent) / problem.ranks, longest)


def _scheduled(problem: _Problem, sizes: Sequence[int], *, by_time: bool) -> tuple[list[GroupBatch], float]:
    """Places groups first, the largest or the longest ones, then one rank's documents. Returns the batches and the
    duration.
    """
    free, batches = [0.0] * problem.ranks, []
    shared = [document for document, size in enumerate(sizes) if size > 1]
    took = {document: problem.seconds(document, sizes[document]) for document in shared}
    for document in sorted(shared, key=lambda one: (-took[one] if by_time else -sizes[one], -problem.works[one], one)):
        size, seconds = sizes[document], took[document]
        first = min(range(problem.ranks - size + 1), key=lambda begin: (*_waste(free[begin : begin + size]), begin))
        ends = max(free[first : first + size]) + seconds
        free[first : first + size] = [ends] * size
        batches.append(GroupBatch(range(first, first + size), (document,), seconds))
    held: list[list[int]] = [[] for _ in range(problem.ranks)]
    alone = [document for document, size in enumerate(sizes) if size == 1]
    for document in sorted(alone, key=lambda one: (-problem.works[one], one)):
        rank = min(range(problem.ranks), key=lambda one: (free[one], one))
        free[rank] += problem.works[document]
        held[rank].append(document)
    for rank, documents in enumerate(held):
        for places in best_fit([int(problem.lengths[document]) for document in documents], problem.tokens_per_rank):
            pack = tuple(documents[place] for place in places)
            batches.append(GroupBatch(range(rank, rank + 1), pack, sum(problem.works[document] for document in pack)))
    return batches, max(free)


@dataclass
class _Group:
    """A group of ranks in a microbatch, which is still given documents."""

    microbatch: int
    size: int
    documents: list[int] = field(default_factory=list)


def _in_microbatches(
    problem: _Problem, sizes: Sequence[int], microbatches: int, smallest: int, barrier: bool
) -> tuple[list[GroupBatch], float] | None:
    """Returns the batches and the duration of a step, or None if documents are left over or a microbatch has none."""
    groups = _opened(problem, sizes, microbatches, smallest)
    if groups is None or not _filled(problem, groups, sizes, smallest):
        return None
    free, batches = [0.0] * problem.ranks, list[GroupBatch]()
    for microbatch in range(microbatches):
        beside = [group for group in groups if group.microbatch == microbatch]
        used = [group for group in beside if group.documents]
        if not used:
            return None
        for group in beside:
            if not group.documents:
                max(used, key=lambda one: _seconds(problem, one)).size += group.size
        batches += _placed(problem, used, free)
        if barrier:
            free = [max(free)] * problem.ranks
    return batches, max(free)


def _opened(problem: _Problem, sizes: Sequence[int], microbatches: int, smallest: int) -> list[_Group] | None:
    """Opens groups for the documents that more than the smallest group share, and fills microbatches with the smallest.

    Returns None if such a document has no place.
    """
    groups, unused = list[_Group](), [problem.ranks] * microbatches
    shared = [document for document, size in enumerate(sizes) if size > smallest]
    for document in sorted(shared, key=lambda one: (-sizes[one], -problem.works[one], one)):
        microbatch = max(range(microbatches), key=lambda one: unused[one])
        size = sizes[document]
        if unused[microbatch] - size < smallest:
            size = max(size, unused[microbatch])  # too few ranks would be left for a group
        if size <= unused[microbatch]:
            unused[microbatch] -= size
            groups.append(_Group(microbatch, size, [document]))
            continue
        fits = [group for group in groups if _tokens(problem, group, document) <= group.size * problem.tokens_per_rank]
        if not fits:
            return None
        min(fits, key=lambda one: _seconds(problem, one, document)).documents.append(document)
    for microbatch, left in enumerate(unused):
        count = left // smallest
        groups += [_Group(microbatch, smallest + left % smallest * (place == 0)) for place in range(count)]
    return groups


def _filled(problem: _Problem, groups: list[_Group], sizes: Sequence[int], smallest: int) -> bool:
    """Gives documents of the smallest groups to groups in which they end the earliest; False if one has no room."""
    order = np.argsort([group.microbatch for group in groups], kind="stable")
    turn = np.concatenate([np.arange(count) for count in np.bincount([group.microbatch for group in groups])])
    groups[:] = [groups[place] for place in order[np.argsort(turn, kind="stable")]]  # ties: one in each microbatch
    width = np.array([group.size for group in groups], np.float64)
    ends = np.array([_seconds(problem, group) for group in groups])
    room = width * problem.tokens_per_rank - [_tokens(problem, group) for group in groups]
    for document in sorted(
        (document for document, size in enumerate(sizes) if size <= smallest),
        key=lambda one: (-problem.works[one], one),
    ):
        length = int(problem.lengths[document])
        then = ends + (problem.works[document] + problem.exchange * length * (width - 1) / width) / width
        place = int(np.argmin(np.where(room >= length, then, np.inf)))
        if room[place] < length:
            return False
        ends[place], room[place] = then[place], room[place] - length
        groups[place].documents.append(document)
    return True


def _placed(problem: _Problem, groups: list[_Group], free: list[float]) -> list[GroupBatch]:
    """Places the groups of a microbatch side by side, the largest first so that few different groups occur in a step.

    Of groups of one size the longest goes where the ranks are free the earliest. Sets `free` to when they end.
    """
    batches, first = list[GroupBatch](), 0
    for size, alike in itertools.groupby(sorted(groups, key=lambda one: -one.size), key=lambda one: one.size):
        longest_first = sorted(alike, key=lambda one: -_seconds(problem, one))
        places = [range(first + size * place, first + size * (place + 1)) for place in range(len(longest_first))]
        first = places[-1].stop
        for group, ranks in zip(
            longest_first, sorted(places, key=lambda one: max(free[rank] for rank in one)), strict=True
        ):
            seconds = _seconds(problem, group)
            ends = max(free[rank] for rank in ranks) + seconds
            free[ranks.start : ranks.stop] = [ends] * size
            batches.append(GroupBatch(ranks, tuple(group.documents), seconds))
    return sorted(batches, key=lambda one: one.ranks.start)


def _seconds(problem: _Problem, group: _Group, *more: int) -> float:
    return sum(problem.seconds(document, group.size) for document in (*group.documents, *more))


def _tokens(problem: _Problem, group: _Group, *more: int) -> int:
    return sum(int(problem.lengths[document]) for document in (*group.documents, *more))


def _waste(free: Sequence[float]) -> tuple[float, float]:
    """Returns the time when ranks are all free, and the sum of their waits until then."""
    begins = max(free)
    return begins, sum(begins - one for one in free)
