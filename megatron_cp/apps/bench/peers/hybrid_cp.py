"""A step of megatron-core under hybrid context parallelism: no packs, and a number of ranks for each sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

from megatron_cp.apps.bench.peers.distributed import Ranks
from megatron_cp.data import Cost


def hybrid_step(
    lengths: Sequence[int], ranks: int, tokens_per_rank: int, cost: Cost, pack: float, cp_size: int
) -> float:
    """Returns the time of a step whose samples megatron-core's `BalancedCPScheduler` assigns, by the same cost as ours.

    It runs each sample alone on 1, 2, 4, ... ranks, group of samples after group, and all ranks wait for each other
    between groups (`hybrid_context_parallel_forward_backward`).

    Args:
        tokens_per_rank: the most tokens of a sample that one rank takes.
        cost: cost of a document on `cp_size` ranks; other numbers of ranks share its work as evenly.
        pack: cost of running a sample, whatever its length.
        cp_size: number of ranks for which `cost` holds.
    """
    group: Any = Ranks(ranks)
    scheduler = BalancedCPScheduler(tokens_per_rank, group)
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    tokens = np.asarray(lengths, np.float64)
    work = (cost.token * tokens + cost.pair * tokens * tokens) * cp_size
    seen: Counter[int] = Counter()
    seconds = 0.0
    for samples_of in groups:
        shared = Counter(sample for samples in samples_of for sample in samples)
        seconds += max(sum(work[sample] / shared[sample] + pack for sample in samples) for samples in samples_of)
        seen.update(shared.keys())
    assert seen == Counter(range(len(lengths))), "each sample is run once"
    return float(seconds)
