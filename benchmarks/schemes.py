"""`python -m benchmarks attention|linear`: compares every scheme or mode of a layer with the same layer on one rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.layer_step import LayerStep
from benchmarks.ranks import measured_on_ranks, with_defaults
from benchmarks.timing import (
    DIRECTIONS,
    Measure,
    Timing,
    Watch,
    WatchedGroup,
    formatted,
    interleaved,
    slowest,
    spread,
    table,
)
from megatron_cp.cli import case_of, hosts_of_job
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import RankGroup, ThreadGroup, TorchGroup, hosts_of
from megatron_cp.plan import MODES
from megatron_cp.planner import checked_search, machine, priced, working
from megatron_cp.testing import Case

SHAPES = {
    "attention": {"heads": 8, "kv_heads": 2, "head_dim": 64},
    "gdn": {"heads": 4, "key_heads": 2, "head_dim": 128},
    "kda": {"heads": 4, "key_heads": 4, "head_dim": 128},
    "mamba": {"heads": 8, "groups": 1, "head_dim": 64, "state": 128},
    "conv1d": {"heads": 8, "head_dim": 128},
}
LINEAR = tuple(SHAPES)[1:]

LEGEND = """\
over ideal: time of the busiest rank without transfers, over that of the layer on one rank with the whole batch, divided
by cp (all ranks run that at once, so that cores and memory are as busy). wait: the share of all ranks' wall-clock time
spent starting and awaiting transfers. Medians [quartiles] over the repeats. On the CPU times are those of a rank's own
thread, which others on the same core do not change; on CUDA those of its stream. rank ms: the busiest rank's time
without transfers; wall ms: by the clock, with transfers and with all else that shares the cores; predicted ms: the
same, by the simulator for the machine of --gpu. sent: MiB to other ranks, by the rank that sends most."""


Seen = tuple[tuple[int, ...], dict[tuple[str, str], list[Timing]]]  # hosts, and timings; way "" is one rank


def report(args: argparse.Namespace, world: TorchGroup | None) -> tuple[str, dict[str, Any]]:
    """Measures every way of the layer; returns the report and its numbers."""
    args = with_defaults(args, world, LINEAR if args.name == "linear" else ("attention",), SHAPES)
    cases, not_run = _cases(args, world)
    compared = (case.plan() for case in cases.values())
    ranks: list[Seen] = measured_on_ranks(
        measure, cases, args.repeats, plans=compared, cp=args.cp, args=args, world=world
    )
    case = next(iter(cases.values()))
    data = {
        **_ratios(cases, ranks, args.cp),
        "predicted_ms": None if args.gpu is None else _predicted(cases, args.gpu, ranks[0][0]),
        "layer": args.layer,
        "cp": args.cp,
        "lengths": list(case.lengths),
        "device": args.device,
        "kernel": args.kernel,
        "not_run": not_run,
    }
    return _text(case, data), data


def _cases(args: argparse.Namespace, world: TorchGroup | None) -> tuple[dict[str, Case], dict[str, str]]:
    """Returns the case of each way, and why others cannot be run; raises that for a way that was asked for."""
    every = list(MODES) if args.name == "linear" else [scheme for scheme in working("scheme") if scheme != "auto"]
    asked = [args.scheme] if args.scheme else every
    hosts = hosts_of_job(args, world, args.cp)
    base = case_of(args, args.cp, kernel=args.kernel, device=args.device, hosts=hosts)
    if args.name == "linear":
        base = replace(base, hidden_size=base.heads * base.value_head_dim)
    checked_search(base.search_seconds, asked)
    cases, not_run = {}, {}
    for way in asked:
        case = base.with_scheme(way)
        try:
            case.refuse_early()
        except ArgumentError as error:
            if args.scheme or error.argument not in ("scheme", "mode", "ulysses_degree", "head_chunks"):
                raise
            not_run[way] = str(error)
        else:
            cases[way] = case
    if not cases:
        raise ArgumentError("--scheme", None, " or ".join(asked), " ".join(not_run.values()))
    return cases, not_run


def measure(group: RankGroup, cases: dict[str, Case], repeats: int) -> Seen:
    """Measures on one rank, with the ways in turn; each runs once before, which makes the batch's tables."""
    case = next(iter(cases.values()))
    one_rank = {"attention": "a2a"}.get(case.layer, "headwise")
    whole = replace(
        case.with_scheme(one_rank), cp=1, layout="contiguous", align=1, ulysses_degree=None, head_chunks=None
    )  # fmt: skip
    watch = Watch(torch.device(case.device).type)
    watched = WatchedGroup(group, watch)
    steps = {way: LayerStep(each, watched) for way, each in cases.items()}
    steps[""] = LayerStep(whole, WatchedGroup(ThreadGroup.create(1)[0], watch))

    def run(step: LayerStep, timed: Measure) -> None:
        results = timed("forward", step.forward)
        timed("backward", lambda: step.backward(results))

    for step in steps.values():
        run(step, lambda _, call: call())
    return hosts_of(group), interleaved({way: partial(run, step) for way, step in steps.items()}, repeats, watch, group)


def _ratios(cases: dict[str, Case], ranks: list[Seen], cp: int) -> dict[str, Any]:
    def values(way: str, direction: str, what: str) -> Any:
        return np.array([[getattr(each, what) for each in spent[way, direction]] for _, spent in ranks])

    def over_ideal(way: str, direction: str) -> dict[str, float]:
        return spread(values(way, direction, "busy").max(0) * cp / values("", direction, "busy").mean(0))

    def waiting(way: str, direction: str) -> dict[str, float]:
        return spread(values(way, direction, "wall_wire").sum(0) / values(way, direction, "wall").sum(0))

    def milliseconds(value: Callable[[Timing], float], way: str, direction: str) -> dict[str, float]:
        return spread(slowest([spent for _, spent in ranks], (way, direction), value) * 1e3)

    def sent(way: str, direction: str) -> list[int]:
        return [spent[way, direction][-1].sent for _, spent in ranks]

    def planned(way: str, direction: str) -> list[int]:
        return cases[way].plan().bytes_sent(cases[way].dtype.itemsize, forward=direction == "forward")

    def each(value: Callable[[str, str], Any]) -> dict[str, dict[str, Any]]:
        return {way: {direction: value(way, direction) for direction in DIRECTIONS} for way in cases}

    return {
        "local_over_ideal": each(over_ideal),
        "wait_share": each(waiting),
        "busy_ms": each(partial(milliseconds, lambda timing: timing.busy)),
        "wall_ms": each(partial(milliseconds, lambda timing: timing.wall)),
        "one_rank_ms": {way: spread(values("", way, "busy").mean(0) * 1e3) for way in DIRECTIONS},
        "bytes_sent_per_rank": each(sent),
        "bytes_planned_per_rank": each(planned),
    }


def _predicted(cases: dict[str, Case], name: str, hosts: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of each way and direction that the planner predicts for a machine."""
    found = machine(name)
    topology, predicted = found.topology(len(hosts), hosts), {}
    for way, case in cases.items():
        price = priced(case.plan(), found, topology, item_size=case.dtype.itemsize)
        predicted[way] = {direction: float(getattr(price, direction)) for direction in DIRECTIONS}
    return predicted


def _text(case: Case, data: dict[str, Any]) -> str:
    predicted = data["predicted_ms"]
    rows = [
        [
            way, direction, formatted(data["local_over_ideal"][way][direction]),
            formatted(data["wait_share"][way][direction], percent=True),
            *(f"{data[name][way][direction]['median']:.1f}" for name in ("busy_ms", "wall_ms")),
            f"{max(data['bytes_sent_per_rank'][way][direction]) / 2**20:.2f}",
            f"{predicted[way][direction]:.1f}" if predicted else "",
        ]
        for way in data["local_over_ideal"] for direction in DIRECTIONS
    ]  # fmt: skip
    alone = ", ".join(f"{way} {data['one_rank_ms'][way]['median']:.1f} ms" for way in DIRECTIONS)
    dtype = str(case.dtype).removeprefix("torch.")
    return "\n".join([
        f"{case.layer} cp={data['cp']} {case.layout} {case.mask if case.layer == 'attention' else ''}, "
        f"{sum(data['lengths'])} tokens in {len(data['lengths'])} documents, heads {case.heads}/{case.groups} of "
        f"{case.head_dim}/{case.value_head_dim}, {dtype} on {data['device']}, kernel {data['kernel']}",
        "",
        *table(("", ""), ("over ideal", "wait", "rank ms", "wall ms", "sent", "predicted ms"), rows),
        "",
        f"The whole batch on one rank: {alone}.",
        *(f"{way} was not run: {reason}" for way, reason in data["not_run"].items()),
        LEGEND,
    ])  # fmt: skip
