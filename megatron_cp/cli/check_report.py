"""The page of `megatron-cp check --report`: cases with their errors against the limits, the worst first."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from typing import Any

from megatron_cp.cli.environment import command_line, environment, environment_facts
from megatron_cp.page import save_page
from megatron_cp.plan.describe import counted
from megatron_cp.testing.parity import Parity


def save_check(args: argparse.Namespace, results: Sequence[Parity], verdict: str) -> None:
    """Writes the page of a check to `args.report`."""
    passed = all(result.passed for result in results)
    report = {
        "title": f"Check of {args.layer}, {counted(len(results), 'case')}",
        "verdict": {"text": verdict, "ok": passed},
        "command": command_line(args),
        "facts": environment_facts(environment()),
        "tables": [_by_scheme(results), _cases(results)],
    }
    save_page(report, args.report)


def _cases(results: Sequence[Parity]) -> dict[str, Any]:
    ordered = sorted(results, key=_share, reverse=True)
    rows: list[list[Any]] = []
    for result in ordered:
        name, error = _worst(result)
        bits = ["yes" if same else "no" for same in (result.bitwise_forward, result.bitwise_backward)]
        kernel = result.kernel_errors.get(name)
        rows.append([str(result.case), name, error, result.tolerance, _share(result), kernel, *bits])
    bad = [[row, column] for row, result in enumerate(ordered) if not result.passed for column in (0, 2, 4)]
    columns: list[str] = [
        "case", "tensor with the largest error", "error", "limit", "error / limit", "kernel's own error",
        "same bits forward", "backward",
    ]  # fmt: skip
    text = "An error is the largest difference from one rank, over the largest value. The worst cases are first."
    if not any(result.kernel_errors for result in results):  # in float64 there is none to show
        kept = [place for place, name in enumerate(columns) if name != "kernel's own error"]
        columns, rows = [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]
    return {"title": "Cases", "text": text, "columns": columns, "rows": rows, "bad": bad}


def _by_scheme(results: Sequence[Parity]) -> dict[str, Any]:
    rows: list[list[Any]] = []
    bad: list[list[int]] = []
    ordered = sorted(results, key=lambda result: (result.case.cp, result.case.scheme))
    for (cp, scheme), group in itertools.groupby(ordered, key=lambda result: (result.case.cp, result.case.scheme)):
        cases = list(group)
        failed = sum(not result.passed for result in cases)
        bad += [[len(rows), 3]] * (failed > 0)
        rows.append([scheme, cp, len(cases), failed, max(map(_share, cases))])
    return {
        "title": "Schemes", "columns": ["scheme", "cp", "cases", "failed", "largest error / limit"], "rows": rows,
        "bad": bad,
    }  # fmt: skip


def _worst(result: Parity) -> tuple[str, float]:
    def size(name: str) -> float:
        error = result.errors[name]
        return math.inf if math.isnan(error) else error

    name = max(result.errors, key=size)
    return name, result.errors[name]


def _share(result: Parity) -> float:
    """Returns the largest error over the limit; infinity for NaN, so that it comes first."""
    error = _worst(result)[1]
    return math.inf if math.isnan(error) else error / result.tolerance
