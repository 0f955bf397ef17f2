"""Blocks of each document's tokens, and rows of whole blocks on one rank, for layers whose keys are made of blocks."""

import itertools

import numpy as np
import torch

import megatron_cp as cp


class Blocks:
    """Blocks of `size` tokens, counted from the start of each document, each on the rank of its first token.

    The last one of a document may be short.

    Attributes:
        starts, ends: `[blocks]` places in the stream.
        first: `[blocks]` True for the first one of a document.
        positions: `[blocks]` places of their first tokens in their documents.
        whole: `[blocks]` False for short ones.
        entries: the layout of a stream that has one row for each block.
        mask: a query's whole blocks, which end at its own place or before.
    """

    def __init__(self, layout, size):
        packing = layout.packing
        spans = list(packing.spans())
        self.size, self._tokens = size, layout
        self.starts = np.concatenate([np.arange(first, last, size) for first, last in spans])
        documents = packing.documents_of(self.starts)
        document_starts, document_ends = (np.array(edges)[documents] for edges in zip(*spans, strict=True))
        self.ends = np.minimum(self.starts + size, document_ends)
        self.positions = self.starts - document_starts
        self.first, self.whole = self.positions == 0, self.ends - self.starts == size
        owners, numbers = layout.located(self.starts)[0], np.arange(len(self.starts) + 1)
        edges = np.append(self.starts, packing.total)
        of_entries = cp.Packing(-(-packing.lengths // size))
        self.entries = _layout(of_entries, numbers, owners, layout.cp_size)
        self._own = _layout(packing, edges, owners, layout.cp_size)
        self._before = _layout(packing, edges, np.roll(owners, -1), layout.cp_size)
        # Slices that share no query: from a block's last token up to the next one's, all blocks up to it are seen.
        firsts = np.maximum.accumulate(np.where(self.first, numbers[:-1], 0))
        until = np.where(self.ends + size <= document_ends, self.ends + size - 1, document_ends)
        slices = [
            (int(self.ends[at]) - 1, int(until[at]), int(firsts[at]), at + 1, "full")
            for at in np.flatnonzero(self.whole).tolist()
        ]
        self.mask = cp.Mask.from_slices(packing, slices, of_entries)

    def of_rank(self, values, group):
        """Returns this rank's part of an array `[blocks]`."""
        return self.entries.shard(torch.from_numpy(values), group.rank)

    def rows(self, x, group, *, before=False):
        """Moves this rank's rows `[t, ...]` of tokens; returns `[blocks, size, ...]`, those of its blocks.

        Rows that a short block lacks are any others, or zero.

        Args:
            x: rows in the layout of tokens; those of blocks that other ranks hold a part of are sent.
            before: True for the rows of the blocks before them; those before a document's first block are any others.
        """
        target, starts = (self._before, np.roll(self.starts, 1)) if before else (self._own, self.starts)
        x = cp.relayout(x, self._tokens, target, group)
        wanted = starts[self.entries.tokens(group.rank), None] + np.arange(self.size)
        rows = torch.from_numpy(np.searchsorted(target.tokens(group.rank), wanted))
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows]


def _layout(packing, edges, owners, ranks):
    """Returns the layout in which a rank has the ranges between neighbouring `edges` that it owns."""
    cuts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    fragments = [[] for _ in range(ranks)]
    for first, last in itertools.pairwise(cuts):
        fragments[owners[first]].append((int(edges[first]), int(edges[last])))
    return cp.Layout.from_fragments(packing, fragments)
