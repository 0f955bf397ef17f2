"""Measures planning at cp 64 and 1M tokens, warm: `python -m tools.plan_times [--json]`.

Masks, layouts and batches take turns, for two shapes of heads. A plan of a known scheme and the tables of one rank,
and a plan by `auto` with the tables of what it takes; layouts are there before. Every plan is of a layout of its own,
so that nothing is remembered from the one before; the median of some counts. Times are a thread's own, which other work
on its core is not part of, and by the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.plan.flows import Fetch
from megatron_cp.plan.plan import Plan
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.predict.machine_files import machine

CP, TOTAL, RANK = 64, 2**20, 5
KNOWN = ("a2a", "p2p", "all_gather", "exact")
HEADS = ((32, 8, 128), (16, 2, 256))
TARGET_KNOWN, TARGET_AUTO = 15.0, 75.0  # milliseconds


class Cell(NamedTuple):
    """A batch and a layer."""

    batch: str
    layout: str
    mask: str
    heads: tuple[int, int, int]


def cells() -> Iterator[Cell]:
    """All of them."""
    for batch in ("64 heavy-tailed", "64 equal", "1 document"):
        for layout in ("zigzag", "contiguous", "balanced"):
            yield from (Cell(batch, layout, mask, heads) for mask in ("causal", "window:4095,0") for heads in HEADS)


def lengths_of(batch: str) -> list[int]:
    """The documents of a batch."""
    count = int(batch.split()[0])
    if "heavy-tailed" not in batch:
        return [TOTAL // count] * count
    drawn = np.random.default_rng(0).lognormal(8, 1.2, count)
    return np.diff(np.round(np.cumsum(drawn) / drawn.sum() * TOTAL).astype(np.int64), prepend=0).tolist()


def make_tables(plan: Plan, rank: int) -> None:
    """Makes the tables that a rank needs to run an attention."""
    kv_rank = rank // plan.ulysses_degree
    for exchange, _ in plan.exchanges(forward=True):
        layout = exchange.subgroup(kv_rank).layout
        _ = layout.order, layout.inverse_order
    for stage in plan.attend.stages if plan.attend else ():
        assert plan.attend is not None
        if len(plan.attend.tiles(kv_rank, stage).bands):
            plan.attend.call_tiles(kv_rank, stage)
        if isinstance(stage.keys, Fetch):
            _ = stage.keys.tables(kv_rank), stage.keys.split_counts
            _ = stage.keys.shares() if stage.keys.equal_shares else None


def timed(cell: Cell, scheme: str, gpu: str, repeats: int) -> tuple[float, float, Plan]:
    """Milliseconds of a plan with a rank's tables, the thread's own and by the clock, each the median; the plan."""
    heads, groups, size = cell.heads
    taken = []
    for _ in range(repeats + 1):
        packing = Packing(lengths_of(cell.batch))
        layout = getattr(Layout, cell.layout)(packing, CP)
        mask = Mask.named(packing, cell.mask)
        began = time.thread_time(), time.perf_counter()
        plan = plan_attention(
            packing, layout, heads=heads, kv_heads=groups, head_dim=size, mask=mask, scheme=scheme, hardware=gpu
        )
        make_tables(plan, RANK)
        taken.append((time.thread_time() - began[0], time.perf_counter() - began[1]))
    own, clock = (1e3 * statistics.median(times) for times in zip(*taken[1:], strict=True))
    return own, clock, plan


def measured(cell: Cell, gpu: str, repeats: int) -> dict[str, Any]:
    """A row of the table."""
    known = {scheme: timed(cell, scheme, gpu, repeats)[:2] for scheme in KNOWN}
    *auto, plan = timed(cell, "auto", gpu, repeats)
    took = plan.prices[0]
    return {**cell._asdict(), "known_ms": known, "auto_ms": auto, "candidate": took.scheme + took.detail,
            "predicted_ms": took.total, "played": sum(not price.is_bound for price in plan.prices)}  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="cells whose batch, layout or mask has this in it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    rows = [measured(cell, args.gpu, args.repeats) for cell in cells() if args.only in " ".join(map(str, cell))]
    known = np.array([[row["known_ms"][scheme] for scheme in KNOWN] for row in rows]).max(axis=1)
    auto = np.array([row["auto_ms"] for row in rows])
    print(f"cp {CP}, {TOTAL:,} tokens, {machine(args.gpu).describe()}; milliseconds, medians of {args.repeats}")
    for what, times, target in (
        ("a known scheme with one rank's tables", known, TARGET_KNOWN),
        ("auto with those of what it takes", auto, TARGET_AUTO),
    ):
        for clock, each in zip(("the thread's own", "by the clock"), times.T, strict=True):
            print(f"{what}, {clock}: median {np.median(each):.1f}, most {each.max():.1f} (target {target:g})")
    print(f"\n| batch | layout | mask | heads | {' | '.join(KNOWN)} | auto | takes | predicted ms |")
    print("|---|---|---|---|" + "--:|" * (len(KNOWN) + 1) + "---|--:|")
    for row in rows:
        times = " | ".join(f"{row['known_ms'][scheme][0]:.1f}" for scheme in KNOWN)
        print(f"| {row['batch']} | {row['layout']} | {row['mask']} | {'/'.join(map(str, row['heads']))} | {times} | "
              f"{row['auto_ms'][0]:.1f} | {row['candidate']} | {row['predicted_ms']:.3f} |")  # fmt: skip
    if args.json:
        print(json.dumps({"known_ms": known.max(axis=0).tolist(), "auto_ms": auto.max(axis=0).tolist(), "rows": rows}))


if __name__ == "__main__":
    main()
