"""Groups of ranks for each microbatch beside Megatron's own scheduler, in one cost model: nothing is measured.

`python -m benchmarks.group_schedule [--batches 10]` deals global batches of documents of three corpora's lengths over
3, 8, 12 and 16 ranks. A document of n tokens takes `token n + pair n^2` on one rank; over s ranks it takes the s-th
part of it, and the messages of its tokens, whose heads change places.
"""

from __future__ import annotations

import argparse
import logging
import types
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_cp.data import GroupSchedule, group_batches, group_microbatches
from megatron_cp.errors import ArgumentError
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.pack_cost import PackCost

TOKENS_PER_RANK, PER_RANK = 32_768, 2 * 32_768  # that a rank holds at a time, and that it has in a global batch
MICROBATCHES = 4  # of group_microbatches
CORPORA = ("uniform", "lognormal", "heavy-tailed")
# An 8B model of 32 layers: 32 query and 8 key/value heads of 128. Bytes of a token in bf16: q, k, v and the output.
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
SENT = LAYERS * 2 * 2 * (HEADS + KV_HEADS) * HEAD_DIM * 2


def drawn(corpus: str, tokens: int, seed: int) -> list[int]:
    """Returns lengths of documents with so many tokens in all, none longer than a quarter of them."""
    random, lengths = np.random.default_rng(seed), list[int]()
    while sum(lengths) < tokens:
        if corpus == "uniform":
            length = int(random.integers(256, 16_384))
        else:
            length = int(random.lognormal(*{"lognormal": (8.0, 1.0), "heavy-tailed": (7.5, 1.8)}[corpus])) + 1
        lengths.append(min(length, tokens // 4, tokens - sum(lengths)))
    return lengths


def costs(ranks: int) -> tuple[PackCost, float]:
    """Returns the cost of documents on an H100, and of a token that a rank exchanges over the slowest link."""
    on = machine("h100")
    flops = PackCost.of_flops(active_parameters=8_000_000_000, softmax_features=LAYERS * HEADS * HEAD_DIM)
    topology = on.topology(ranks)
    link = topology.within if topology.num_hosts == 1 else topology.between
    return flops.at_rates_of(on.hardware, HEAD_DIM), SENT / link.bandwidth


def of_megatron(
    lengths: Sequence[int], ranks: int, cost: PackCost, exchange: float, tokens_per_rank: int = TOKENS_PER_RANK
) -> tuple[float, int] | str:
    """Returns seconds and microbatches of megatron-core's schedule, or the reason why there is none.

    Its groups run one document after another, and all ranks wait for each other after a set of groups. The number of
    microbatches is the busiest rank's in each set.
    """
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    scheduler = BalancedCPScheduler(tokens_per_rank, types.SimpleNamespace(size=lambda: ranks))
    try:
        _, sets = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    except (AssertionError, IndexError, RuntimeError, ZeroDivisionError) as error:
        return type(error).__name__
    total, microbatches, done = 0.0, 0, set[int]()
    for given in sets:
        of_ranks = [list(given[rank]) if rank < len(given) else [] for rank in range(ranks)]
        sizes = defaultdict[int, int](int)
        for samples in of_ranks:
            for sample in samples:
                sizes[sample] += 1
        if any(size & (size - 1) and size != ranks for size in sizes.values()):
            return "no such group"
        done.update(sizes)
        total += max(sum(seconds(lengths[one], sizes[one], cost, exchange) for one in samples) for samples in of_ranks)
        microbatches += max(map(len, of_ranks))
    return (total, microbatches) if done == set(range(len(lengths))) else "documents left out"


def seconds(length: int, size: int, cost: PackCost, exchange: float) -> float:
    """Returns the duration of a document over `size` ranks."""
    work = cost.token * length + cost.pair * length * length
    return (work + exchange * length * (size - 1) / size) / size


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batches", type=int, default=10)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| lengths | ranks | schedule | largest load / bound, mean | worst | microbatches, mean | none |")
    print("|---|--:|---|--:|--:|--:|--:|")
    for corpus in CORPORA:
        for ranks in (3, 8, 12, 16):
            cost, exchange = costs(ranks)
            rows, none = defaultdict[str, list[tuple[float, float]]](list), defaultdict[str, int](int)
            for seed in range(args.batches):
                lengths = drawn(corpus, ranks * PER_RANK, seed)
                options: dict[str, Any] = {
                    "ranks": ranks,
                    "tokens_per_rank": TOKENS_PER_RANK,
                    "cost": cost,
                    "exchange": exchange,
                }
                free: GroupSchedule = group_batches(lengths, **options)
                count = max(len(free.of_rank(rank)) for rank in range(ranks))
                rows["group_batches"].append((free.seconds / free.bound, count))
                for name, barrier in (("group_microbatches", False), ("the same, all ranks wait in each", True)):
                    try:
                        found = group_microbatches(lengths, **options, microbatches=MICROBATCHES, barrier=barrier)
                    except ArgumentError:
                        none[name] += 1
                    else:
                        rows[name].append((found.seconds / free.bound, MICROBATCHES))
                theirs = of_megatron(lengths, ranks, cost, exchange)
                if isinstance(theirs, str):
                    none["BalancedCPScheduler"] += 1
                else:
                    rows["BalancedCPScheduler"].append((theirs[0] / free.bound, theirs[1]))
            for name in (*dict.fromkeys(rows), *(name for name in none if name not in rows)):
                known = np.array(rows[name] or [(np.nan, np.nan)])
                mean, most = known.mean(0), known.max(0)
                print(f"| {corpus} | {ranks} | {name} | {mean[0]:.3f} | {most[0]:.3f} | {mean[1]:.1f} | {none[name]} |")


if __name__ == "__main__":
    main()
