"""`PackCost`: predicts the cost of a pack from the lengths of its documents alone. No torch in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from megatron_cp.errors import MAX_INTEGER, ArgumentError, as_number, checked_integer
from megatron_cp.layout.array_types import FloatArray, IntArray
from megatron_cp.layout.packing import host_array, is_integral
from megatron_cp.planner.predict.hardware import Hardware

FLOPS_OF_A_PARAMETER = 6  # a token's multiply-add forward, and two backward (Kaplan et al., arXiv 2001.08361)
# For a feature and a pair of tokens: two products of two flops forward, twice that backward, and half of all pairs.
FLOPS_OF_A_CAUSAL_PAIR = 6


@dataclass(frozen=True)
class PackCost:
    """The seconds of a pack: `pack + token * tokens + pair * (sum of squared document lengths)`.

    GEMMs, norms and linear layers take as long for each token; softmax layers see each pair of tokens of a document.
    The unit cancels where packs are compared with each other: flops do as well as seconds.

    Attributes:
        pack: constant seconds of any pack, such as launches and the latency of collectives.
        token: seconds of a token.
        pair: seconds of a pair of tokens; a document of n tokens has n * n, whatever its mask.

    Raises:
        ArgumentError: a value that is no finite number of at least 0.

    Example:
        >>> cost = PackCost(pack=0.5, token=0.001, pair=1e-6)
        >>> cost.of([1000, 2000])
        8.5
        >>> cost.of_documents([1000, 2000]).tolist()
        [2.0, 6.0]
    """

    pack: float
    token: float
    pair: float

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = as_number(getattr(self, entry.name))
            if not 0 <= value < float("inf"):
                raise ArgumentError(entry.name, getattr(self, entry.name), "a finite number of at least 0")
            object.__setattr__(self, entry.name, value)

    @classmethod
    def of_flops(cls, *, active_parameters: int, softmax_features: int, token: float = 0.0) -> PackCost:
        """Computes the cost of a pack in flops, forward and backward, from the sizes of a causal model.

        No hardware is assumed: attention and GEMMs count as equally fast, and a pack has no constant cost.

        Args:
            active_parameters: weights that a token is multiplied with: all GEMMs, and of experts the active ones.
            softmax_features: features of the query heads of all softmax layers, `layers * heads * head_dim`. Layers
                whose window is short belong in `token`.
            token: further flops of a token, such as those of linear layers' recurrences.

        Raises:
            ArgumentError: a value that is no finite number of at least 0.

        Example:
            >>> cost = PackCost.of_flops(active_parameters=8_000_000_000, softmax_features=32 * 32 * 128)
            >>> cost.token / cost.pair  # tokens of a document whose attention costs as much as the rest
            61035.15625
        """
        given = {"active_parameters": active_parameters, "softmax_features": softmax_features, "token": token}
        for name, value in given.items():
            if not 0 <= as_number(value) < float("inf"):
                raise ArgumentError(name, value, "a finite number of at least 0")
        return cls(
            0.0, FLOPS_OF_A_PARAMETER * active_parameters + token, float(FLOPS_OF_A_CAUSAL_PAIR * softmax_features)
        )

    def at_rates_of(self, hardware: Hardware, head_dim: int) -> PackCost:
        """Converts flops to seconds: pairs at the rate of attention's kernel, tokens at that of matrix products.

        Kernels of attention do at most half as many operations a second as products, and in backward they compute
        scores again: a pair takes about twice as long as its flops suggest.

        Args:
            hardware: rates of a rank.
            head_dim: features of a softmax head.

        Raises:
            ArgumentError: no hardware, or `head_dim` is no integer of at least 1.

        Example:
            >>> from megatron_cp.planner.predict import machine
            >>> flops = PackCost.of_flops(active_parameters=8_000_000_000, softmax_features=32 * 32 * 128)
            >>> seconds = flops.at_rates_of(machine("h100").hardware, head_dim=128)
            >>> round(seconds.token / seconds.pair)
            40668
        """
        if not isinstance(hardware, Hardware):
            raise ArgumentError("hardware", hardware, "a Hardware, such as machine('h100').hardware")
        head_dim = checked_integer("head_dim", head_dim, 1)
        forward, backward = (hardware.attention_rate(head_dim, forward=forward) for forward in (True, False))
        # Two of six products of a pair are forward; backward computes five, of which four are counted.
        pair = self.pair * (2 / forward + 5 / backward) / 6
        return PackCost(self.pack, self.token / hardware.matrix, pair)

    def of(self, lengths: Sequence[int] | IntArray) -> float:
        """Returns the seconds of one pack.

        Args:
            lengths: `[documents]` tokens of each.

        Raises:
            ArgumentError: lengths that are no integers of at least 0.
        """
        return self.pack + float(self.of_documents(lengths).sum())

    def of_documents(self, lengths: Sequence[int] | IntArray) -> FloatArray:
        """Returns `[documents]` the seconds that each document adds to its pack.

        Args:
            lengths: `[documents]` tokens of each.

        Raises:
            ArgumentError: lengths that are no integers of at least 0.
        """
        sizes = host_array("lengths", lengths)
        if sizes.ndim != 1 or (
            sizes.size and not (is_integral(sizes) and 0 <= int(sizes.min()) <= int(sizes.max()) <= MAX_INTEGER)
        ):
            raise ArgumentError("lengths", sizes.tolist(), "a flat list of integers of at least 0")
        tokens = sizes.astype(np.float64)
        return self.token * tokens + self.pair * tokens * tokens
