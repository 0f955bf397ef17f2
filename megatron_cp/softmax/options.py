"""Checks the numbers that a softmax attention takes besides its tensors. It imports no torch, for the command line."""

from __future__ import annotations

from typing import NamedTuple

from megatron_cp.errors import ArgumentError, as_number, checked_integer, checked_scale


class SoftmaxOptions(NamedTuple):
    """Checked numbers of a softmax."""

    scale: float
    softcap: float
    dropout: float
    seed: int


def checked_options(
    head_dim: int,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: int | None = None,
) -> SoftmaxOptions:
    """Checks the options of `attention` for keys of `head_dim` features.

    Raises:
        ArgumentError: an invalid scale, soft cap, dropout or seed, or dropout without a seed.

    Example:
        >>> checked_options(16, dropout=0.1, seed=7)
        SoftmaxOptions(scale=0.25, softcap=0.0, dropout=0.1, seed=7)
    """
    if not 0 <= as_number(softcap) < float("inf"):
        raise ArgumentError("softcap", softcap, "a finite number of at least 0, 0 for none")
    if not 0 <= as_number(dropout) < 1:
        raise ArgumentError("dropout", dropout, "a share from 0 up to but not including 1")
    if dropout and seed is None:
        raise ArgumentError("seed", None, f"an integer of at least 0, since dropout is {float(dropout):g}", _SEED)
    scale = checked_scale("softmax_scale", softmax_scale, head_dim)
    number = checked_integer("seed", 0 if seed is None else seed, 0, 2**64 - 1)
    return SoftmaxOptions(scale, float(softcap), float(dropout), number)


_SEED = (
    "Combine the numbers of step and layer, as in seed=step * num_layers + layer: with one seed every call would "
    "drop the same weights."
)
