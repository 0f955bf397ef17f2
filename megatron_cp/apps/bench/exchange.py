"""`megatron-cp bench exchange`: compares Gated DeltaNet's head exchange with a copy and with megatron-core's own."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from megatron_cp.apps.bench.allocator import keep_freed_memory
from megatron_cp.apps.bench.contenders import Contender, megatrons, ours
from megatron_cp.apps.bench.defaults import EXCHANGE_RANKS, with_defaults
from megatron_cp.apps.bench.exchange_report import OnRank, Seen, cell_rows, exchange_ratios, text
from megatron_cp.apps.bench.local_part import local_ratios, measure_alone
from megatron_cp.apps.bench.peer_limits import (
    MEGATRON,
    aligned_lengths,
    check_megatron_takes,
    check_ranks,
    megatron_missing,
)
from megatron_cp.apps.bench.peers.distributed import watched_wire
from megatron_cp.apps.bench.section_batch import LAYOUTS, Batch
from megatron_cp.apps.bench.timing import Watch, interleaved_order, with_progress
from megatron_cp.cli import Report, case_of, hosts_of_job, known_shapes
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import Communicator, TorchGroup, run_ranks
from megatron_cp.plan import HEADWISE
from megatron_cp.testing import Case, Counters, host_work

_SHAPE = next(iter(known_shapes("qwen3-next")["gdn"]))
_SHAPES = {"gdn": {"heads": _SHAPE.heads, "key_heads": _SHAPE.groups, "head_dim": _SHAPE.head_dim}}
_DOCUMENTS = 16
_CELLS = ((1024, 16), (4096, 16), (8192, 64))  # tokens and documents
_CELL_RANKS = (2, 4)


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """Measures every exchange and returns the report."""
    if args.ranks != "processes":
        raise ArgumentError("--ranks", args.ranks, "processes", f"{MEGATRON} runs on no other ranks.")
    if args.scheme not in (None, HEADWISE.name):
        raise ArgumentError("--scheme", args.scheme, HEADWISE.name, "No other scheme exchanges heads.")
    asked = world.size if world else args.cp
    args = argparse.Namespace(**vars(args))
    args.dtype, args.scheme = args.dtype or "bfloat16", "headwise"
    cells = _cells(args.cells, asked, world)
    args.cp = asked or EXCHANGE_RANKS
    if args.lengths is None:
        tokens = (args.tokens_per_rank or 2048) * args.cp
        args.lengths = aligned_lengths(tokens, args.documents or _DOCUMENTS, 2 * args.cp, "--tokens-per-rank")
        args.tokens_per_rank = args.documents = None
    args = with_defaults(args, world, ("gdn",), _SHAPES)
    local = case_of(args, args.cp, device=args.device, hosts=hosts_of_job(args, world, args.cp))
    check_megatron_takes(local)
    cases = sorted((_of_cell(local, cell) for cell in cells), key=lambda case: case.cp)
    for case in cases:
        check_megatron_takes(case)
    return _reported(local, cases, args, world)


def _reported(local: Case, cases: list[Case], args: argparse.Namespace, world: TorchGroup | None) -> Report:
    not_run = megatron_missing()
    peers = not not_run
    if world is not None:
        stages = [measure_alone(world, local, args.repeats, peers)] if world.rank == 0 else []
        world.barrier()
        sets = [world.all_gather_object(measure(world, cases, args.repeats, peers))]
    else:
        limit = args.timeout
        stages = run_ranks(measure_alone, 1, local, args.repeats, peers, kind="processes", timeout=limit)
        sets = [
            run_ranks(measure, size, list(of_size), args.repeats, peers, kind="processes", timeout=limit)
            for size, of_size in itertools.groupby(cases, lambda case: case.cp)
        ]
    ranks = [list(of_cell) for of_ranks in sets for of_cell in zip(*of_ranks, strict=True)]
    if world is not None and world.rank != 0:
        return Report("", quiet=True)
    data = {
        **local_ratios(stages[0]),
        **exchange_ratios([cell_rows(case, seen) for case, seen in zip(cases, ranks, strict=True)]),
        "megatron_host_syncs_in_checks": ranks[0][0].syncs_in_checks,
        "cp": args.cp,
        "layer": args.layer,
        "heads": [local.heads, local.groups, local.head_dim, local.value_head_dim],
        "dtype": args.dtype,
        "lengths": list(local.lengths),
        "head_chunks": args.head_chunks or 1,
        "transport": args.transport,
        "codec": args.codec,
        "repeats": args.repeats,
        "device": args.device,
        "torch": torch.__version__,
        "megatron_core": version(MEGATRON) if peers else None,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "not_run": not_run,
    }
    return Report(text(local, data), data)


def _cells(given: str | None, ranks: int | None, world: TorchGroup | None) -> list[tuple[int, int, int]]:
    """Returns the ranks, tokens and documents of each exchange that is timed between processes."""
    if given is None:
        return [(size, *batch) for size in ([ranks] if ranks else _CELL_RANKS) for batch in _CELLS]
    cells = []
    for cell in given.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)/(\d+)", cell)
        if match is None or not all(int(number) for number in match.groups()):
            raise ArgumentError("--cells", given, "RANKSxTOKENS/DOCUMENTS,... as in 2x1024/16,4x8192/64")
        size, tokens, documents = (int(number) for number in match.groups())
        if world and size != world.size:
            raise ArgumentError("--cells", given, f"cells of the {world.size} ranks of this job")
        cells.append((size, tokens, documents))
    return cells


def _of_cell(case: Case, cell: tuple[int, int, int]) -> Case:
    size, tokens, documents = cell
    case = replace(case, cp=size)
    check_ranks(case)
    return replace(case, lengths=tuple(aligned_lengths(tokens, documents, 2 * size)))


def measure(group: TorchGroup, cases: list[Case], repeats: int, with_megatron: bool) -> list[OnRank]:
    """Measures every cell on one rank."""
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about packages that nothing here uses
        return [_measured(group, case, repeats, with_megatron=with_megatron) for case in cases]


def _measured(group: TorchGroup, case: Case, repeats: int, *, with_megatron: bool) -> OnRank:
    """Measures one cell: compares the results bit by bit, then counts, then times."""
    batch, watch = Batch(case), Watch(torch.device(case.device).type)
    contenders: list[Contender] = []
    syncs, counters = None, Counters()
    if with_megatron:
        contenders, check_offsets = megatrons(batch, group)
        with counters:
            check_offsets()
        syncs = dict(counters.host_syncs)
    for layout in LAYOUTS:
        contenders += ours(batch, layout, Communicator(counters.watch(group), batch.plans[layout].transport))
    for contender in contenders:
        contender.check()
    stages: dict[str, Seen] = {}
    for contender in contenders:
        contender.run(partial(_counted, counters, stages, contender))
        contender.run(partial(_worked, stages, case.device))
    _time(group, contenders, stages, repeats, watch)
    return OnRank(stages, syncs)


def _counted(
    counters: Counters, stages: dict[str, Seen], contender: Contender, key: str, call: Callable[[], Any]
) -> Any:
    """Returns `call()`, and stores what it adds to the counters, which watch our groups."""
    before = _counts(counters)
    with counters:
        result = call()
    written, collectives, host_syncs = (after - had for after, had in zip(_counts(counters), before, strict=True))
    stages[key] = Seen(contender.entering, written, collectives, host_syncs)
    return result


def _worked(stages: dict[str, Seen], device: str, key: str, call: Callable[[], Any]) -> Any:
    """Returns `call()`, and stores the host's work for it."""
    stages[key].work = host_work(call, torch.device(device).type)
    return call()


def _counts(counters: Counters) -> tuple[int, int, int]:
    """Returns the bytes written by copies, the collectives, and the waits of the host."""
    return sum(counters.copied.values()), counters.collectives, sum(counters.host_syncs.values())


def _time(
    group: TorchGroup, contenders: list[Contender], stages: dict[str, Seen], repeats: int, watch: Watch
) -> None:  # fmt: skip
    most = max(contender.entering for contender in contenders)
    source, target = (torch.zeros(most, dtype=torch.uint8, device=contenders[0].inputs[0].device) for _ in range(2))
    numbers = [str(number) for number in range(len(contenders))]

    def collective(size: int) -> None:
        """Runs a bare collective of as many bytes in equal pieces."""
        equal = size // group.size * group.size
        dist.all_to_all_single(target[:equal], source[:equal], group=group.group)

    with watched_wire(watch):
        for number in with_progress(interleaved_order(numbers, repeats), "timings of this cell", group.rank):
            contender = contenders[int(number)]
            size = contender.entering
            group.barrier()
            _, copied = watch.timed(lambda size=size: target[:size].copy_(source[:size]))  # type: ignore[misc]
            group.barrier()
            _, bare = watch.timed(lambda size=size: collective(size))  # type: ignore[misc]

            def timed(
                key: str, call: Callable[[], Any], copy: float = copied.wall, bare: float = bare.wall
            ) -> Any:  # fmt: skip
                group.barrier()
                result, spent = watch.timed(call)
                stages[key].spent.append(spent)
                stages[key].copy.append(copy)
                stages[key].collective.append(bare)
                return result

            contender.run(timed)
