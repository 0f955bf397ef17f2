"""The job that some ranks measure in `megatron-cp bench wire`, their measurements, and the bytes that a plan sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megatron_cp.apps.bench.overlap import inbound
from megatron_cp.exchange import Geometry, SplitCounts
from megatron_cp.plan import Plan, Transport
from megatron_cp.testing import Case

PARTS = ("transports", "codecs", "overlap")
HALVES = ("transfer", "compute", "together")
Key = tuple[str | int, ...]  # name of a measurement, and its direction


@dataclass(frozen=True)
class Job:
    """The job that some ranks measure together.

    Attributes:
        parts: names from `PARTS`.
        repeats: number of timings of transports and codecs.
        hosts: host of each rank.
        transport: transport for codecs and overlap.
        sent: the attention whose exchange to heads every transport runs.
        coded: the attention whose exchange to heads every codec runs.
        chunks: numbers of chunks for codecs and overlap, if heads allow them.
    """

    parts: tuple[str, ...]
    repeats: int
    hosts: tuple[int, ...]
    transport: Transport
    sent: Case
    coded: Case
    codecs: tuple[str, ...]
    layers: tuple[Case, ...]
    chunks: tuple[int, ...]

    def plan(self, case: Case, **changes: Any) -> Plan:
        """Returns a case's plan, with the job's transport."""
        return replace(replace(case, **changes).plan(), transport=self.transport)

    def chunks_of(self, case: Case) -> list[int]:
        """Returns the numbers of chunks into which heads can be cut."""
        most = case.plan().partition.most_groups
        return [count for count in self.chunks if count <= most]

    @property
    def ends(self) -> list[int]:
        """The fewest and the most chunks for codecs."""
        counts = self.chunks_of(self.coded)
        return sorted({counts[0], counts[-1]})


@dataclass
class Seen:
    """The measurements of one rank.

    Attributes:
        times: seconds of every repeat, by what was measured and its direction, which is "" if it has only one.
        counted: bytes sent to other hosts, by kind of exchange and transport.
    """

    times: dict[Key, list[float]] = field(default_factory=dict)
    counted: dict[tuple[str, str], int] = field(default_factory=dict)


def split_counts_of(plan: Plan, case: Case, part: int = 0) -> SplitCounts:
    """Returns the bytes from rank to rank of one part of attention's exchange to heads."""
    exchange = inbound(plan)
    dtypes = (case.dtype,) * len(exchange.sections.blocks)
    return Geometry(exchange, 0, dtypes, None, torch.device(case.device), part).split_counts(to_heads=True)


def between_hosts(split_counts: SplitCounts, hosts: Sequence[int]) -> int:
    """Returns the bytes that cross hosts."""
    host = np.array(hosts)
    return int(split_counts.counts[host[:, None] != host].sum())


def coded_bytes(job: Job, codec: str, chunks: int = 1) -> int:
    """Returns the bytes that cross hosts in the exchange to heads."""
    plan = job.plan(job.coded, codec=codec, head_chunks=chunks)
    return sum(between_hosts(split_counts_of(plan, job.coded, part), job.hosts) for part in range(chunks))
