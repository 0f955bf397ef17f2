"""`megatron-cp check`: compares a layer over N ranks with the same layer on one rank."""

from __future__ import annotations

import argparse
import warnings

from megatron_cp.cli.case_options import LEFT_OPTIONS, RANK_KINDS, add_batch_arguments, add_layer_arguments
from megatron_cp.cli.parser import cp_sizes, flags, minutes, seconds
from megatron_cp.cli.paths import check_paths
from megatron_cp.cli.report import Report
from megatron_cp.cli.shapes import layers_of

EXAMPLES = (
    "check --cp 2,3 --layer gdn",
    "check --all --cp 4 --mask window:128",
)
# The options that --help lists.
COMMON = (
    "cp", "layer", "model", "heads", "kv_heads", "head_dim", "scheme", "mask", "lengths", "layout", "all",
    "details", "report",
)  # fmt: skip
LEFT = LEFT_OPTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        *flags("cp"),
        type=cp_sizes,
        metavar="N,N,...",
        help="context-parallel sizes (default: 2,3,5; with --all 2,3,4,5)",
    )
    add_layer_arguments(parser, dtype="float64")
    add_batch_arguments(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="check every scheme, layout, kind of heads and mask; options that you give stay fixed",
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="print the error of every tensor, and whether outputs and gradients have the same bits",
    )
    parser.add_argument("--kernel", default="auto", help="a kernel from doctor --all (default: auto)")
    parser.add_argument(
        "--ranks", choices=RANK_KINDS, default="threads", help="kind of local ranks; ignored under torchrun"
    )
    parser.add_argument(
        "--distributed-timeout-minutes",
        type=minutes,
        default=0.75,
        help="longest wait for another rank, from the second case on (default: 0.75)",
    )
    parser.add_argument("--report", metavar="FILE.html", help="save a page with all cases, the worst first")
    parser.add_argument("--timeout", type=seconds, default=300.0, help="seconds that one case may take (default: 300)")


def run(args: argparse.Namespace) -> Report:
    """Runs every case, on local ranks or on the ranks that torchrun started."""
    check_paths(args)
    layers_of(args)  # refuses a shape that the layer does not have before torch is imported, which takes seconds
    from megatron_cp.cli import check_cases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ranks without heads are part of what is checked
        return check_cases.report(args)
