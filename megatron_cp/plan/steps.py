"""The steps of a plan, which the ranks run in order. Pure data; no torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.recurrence import Halo, Scan


@dataclass(frozen=True)
class ToHeads:
    """Exchanges all sections in one collective, from own tokens to own heads.

    `inputs` is a range of the operation's tensors: queries and keys of different packings travel separately.
    """

    exchange: Exchange
    inputs: tuple[int, int]


@dataclass(frozen=True)
class Compute:
    """Local work between collectives, by the name under which the operation hands it to the executor."""

    name: str


@dataclass(frozen=True)
class ToTokens:
    """Exchanges all sections in one collective, from own heads back to own tokens."""

    exchange: Exchange


LocalStep = Compute | Attend | Halo | Scan
Step = ToHeads | LocalStep | ToTokens
