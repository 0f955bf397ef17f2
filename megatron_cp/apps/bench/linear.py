"""`megatron-cp bench linear`: compares segments with whole documents, saved memory, and headwise with chunkwise."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import torch

from megatron_cp.apps.bench.defaults import with_defaults
from megatron_cp.apps.bench.linear_report import LAYERS, MODES, Seen, ratios, text
from megatron_cp.apps.bench.on_ranks import measured_on_ranks
from megatron_cp.apps.bench.peer_limits import MEGATRON
from megatron_cp.apps.bench.saved_bytes import saved_bytes
from megatron_cp.apps.bench.segments import megatron_rule, segments
from megatron_cp.apps.bench.timing import Timing, Watch, interleaved
from megatron_cp.apps.bench.work import Work, mixer
from megatron_cp.cli import Report, case_of, hosts_of_job
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import RankGroup, ThreadGroup, TorchGroup
from megatron_cp.linear import LinearOnRank, choose_conv, choose_rule
from megatron_cp.plan import KINDS
from megatron_cp.testing import Case, draw

SHAPES = {
    "gdn": {"heads": 4, "key_heads": 2, "head_dim": 128},
    "kda": {"heads": 4, "key_heads": 4, "head_dim": 128},
    "mamba": {"heads": 8, "groups": 1, "head_dim": 64, "state": 128},
    "conv1d": {"heads": 8, "head_dim": 128},
}


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """Measures the mixers and returns the report."""
    args = with_defaults(args, world, LAYERS, SHAPES)
    if args.scheme is not None:
        raise ArgumentError("--scheme", args.scheme, "nothing", f"This benchmark measures {' and '.join(MODES)}.")
    args.layout = args.layout or "contiguous"
    hosts = hosts_of_job(args, world, args.cp)
    cases = {mode: case_of(args, args.cp, kernel=args.kernel, device=args.device, hosts=hosts) for mode in MODES}
    cases = {mode: replace(case, scheme=mode) for mode, case in cases.items()}
    for case in cases.values():
        case.refuse_early()
    compared = (case.plan() for case in cases.values())
    ranks: list[Seen] = measured_on_ranks(
        measure, cases, args.repeats, plans=compared, cp=args.cp, args=args, world=world
    )
    data = {
        **ratios(cases, ranks),
        "cp": args.cp,
        "layer": args.layer,
        "lengths": list(cases["chunkwise"].lengths),
        "repeats": args.repeats,
        "device": args.device,
        "kernel": ranks[0].kernel,
        "torch": torch.__version__,
        "megatron_core": None if MEGATRON in ranks[0].not_run else version(MEGATRON),
        "cores": os.cpu_count(),
        "not_run": ranks[0].not_run,
    }
    return Report(text(cases["chunkwise"], data), data, quiet=world is not None and world.rank != 0)


def measure(group: RankGroup, cases: dict[str, Case], repeats: int) -> Seen:
    """Measures on one rank: whole mixers, then, only on the first rank, the work on its own tokens."""
    case = cases["chunkwise"]
    watch = Watch(torch.device(case.device).type)
    problem = draw(case)
    seen = Seen(_kernel_of(case))
    mixers = {mode: mixer(one, problem, group) for mode, one in cases.items()}
    seen.saved = {mode: saved_bytes(work, work.inputs[len(problem.inputs) :]) for mode, work in mixers.items()}
    seen.spent = _interleaved(mixers, repeats, watch, group)
    if group.rank == 0:
        works = segments(case, int(case.plan().layout.token_counts.max()))
        try:
            works |= megatron_rule(case, works["plain"])
        except ImportError as error:
            seen.not_run[MEGATRON] = str(error)
        seen.local = _interleaved(works, repeats, watch, ThreadGroup.create(1)[0])
    group.barrier()
    return seen


def _interleaved(
    works: Mapping[str, Work], repeats: int, watch: Watch, group: RankGroup
) -> dict[tuple[str, str], list[Timing]]:
    """Times every work in both directions, once it has run."""
    for work in works.values():
        work.step(lambda _, call: call(), watch)
    return interleaved({name: partial(work.step, watch=watch) for name, work in works.items()}, repeats, watch, group)


def _kernel_of(case: Case) -> str:
    group = ThreadGroup.create(case.cp)[0]
    share = LinearOnRank(
        case.plan(), group, case.kernel, "values", torch.empty(0, dtype=case.dtype, device=case.device)
    )
    return (choose_rule if KINDS[case.layer].has_state else choose_conv)(case.kernel, share.call).name
