"""Checks that megatron-core can be compared: it is installed, and supports the ranks and the documents."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import numpy as np

from megatron_cp.cli import INSTALL_MEGATRON
from megatron_cp.errors import ArgumentError
from megatron_cp.testing import Case

MEGATRON = "megatron-core"


def megatron_missing() -> dict[str, str]:
    """Returns why Megatron's side cannot be run; empty if it can."""
    try:
        version(MEGATRON)  # only the ranks import it: that takes seconds
    except PackageNotFoundError:
        return {MEGATRON: f"it is not installed; {INSTALL_MEGATRON}"}
    return {}


def aligned_lengths(tokens: int, documents: int, multiple: int, name: str = "--cells") -> list[int]:
    """Returns documents of very different lengths, always the same, all multiples of what Megatron can shard."""
    units = tokens // multiple
    if tokens % multiple or units < documents:
        raise ArgumentError(
            name, f"{tokens} tokens in {documents} documents", f"multiples of 2 * cp = {multiple}, one a document"
        )
    draws = np.random.default_rng(0).lognormal(mean=3.0, sigma=1.2, size=documents)
    cuts = np.round(np.cumsum(draws) / draws.sum() * (units - documents)).astype(int)  # each has one already
    return ((np.diff(cuts, prepend=0) + 1) * multiple).tolist()


def check_megatron_takes(case: Case) -> None:
    """Refuses cases that Megatron cannot exchange, so that no report lacks its peer."""
    check_ranks(case)
    if any(not length or length % (2 * case.cp) for length in case.lengths):
        allowed = f"multiples of 2 * cp = {2 * case.cp}"
        raise ArgumentError("--lengths", list(case.lengths), allowed, f"{MEGATRON} shards no others.")
    case.plan()


def check_ranks(case: Case) -> None:
    """Refuses numbers of ranks that cannot share the heads evenly."""
    if case.cp < 2 or case.groups % case.cp:
        allowed = f"divisors of the {case.groups} key heads above 1"
        raise ArgumentError("--cp", case.cp, allowed, f"{MEGATRON} exchanges no others.")
