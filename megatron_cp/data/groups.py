"""`group_batches`: deals the documents of a global batch to groups of ranks, each document to as few as are fast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    ideal = sum(problem.works) / ranks
    documents = range(len(problem.lengths))
    choices = {tuple(problem.size_within(document, target * ideal) for document in documents) for target in _TARGETS}
    # Also with every shared document over all ranks, where no rank ever waits.
    choices |= {tuple(ranks if size > 1 else 1 for size in sizes) for sizes in choices}
    options = itertools.product(sorted(choices), (False, True))
    known = {(sizes, by_time): _scheduled(problem, sizes, by_time=by_time) for sizes, by_time in options}
    batches, seconds = min(known.values(), key=lambda found: found[1])
    return GroupSchedule(tuple(batches), seconds, _bound(problem), ideal)


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


def _waste(free: Sequence[float]) -> tuple[float, float]:
    """Returns the time when ranks are all free, and the sum of their waits until then."""
    begins = max(free)
    return begins, sum(begins - one for one in free)
