"""Rows of one forward pass: which of the image and of the text each rank has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_cp.diffusers.families import IMAGE, TEXT
from megatron_cp.layout import Layout
from megatron_cp.layout.packing import IntArray


def share(rows: int, cp_size: int, stream: str) -> IntArray:
    """Returns `[cp_size]` near-equal numbers of rows; the first ranks have one more of the image, the last of text."""
    shares = rows // cp_size + (np.arange(cp_size) < rows % cp_size)
    return shares[::-1] if stream == TEXT else shares


def own_range(rows: int, cp_size: int, rank: int, stream: str) -> tuple[int, int]:
    """Returns the first of a rank's rows of a stream, and how many it has.

    A rank without a share has the stream's first row, as a stand-in that is not real: models slice by the number of
    rows from the end, where 0 means all, and have reshapes that infer a size.
    """
    shares = share(rows, cp_size, stream)
    first, count = int(shares[:rank].sum()), int(shares[rank])
    return (first, count) if count or not rows else (0, 1)


@lru_cache(64)
def image_layout(rows: int, batch: int, cp_size: int) -> Layout:
    """Returns the layout of a batch of images, each a document of `rows` rows."""
    return Layout.from_counts(np.repeat(share(rows, cp_size, IMAGE)[:, None], batch, axis=1))


@dataclass(frozen=True)
class PassRows:
    """The rows of a forward pass, equal on every rank.

    Attributes:
        batch: entries of the batch; each attends to itself.
        streams: `(name, rows)` of the streams, in the order in which attentions concatenate them.
        holds_text: True if every rank has all rows of text, False if they are split.
        real_text: for each entry the rows of text that are real, `(0, 1, ...)`; None if all are.
    """

    batch: int
    streams: tuple[tuple[str, int], ...]
    cp_size: int
    holds_text: bool = False
    real_text: tuple[tuple[int, ...], ...] | None = None

    @property
    def image(self) -> PassRows:
        """The rows of the image alone."""
        return replace(self, streams=tuple(each for each in self.streams if each[0] == IMAGE), holds_text=False)

    @property
    def text_rows(self) -> int:
        """The real rows of text of all entries."""
        if self.real_text is not None:
            return sum(map(len, self.real_text))
        return self.batch * dict(self.streams).get(TEXT, 0)

    def describe(self) -> str:
        """Returns the rows as text."""
        streams = " and ".join(f"{rows} rows of {name}" for name, rows in self.streams)
        real = "" if self.real_text is None else f", of which {self.text_rows} of {TEXT} in all are real"
        return f"for a batch of {self.batch}, each with {streams}{real}:"

    def ranges(self, rank: int) -> list[tuple[str, int, int]]:
        """Returns `(name, first, count)` of the rows that a rank has of each stream of one entry."""
        found = []
        for name, rows in self.streams:
            is_whole = name == TEXT and self.holds_text
            found.append((name, 0, rows) if is_whole else (name, *own_range(rows, self.cp_size, rank, name)))
        return found

    def stand_ins(self, rank: int) -> set[str]:
        """Returns the streams of which the rank has a row that stands for none."""
        split = [each for each in self.streams if not (each[0] == TEXT and self.holds_text)]
        return {name for name, rows in split if rows and not share(rows, self.cp_size, name)[rank]}

    def local_rows(self, rank: int) -> int:
        """Returns how many rows of one entry a rank's attention has."""
        return sum(count for _, _, count in self.ranges(rank))

    def real_rows(self, rank: int) -> IntArray:
        """Returns which of the rank's rows `[batch * local_rows]` are real, as increasing indices."""
        found, start, stand_ins = [], 0, self.stand_ins(rank)
        for entry in range(self.batch):
            for name, first, count in self.ranges(rank):
                own = np.arange(0 if name in stand_ins else count)
                if name == TEXT and self.real_text is not None and name not in stand_ins:
                    real = np.array(self.real_text[entry], np.int64) - first
                    own = real[(real >= 0) & (real < count)]
                found.append(start + own)
                start += count
        return np.concatenate(found)

    def are_image(self, rank: int) -> NDArray[np.bool_]:
        """Returns `[batch * local_rows]` True for the rank's rows that are image."""
        ranges = self.ranges(rank)
        of_entry = np.repeat([name == IMAGE for name, _, _ in ranges], [count for _, _, count in ranges])
        return np.tile(of_entry, self.batch)

    def counts(self, rank: int) -> IntArray:
        """Returns `[batch]` real rows of each entry that a rank has."""
        return np.bincount(self.real_rows(rank) // max(self.local_rows(rank), 1), minlength=self.batch)

    def layout(self) -> Layout:
        """Returns the layout of all real rows: a document for each entry, of which each rank has one range."""
        return Layout.from_counts(np.stack([self.counts(rank) for rank in range(self.cp_size)]))
