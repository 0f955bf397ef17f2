"""`PackedStream`: the packs that training reads."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.corpus import Corpus, checked_counts
from megatron_cp.data.even import GlobalBatch, balance_packs
from megatron_cp.data.pieces import Piece, best_fit, cut
from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout import Packing
from megatron_cp.layout.packing import IntArray


class PackedStream:
    """An endless sequence of packs, epoch after epoch, each a function of its number alone.

    A pack depends on the arguments below, its number and numpy's random generator, not on ranks, restarts or earlier
    reads: a job that resumes asks for the next number, and gets the same pack.

    In each epoch every token comes exactly once. Documents are shuffled, those longer than `budget` are cut into
    pieces, the pieces are packed by best fit, and packs and the pieces inside each are shuffled again.

    With `even`, global batch number n is packs `n * even.packs` up to the next one's, and holds the pieces that it has
    without, in packs whose predicted times are even (`even_packs`). Pieces keep the order that they have without: first
    those of the batch's first pack. If an epoch ends inside a global batch, a pack may hold pieces of two.

    Training is unchanged, since a step reads the same documents: each sees itself alone, in any pack, and the loss and
    its gradient are sums over the tokens of a global batch divided by their number. They differ by rounding, and by
    operations on a whole pack: draws of dropout, and losses that balance experts in each microbatch.

    Args:
        corpus: the documents.
        budget: the most tokens of a pack, at least 2, since a next-token label needs two. Packs are not padded.
        seed: seed of the shuffles, together with the epoch.
        window: best fit sees this many pieces at a time, which bounds its time and memory.
        even: the global batch and the cost of its packs, if they are to take equally long.

    Raises:
        ArgumentError: `budget` (called `seq_length`, as Megatron spells it), `seed` or `window` is no integer in
            range, `even` is no `GlobalBatch`, or the corpus has no tokens.

    Example:
        >>> import numpy as np
        >>> from megatron_cp.data import GlobalBatch, TokenCorpus
        >>> from megatron_cp.planner.predict.pack_cost import PackCost
        >>> corpus = TokenCorpus("numbers", 24, np.arange(24), np.array([0, 8, 12, 16, 18, 20, 22, 24]))
        >>> stream = PackedStream(corpus, 12)
        >>> [stream.pack(index)[0].lengths.tolist() for index in range(2)]
        [[8, 4], [4, 2, 2, 2, 2]]
        >>> stream = PackedStream(corpus, 12, even=GlobalBatch(ranks=2, microbatches=1, cost=PackCost(0, 1, 1)))
        >>> [stream.pack(index)[0].lengths.tolist() for index in range(2)]
        [[8, 2, 2], [4, 4, 2, 2]]
    """

    def __init__(
        self, corpus: Corpus, budget: int, seed: int = 0, window: int = 65536, even: GlobalBatch | None = None
    ) -> None:
        self.corpus = corpus
        self.budget = checked_integer("seq_length", budget, 2)
        self.seed = checked_integer("seed", seed, 0)
        self.window = checked_integer("window", window, 1)
        if even is not None and not isinstance(even, GlobalBatch):
            raise ArgumentError("even", even, "a GlobalBatch or None", "GlobalBatch(ranks, microbatches, cost)")
        self.even = even
        self._lengths = checked_counts("corpus.lengths", corpus.lengths)
        self.tokens_per_epoch = int(self._lengths.sum())
        if self.tokens_per_epoch == 0:
            raise ArgumentError("data_path", corpus.name, "a corpus with at least one token")
        self._first_packs = [0]  # the number of the first pack of each epoch so far
        self._latest: _Epoch | None = None
        self._batch: tuple[int, list[list[Piece]]] = (-1, [])  # the latest global batch and its packs

    def pack(self, index: int) -> tuple[Packing, IntArray]:
        """Returns pack number `index`: the lengths of its pieces, and their tokens `[packing.total]` in one stream.

        Raises:
            ArgumentError: `index` is no integer of at least 0.
        """
        pieces = self.pieces(index)
        packing = Packing([piece.end - piece.start for piece in pieces])
        return packing, np.concatenate([self.corpus.tokens(*piece) for piece in pieces])

    def loss_weights(self, index: int) -> NDArray[np.float32] | None:
        """Returns `[packing.total]` weights of pack number `index`: 1 if the next token is learnt; None for all ones.

        Raises:
            ArgumentError: `index` is no integer of at least 0.
        """
        pieces = self.pieces(index)
        found = [self.corpus.is_learnt(*piece) for piece in pieces]
        if all(part is None for part in found):
            return None
        learnt = [
            np.ones(piece.end - piece.start, np.bool_) if part is None else part
            for piece, part in zip(pieces, found, strict=True)
        ]
        return np.concatenate([np.append(part[1:], False) for part in learnt]).astype(np.float32)

    def pieces(self, index: int) -> list[Piece]:
        """Returns the document and range of each piece of pack number `index`, in stream order.

        Raises:
            ArgumentError: `index` is no integer of at least 0.
        """
        index = checked_integer("index", index, 0)
        if self.even is None:
            return self._best_fit(index)
        batch, place = divmod(index, self.even.packs)
        if self._batch[0] != batch:
            self._batch = batch, self._balanced(batch, self.even)
        return list(self._batch[1][place])

    def _balanced(self, number: int, even: GlobalBatch) -> list[list[Piece]]:
        """Returns the packs of a global batch from the pieces that best fit gave it, so that a step reads the same
        documents.
        """
        given = [self._best_fit(index) for index in range(number * even.packs, (number + 1) * even.packs)]
        pieces = [piece for pack in given for piece in pack]
        bounds = np.cumsum([0, *map(len, given)])
        packs = [np.arange(first, last) for first, last in itertools.pairwise(bounds)]
        lengths = np.array([piece.end - piece.start for piece in pieces])
        return [[pieces[place] for place in pack] for pack in balance_packs(lengths, packs, self.budget, even)]

    def _best_fit(self, index: int) -> list[Piece]:
        while self._first_packs[-1] <= index:
            self._count_next_epoch()
        epoch = bisect_right(self._first_packs, index) - 1
        return self._epoch(epoch).pieces(index - self._first_packs[epoch])

    def packs_per_epoch(self, epoch: int) -> int:
        """Returns the number of packs of an epoch, which varies a little, since other documents meet in a window.

        Raises:
            ArgumentError: `epoch` is no integer of at least 0.
        """
        epoch = checked_integer("epoch", epoch, 0)
        while len(self._first_packs) <= epoch + 1:
            self._count_next_epoch()
        return self._first_packs[epoch + 1] - self._first_packs[epoch]

    @property
    def fill(self) -> float:
        """The share of the budget that tokens take in the first epoch's packs."""
        return self.tokens_per_epoch / (self.packs_per_epoch(0) * self.budget)

    def _count_next_epoch(self) -> None:
        epoch = self._epoch(len(self._first_packs) - 1)
        self._first_packs.append(self._first_packs[-1] + epoch.num_packs)

    def _epoch(self, number: int) -> _Epoch:
        latest = self._latest
        if latest is None or latest.number != number:
            latest = self._latest = _Epoch.packed(self._lengths, self.budget, self.seed, self.window, number)
        return latest


@dataclass(frozen=True, eq=False)
class _Epoch:
    """The packs of one epoch, as arrays: a corpus may have millions of documents.

    Attributes:
        rows: `[pieces, 3]` every `Piece`, pack by pack.
        bounds: `[packs + 1]` start of each pack in `rows`.
    """

    number: int
    rows: IntArray
    bounds: IntArray

    @classmethod
    def packed(cls, lengths: IntArray, budget: int, seed: int, window: int, number: int) -> _Epoch:
        random = np.random.default_rng([seed, number])
        documents = random.permutation(lengths.size)
        rows = cut(documents, lengths[documents], budget)
        sizes = rows[:, 2] - rows[:, 1]
        pack_of = np.empty(len(rows), np.int64)
        num_packs = 0
        for first in range(0, len(rows), window):
            packs = best_fit(sizes[first : first + window], budget)
            held = np.fromiter(itertools.chain.from_iterable(packs), np.int64)
            pack_of[first + held] = num_packs + np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
            num_packs += len(packs)
        # Best fit yields the fullest packs first, and the longest piece first in each.
        place = random.permutation(num_packs)[pack_of]
        bounds = np.concatenate([[0], np.cumsum(np.bincount(place))])
        return cls(number, rows[np.lexsort((random.random(len(rows)), place))], bounds)

    @property
    def num_packs(self) -> int:
        return self.bounds.size - 1

    def pieces(self, pack: int) -> list[Piece]:
        return [Piece(*row) for row in self.rows[self.bounds[pack] : self.bounds[pack + 1]].tolist()]
