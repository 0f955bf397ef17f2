"""`group_batches`: the documents of a global batch dealt to groups of ranks, each document to as few as are fast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_cp.data.even import Cost
from megatron_cp.errors import ArgumentError, as_number, checked_integer
from megatron_cp.layout.packing import IntArray, host_array, is_integral

# Of the ideal step: within which time a document has to be through, which decides over how many ranks it is spread.
_TARGETS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.35, 1.5, 2.0, math.inf)


@dataclass(frozen=True)
class GroupBatch:
    """A microbatch of some ranks.

    Attributes:
        ranks: that hold it, side by side.
        documents: indices into the lengths.
        seconds: that it takes, in the unit of the cost.
    """

    ranks: range
    documents: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class GroupSchedule:
    """A step over ranks in groups. Every rank runs its batches in the order in which they are here.

    Attributes:
        batches: in an order in which no rank waits for one that waits for it.
        seconds: of the step, ranks that wait for the others of their group included.
        bound: that no schedule of whole documents in groups takes less than, see `group_batches`.
        ideal: all work, spread evenly and without messages.
    """

    batches: tuple[GroupBatch, ...]
    seconds: float
    bound: float
    ideal: float

    def of_rank(self, rank: int) -> list[GroupBatch]:
        """The batches of a rank, in order."""
        return [batch for batch in self.batches if rank in batch.ranks]


@dataclass(frozen=True)
class _Problem:
    """What a schedule is made of; `works` are each document's seconds on one rank."""

    lengths: IntArray
    works: tuple[float, ...]
    ranks: int
    tokens_per_rank: int
    exchange: float

    def seconds(self, document: int, size: int) -> float:
        """A document over so many ranks."""
        sends = self.exchange * int(self.lengths[document]) * (size - 1) / size
        return (self.works[document] + sends) / size

    def fewest(self, document: int) -> int:
        """Ranks that have room for it."""
        return -(-int(self.lengths[document]) // self.tokens_per_rank)

    def size_within(self, document: int, target: float) -> int:
        """The fewest ranks that are through with it in time; else all of them."""
        sizes = range(self.fewest(document), self.ranks + 1)
        return next((size for size in sizes if self.seconds(document, size) <= target), self.ranks)


def group_batches(
    lengths: Iterable[int], *, ranks: int, tokens_per_rank: int, cost: Cost, exchange: float = 0.0
) -> GroupSchedule:
    """The documents of a global batch in microbatches of groups of ranks, of any size, so that the step is short.

    A document is spread over the fewest ranks that hold it and are through within a target; groups are placed where
    their ranks are free the earliest, the largest first. Documents that one rank holds go, longest work first, to the
    rank with the least work so far (Graham 1969), and there into packs. Some targets are tried; the shortest step is
    taken. A function of the arguments alone, so that every rank finds the same.

    `bound` is the greater of two: all work on all ranks, with the messages of documents that one rank has no room for;
    and the document that takes longest even over its best number of ranks.

    Args:
        lengths: `[documents]` tokens of each, from 1 to `ranks * tokens_per_rank`.
        ranks: of the job's data- and context-parallel ranks together.
        tokens_per_rank: the most that a rank holds of a microbatch.
        cost: its `token` and `pair` are a document's seconds on one rank, as of a `PackCost`.
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
    ideal = sum(problem.works) / ranks
    documents = range(len(problem.lengths))
    choices = {tuple(problem.size_within(document, target * ideal) for document in documents) for target in _TARGETS}
    # What has to be shared over all ranks: then none ever waits.
    choices |= {tuple(ranks if size > 1 else 1 for size in sizes) for sizes in choices}
    ways = itertools.product(sorted(choices), (False, True))
    known = {(sizes, by_time): _scheduled(problem, sizes, by_time=by_time) for sizes, by_time in ways}
    batches, seconds = min(known.values(), key=lambda found: found[1])
    return GroupSchedule(tuple(batches), seconds, _bound(problem), ideal)


def _checked(lengths: Iterable[int], ranks: int, tokens_per_rank: int, cost: Cost, exchange: float) -> _Problem:
    ranks = checked_integer("ranks", ranks, 1)
    tokens_per_rank = checked_integer("tokens_per_rank", tokens_per_rank, 1)
    for name in ("token", "pair"):
        if not 0 <= as_number(getattr(cost, name, None)) < math.inf:
            raise ArgumentError("cost", cost, "a PackCost, whose token and pair are finite numbers of at least 0")
    if not 0 <= as_number(exchange) < math.inf:
        raise ArgumentError("exchange", exchange, "a finite number of at least 0")
    found = host_array("lengths", lengths)
    if found.ndim != 1 or found.size == 0 or not is_integral(found):
        raise ArgumentError("lengths", found.tolist(), "a flat list of at least one integer of at least 1")
    wrong = [length for length in found.tolist() if not 1 <= length <= ranks * tokens_per_rank]
    if wrong:
        raise ArgumentError("lengths", wrong[0], f"from 1 to {ranks * tokens_per_rank}, what all ranks hold together")
    works = tuple(cost.token * length + cost.pair * length * length for length in found.tolist())
    return _Problem(found, works, ranks, tokens_per_rank, float(exchange))


def _bound(problem: _Problem) -> float:
    documents = range(len(problem.lengths))
    sent = sum(problem.exchange * int(n) / 2 for n in problem.lengths if n > problem.tokens_per_rank)  # of 2 ranks half
    longest = max(
        (
            min(problem.seconds(one, size) for size in range(problem.fewest(one), problem.ranks + 1))
            for one in documents
        ),
        default=0.0,
    )
    return max((sum(problem.works) + sent) / problem.ranks, longest)


def _scheduled(problem: _Problem, sizes: Sequence[int], *, by_time: bool) -> tuple[list[GroupBatch], float]:
    """Groups first, the largest or the longest ones, one rank's documents after them; and when the last is through."""
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
        for pack in _packs(problem, documents):
            seconds = sum(problem.works[document] for document in pack)
            batches.append(GroupBatch(range(rank, rank + 1), tuple(pack), seconds))
    return batches, max(free)


def _waste(free: Sequence[float]) -> tuple[float, float]:
    """When ranks are all free, and how long some of them then have waited."""
    begins = max(free)
    return begins, sum(begins - one for one in free)


def _packs(problem: _Problem, documents: Sequence[int]) -> list[list[int]]:
    """One rank's documents in packs that it has room for: each into the first that does (Johnson 1973)."""
    packs, room = list[list[int]](), list[int]()
    for document in sorted(documents, key=lambda one: (-int(problem.lengths[one]), one)):
        length = int(problem.lengths[document])
        place = next((number for number, left in enumerate(room) if left >= length), None)
        if place is None:
            packs.append([])
            room.append(problem.tokens_per_rank)
            place = len(packs) - 1
        packs[place].append(document)
        room[place] -= length
    return packs
