"""`megatron-cp bench`: measures how far an operation is from its limits, in ratios that are taken in one run.

It defines the options and chooses the benchmark, whose module is imported when it runs.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_cp.apps.bench.defaults import EXCHANGE_RANKS, PACK_RANKS, RANKS, WIRE_RANKS
from megatron_cp.cli import (
    RANK_KINDS,
    Report,
    add_batch_arguments,
    add_layer_arguments,
    check_paths,
    flags,
    positive,
    seconds,
)
from megatron_cp.errors import ArgumentError

if TYPE_CHECKING:
    from megatron_cp.executor import TorchGroup

EXAMPLES = (
    "bench layer --layer gdn --cp 2",
    "bench wire --only transports --json",
)
BENCHMARKS = ("attention", "linear", "exchange", "layer", "wire", "packs", "planner")
DEVICES = ("cpu", "cuda")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("what", metavar="|".join(BENCHMARKS), help="what to measure")
    wire, packs = (f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}" for sizes in (WIRE_RANKS, PACK_RANKS))
    parser.add_argument(
        *flags("cp"),
        type=positive,
        metavar="N",
        help=f"context-parallel size (default: {RANKS}; for exchange {EXCHANGE_RANKS}, for wire {wire}, for packs "
        f"{packs})",
    )
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="timed rounds (default: 5)")
    add_layer_arguments(parser, dtype="float32")
    add_batch_arguments(parser)
    ours = {
        "layer": "for linear: gdn, kda, mamba or conv1d (default: gdn)",
        "scheme": "for attention: one scheme (default: all that the ranks can run)",
        "model": "the layer's shape in a known model (default: a few heads)",
        "layout": "default: zigzag; for linear: contiguous",
        "dtype": "default: float32; bfloat16 for exchange, layer and wire, and on cuda",
    }
    for action in parser._actions:
        action.help = ours.get(action.dest, action.help)
    parser.set_defaults(layer=None, dtype=None)  # depend on what is measured, and on the device
    parser.add_argument("--kernel", default="auto", help="a kernel that doctor lists (default: auto)")
    parser.add_argument("--device", choices=DEVICES, help="default: cuda if present")
    parser.add_argument(
        "--ranks", choices=RANK_KINDS, default="processes", help="kind of local ranks; ignored under torchrun"
    )
    cells = "RANKSxTOKENS/DOCUMENTS,..."
    parser.add_argument(
        "--cells",
        metavar=cells,
        help="for exchange: batches to time between processes; --tokens-per-rank sets that of the local part",
    )
    parser.add_argument("--only", metavar="PART,...", help="for wire: transports, codecs or overlap (default: all)")
    parser.add_argument(
        "--profile",
        metavar="FILE.json",
        help="for layer: file for a Chrome trace of one forward and backward of our layer on rank 0, made last; "
        "two layers make FILE.gdn.json and FILE.mamba.json",
    )
    parser.add_argument(
        "--batches",
        type=positive,
        metavar="N",
        help="for packs: global batches for each number of ranks (default: 100)",
    )
    parser.add_argument(
        "--calibrate", metavar="FILE.toml", help="for planner: file for the rates of this machine, as a preset"
    )
    parser.add_argument(
        *flags("gpu"),
        metavar="NAME-OR-FILE",
        help="for planner: machine for which to predict (default: measured beforehand)",
    )
    parser.add_argument("--timeout", type=seconds, default=600.0, help="seconds the run may take (default: 600)")


def run(args: argparse.Namespace) -> Report:
    """Measures, on local ranks or those of torchrun."""
    if args.what not in BENCHMARKS:
        raise ArgumentError("benchmark", args.what, " or ".join(BENCHMARKS))
    of_one = {
        "only": "wire", "cells": "exchange", "profile": "layer", "batches": "packs", "calibrate": "planner",
        "gpu": "planner",
    }  # fmt: skip
    for option, benchmark in of_one.items():
        if getattr(args, option) is not None and args.what != benchmark:
            raise ArgumentError(f"--{option}", getattr(args, option), f"only with bench {benchmark}")
    if args.parents is not None:  # peers would compute other documents
        raise ArgumentError("--parents", args.parents, "only with check and plan")
    check_paths(args)
    import torch
    import torch.distributed as dist

    from megatron_cp.apps.bench import attention, exchange, layer, linear, packs, planner, wire
    from megatron_cp.executor import in_torchrun, start_torchrun_rank

    reports: dict[str, Callable[[argparse.Namespace, TorchGroup | None], Report]] = {
        "attention": attention.report,
        "linear": linear.report,
        "exchange": exchange.report,
        "layer": layer.report,
        "wire": wire.report,
        "planner": planner.report,
        "packs": packs.report,
    }
    torch.set_num_threads(1)
    world = start_torchrun_rank(args.timeout) if in_torchrun() else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # ranks without heads are part of what is measured
            report = reports[args.what](args, world)
    finally:
        if world is not None:
            dist.destroy_process_group()
    return report
