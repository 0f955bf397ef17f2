"""`auto` against every fixed choice over 60 cells, in the simulator: `python -m tools.auto_suite [--json]`.

A cell is a model, a context-parallel size, a batch and a mask, on full hosts of one machine. Fixed choices are every
scheme with every degree, and every mode of the linear layers; a cell's time is that of all layers of the model.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.schemes import MODES, SCHEMES
from megatron_cp.planner.batch import AttentionSpec, LinearSpec, Slot
from megatron_cp.planner.predict import Machine, machine
from megatron_cp.planner.predict.price import priced

MODELS = ("llama3-8b", "qwen3-next", "kimi-linear", "nemotron-h")
SIZES = (4, 8, 16, 32, 64)
TOKENS_PER_RANK = 8192


@dataclass(frozen=True)
class Cell:
    """A cell of the suite."""

    model: str
    cp: int
    batch: str
    mask: str
    layout: str


def cells() -> Iterator[Cell]:
    """Returns 60 cells, in which masks and layouts alternate."""
    masks = {"one document": "causal", "heavy-tailed": "causal", "short documents": "window:4095,0"}
    for number, (model, cp, batch) in enumerate((m, c, b) for m in MODELS for c in SIZES for b in masks):
        yield Cell(model, cp, batch, masks[batch], ("zigzag", "balanced", "contiguous")[number % 3])


def lengths_of(batch: str, total: int) -> list[int]:
    """The documents of a batch, from a log-normal law."""
    count = {"one document": 1, "heavy-tailed": 64, "short documents": total // 2048}[batch]
    drawn = np.random.default_rng(count).lognormal(0.0, 1.5 if batch == "heavy-tailed" else 0.5, count)
    lengths = np.maximum((drawn / drawn.sum() * total).astype(np.int64), 1)
    lengths[int(lengths.argmax())] += total - int(lengths.sum())
    return lengths.tolist()


def judged(cell: Cell, on: Machine) -> dict[str, Any]:
    """Milliseconds of all layers by `auto` and by every fixed choice, and what planning took."""
    packing = Packing(lengths_of(cell.batch, TOKENS_PER_RANK * cell.cp))
    layout = getattr(Layout, cell.layout)(packing, cell.cp)
    chosen = fixed = planned = 0.0
    candidates: dict[str, str] = {}
    for slot, count in Counter(read_model(cell.model).slots()).items():
        slot = replace(slot, hardware=on, **({"mask": cell.mask} if isinstance(slot, AttentionSpec) else {}))
        began = time.perf_counter()
        plan = slot.plan(layout)
        planned += time.perf_counter() - began
        own = {"auto": count * priced(plan, on).total}
        candidates[plan.kind] = plan.prices[0].scheme + plan.prices[0].detail
        for name, other in _fixed(slot, cell.cp):
            try:
                made = other.plan(layout)
            except ArgumentError:
                continue
            if sum(made.bytes_sent(2, forward=True)) > 2**42:  # states of very many segments: hours, not milliseconds
                continue
            own[name] = count * priced(made, on).total
        chosen += own.pop("auto")
        fixed += min(own.values())
    return {"cell": vars(cell), "auto_ms": chosen, "best_fixed_ms": fixed, "over_best": chosen / fixed,
            "candidates": candidates, "plan_seconds": planned}  # fmt: skip


def _fixed(slot: Slot, cp: int) -> Iterator[tuple[str, Slot]]:
    if isinstance(slot, LinearSpec):
        yield from ((mode, replace(slot, mode=mode)) for mode in MODES)
        return
    for name, scheme in SCHEMES.items():
        degrees = [u for u in range(2, cp) if cp % u == 0] if scheme.is_product else [None]
        for degree in degrees:
            yield f"{name} {degree or ''}", replace(slot, scheme=name, ulysses_degree=degree)


def main() -> None:
    """Prints the suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    rows = [judged(cell, machine(args.gpu)) for cell in cells()]
    ratios = np.array([row["over_best"] for row in rows])
    seconds = np.array([row["plan_seconds"] for row in rows])
    print(f"{len(rows)} cells on {machine(args.gpu).describe()}")
    print(f"auto over the best fixed choice of each cell: geometric mean {np.exp(np.log(ratios).mean()):.4f}, worst "
          f"{ratios.max():.4f} (at most 1.05 is the target)")  # fmt: skip
    print(f"seconds to plan all kinds of layers of a cell: median {np.median(seconds):.3f}, most {seconds.max():.3f}")
    print("\n| model | cp | batch | mask | layout | auto ms | best fixed ms | over | candidates | plan s |")
    print("|---|--:|---|---|---|--:|--:|--:|---|--:|")
    for row in rows:
        cell = row["cell"]
        candidates = "; ".join(f"{kind}: {name}" for kind, name in row["candidates"].items())
        print(f"| {cell['model']} | {cell['cp']} | {cell['batch']} | {cell['mask']} | {cell['layout']} | "
              f"{row['auto_ms']:.1f} | {row['best_fixed_ms']:.1f} | {row['over_best']:.3f} | {candidates} | "
              f"{row['plan_seconds']:.3f} |")  # fmt: skip
    if args.json:
        print(json.dumps({"worst": ratios.max(), "rows": rows}))


if __name__ == "__main__":
    main()
