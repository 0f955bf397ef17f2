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
from collections.abc import Iterator
from pathlib import Path

from tools.faults.cases import Case, draw
from tools.faults.report import line, summary, table

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
        elif args.show:
            print(f"{case.number} {case.fault.kind}: {verdict.outcome}", flush=True)
        for name, message in verdict.messages.items() if args.show else ():
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
    parser.add_argument("--case", help="one case, as a failure prints it")
    parser.add_argument("--only", help="of the cases, those of these kinds of faults, with commas")
    parser.add_argument("--json", help="a file for verdicts and records")
    parser.add_argument("--show", action="store_true", help="every case, with what its survivors say")
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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        code = main(_arguments(), Path(folder))
    sys.exit(code)
