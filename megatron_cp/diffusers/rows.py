"""Rows of one forward pass: which each rank has, and the plans of attentions over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_cp.diffusers.families import TEXT
from megatron_cp.layout import Layout
from megatron_cp.layout.packing import IntArray


def share(rows: int, cp_size: int, stream: str) -> IntArray:
    """Returns `[cp_size]` near-equal numbers of rows; the first ranks have one more of the image, the last of text."""
    shares = rows // cp_size + (np.arange(cp_size) < rows % cp_size)
    return shares[::-1] if stream == TEXT else shares


@dataclass(frozen=True)
class PassRows:
    """The rows of a forward pass, equal on every rank.

    Attributes:
        batch: entries of the batch; each attends to itself.
        streams: `(name, rows)` of the streams, in the order in which attentions concatenate them.
        real_text: for each entry the rows of text that are real, `(0, 1, ...)`; None if all are.
    """

    batch: int
    streams: tuple[tuple[str, int], ...]
    real_text: tuple[tuple[int, ...], ...] | None

    def local_rows(self, cp_size: int, rank: int) -> int:
        """Returns how many rows of one entry a rank's attention has."""
        return int(sum(share(rows, cp_size, name)[rank] for name, rows in self.streams))

    def real_rows(self, cp_size: int, rank: int) -> IntArray:
        """Returns which of the rank's rows `[batch * local_rows]` are real, as increasing indices."""
        local, before = [], 0
        for name, rows in self.streams:
            shares = share(rows, cp_size, name)
            first, count = int(shares[:rank].sum()), int(shares[rank])
            for entry in range(self.batch):
                real = np.arange(rows)
                if name == TEXT and self.real_text is not None:
                    real = np.array(self.real_text[entry], np.int64)
                own = real[(real >= first) & (real < first + count)] - first
                local.append(own + before + entry * self.local_rows(cp_size, rank))
            before += count
        return np.sort(np.concatenate(local))

    def layout(self, cp_size: int) -> Layout:
        """Returns the layout of all real rows: a document for each entry, of which each rank has one range."""
        counts = [
            np.bincount(self.real_rows(cp_size, rank) // max(self.local_rows(cp_size, rank), 1), minlength=self.batch)
            for rank in range(cp_size)
        ]
        return Layout.from_counts(counts)
