"""`BlendedStream`: the packs of several corpora in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.stream import PackedStream
from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.layout import Packing
from megatron_cp.layout.packing import IntArray


class BlendedStream:
    """An endless sequence of packs, each from one of several streams, in the order of Megatron's blends.

    The next pack is from the stream that is furthest behind its share, the first of those if several are. So a pack is
    a function of its number and the weights, as in `PackedStream`, and holds documents of one corpus only. Weights are
    shares of packs, and no epoch of one stream waits for another's.

    Args:
        streams: at least one stream.
        weights: a share of the packs for each, above 0, of any sum; None for the tokens that each has in an epoch.

    Raises:
        ArgumentError: no stream, or weights (called `data_path`, as Megatron spells blends) that are not so.

    Example:
        >>> import numpy as np
        >>> from megatron_cp.data import BlendedStream, PackedStream, TokenCorpus
        >>> corpora = [TokenCorpus("", 9, np.full(8, token), np.array([0, 4, 8])) for token in (1, 2)]
        >>> streams = [PackedStream(corpus, 4) for corpus in corpora]
        >>> [BlendedStream(streams, [3, 1]).pack(index)[1][0].item() for index in range(8)]
        [1, 2, 1, 1, 1, 2, 1, 1]
    """

    def __init__(self, streams: Sequence[PackedStream], weights: Sequence[float] | None = None) -> None:
        self.streams = list(streams)
        if not self.streams or not all(isinstance(stream, PackedStream) for stream in self.streams):
            raise ArgumentError("streams", streams, "one PackedStream or more")
        given = [float(stream.tokens_per_epoch) for stream in self.streams] if weights is None else list(weights)
        if len(given) != len(self.streams) or not all(math.isfinite(weight) and weight > 0 for weight in given):
            raise ArgumentError("data_path", weights, f"{len(self.streams)} weights above 0")
        self.weights = np.array(given) / sum(given)
        self._counts = np.zeros(len(given), np.int64)
        self._places: list[tuple[int, int]] = []  # stream, and number in it, of each pack so far

    def pack(self, index: int) -> tuple[Packing, IntArray]:
        """Returns pack number `index`: the lengths of its pieces, and their tokens `[packing.total]` in one stream.

        Raises:
            ArgumentError: `index` is no integer of at least 0.
        """
        stream, number = self.place(index)
        return self.streams[stream].pack(number)

    def loss_weights(self, index: int) -> NDArray[np.float32] | None:
        """Returns `[packing.total]` weights of pack number `index`: 1 if the next token is learnt; None for all ones.

        Raises:
            ArgumentError: `index` is no integer of at least 0.
        """
        stream, number = self.place(index)
        return self.streams[stream].loss_weights(number)

    def place(self, index: int) -> tuple[int, int]:
        """Returns the stream of pack number `index`, and the pack's number in it.

        Raises:
            ArgumentError: `index` is no integer of at least 0.
        """
        index = checked_integer("index", index, 0)
        while len(self._places) <= index:
            # Megatron counts from 1, so that its first pack is from the stream with the largest weight.
            lag = self.weights * max(len(self._places), 1) - self._counts
            stream = int(lag.argmax())
            self._places.append((stream, int(self._counts[stream])))
            self._counts[stream] += 1
        return self._places[index]
