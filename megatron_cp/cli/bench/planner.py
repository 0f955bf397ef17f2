"""`megatron-cp bench planner`: predicted beside measured times of a step, for every scheme and mode."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_cp.cli.bench.calibrate import Slowest, calibrated
from megatron_cp.cli.bench.defaults import with_defaults
from megatron_cp.cli.bench.layer_step import LayerStep
from megatron_cp.cli.bench.on_ranks import measured_on_ranks
from megatron_cp.cli.options import case_of, hosts_of_job
from megatron_cp.cli.report import Report
from megatron_cp.errors import ArgumentError
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.executor.groups import RankGroup, TorchGroup
from megatron_cp.executor.hosts import hosts_of
from megatron_cp.plan.kinds import GDN, MAMBA
from megatron_cp.plan.schemes import MODES, SCHEMES
from megatron_cp.planner.predict import Machine, machine
from megatron_cp.planner.predict.hardware import written
from megatron_cp.planner.predict.price import priced
from megatron_cp.testing.parity import Case

_SHAPES = {
    "attention": {"heads": 8, "kv_heads": 4, "head_dim": 64},
    GDN.name: {"heads": 8, "key_heads": 4, "head_dim": 64},
    MAMBA.name: {"heads": 8, "groups": 4, "head_dim": 64, "state": 64},
}
_LAYERS = ("attention", GDN.name, MAMBA.name)
_CELLS = (("one document", 1), ("16 documents", 16))
_WITHIN = 0.25

LEGEND = """\
measured: milliseconds by the clock of a forward and a backward of the layer alone, of the slowest rank; medians over
the repeats. predicted: by the simulator, with the rates of the machine that the first line names. ratio: predicted over
measured. fastest: whether the way that is predicted to be fastest is the one that was; where not, how much longer it
took. rank correlation: Spearman's, of all ways of a cell."""


@dataclass(frozen=True)
class Cell:
    """The ways of one layer on one batch.

    Attributes:
        name: of the layer and the batch.
        ways: the case of each scheme or mode.
    """

    name: str
    ways: dict[str, Case]


def report(args: argparse.Namespace, world: TorchGroup | None) -> Report:
    """What the command prints."""
    given = None if args.gpu is None else machine(args.gpu)
    if _size(args, world) == 1:
        raise ArgumentError("--cp", 1, "at least 2 ranks, between which there are links to measure")
    if args.calibrate is not None:
        if given is not None:
            raise ArgumentError("--calibrate", args.calibrate, "not together with --gpu, which measures nothing")
        if not Path(args.calibrate).resolve().parent.is_dir():
            raise ArgumentError("--calibrate", args.calibrate, "a file in a folder that exists")
    layers = _LAYERS if args.layer is None else (args.layer,)
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
    """Every way that the ranks can run, on one long document and on many."""
    attention = layer == "attention"
    given = argparse.Namespace(**{**vars(args), "layer": layer})
    given = with_defaults(given, world, (layer,), _SHAPES)
    size, cells = _size(args, world), []
    given.cp = size
    base = case_of(given, size, kernel=given.kernel, device="cpu", hosts=hosts_of_job(given, world, size))
    for name, count in _CELLS:
        total = sum(base.lengths)
        batch = replace(base, lengths=_lengths(total, count))
        ways = {}
        for way in SCHEMES if attention else MODES:
            for layout in ("zigzag", "contiguous"):
                if not attention and MODES[way].redistributes == (layout == "contiguous"):
                    continue  # states of many segments are not what anybody would run, and it is there already
                hidden = None if attention else base.heads * base.value_head_dim
                case = replace(batch, scheme=way, layout=layout, hidden_size=hidden)
                try:
                    case.refuse_early()
                except ArgumentError:
                    continue
                ways[f"{way}, {layout}"] = case
        cells.append(Cell(f"{layer}, {name} of {total} tokens", ways))
    return [cell for cell in cells if cell.ways]


def _lengths(total: int, count: int) -> tuple[int, ...]:
    """A heavy-tailed batch of so many documents, the same everywhere."""
    if count == 1:
        return (total,)
    drawn = np.random.default_rng(0).lognormal(0.0, 1.0, count)
    lengths = np.maximum((drawn / drawn.sum() * total).astype(np.int64), 1)
    lengths[int(lengths.argmax())] += total - lengths.sum()
    return tuple(lengths.tolist())


def measure(
    group: RankGroup, cells: list[Cell], repeats: int, given: Machine | None
) -> tuple[Machine, tuple[int, ...], list[dict[str, float]]]:
    """The machine, the ranks' hosts, and the milliseconds of every way; on one rank."""
    dtype = next(iter(cells[0].ways.values())).dtype
    found = calibrated(group, dtype, max(repeats, 5)) if given is None else given
    slowest, measured = Slowest(group, repeats), []
    for cell in cells:
        times = {}
        for name, case in cell.ways.items():
            group.buffers = Buffers()
            times[name] = 1e3 * slowest(LayerStep(case, group).both)
        measured.append(times)
    return found, hosts_of(group), measured


def _judged(
    cells: list[Cell], found: Machine, hosts: tuple[int, ...], measured: list[dict[str, float]]
) -> dict[str, Any]:
    """Predictions beside what was measured."""
    topology = found.topology(len(hosts), hosts)
    rows: list[dict[str, Any]] = []
    for cell, times in zip(cells, measured, strict=True):
        prices = {
            name: priced(case.plan(), found, topology, item_size=case.dtype.itemsize).total
            for name, case in cell.ways.items()
        }
        named, fastest = min(prices, key=prices.__getitem__), min(times, key=times.__getitem__)
        rows.append(
            {
                "cell": cell.name, "measured_ms": times, "predicted_ms": prices,
                "ratio": {name: prices[name] / times[name] for name in times},
                "fastest_named": named == fastest, "named": named, "fastest": fastest,
                "named_over_fastest": times[named] / times[fastest],
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
        f"{found.describe()}; {data['cp']} ranks on {hosts} host{'s' * (hosts > 1)}, {data['repeats']} repeats; torch "
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
        lines += ["", f"### {row['cell']}", "", "| | measured ms | predicted ms | ratio |", "|---|--:|--:|--:|"]
        for name, time in sorted(row["measured_ms"].items(), key=lambda pair: pair[1]):
            marks = [word for word, which in (("fastest", row["fastest"]), ("named", row["named"])) if which == name]
            note = f" ({', '.join(marks)})" if marks else ""
            lines.append(f"| {name}{note} | {time:.2f} | {row['predicted_ms'][name]:.2f} | {row['ratio'][name]:.2f} |")
        lines += ["", f"rank correlation {row['rank_correlation']:.2f}"]
    return "\n".join([*lines, "", LEGEND])
