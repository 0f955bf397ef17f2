"""`python -m benchmarks NAME`: measures how far an operation is from its limits, in ratios that are taken in one run.

It defines the options and chooses the benchmark, whose module is imported when it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from benchmarks.ranks import EXCHANGE_RANKS, RANKS, WIRE_RANKS
from megatron_cp.cli import (
    RANK_KINDS,
    UsageError,
    add_batch_arguments,
    add_layer_arguments,
    check_paths,
    environment,
    flags,
    positive,
    seconds,
)
from megatron_cp.cli.parser import Parser, as_flag
from megatron_cp.errors import ArgumentError, PlanMismatchError

BENCHMARKS = {
    "exchange": "the head exchange of Gated DeltaNet beside a copy, a bare collective and megatron-core's own exchange",
    "layer": "a whole layer of Gated DeltaNet beside megatron-core's own with the same parameters",
    "attention": "every scheme beside the same layer on one rank",
    "linear": "every mode of a linear layer beside the same layer on one rank",
    "wire": "an exchange by every transport, and with every codec",
    "planner": "the rates of this machine's CPUs and links; --calibrate FILE writes them for plan --gpu FILE",
}
_MODULES = {"attention": "schemes", "linear": "schemes", "planner": "calibrate"}
_OF_ONE = {"profile": ("layer",), "calibrate": ("planner",), "gpu": ("attention", "linear")}


def parser() -> Parser:
    """Returns the command's parser."""
    found = Parser(
        prog="python -m benchmarks",
        description="\n".join(f"  {name:10} {purpose}" for name, purpose in BENCHMARKS.items()),
        epilog="examples:\n  python -m benchmarks layer --layer gdn --cp 2\n  python -m benchmarks wire --json",
    )
    add = found.add_argument
    add("name", metavar="|".join(BENCHMARKS), help="what to measure")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add(
        *flags("cp"), type=positive, metavar="N",
        help=f"context-parallel size (default: {RANKS}; for exchange {EXCHANGE_RANKS}, for wire {WIRE_RANKS}, in turn)",
    )  # fmt: skip
    add("--repeats", type=positive, default=5, metavar="N", help="timed rounds (default: 5)")
    add_layer_arguments(found, dtype="float32")
    add_batch_arguments(found)
    ours = {
        "layer": "for linear: gdn, kda, mamba or conv1d (default: gdn)",
        "scheme": "for attention and linear: one scheme or mode (default: all that the ranks can run)",
        "model": "the layer's shape in a known model (default: a few heads)",
        "dtype": "default: float32; bfloat16 for exchange, layer and wire, and on cuda",
    }
    for action in found._actions:
        action.help = ours.get(action.dest, action.help)
    found.set_defaults(layer=None, dtype=None)  # depend on what is measured, and on the device
    add("--kernel", default="auto", help="a kernel that doctor lists (default: auto)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if present")
    add("--ranks", choices=RANK_KINDS, default="processes", help="kind of local ranks; ignored under torchrun")
    add(
        "--profile", metavar="FILE.json",
        help="for layer: file for a Chrome trace of one forward and backward of our layer on rank 0, made last",
    )  # fmt: skip
    add("--calibrate", metavar="FILE.toml", help="for planner: file for the rates of this machine")
    add(
        *flags("gpu"), metavar="NAME-OR-FILE",
        help="for attention and linear: machine whose predicted times to print beside those that are measured",
    )  # fmt: skip
    add("--timeout", type=seconds, default=600.0, help="seconds the run may take (default: 600)")
    return found


def run(args: argparse.Namespace) -> tuple[str, dict[str, Any]] | None:
    """Measures, on local ranks or those of torchrun; returns the report and its numbers on the first rank."""
    if args.name not in BENCHMARKS:
        raise ArgumentError("benchmark", args.name, " or ".join(BENCHMARKS))
    for option, names in _OF_ONE.items():
        if getattr(args, option) is not None and args.name not in names:
            raise ArgumentError(f"--{option}", getattr(args, option), f"only with {' and '.join(names)}")
    if args.parents is not None:  # peers would compute other documents
        raise ArgumentError("--parents", args.parents, "only with check and plan")
    check_paths(args)
    import torch
    import torch.distributed as dist

    from megatron_cp.executor import in_torchrun, start_torchrun_rank

    torch.set_num_threads(1)
    module = import_module(f"benchmarks.{_MODULES.get(args.name, args.name)}")
    world = start_torchrun_rank(args.timeout) if in_torchrun() else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # ranks without heads are part of what is measured
            text, data = module.report(args, world)
    finally:
        if world is not None:
            dist.destroy_process_group()
    if world is not None and world.rank != 0:
        return None
    found = environment()
    data |= {"repeats": args.repeats, "versions": found["versions"], "cores": found["cores"]}
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{text}\n{args.repeats} repeats, {found['cores']} cores; {versions}", data


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; its exit status is 1 if a rank failed and 2 if the command was refused."""
    words = sys.argv[1:] if words is None else list(words)
    try:
        args, unknown = (commands := parser()).parse_known_args(words)
        if unknown:
            commands.refuse_unknown(unknown, {})
        args.words = words
        found = run(args)
    except (ArgumentError, UsageError) as error:
        text = f"benchmarks: {as_flag(error, args)}" if isinstance(error, ArgumentError) else str(error)
        print(text, file=sys.stderr)
        return 2
    except RuntimeError as error:
        from megatron_cp.executor.launch import RankError

        if not isinstance(error, PlanMismatchError | RankError):
            raise
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    if found is not None:
        print(json.dumps(found[1]) if args.json else found[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
