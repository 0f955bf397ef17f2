"""Counts the layers that ran over the ranks in a forward pass, so that one which did not is found by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from megatron_cp.errors import ArgumentError

_SHOWN = 3  # names in a message


class LayerRuns:
    """The number of times that each layer ran over the ranks.

    Splitting a batch and replacing a model's layers are two steps, and a user can take one without the other. A layer
    that was not replaced computes what it can see, a rank's own rows, without an error. So each layer that runs over
    the ranks reports itself here, and the model checks after its forward pass that all have.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, layer: object) -> None:
        """Counts a run of a layer."""
        self._counts[id(layer)] += 1

    def so_far(self, layers: Mapping[str, object]) -> list[int]:
        """Returns how often each of the layers has run."""
        return [self._counts[id(layer)] for layer in layers.values()]

    def check(self, layers: Mapping[str, object], before: list[int], remedy: str) -> None:
        """Checks that each layer has run since `before`, what `so_far` returned then.

        A layer may have run more than once: models share layers, or loop over them.

        Raises:
            ArgumentError: layers that have not; the message has their names.
        """
        counts = zip(layers, before, self.so_far(layers), strict=True)
        missing = [name for name, earlier, now in counts if now == earlier]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            given = f"a forward in which {', '.join(missing[:_SHOWN])}{more} did not run over the ranks"
            raise ArgumentError("model", given, f"all {len(layers)} layers that mix tokens", remedy)
