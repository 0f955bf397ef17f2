"""`even_packs`: puts the documents of a global batch in packs whose predicted times are even."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import numpy as np

from megatron_cp.data.packs import Packs
from megatron_cp.data.pieces import best_fit
from megatron_cp.errors import ArgumentError, as_number, checked_flag, checked_integer
from megatron_cp.layout.array_types import FloatArray, IntArray
from megatron_cp.layout.packing import host_array, is_integral

TRIES = 64  # pairs of packs tried in a round, so that a batch of any size takes some tens of milliseconds
ROUNDS = 2  # rounds of sorting into microbatches; a third gains less than a thousandth
TAILS = (0.0, 0.1, 0.4)  # shares of the tokens that best fit adds if packs would overflow
ROOM = 0.01  # with less of the budget free, packs would overflow without a tail


_MOST_TOKENS = 2**60  # sums of a few such numbers fit 64 bits


class Cost(Protocol):
    """The time of a pack as a function of its documents, such as `planner.predict.pack_cost.PackCost`; in any unit.

    Attributes:
        token: time of a token.
        pair: time of a pair of tokens of a document.
    """

    @property
    def token(self) -> float: ...

    @property
    def pair(self) -> float: ...


def check_cost(cost: Cost) -> None:
    """Raises an `ArgumentError` unless a cost has a `token` and a `pair` that are finite and at least 0."""
    for name in ("token", "pair"):
        if not 0 <= as_number(getattr(cost, name, None)) < math.inf:
            raise ArgumentError("cost", cost, "a PackCost, whose token and pair are finite numbers of at least 0")


def checked_lengths(lengths: Iterable[int]) -> IntArray:
    """Returns the lengths of documents as an array; raises an `ArgumentError` unless they are a list of integers."""
    sizes = host_array("lengths", lengths)
    if sizes.ndim != 1 or sizes.size == 0 or not is_integral(sizes):
        raise ArgumentError("lengths", sizes.tolist(), "a flat list of at least one integer of at least 1")
    return sizes


@dataclass(frozen=True)
class GlobalBatch:
    """The packs that a step reads, and the rule for its duration.

    Pack number `microbatch * ranks + rank` of a global batch is that microbatch of that rank.

    Attributes:
        ranks: the number of data-parallel ranks.
        microbatches: packs that each rank reads in a step.
        cost: the cost of a pack.
        barrier: True if ranks wait for each other in each microbatch: if experts or parameters are shared among
            data-parallel ranks, or with pipeline stages. The step then takes the sum over microbatches of the heaviest
            rank's time, and else the heaviest rank's sum over microbatches.

    Raises:
        ArgumentError: `ranks` or `microbatches` is no integer of at least 1, `barrier` is not True or False, or `cost`
            has no `token` and `pair` that are finite and at least 0.

    Example:
        >>> from megatron_cp.planner.predict.pack_cost import PackCost
        >>> batch = GlobalBatch(ranks=2, microbatches=2, cost=PackCost(0, 1, 0))
        >>> batch.step_time([4, 2, 1, 5])
        7.0
        >>> GlobalBatch(2, 2, batch.cost, barrier=True).step_time([4, 2, 1, 5])
        9.0
    """

    ranks: int
    microbatches: int
    cost: Cost
    barrier: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "microbatches"):
            object.__setattr__(self, name, checked_integer(name, getattr(self, name), 1))
        check_cost(self.cost)
        checked_flag("barrier", self.barrier)

    @property
    def packs(self) -> int:
        """The number of packs of a global batch."""
        return self.ranks * self.microbatches

    def step_time(self, times: Sequence[float] | FloatArray) -> float:
        """Returns the time of a step.

        Args:
            times: `[microbatches * ranks]` times of its packs, by their numbers.

        Raises:
            ArgumentError: another number of packs, or a time that is not finite.
        """
        packs = np.asarray(times, np.float64)
        if packs.shape != (self.packs,) or not np.isfinite(packs).all():
            raise ArgumentError("times", times, f"a finite number for each of {self.packs} packs")
        return self._seconds(packs.reshape(self.microbatches, self.ranks))

    def _seconds(self, times: FloatArray, *, other: bool = False) -> float:
        """Returns the step time for times `[microbatches, ranks]`; for the other setting of `barrier` if `other`."""
        return float(times.max(1).sum() if self.barrier != other else times.sum(0).max())


def even_packs(
    lengths: Iterable[int],
    *,
    budget: int,
    cost: Cost,
    ranks: int = 1,
    microbatches: int | None = None,
    barrier: bool = False,
) -> list[list[int]]:
    """Puts the documents of a global batch in packs for all data-parallel ranks, so that its step is short.

    First, longest document first, each goes to the rank with the least work so far, and there into the lightest pack
    that has room (longest processing time first, Graham 1969); if packs would overflow, best fit adds the shortest
    documents. Then packs exchange documents: one for a run of shorter ones, which moves work at equal tokens. The
    result is never worse than best fit by tokens, and depends on the arguments alone.

    With `barrier=False` the heaviest rank's sum over its microbatches is minimised, and with `barrier=True` the sum
    over microbatches of the heaviest pack; ties are broken by the other of the two.

    Args:
        lengths: `[documents]` tokens of each document, from 1 to `budget`: longer ones are cut before.
        budget: the most tokens of a pack.
        cost: the cost of a pack: its `token` and `pair` are used.
        ranks: data-parallel ranks.
        microbatches: packs of each rank; if None the fewest that hold what best fit needs. More leave room to be even.
        barrier: as in `GlobalBatch`.

    Returns:
        `microbatches * ranks` packs, each a rising list of indices into `lengths`, at least one; pack number
        `microbatch * ranks + rank` is that microbatch of that rank.

    Raises:
        ArgumentError: a length outside 1 to `budget`, fewer documents than packs, fewer packs than best fit needs, or
            what `GlobalBatch` refuses.

    Example:
        >>> from megatron_cp.planner.predict.pack_cost import PackCost
        >>> even_packs([8, 4, 4, 2, 2, 2, 2], budget=16, cost=PackCost(0, 1, 1), ranks=2)
        [[0], [1, 2, 3, 4, 5, 6]]
    """
    budget = checked_integer("budget", budget, 1)
    sizes = checked_lengths(lengths)
    batch = GlobalBatch(ranks, 1 if microbatches is None else microbatches, cost, barrier)
    packs = best_fit(sizes, budget)
    if sum(sizes.tolist()) > _MOST_TOKENS:
        raise ArgumentError("lengths", sizes.tolist(), f"at most {_MOST_TOKENS} tokens in a global batch")
    needed = max(-(-len(packs) // batch.ranks), 1)
    if microbatches is None:
        batch = GlobalBatch(batch.ranks, needed, cost, barrier)
    elif batch.microbatches < needed:
        allowed = f"at least {needed} for {sizes.size} documents in packs of {budget} tokens over {batch.ranks} ranks"
        raise ArgumentError("microbatches", microbatches, allowed, "Or give a larger budget.")
    if sizes.size < batch.packs:
        name = "ranks" if microbatches is None else "microbatches"
        allowed = f"at most one pack for each of {sizes.size} documents"
        raise ArgumentError(name, getattr(batch, name), allowed, f"These are {batch.packs} packs.")
    return balance_packs(sizes.astype(np.int64), _split(packs, batch.packs), budget, batch)


def balance_packs(
    lengths: IntArray, packs: Sequence[Sequence[int] | IntArray], budget: int, batch: GlobalBatch
) -> list[list[int]]:
    """Redistributes the documents of given packs over as many packs like `even_packs`, and never makes the step longer.

    Args:
        lengths: `[documents]` tokens of each document.
        packs: the documents of each of `batch.packs` packs, at least one and at most `budget` tokens.
        budget: the most tokens of a pack.
        batch: the global batch of the packs.

    Returns:
        as many packs, each a rising list of documents, at least one.
    """
    budget = min(budget, int(lengths.sum()))  # more is never used, and a few times this fits 64 bits
    tokens = lengths.astype(np.float64)
    token, pair = float(batch.cost.token), float(batch.cost.pair)
    unit = max(token, pair) or 1.0  # cancels; keeps sums of squares finite
    work = token / unit * tokens + pair / unit * tokens * tokens
    best = Packs(lengths, work, budget, batch.ranks, packs)
    start = greedy(lengths, work, budget, batch)
    found = Packs(lengths, work, budget, batch.ranks, packs if start is None else start)
    best = _shorter(batch, best, found)
    if batch.barrier or start is None:
        for _ in range(ROUNDS):
            found.sort_into_microbatches()
            levels = _levels(found.longest.max(1), float(found.work.sum()) / batch.ranks)
            found.meet_targets(np.repeat(levels[:, None], batch.ranks, axis=1), TRIES)
            found.sort_into_microbatches()
            best = _shorter(batch, best, found)
        found = best.copy()
    else:
        found.sort_in_ranks()
    found.even_ranks(TRIES // 4, keep_peaks=batch.barrier)
    return [sorted(pack.tolist()) for pack in _shorter(batch, best, found).packs]


def _shorter(batch: GlobalBatch, best: Packs, found: Packs) -> Packs:
    """Returns the packs with the shorter step; a copy of `found`, which changes later."""
    times = ((batch._seconds(each.work), batch._seconds(each.work, other=True)) for each in (found, best))
    return found.copy() if next(times) < next(times) else best


def _levels(least: FloatArray, total: float) -> FloatArray:
    """Returns `[microbatches]` the target work of a pack, with the sum `total`: even, except for those that must be
    higher.

    Args:
        least: `[microbatches]` the work of the longest document, which is a lower bound of every pack.
    """
    if least.sum() >= total:
        return least * (total / least.sum() if total else 1.0)
    falling = np.sort(least)[::-1]
    level = 0.0
    for raised, highest in enumerate(falling):
        level = float(total - falling[:raised].sum()) / (least.size - raised)
        if highest <= level:
            break
    return np.maximum(least, level)


def _split(packs: list[list[int]], count: int) -> list[list[int]]:
    """Splits packs in two, those with the most documents first, until there are `count`."""
    packs = list(packs)
    while len(packs) < count:
        most = max(range(len(packs)), key=lambda pack: len(packs[pack]))
        packs[most], new = packs[most][::2], packs[most][1::2]
        packs.append(new)
    return packs


def greedy(lengths: IntArray, work: FloatArray, budget: int, batch: GlobalBatch) -> list[IntArray] | None:
    """Puts each document, longest first, into the lightest pack with room of the rank with the least work; the rest by
    best fit.

    Returns:
        the documents of each pack, or None if some fit nowhere or a pack stays empty.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order]
    total = int(sizes.sum())
    left = total - np.cumsum(sizes)
    tails = TAILS if total <= (1 - ROOM) * budget * batch.packs else TAILS[1:]
    counts = [int(np.count_nonzero(left >= share * total)) for share in tails]
    chosen = _longest_first(sizes.tolist(), work[order].tolist(), counts[0], budget, batch)
    for count in counts:
        if count > len(chosen):
            continue
        rooms = np.full(batch.packs, budget)
        np.subtract.at(rooms, np.array(chosen[:count], np.int64), sizes[:count])
        tail = _fit_into_rooms(sizes[count:].tolist(), rooms.tolist())
        if tail is None:
            continue
        pack_of = np.array([*chosen[:count], *tail], np.int64)
        packs = [order[pack_of == pack] for pack in range(batch.packs)]
        return packs if all(pack.size for pack in packs) else None
    return None


def _longest_first(sizes: list[int], work: list[float], count: int, budget: int, batch: GlobalBatch) -> list[int]:
    """Returns the pack of each of the first `count` documents, or up to the first that fits into none."""
    room = [budget] * batch.packs
    ranks = [(0.0, rank) for rank in range(batch.ranks)]
    packs = [[(0.0, number) for number in range(rank, batch.packs, batch.ranks)] for rank in range(batch.ranks)]
    smallest = sizes[-1]
    chosen: list[int] = []
    for size, added in zip(sizes[:count], work, strict=False):
        full = []
        while ranks:
            load, rank = heappop(ranks)
            pack = _lightest(packs[rank], room, size)
            if pack is not None:
                break
            full.append((load, rank))
        else:
            break
        weight, number = pack
        room[number] -= size
        chosen.append(number)
        if room[number] >= smallest:
            heappush(packs[rank], (weight + added, number))
        if packs[rank]:
            full.append((load + added, rank))
        for entry in full:
            heappush(ranks, entry)
    return chosen


def _lightest(packs: list[tuple[float, int]], room: list[int], size: int) -> tuple[float, int] | None:
    """Removes and returns the lightest pack that has room from a heap of (work, pack)."""
    full = []
    found = None
    while packs:
        entry = heappop(packs)
        if room[entry[1]] >= size:
            found = entry
            break
        full.append(entry)
    for entry in full:
        heappush(packs, entry)
    return found


def _fit_into_rooms(sizes: list[int], rooms: list[int]) -> list[int] | None:
    """Returns the pack of each document by best fit into the remaining room, or None if one does not fit."""
    rising = sorted((room, pack) for pack, room in enumerate(rooms))
    chosen = []
    for size in sizes:
        place = bisect_left(rising, (size, 0))
        if place == len(rising):
            return None
        room, pack = rising.pop(place)
        insort(rising, (room - size, pack))
        chosen.append(pack)
    return chosen
