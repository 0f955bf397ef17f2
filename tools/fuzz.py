"""Draws cases of every operation for as long as one asks, and holds each to an oracle of its own.

    make fuzz SECONDS=600            for so long, from a new seed, which is printed
    make fuzz CASES=20000 SEED=1     the same cases always
    python tools/fuzz.py --case '{"cp_size":2,...}'     one case, as a failure prints it
    python tools/fuzz.py --row nn,gdn,auto,zigzag,...   one row of the table of entries, likewise
    python tools/fuzz.py --only parents --cases 2000    those alone of which a call has this field of `Call`

What is drawn: `tests/fuzz_draw.py`. What it is compared with: `tests/fuzz_oracle.py`. A failing case is made smaller
and printed as the line that runs it again. Among the cases are rows of `tests/entries.py`: layers and models, each with
drawn options, beside one rank. Exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import random
import re
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.entries import Row, judged
from tests.entries import drawn as drawn_row
from tests.fuzz_cases import OPERATIONS, Case, shrunk
from tests.fuzz_check import check
from tests.fuzz_draw import case_of

SAY_EVERY = 30.0  # seconds
ROW_EVERY = 10  # cases
HUNG = ("did not finish in", "waited", "not finished")  # in the messages of what took too long


def main() -> int:
    """Runs cases until the time or their number is up; 1 if one failed."""
    args = _arguments()
    torch.set_num_threads(1)
    if args.case:
        error = _failure(Case.read(args.case), args.limit)
        print("passed" if error is None else "".join(traceback.format_exception(error)))
        return int(error is not None)
    if args.row:
        print(judged(Row.read(args.row)) or "exact")
        return 0
    print(f"seed {args.seed}", flush=True)
    started = said = time.monotonic()
    drawn: collections.Counter[tuple[str, str]] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    rows: collections.Counter[str] = collections.Counter()
    number = ran = 0
    while (ran < args.cases) if args.cases else (time.monotonic() - started < args.seconds):
        case = case_of(args.seed, number, args.operations)
        if args.only and not any(getattr(call, args.only) for call in case.calls):
            number += 1
            continue
        ran += 1
        drawn.update((call.operation, call.scheme) for call in case.calls)
        error = _failure(case, args.limit)
        number += 1
        if not args.only and number % ROW_EVERY == 0:
            rows[_row(args.seed, number, failed)] += 1
        if error is not None:
            failed[_report(case, number - 1, error, args)] += 1
            if args.stop:
                break
        if time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            print(f"{ran} cases in {said - started:.0f} s, {failed.total()} failed", flush=True)
    _summary(drawn, failed, ran, time.monotonic() - started, args.seed)
    print(f"rows of entries: {', '.join(f'{entry} {count}' for entry, count in sorted(rows.items())) or 'none'}")
    return int(bool(failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long; the last case is finished")
    parser.add_argument("--cases", type=int, help="how many instead")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="of the draws; a new one if left out")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="OPERATION",
                        help=f"draw these alone, of {', '.join(OPERATIONS)}")  # fmt: skip
    parser.add_argument("--only", metavar="FIELD", help="pass over cases without it: parents, kv_lengths, sink, ...")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a case counts as hung")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--case", metavar="JSON", help="run this case")
    parser.add_argument("--row", metavar="VALUES", help="run this row of the table of entries")
    return parser.parse_args()


def _failure(case: Case, limit: float) -> BaseException | None:
    """Runs a case and returns its error, or None. If it hangs, every thread's stack is written to standard error."""
    alarms = []

    def alarm(*_: object) -> None:
        alarms.append(case)
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        if len(alarms) > 1:  # ranks would have given up: planning hangs, or the oracle
            raise TimeoutError(f"not finished after {2 * limit:g} s; the stacks are on standard error")

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.9 * limit, 1.1 * limit)
    try:
        check(case, limit)
    except Exception as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _row(seed: int, number: int, failed: collections.Counter[str]) -> str:
    """Draws and runs a row of the table of entries, and returns its entry. A failure is printed and counted."""
    row = drawn_row(random.Random(f"{seed}/{number}/row"))
    try:
        judged(row)
    except Exception as error:
        print(f"\nrow {number} of seed {seed} failed: {type(error).__name__}: {error}")
        print(f"  python tools/fuzz.py --row {shlex.quote(row.line())}", flush=True)
        failed[f"{row.entry}: {' '.join(str(error).split()[:16])}"] += 1
    return row.entry


def _report(case: Case, number: int, error: BaseException, args: argparse.Namespace) -> str:
    """Prints a failure with the line that runs it again, and returns it in short."""
    what = f"{type(error).__name__}: {error}"
    hung = any(words in what for words in HUNG)
    cause = error.__cause__ or error
    where = traceback.extract_tb(cause.__traceback__)[-1]
    print(f"\ncase {number} of seed {args.seed} failed: {what}\n  at {where.filename}:{where.lineno} in {where.name}")
    print(f"  python tools/fuzz.py --case {shlex.quote(case.line())}")
    if not hung:  # each try of one that hangs would take as long as the limit
        smaller = shrunk(case, lambda other: _alike(_failure(other, args.limit), error))
        print(f"  smaller: python tools/fuzz.py --case {shlex.quote(smaller.line())}", flush=True)
    return " ".join(what.split()[:12])


def _alike(error: BaseException | None, other: BaseException) -> bool:
    """Returns True if two errors have the same words, except for operations and numbers."""
    return error is not None and _words(error) == _words(other)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__} {re.sub(r'[^a-zA-Z ]', '', str(error).split(':')[-1])[:40]}"


def _summary(
    drawn: collections.Counter[tuple[str, str]], failed: collections.Counter[str], cases: int, seconds: float, seed: int
) -> None:
    print(f"\n{'calls of':22} by scheme or mode")
    for operation in OPERATIONS:
        schemes = ", ".join(f"{name} {n}" for (of, name), n in sorted(drawn.items()) if of == operation)
        if schemes:
            print(f"{operation:22} {schemes}")
    for what, count in failed.most_common():
        print(f"failed {count} times: {what}")
    rate = cases / max(seconds, 1e-9)
    print(f"{cases} cases from seed {seed} in {seconds:.0f} s ({rate:.1f}/s), {drawn.total()} calls: "
          f"{failed.total() or 'none'} failed")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
