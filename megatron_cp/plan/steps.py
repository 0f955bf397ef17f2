"""The steps of a plan: what the ranks do one after the other. Pure data; no torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.recurrence import Halo, Scan


@dataclass(frozen=True)
class ToHeads:
    """One collective: all sections of the exchange, from own tokens to own heads.

    Attributes:
        exchange: what changes places.
        inputs: which of the tensors at hand it takes, as a range: queries and keys of other documents travel apart.
    """

    exchange: Exchange
    inputs: tuple[int, int]


@dataclass(frozen=True)
class Compute:
    """Local work between collectives, by the name under which the operation hands it to the executor."""

    name: str


@dataclass(frozen=True)
class ToTokens:
    """One collective: back from own heads to own tokens."""

    exchange: Exchange


Step = ToHeads | Compute | Attend | Halo | Scan | ToTokens
