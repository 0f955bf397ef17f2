"""`python -m benchmarks wire`: times an exchange by every transport and with every codec."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranks import WIRE_RANKS, measured_on_ranks, with_defaults
from benchmarks.timing import Timing, Watch, WatchedGroup, formatted, interleaved, once, slowest, spread, table
from megatron_cp.cli import case_of
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange import Exchange
from megatron_cp.executor import (
    Communicator,
    RankGroup,
    ToHeadsInParts,
    TorchGroup,
    hosts_of,
)
from megatron_cp.plan import DEFAULT, TRANSPORTS, ToHeads, Transport, knows_hosts
from megatron_cp.planner import working
from megatron_cp.testing import Case, draw

GATHER = "all-gather"
_TOKENS = 2048  # in all

LEGEND = f"""\
Attention's exchange to heads by each transport, with each codec by the transport of --transport, and one {GATHER} of
an average rank's keys and values by each transport. An exchange packs or codes q, k and v, sends them, and unpacks or
decodes them. All ranks start together and the slowest counts, by the clock; medians [quartiles] over the repeats, of
ratios within one repeat. between hosts: MiB from any host to another, counted as they were sent; those of a backend's
own {GATHER} are not known. Hosts are torchrun's if there are several, and otherwise imagined."""


@dataclass(frozen=True)
class Job:
    """The exchange that some ranks measure.

    Attributes:
        hosts: host of each rank.
        ways: name of each transport and codec.
    """

    case: Case
    hosts: tuple[int, ...]
    ways: dict[str, tuple[Transport, str]]


Seen = tuple[dict[tuple[str, str], list[Timing]], dict[str, int]]  # timings, and bytes sent to other hosts, by way


def report(args: argparse.Namespace, world: TorchGroup | None) -> tuple[str, dict[str, Any]]:
    """Measures every way; returns the report and its numbers."""
    if args.scheme is not None:
        raise ArgumentError("--scheme", args.scheme, "nothing", f"This benchmark measures {DEFAULT.name}.")
    sizes = (world.size,) if world else (args.cp,) if args.cp else WIRE_RANKS
    if sizes == (1,):
        raise ArgumentError("--cp", 1, "2 ranks or more", "One rank sends nothing.")
    named = hosts_of(world) if world else ()
    jobs = {cp: _job(args, world, cp, named) for cp in sizes}
    cells = []
    for cp, job in jobs.items():
        plans = [job.case.plan()]
        ranks: list[Seen] = measured_on_ranks(measure, job, args.repeats, plans=plans, cp=cp, args=args, world=world)
        cells.append({"ranks": cp, "hosts": list(job.hosts), "rows": _rows(ranks)})
    case = next(iter(jobs.values())).case
    data = {
        "cells": cells,
        "tokens": sum(case.lengths),
        "heads": [case.heads, case.groups, case.head_dim],
        "transport": args.transport,
        "dtype": str(case.dtype).removeprefix("torch."),
        "device": case.device,
    }
    return _text(data), data


def _job(args: argparse.Namespace, world: TorchGroup | None, cp: int, named: Sequence[int]) -> Job:
    asked = argparse.Namespace(**vars(args))
    asked.cp, asked.dtype, asked.transport, asked.hosts = cp, args.dtype or "bfloat16", "collective", None
    asked.codec = "none"
    if args.lengths is None and args.tokens_per_rank is None:
        asked.tokens_per_rank = -(-_TOKENS // cp)
    shape = {"heads": 4 * cp, "kv_heads": cp, "head_dim": 128}
    asked = with_defaults(asked, world, ("attention",), {"attention": shape})
    case = replace(case_of(asked, cp, kernel=args.kernel, device=asked.device), scheme=DEFAULT.name)
    case.refuse_early()
    even = Transport.even_hosts("hierarchical", cp, args.hosts or 2).hosts
    hosts = tuple(named) if len(set(named)) > 1 and args.hosts is None else even
    one_host = len(set(hosts)) == 1 and case.device == "cpu"
    # The groups that count here are none of torch.distributed, which symmetric memory needs.
    names = [name for name in TRANSPORTS if name != "symmetric_memory" and (one_host or name != "shared_memory")]
    of_hosts = {name: Transport(name, hosts if knows_hosts(name) else ()) for name in names}
    if args.transport not in of_hosts:
        raise ArgumentError("--transport", args.transport, " or ".join(of_hosts))
    ways = {name: (transport, "none") for name, transport in of_hosts.items()}
    codecs = [codec for codec in working("codec") if codec != "none"] if args.codec == "none" else [args.codec]
    ways |= {f"{args.transport}, {codec}": (of_hosts[args.transport], codec) for codec in codecs}
    return Job(case, hosts, ways)


def measure(group: RankGroup, job: Job, repeats: int) -> Seen:
    """Measures every way on one rank; without a codec, all must deliver the same."""
    case, watch, sent = job.case, Watch(torch.device(job.case.device).type), {}
    layout = case.plan().layout
    tensors = [layout.shard(x, group.rank).flatten(1) for x in draw(case).inputs.values()]
    calls: dict[str, Callable[[RankGroup], list[Tensor]]] = {}
    for name, (transport, codec) in job.ways.items():
        exchange = inbound(replace(case, codec=codec))
        calls[name] = partial(_to_heads, exchange, transport, tensors)
        if codec == "none":
            calls[f"{GATHER}, {name}"] = partial(_all_gather, transport, case, group.size)
    expected: dict[bool, list[Tensor]] = {}
    for name, call in calls.items():
        watch.sent = 0
        found = call(WatchedGroup(group, watch, job.hosts))
        sent[name] = watch.sent
        wanted = expected.setdefault(name.startswith(GATHER), found)
        is_coded = name in job.ways and job.ways[name][1] != "none"
        if not is_coded and not all(map(torch.equal, found, wanted)):
            raise RuntimeError(f"{name} gave rank {group.rank} other data than {TRANSPORTS[0]}")

    steps = {name: partial(once, partial(call, group)) for name, call in calls.items()}
    return interleaved(steps, repeats, watch, group), sent


def inbound(case: Case) -> Exchange:
    """Returns the exchange with which a case's plan begins."""
    return next(step.exchange for step in case.plan().steps if isinstance(step, ToHeads))


def _to_heads(exchange: Exchange, transport: Transport, tensors: list[Tensor], group: RankGroup) -> list[Tensor]:
    with torch.no_grad():
        move = ToHeadsInParts(exchange, Communicator(group, transport))
        move.start(*tensors)
        return [heads for part in range(move.num_parts) for heads in move.finish(part)]


def _all_gather(transport: Transport, case: Case, size: int, group: RankGroup) -> list[Tensor]:
    share = sum(case.lengths) // size * case.groups * (case.head_dim + case.value_head_dim) * case.dtype.itemsize
    own = torch.full((share,), group.rank, dtype=torch.uint8, device=case.device)
    everyone = own.new_empty(share * size)
    Communicator(group, transport).start_all_gather(everyone, own).wait()
    return [everyone]


def _rows(ranks: list[Seen]) -> dict[str, dict[str, Any]]:
    def taken(name: str) -> Any:
        return slowest([spent for spent, _ in ranks], (name, ""), lambda timing: timing.wall)

    rows = {}
    for name in ranks[0][1]:
        gathers = name.startswith(GATHER)
        first = f"{GATHER}, {TRANSPORTS[0]}" if gathers else TRANSPORTS[0]
        rows[name] = {
            "collective_over_this": spread(taken(first) / taken(name)),
            "ms": spread(taken(name) * 1e3),
            "bytes_between_hosts": None if gathers and name == first else sum(sent[name] for _, sent in ranks),
        }
    return rows


def _text(data: dict[str, Any]) -> str:
    lines = [
        f"attention's exchange, heads {data['heads']} at the fewest ranks, {data['tokens']} tokens, {data['dtype']} on "
        f"{data['device']}"
    ]
    for cell in data["cells"]:
        rows = [
            [
                name, formatted(row["ms"]), formatted(row["collective_over_this"]),
                "" if row["bytes_between_hosts"] is None else f"{row['bytes_between_hosts'] / 2**20:.2f}",
            ]
            for name, row in cell["rows"].items()
        ]  # fmt: skip
        lines += ["", f"{cell['ranks']} ranks on hosts {cell['hosts']}:", ""]
        lines += table(("",), ("ms", "collective / this", "between hosts"), rows)
    return "\n".join([*lines, "", LEGEND])
