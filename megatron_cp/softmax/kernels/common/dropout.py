"""Dropout masks that are a hash of seed, head, query token and key token only.

A generator's mask depends on the order in which numbers are drawn, and so on which rank computes what. This mask is
the same for any number of ranks, on any device, in the backward pass and under recomputation, and is never stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

# SplitMix64: a counter that steps by an odd number near 2^64 / golden ratio, through a finaliser of full avalanche
# (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). int64 products wrap as uint64 ones do.
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def kept(q_tokens: Tensor, k_tokens: Tensor, *, head: int, seed: int, dropout: float) -> Tensor:
    """Returns `[T, S]` bools: True for weights that are kept, each with probability `1 - dropout`.

    Args:
        q_tokens, k_tokens: int64 `[T]` and `[S]`: the position of each row in its packed stream.
        head: number of the query head in the whole layer.
    """
    stream = torch.tensor(_signed(seed))  # a number on the host needs no copy that the device waits for
    for counter in (torch.tensor(head), q_tokens[:, None], k_tokens):
        # A level's hash starts the next level's counter, so two streams overlap as seldom as two hashes are close.
        stream = _mixed(stream + counter * _signed(_STEP))
    return stream >= int(dropout * 2**64) - 2**63


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in _ROUNDS:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, _LAST_SHIFT)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shifts right as an unsigned number with the same bits."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """Returns the int64 that is congruent to the number modulo 2^64."""
    return (number + 2**63) % 2**64 - 2**63
