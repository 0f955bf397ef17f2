"""`megatron-cp bench planner`: compares predicted with measured times of a step, for every scheme and mode."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_cp.apps.bench import attention, linear, linear_report
from megatron_cp.apps.bench.calibrate import Bench, calibrated
from megatron_cp.apps.bench.defaults import with_defaults
from megatron_cp.apps.bench.layer_step import LayerStep
from megatron_cp.apps.bench.on_ranks import measured_on_ranks
from megatron_cp.apps.bench.spread import table
from megatron_cp.apps.bench.timing import DIRECTIONS, interleaved_order, with_progress
from megatron_cp.cli import Report, case_of, hosts_of_job
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange import Buffers
from megatron_cp.executor import RankGroup, TorchGroup, hosts_of
from megatron_cp.plan import GDN, MAMBA, MODES, SCHEMES, counted
from megatron_cp.planner import Machine, machine, priced, written
from megatron_cp.testing import Case

_SHAPES = {
    "attention": {"heads": 8, "kv_heads": 4, "head_dim": 64},
    GDN.name: {"heads": 8, "key_heads": 4, "head_dim": 64},
    MAMBA.name: {"heads": 8, "groups": 4, "head_dim": 64, "state": 64},
}
_LAYERS = ("attention", GDN.name, MAMBA.name)
_CELLS = (("one document", 1), ("16 documents", 16))
_OF_BENCHMARKS = (  # layers, shapes, layout, and the ways that are measured there
    (("attention",), attention.SHAPES, "zigzag", tuple(SCHEMES)),
    (linear_report.LAYERS, linear.SHAPES, "contiguous", linear_report.MODES),
)
_WITHIN = 0.25

_COLUMNS = ("measured ms", "predicted ms", "ratio", *DIRECTIONS)
Directions = dict[str, float]  # milliseconds of each

LEGEND = """\
measured: milliseconds by the clock of a forward and a backward of the layer alone; all ranks begin both together, and
the slowest counts; medians over the repeats, in which the candidates of a cell take turns. predicted: by the simulator,
with the rates of the machine that the first line names, which were measured on other layers before. ratio: predicted
over measured, for both directions together and for each. named: the candidate that is predicted to be fastest, and
those predicted alike to the last digit, which send the same messages; fastest: the one that was. rank correlation:
Spearman's, over all candidates of a cell."""


@dataclass(frozen=True)
class Cell:
    """The candidates for one layer on one batch."""

    name: str
    ways: dict[str, Case]


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """Measures and predicts every candidate and returns the report."""
    given = None if args.gpu is None else machine(args.gpu)
    if _size(args, world) == 1:
        raise ArgumentError("--cp", 1, "at least 2 ranks, between which there are links to measure")
    if args.calibrate is not None:
        if given is not None:
            raise ArgumentError("--calibrate", args.calibrate, "only without --gpu, which measures nothing")
        if not Path(args.calibrate).resolve().parent.is_dir():
            raise ArgumentError("--calibrate", args.calibrate, "a file in a folder that exists")
    layers = ("attention", *linear_report.LAYERS) if args.layer is None else (args.layer,)
    cells = [cell for layer in layers for cell in _cells(args, world, layer)]
    if not cells:
        raise ArgumentError("--layer", args.layer, "a layer that some scheme can run on these ranks")
    plans = (case.plan() for cell in cells for case in cell.ways.values())
    ranks = measured_on_ranks(
        measure, cells, args.repeats, given, plans=plans, cp=_size(args, world), args=args, world=world
    )
    found, hosts, measured = ranks[0]
    data = _judged(cells, found, hosts, measured)
    data |= {
        "machine": found.describe(), "hosts": list(hosts), "cp": len(hosts), "repeats": args.repeats,
        "torch": torch.__version__, "cores": os.cpu_count(),
    }  # fmt: skip
    if args.calibrate is not None and (world is None or world.rank == 0):
        Path(args.calibrate).write_text(written(found))
    return Report(_text(data, found, args.calibrate), data, quiet=world is not None and world.rank != 0)


def _size(args: argparse.Namespace, world: TorchGroup | None) -> int:
    size: int = world.size if world is not None else args.cp or 2
    return size


def _cells(args: argparse.Namespace, world: TorchGroup | None, layer: str) -> list[Cell]:
    """Returns all candidates that the ranks can run: on one long document, many, and on other benchmarks' batches."""
    size, cells = _size(args, world), []
    if layer in _LAYERS:
        base = _base(args, world, layer, _SHAPES)
        for name, count in _CELLS:
            total = sum(base.lengths)
            batch = replace(base, lengths=_lengths(total, count))
            ways = SCHEMES if layer == "attention" else MODES
            cases = {
                f"{way}, {layout}": batch.with_scheme(way, layout=layout)
                for way in ways
                for layout in ("zigzag", "contiguous")
                # States of many segments are not what anybody would run, and a redistribution is there already.
                if layer == "attention" or MODES[way].redistributes == (layout == "zigzag")
            }
            cells.append(Cell(f"{layer}, {name} of {total} tokens", _that_run(cases)))
    for layers, shapes, layout, names in _OF_BENCHMARKS:
        if layer in layers:
            base = _base(args, world, layer, shapes)
            cases = {f"{way}, {layout}": base.with_scheme(way, layout=layout) for way in names}
            shape = f"{base.heads} heads of {base.value_head_dim}, {base.groups} groups"
            what = "attention" if layer == "attention" else "linear"
            cells.append(Cell(f"{layer}, as bench {what}: {shape}, {size} ranks", _that_run(cases)))
    return [cell for cell in cells if cell.ways]


def _base(
    args: argparse.Namespace, world: TorchGroup | None, layer: str, shapes: Mapping[str, Mapping[str, int]]
) -> Case:
    given = argparse.Namespace(**{**vars(args), "layer": layer})
    given = with_defaults(given, world, (layer,), shapes)
    given.cp = size = _size(args, world)
    base = case_of(given, size, kernel=given.kernel, device="cpu", hosts=hosts_of_job(given, world, size))
    return replace(base, hidden_size=None if layer == "attention" else base.heads * base.value_head_dim)


def _that_run(cases: dict[str, Case]) -> dict[str, Case]:
    ways = {}
    for name, case in cases.items():
        try:
            case.refuse_early()
        except ArgumentError:
            continue
        ways[name] = case
    return ways


def _lengths(total: int, count: int) -> tuple[int, ...]:
    """Returns a heavy-tailed batch of `count` documents, the same on every rank."""
    if count == 1:
        return (total,)
    drawn = np.random.default_rng(0).lognormal(0.0, 1.0, count)
    lengths = np.maximum((drawn / drawn.sum() * total).astype(np.int64), 1)
    lengths[int(lengths.argmax())] += total - lengths.sum()
    return tuple(lengths.tolist())


def measure(
    group: RankGroup, cells: list[Cell], repeats: int, given: Machine | None
) -> tuple[Machine, tuple[int, ...], list[dict[str, Directions]]]:
    """Returns the machine, the ranks' hosts, and each candidate's milliseconds in both directions; runs on one rank.

    The candidates of a cell take turns, so that a disturbance of the machine does not hit only one of them.
    """
    dtype = next(iter(cells[0].ways.values())).dtype
    found = calibrated(group, dtype, max(repeats, 5)) if given is None else given
    bench, measured = Bench(group, repeats, dtype), []
    for cell in with_progress(cells, "cells", group.rank):
        group.buffers = Buffers()
        steps = {name: LayerStep(case, group) for name, case in cell.ways.items()}
        taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
        for step in steps.values():
            step.timed(group)
        for name in interleaved_order(list(steps), repeats):
            taken[name].append(steps[name].timed(group))
        found_ms = {name: [1e3 * seconds for seconds in bench.slowest(each)] for name, each in taken.items()}
        measured.append({name: dict(zip(DIRECTIONS, each, strict=True)) for name, each in found_ms.items()})
    return found, hosts_of(group), measured


def _judged(
    cells: list[Cell], found: Machine, hosts: tuple[int, ...], measured: list[dict[str, Directions]]
) -> dict[str, Any]:
    topology = found.topology(len(hosts), hosts)
    rows: list[dict[str, Any]] = []
    for cell, directions in zip(cells, measured, strict=True):
        priced_ways = {
            name: priced(case.plan(), found, topology, item_size=case.dtype.itemsize)
            for name, case in cell.ways.items()
        }
        prices = {name: price.total for name, price in priced_ways.items()}
        times = {name: sum(each.values()) for name, each in directions.items()}
        named = [name for name, price in prices.items() if price == min(prices.values())]
        fastest = min(times, key=times.__getitem__)
        rows.append(
            {
                "cell": cell.name, "measured_ms": times, "predicted_ms": prices,
                "ratio": {name: prices[name] / times[name] for name in times},
                "ratio_of": {
                    way: {name: getattr(price, way) / directions[name][way] for name, price in priced_ways.items()}
                    for way in DIRECTIONS
                },
                "fastest_named": fastest in named, "named": named, "fastest": fastest,
                "named_over_fastest": max(times[name] for name in named) / times[fastest],
                "rank_correlation": _spearman(list(prices.values()), list(times.values())),
            }
        )  # fmt: skip
    ratios = [ratio for row in rows for ratio in row["ratio"].values()]
    return {
        "within_25_percent": sum(abs(ratio - 1) <= _WITHIN for ratio in ratios) / len(ratios),
        "fastest_named": sum(row["fastest_named"] for row in rows) / len(rows),
        "most_named_over_fastest": max(row["named_over_fastest"] for row in rows),
        "rank_correlation": float(np.mean([row["rank_correlation"] for row in rows])),
        "cells": rows,
    }


def _spearman(first: list[float], second: list[float]) -> float:
    if len(first) < 2:
        return 1.0
    ranks = np.array([np.argsort(np.argsort(each)) for each in (first, second)], dtype=np.float64)
    correlations: Any = np.corrcoef(ranks)
    return float(correlations[0, 1])


def _text(data: dict[str, Any], found: Machine, saved: str | None) -> str:
    hosts = len(set(data["hosts"]))
    lines = [
        f"{found.describe()}; {data['cp']} ranks on {counted(hosts, 'host')}, {data['repeats']} repeats; torch "
        f"{data['torch']}, {data['cores']} cores",
        "",
        f"Within 25 %: {data['within_25_percent']:.0%} of all ways, 100 % is the target: "
        f"{'met' if data['within_25_percent'] == 1 else 'NOT met'}.",
        f"Fastest way named: in {data['fastest_named']:.0%} of the cells, 90 % is the target: "
        f"{'met' if data['fastest_named'] >= 0.9 else 'NOT met'}; the one that was named took at most "
        f"{data['most_named_over_fastest']:.2f} times as long.",
        f"Rank correlation: {data['rank_correlation']:.2f}, mean of the cells.",
        *([f"machine written to {saved}"] if saved else []),
    ]
    for row in data["cells"]:
        cells = []
        for name, time in sorted(row["measured_ms"].items(), key=lambda pair: pair[1]):
            marks = ["fastest"] * (name == row["fastest"]) + ["named"] * (name in row["named"])
            note = f" ({', '.join(marks)})" if marks else ""
            ratios = (row["ratio"], *(row["ratio_of"][way] for way in DIRECTIONS))
            numbers = [f"{number:.2f}" for number in (time, row["predicted_ms"][name], *(of[name] for of in ratios))]
            cells.append([name + note, *numbers])
        lines += ["", f"### {row['cell']}", "", *table(("",), _COLUMNS, cells)]
        lines += ["", f"rank correlation {row['rank_correlation']:.2f}"]
    return "\n".join([*lines, "", LEGEND])
