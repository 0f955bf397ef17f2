"""`Packs`: the documents of a global batch in packs, and swaps that even out their work.

Work is the contribution of a document to its pack's time, in any unit. Packs are numbered in the order in which they
are read: pack number `microbatch * ranks + rank` is the microbatch of that rank.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_cp.layout.array_types import FloatArray, IntArray

EVEN = 1e-3  # a difference of less than this share of the mean is ignored
GAIN = 0.02  # a swap closes at least this share of the gap
GIVEN, TAKEN = 24, 96  # documents of a pack that are tried as the given one, and as the first of the run taken for it
TAKERS = 6  # packs that are tried as takers of one pack's document, the lightest first


class _Pack(NamedTuple):
    """A pack's documents `[n]`, longest first, and running sums `[n + 1]` of their tokens and of their work."""

    documents: IntArray
    tokens: IntArray
    work: FloatArray


class Swap(NamedTuple):
    """A document of a pack for a run of another's, which may be empty.

    Attributes:
        given: place of the document in the pack that gives it.
        start, end: places of the run in the pack that takes the document.
        work: the work that the first pack loses and the second gains.
    """

    given: int
    start: int
    end: int
    work: float


class Packs:
    """The packs of a global batch, which swap documents. Tokens of a pack never exceed the budget.

    Args:
        ranks: data-parallel ranks; they divide the number of packs.
        packs: the documents of each pack, at least one.
    """

    def __init__(
        self, lengths: IntArray, work: FloatArray, budget: int, ranks: int, packs: Sequence[Sequence[int] | IntArray]
    ) -> None:
        self._lengths, self._work, self._budget, self.ranks = lengths, work, budget, ranks
        self._packs = [self._pack(np.asarray(pack, np.int64)) for pack in packs]

    def copy(self) -> Packs:
        """Returns an independent copy."""
        copied = copy.copy(self)
        copied._packs = list(self._packs)
        return copied

    @property
    def packs(self) -> list[IntArray]:
        """The documents of each pack, longest first."""
        return [pack.documents for pack in self._packs]

    @property
    def work(self) -> FloatArray:
        """`[microbatches, ranks]` work of the packs."""
        return np.array([pack.work[-1] for pack in self._packs]).reshape(-1, self.ranks)

    @property
    def longest(self) -> FloatArray:
        """`[microbatches, ranks]` work of the longest document of each pack."""
        return np.array([pack.work[1] for pack in self._packs]).reshape(-1, self.ranks)

    def sort_into_microbatches(self) -> None:
        """Groups packs of similar work into microbatches; in each, the rank with the least work so far gets the
        heaviest.
        """
        work = self.work.ravel()
        order = np.argsort(-work, kind="stable").reshape(-1, self.ranks)
        loads = np.zeros(self.ranks)
        for row in order:
            row[np.argsort(loads, kind="stable")] = row.copy()
            loads += work[row]
        self._packs = [self._packs[pack] for pack in order.ravel().tolist()]

    def sort_in_ranks(self) -> None:
        """Sorts each rank's packs by falling work, so that those of one microbatch are similar."""
        order = np.argsort(-self.work, axis=0, kind="stable") * self.ranks + np.arange(self.ranks)
        self._packs = [self._packs[pack] for pack in order.ravel().tolist()]

    def meet_targets(self, targets: FloatArray, tries: int) -> None:
        """Swaps documents until no pack is above its target, as far as swaps of two packs can achieve.

        Args:
            targets: `[microbatches, ranks]` target work of each pack; they sum to the total work.
        """
        least = EVEN * float(targets.mean())
        done = np.zeros(len(self._packs), bool)
        while tries > 0:
            above = (self.work - targets).ravel()
            giver = int(np.where(done, -np.inf, above).argmax())
            if done[giver] or above[giver] <= least:
                return
            done[giver] = True
            for taker in np.argsort(above, kind="stable")[:TAKERS].tolist():
                gap = float(above[giver] - above[taker])
                if gap <= least:
                    break
                tries -= 1
                found = self._find(giver, taker, gap / 2)
                if found is not None:
                    self._apply(giver, taker, found)
                    done[giver] = False
                    break

    def even_ranks(self, tries: int, *, keep_peaks: bool) -> None:
        """Swaps documents or packs until the ranks' sums are even, as far as swaps of two ranks can achieve.

        Args:
            keep_peaks: no pack may grow beyond the heaviest of its microbatch.
        """
        done = np.zeros(self.ranks, bool)
        while tries > 0:
            work = self.work
            loads = work.sum(0)
            least = EVEN * float(loads.mean())
            giver = int(np.where(done, -np.inf, loads).argmax())
            if done[giver] or loads[giver] - loads.mean() <= least:
                return
            done[giver] = True
            for taker in np.argsort(loads, kind="stable")[:TAKERS].tolist():
                gap = float(loads[giver] - loads[taker])
                if gap <= least:
                    break
                tries -= 1
                peaks = work.max(1) if keep_peaks else np.full(len(work), np.inf)
                if self._swap_between_ranks(giver, taker, gap / 2, peaks):
                    done[giver] = False
                    break

    def _swap_between_ranks(self, giver: int, taker: int, amount: float, peaks: FloatArray) -> bool:
        """Applies the swap that brings two ranks closest: of whole packs of a microbatch, or of documents."""
        work, ranks = self.work, self.ranks
        best = abs(work[:, giver] - work[:, taker] - amount)
        nearest, whole = float(best.min()), int(best.argmin())
        found: tuple[int, int, Swap] | None = None
        for own in _spread(np.argsort(-work[:, giver], kind="stable"), 4).tolist():
            for other in _spread(np.argsort(work[:, taker], kind="stable"), 4).tolist():
                pair = own * ranks + giver, other * ranks + taker
                swap = self._find(*pair, amount)
                if swap is None or work[other, taker] + swap.work > peaks[other]:
                    continue
                if abs(swap.work - amount) < nearest:
                    nearest, found = abs(swap.work - amount), (*pair, swap)
        if nearest >= (1 - GAIN) * amount:
            return False
        if found is not None:
            self._apply(*found)
        else:
            first, second = whole * ranks + giver, whole * ranks + taker
            self._packs[first], self._packs[second] = self._packs[second], self._packs[first]
        return True

    def _find(self, giver: int, taker: int, amount: float) -> Swap | None:
        """Returns the swap whose work is closest to `amount`, if it closes enough of the gap of twice that.

        It gives a document for a run of shorter ones: if packs are full, tokens have to balance while work, which
        grows with the square of a document's length, moves.
        """
        gives, takes = self._packs[giver], self._packs[taker]
        places = _spread(np.arange(gives.documents.size), GIVEN)
        starts = _spread(np.arange(takes.documents.size + 1), TAKEN)
        tokens = np.diff(gives.tokens)[places, None]
        work = np.diff(gives.work)[places, None]
        before = takes.tokens[starts] + tokens
        # Ends of the runs that fit: the taker must have room for the document, and the giver for the run.
        first = np.searchsorted(takes.tokens, before - (self._budget - takes.tokens[-1]))
        last = np.searchsorted(takes.tokens, before + (self._budget - gives.tokens[-1]), side="right") - 1
        first = np.maximum(first, starts)
        wanted = np.searchsorted(takes.work, takes.work[starts] + work - amount)
        nearest, found = (1 - GAIN) * amount, None
        for ends in (wanted, wanted - 1):
            ends = np.clip(ends, first, np.maximum(first, last)).clip(max=takes.documents.size)
            moved = work - (takes.work[ends] - takes.work[starts])
            miss = np.where(first <= last, abs(moved - amount), np.inf)
            if gives.documents.size == 1:
                miss[ends == starts] = np.inf  # a pack keeps a document
            row, column = divmod(int(miss.argmin()), starts.size)
            if miss[row, column] < nearest:
                nearest = float(miss[row, column])
                run = int(starts[column]), int(ends[row, column])
                found = Swap(int(places[row]), *run, float(moved[row, column]))
        return found

    def _apply(self, giver: int, taker: int, swap: Swap) -> None:
        gives, takes = self._packs[giver].documents, self._packs[taker].documents
        given, run = gives[swap.given], takes[swap.start : swap.end]
        kept = np.delete(takes, slice(swap.start, swap.end))
        self._packs[giver] = self._pack(np.append(np.delete(gives, swap.given), run))
        self._packs[taker] = self._pack(np.append(kept, given))

    def _pack(self, documents: IntArray) -> _Pack:
        # Ties are ordered by number, so that a pack does not depend on its history.
        documents = documents[np.lexsort((documents, -self._lengths[documents]))]
        tokens, work = self._lengths[documents], self._work[documents]
        return _Pack(documents, np.append(0, np.cumsum(tokens)), np.append(0.0, np.cumsum(work)))


def _spread(values: IntArray, count: int) -> IntArray:
    """Returns at most `count` of the values: half of them the first ones, the others spread over all."""
    if values.size <= count:
        return values
    return values[np.unique(np.append(np.arange(count // 2), np.linspace(0, values.size - 1, count // 2).astype(int)))]
