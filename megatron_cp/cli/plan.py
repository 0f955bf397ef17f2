"""`megatron-cp plan`: who owns what, what travels, and how even the work is."""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import numpy as np

from megatron_cp.cli.main import Report
from megatron_cp.cli.options import add_batch_arguments, add_layer_arguments, case_of, positive
from megatron_cp.executor.plan import Plan
from megatron_cp.planner.picture import save_picture

HELP = "explain a plan: who owns what, transfers and balance"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--cp", type=positive, default=4, metavar="N", help="context-parallel size (default: 4)")
    add_layer_arguments(parser, dtype="bfloat16")
    add_batch_arguments(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="save a picture of who owns what")


def run(args: argparse.Namespace) -> Report:
    """Plans, explains and draws."""
    case = case_of(args, args.cp)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # explain() shows the notes
        plan = case.plan()
    milliseconds = (time.perf_counter() - started) * 1e3
    item_size = case.dtype.itemsize
    text = [plan.explain(item_size), f"planned in {milliseconds:.1f} ms"]
    if args.plot is not None:
        save_picture(plan, args.plot)
        text.append(f"picture: {args.plot}")
    return Report("\n".join(text), as_json(plan, item_size, milliseconds))


def as_json(plan: Plan, item_size: int, milliseconds: float) -> dict[str, Any]:
    """The plan in numbers. `null` where nothing prices or solves yet."""
    both = {"forward": True, "backward": False}
    return {
        "scheme": plan.scheme,
        "cp": plan.cp_size,
        "tokens_per_rank": plan.layout.token_counts.tolist(),
        "fragments_per_rank": np.diff(plan.layout.fragment_offsets).tolist(),
        "pad_tokens": int(plan.layout.pad_rows.sum()),
        "work_imbalance": plan.work_imbalance,
        "bytes_sent_per_rank": {name: plan.bytes_sent(item_size, forward=forward) for name, forward in both.items()},
        "bytes_lower_bound": {name: plan.bytes_needed(item_size, forward=forward) for name, forward in both.items()},
        "solver": {"optimal": None, "bound": None, "load_cap": None},
        "collectives": {name: plan.collectives(forward=forward) for name, forward in both.items()},
        "predicted_ms": {"forward": None, "backward": None},
        "plan_ms": milliseconds,
        "notes": list(plan.notes),
    }
