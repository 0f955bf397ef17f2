"""The command: `python -m tools.faults --seconds 60`. Exit code 1 if any fault came to a bad end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tools.faults.cases import FAULTS, Case, draw
from tools.faults.classify import FAILURES, OUTCOMES, Verdict

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip


def main(args: argparse.Namespace, home: Path) -> int:
    """Runs a campaign and returns its exit code."""
    os.environ |= _ENVIRONMENT
    warnings.simplefilter("ignore")  # of what Megatron says about optional packages
    from tools.faults import campaign  # after the environment, which torch reads

    campaign.warm_up()
    print(f"seed {args.seed}", flush=True)
    began = time.monotonic()
    ended = []
    for case, verdict, record in campaign.run(_cases(args), home, args.jobs, args.limit):
        ended.append((case, verdict, record))
        if verdict.failed:
            print(line(case, verdict), flush=True)
        for name, message in verdict.messages.items() if args.case else ():
            print(f"    {name}: {message}", flush=True)
    ended.sort(key=lambda each: each[0].number)
    results = [(case, verdict) for case, verdict, _ in ended]
    numbers = {**summary(results), "wall_seconds": round(time.monotonic() - began)}
    print(f"{table(results)}\n{json.dumps(numbers)}")
    if args.json:
        cases = [{"verdict": dataclasses.asdict(verdict), **record} for _, verdict, record in ended]
        Path(args.json).write_text(json.dumps({"summary": numbers, "seed": args.seed, "cases": cases}, indent=1))
    return 1 if numbers["failed"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="start new cases for so long (default: 60)")
    parser.add_argument("--count", type=int, help="so many cases, however long they take")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the cases (default: the time)")
    parser.add_argument("--jobs", type=int, default=8, help="at a time, most of which wait (default: 8)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after a fault that are a hang (default: 60)")
    parser.add_argument("--timeout", type=float, default=8.0, help="of process groups, in seconds (default: 8)")
    parser.add_argument("--case", help="one case, as a failure prints it; shows what its survivors say")
    parser.add_argument("--only", help="of the cases, those of these kinds of faults, with commas")
    parser.add_argument("--json", help="a file for verdicts and records")
    return parser.parse_args()


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    if args.case:
        yield Case.of(args.case)
        return
    only = set(args.only.split(",")) if args.only else None
    end, number, drawn = time.monotonic() + args.seconds, 0, 0
    while drawn < args.count if args.count is not None else time.monotonic() < end:
        case = draw(args.seed, number, args.timeout)
        number += 1
        if only is None or case.fault.kind in only:
            drawn += 1
            yield case


def table(results: list[tuple[Case, Verdict]]) -> str:
    """Returns the table of kinds of faults by outcomes."""
    shown = [outcome for outcome in OUTCOMES if any(verdict.outcome == outcome for _, verdict in results)]
    rows = [["fault", "cases", *shown, "seconds (median, most)"]]
    for kind in (*FAULTS, "all"):
        own = [verdict for case, verdict in results if kind in (case.fault.kind, "all")]
        if own:
            counts = Counter(verdict.outcome for verdict in own)
            known = [verdict.seconds for verdict in own if verdict.seconds is not None]
            times = f"{median(known):.1f}, {max(known):.1f}" if known else ""
            rows.append([kind, str(len(own)), *(str(counts[outcome] or "") for outcome in shown), times])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def summary(results: list[tuple[Case, Verdict]]) -> dict[str, Any]:
    """Counts over all cases: of each failure the cases in which it occurs, of which a case may have several."""
    seconds = [verdict.seconds for case, verdict in results
               if verdict.seconds is not None and case.fault.kind != "delay"]  # fmt: skip
    errors, named = (sum(verdict.named[place] for _, verdict in results) for place in (0, 1))
    return {
        "cases": len(results),
        "failed": sum(verdict.failed for _, verdict in results),
        **{name: sum(name in verdict.of.values() for _, verdict in results) for name in FAILURES},
        "errors": errors,
        "errors_that_name_the_cause": named,
        "seconds_median": round(median(seconds), 2) if seconds else None,
        "seconds_most": round(max(seconds), 2) if seconds else None,
    }


def line(case: Case, verdict: Verdict) -> str:
    """A failing case, and how to run it again."""
    parts = "; ".join(f"{name}: {outcome}" for name, outcome in verdict.of.items() if outcome in FAILURES)
    return f"FAILED {case.number} {case.fault.kind}: {parts}\n  --case '{case.text()}'"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        code = main(_arguments(), Path(folder))
    sys.exit(code)
