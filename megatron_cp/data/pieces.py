"""Documents cut into pieces, and pieces packed by best fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.packing import IntArray


class Piece(NamedTuple):
    """Tokens `start` to `end` (half-open) of a document: all of it, unless it is longer than a pack."""

    document: int
    start: int
    end: int


def cut(documents: IntArray, lengths: IntArray, budget: int) -> IntArray:
    """Cuts documents into pieces that fit into a pack.

    A longer document is cut every `budget` tokens, so only its last piece can share a pack, and no two pieces of one
    document ever do.

    Args:
        lengths: `[documents]` tokens of each document; one without tokens has no piece.

    Returns:
        `[pieces, 3]`, whose rows are `Piece`s, in the order of `documents`.
    """
    budget = min(budget, max(int(lengths.max(initial=0)), 1))  # the same pieces, without overflow of 64 bits
    counts = -(-lengths // budget)
    # Numbers the pieces of each document from 0.
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = numbers * budget
    ends = np.minimum(starts + budget, np.repeat(lengths, counts))
    return np.stack([np.repeat(documents, counts), starts, ends], axis=1)


def best_fit(lengths: Sequence[int] | IntArray, budget: int) -> list[list[int]]:
    """Packs by best-fit decreasing: longest first, each into the fullest pack with room, the older one of two.

    Cuts nothing, unlike one stream cut into equal parts: Ding et al., "Fewer Truncations Improve Language Modeling",
    arXiv 2404.10830. One search among the open packs for each length.

    Args:
        lengths: `[n]` from 1 to `budget`.
        budget: the most tokens of a pack.

    Returns:
        The packs, each a list of indices into `lengths`; each index is in one of them.

    Raises:
        ArgumentError: a length outside 1 to `budget`.

    Example:
        >>> best_fit([3, 5, 2, 6, 4], budget=10)
        [[3, 4], [1, 0, 2]]
    """
    sizes = np.asarray(lengths)
    if sizes.size == 0:
        return []
    if not (np.issubdtype(sizes.dtype, np.integer) and 1 <= sizes.min() <= sizes.max() <= budget):
        allowed = f"integers from 1 to the budget of {budget}"
        raise ArgumentError("lengths", sizes.tolist(), allowed, "Cut longer documents into pieces first.")
    shortest = int(sizes.min())
    order = np.argsort(-sizes.astype(np.int64), kind="stable")
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, pack) of the packs with room, rising
    for index, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        place = bisect_left(rooms, (size, 0))
        if place < len(rooms):
            room, pack = rooms.pop(place)
        else:
            room, pack = budget, len(packs)
            packs.append([])
        packs[pack].append(index)
        if room - size >= shortest:
            insort(rooms, (room - size, pack))
    return packs
