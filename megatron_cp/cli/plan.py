"""`megatron-cp plan`: who owns what, what travels, and how even the work is."""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import numpy as np

from megatron_cp.cli.main import Report
from megatron_cp.cli.options import (
    DTYPES,
    add_batch_arguments,
    add_layer_arguments,
    document_lengths,
    layer_shape,
    positive,
)
from megatron_cp.executor.plan import Plan
from megatron_cp.layout import Packing
from megatron_cp.planner.capabilities import require
from megatron_cp.planner.picture import save_picture
from megatron_cp.planner.plans import plan_attention, plan_linear
from megatron_cp.softmax.mask import Mask
from megatron_cp.testing.layouts import layout_by_name

HELP = "explain a plan: who owns what, transfers and balance"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--cp", type=positive, default=4, metavar="N", help="context-parallel size (default: 4)")
    add_layer_arguments(parser)
    add_batch_arguments(parser)
    parser.add_argument("--scheme", default="auto", help="a2a for attention, headwise for gdn (default: auto)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="for the bytes (default: bfloat16)")
    parser.add_argument("--plot", metavar="FILE.png", help="save a picture of who owns what")


def run(args: argparse.Namespace) -> Report:
    """Plans, explains and draws."""
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # explain() shows the notes
        plan = _plan(args)
    milliseconds = (time.perf_counter() - started) * 1e3
    item_size = {"float64": 8, "float32": 4}.get(args.dtype, 2)
    text = [plan.explain(item_size), f"planned in {milliseconds:.1f} ms"]
    if args.plot:
        save_picture(plan, args.plot)
        text.append(f"picture: {args.plot}")
    return Report("\n".join(text), as_json(plan, item_size, milliseconds))


def _plan(args: argparse.Namespace) -> Plan:
    require("layer", args.layer)
    shape = layer_shape(args)
    packing = Packing(document_lengths(args, args.cp))
    layout = layout_by_name(args.layout, packing, args.cp, align=args.align, seed=args.seed)
    if args.layer == "attention":
        mask = Mask(packing, is_causal=require("mask", args.mask) == "causal")
        return plan_attention(
            packing, layout, heads=shape.heads, kv_heads=shape.groups, head_dim=shape.head_dim,
            value_head_dim=shape.value_dim, mask=mask, scheme=args.scheme,
        )  # fmt: skip
    return plan_linear(
        packing, layout, args.layer, heads=shape.heads, key_heads=shape.groups, head_dim=shape.head_dim,
        value_head_dim=shape.value_dim, mode=args.scheme,
    )  # fmt: skip


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
