"""Groups of ranks for each microbatch, Megatron's scheduler and one group of all ranks, in one cost model.

`python -m tools.group_schedule [--batches 100]`: global batches of documents of three corpora's lengths, on 8, 12 and
16 ranks. A document of n tokens on one rank takes `token n + pair n^2`; over s ranks the s-th part of it, and the
messages of its tokens: heads that change places. One group of all ranks holds packs in the balanced layout, where only
documents that a border cuts send anything: heads likewise, or their keys alone, as `exact` does.
"""

from __future__ import annotations

import argparse
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

import megatron_cp as cp
from megatron_cp.data.groups import GroupSchedule, group_batches
from megatron_cp.data.pieces import best_fit
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.pack_cost import PackCost

TOKENS_PER_RANK, PER_RANK = 32_768, 2 * 32_768  # that a rank holds at a time, and that it has in a global batch
ONE_GROUP = {"one group, heads": False, "one group, keys": True}
CORPORA = ("uniform", "lognormal", "heavy-tailed")
# An 8B model of 32 layers: 32 query and 8 key/value heads of 128.
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
# Bytes of a token in bf16: q, k, v and the output, there and back; and keys and values twice, their gradients once.
SENT_OF_HEADS = LAYERS * 2 * 2 * (HEADS + KV_HEADS) * HEAD_DIM * 2
SENT_OF_KEYS = LAYERS * 3 * 2 * KV_HEADS * HEAD_DIM * 2


def drawn(corpus: str, tokens: int, seed: int) -> list[int]:
    """Documents of so many tokens in all, none longer than a quarter of them."""
    random, lengths = np.random.default_rng(seed), list[int]()
    while sum(lengths) < tokens:
        if corpus == "uniform":
            length = int(random.integers(256, 16_384))
        else:
            length = int(random.lognormal(*{"lognormal": (8.0, 1.0), "heavy-tailed": (7.5, 1.8)}[corpus])) + 1
        lengths.append(min(length, tokens // 4, tokens - sum(lengths)))
    return lengths


def costs(ranks: int) -> tuple[PackCost, float]:
    """Seconds of a document on one H100, and of a token that a rank exchanges: between hosts, where there are two."""
    on = machine("h100")
    flops = PackCost.of_flops(active_parameters=8_000_000_000, softmax_features=LAYERS * HEADS * HEAD_DIM)
    topology = on.topology(ranks)
    link = topology.within if topology.num_hosts == 1 else topology.between
    return flops.at_rates_of(on.hardware, HEAD_DIM), SENT_OF_HEADS / link.bandwidth


def of_megatron(lengths: Sequence[int], ranks: int, cost: PackCost, exchange: float) -> float | str:
    """Seconds of megatron-core's schedule, whose groups all wait for each other; or why there is none."""
    group = types.SimpleNamespace(size=lambda: ranks)
    scheduler = BalancedCPScheduler(TOKENS_PER_RANK, group)
    try:
        _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    except (AssertionError, IndexError, RuntimeError, ZeroDivisionError) as error:
        return type(error).__name__
    total, done = 0.0, set[int]()
    for given in groups:
        of_ranks = [list(given[rank]) if rank < len(given) else [] for rank in range(ranks)]
        sizes = defaultdict[int, int](int)
        for samples in of_ranks:
            for sample in samples:
                sizes[sample] += 1
        for sample, size in sizes.items():
            if size & (size - 1) and size != ranks:
                return "no such group"
            done.add(sample)
        total += max(
            sum(_seconds(lengths[sample], sizes[sample], cost, exchange) for sample in samples) for samples in of_ranks
        )
    return total if done == set(range(len(lengths))) else "documents left out"


def _seconds(length: int, size: int, cost: PackCost, exchange: float) -> float:
    work = cost.token * length + cost.pair * length * length
    return (work + exchange * length * (size - 1) / size) / size


def of_one_group(lengths: Sequence[int], ranks: int, cost: PackCost, exchange: float, *, exact: bool) -> float:
    """Seconds of one group of all ranks, pack after pack: each rank an even part, and messages for what is cut."""
    total = 0.0
    for pack in best_fit(np.array(lengths), ranks * TOKENS_PER_RANK):
        layout = cp.Layout.balanced(cp.Packing([lengths[document] for document in pack]), ranks)
        held = [
            np.unique(layout.packing.documents_of(layout.tokens(rank)), return_counts=True) for rank in range(ranks)
        ]
        spread = np.bincount(np.concatenate([documents for documents, _ in held]))
        work = [
            sum(_part(lengths[pack[document]], int(count), int(spread[document]), cost, exchange, exact=exact)
                for document, count in zip(documents, counts, strict=True))
            for documents, counts in held
        ]  # fmt: skip
        total += max(_with_pairs(work, layout, cost))
    return total


def _part(length: int, count: int, spread: int, cost: PackCost, exchange: float, *, exact: bool) -> float:
    """Returns the cost of `count` tokens of a document, apart from their pairs."""
    sent = count * (spread - 1) / spread
    if exact:
        sent = (length - count) * SENT_OF_KEYS / SENT_OF_HEADS  # at most: keys after a rank's last query stay
    return cost.token * count + exchange * sent


def _with_pairs(work: Sequence[float], layout: cp.Layout, cost: PackCost) -> list[float]:
    """Adds the cost of each rank's pairs, which are those of its rows and all tokens before them."""
    found = []
    for rank, seconds in enumerate(work):
        positions = layout.positions(rank)[: int(layout.token_counts[rank])]
        found.append(seconds + cost.pair * float((2 * positions + 1).sum()))
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batches", type=int, default=100)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| corpus | ranks | schedule | step / ideal, mean | worst | step / bound, mean | worst | none | ms |")
    print("|---|--:|---|--:|--:|--:|--:|--:|--:|")
    for corpus in CORPORA:
        for ranks in (8, 12, 16):
            cost, exchange = costs(ranks)
            rows = defaultdict[str, list[tuple[float, float, float]]](list)
            none = defaultdict[str, int](int)
            for seed in range(args.batches):
                lengths = drawn(corpus, ranks * PER_RANK, seed)
                began = time.perf_counter()
                ours = group_batches(
                    lengths, ranks=ranks, tokens_per_rank=TOKENS_PER_RANK, cost=cost, exchange=exchange
                )
                took = time.perf_counter() - began
                _note(rows, none, "groups", ours.seconds, ours, took)
                began = time.perf_counter()
                theirs = of_megatron(lengths, ranks, cost, exchange)
                _note(rows, none, "BalancedCPScheduler", theirs, ours, time.perf_counter() - began)
                for name, exact in ONE_GROUP.items():
                    _note(rows, none, name, of_one_group(lengths, ranks, cost, exchange, exact=exact), ours, 0.0)
            for name in ("groups", "BalancedCPScheduler", *ONE_GROUP):
                found = np.array(rows[name]).reshape(-1, 3)
                shown = "| | | | " if not len(found) else (
                    f"| {found[:, 0].mean():.3f} | {found[:, 0].max():.3f} | {found[:, 1].mean():.3f} | "
                    f"{found[:, 1].max():.3f} "
                )  # fmt: skip
                slow = f"{1000 * found[:, 2].mean():.1f}" if len(found) and found[:, 2].any() else ""
                print(f"| {corpus} | {ranks} | {name} {shown}| {none[name] or ''} | {slow} |", flush=True)


def _note(
    rows: dict[str, list[tuple[float, float, float]]], none: dict[str, int], name: str, step: float | str,
    ours: GroupSchedule, took: float,
) -> None:  # fmt: skip
    if isinstance(step, str):
        none[name] += 1
    else:
        rows[name].append((step / ours.ideal, step / ours.bound, took))


if __name__ == "__main__":
    main()
