"""`tools/gpu_check.sh [--budget 540]`: all that a machine with a GPU can teach in one call, on one that starts bare.

Each step has its share of the budget; one that exceeds it is ended, what it has found so far is kept, and the next one
begins. What a step spares is shared by those after it.

  smoke     what doctor says, the shortest tests, memcheck of one pack and unpack
  kernels   every Triton kernel compiled and compared with torch's bits; pack and unpack beside a copy at three sizes
  one-rank  kernels of attention, GDN, KDA and Mamba-2: parity; then one rank of 2 and of 8 alone at two real sizes:
            device and host time, launches, memory beside what the plan predicted
  parity    all other tests of the CUDA path, ranks as threads; symmetric memory and benchmarks, ranks as processes
  nccl      one rank over NCCL: collectives to itself, capture, order of waits
  train     20 steps, two processes that share the device over gloo, beside one

Results are gpu_check.log, gpu_check.jsonl (a line for each measured row, as they come) and gpu_check.txt (the summary,
also printed last), in $OUT or else in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_cp.errors import ArgumentError
from tools.gpu_check.plan import BUDGET, BY_NAME, RESERVE, STEPS, Step, commands, seconds_for

WIDTH = 180  # of a line of the summary
GRACE = 5.0  # seconds in which a command that is interrupted says what it has found
OTHERS = 2 << 30  # bytes of the device that an idle one may have in use


@dataclass
class Result:
    """The result of a step.

    Attributes:
        limit: seconds that it had.
        failures: one line each.
        rows: lines of JSON that its commands wrote.
        tests: pytest's last line.
        skipped: why it did not run, if it did not.
        cut: it was ended, since its seconds were over.
    """

    name: str
    limit: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    tests: str = ""
    skipped: str = ""
    cut: bool = False

    @property
    def status(self) -> str:
        """Returns passed, failed, cut or skipped."""
        return "skipped" if self.skipped else "failed" if self.failures else "cut" if self.cut else "passed"

    def line(self) -> str:
        """Returns the line of the step."""
        if self.skipped:
            return f"{self.name:<9}skipped  {self.skipped}"
        measured = sum("device_us" in row for row in self.rows)
        found = [self.tests, f"{measured} rows measured" if measured else "", "its time was over" if self.cut else ""]
        told = "; ".join(filter(None, found))
        return f"{self.name:<9}{self.status:<8}{self.seconds:>4.0f} of {self.limit:.0f} s: {told}"


class Check:
    """Runs the steps, and keeps what they write.

    Args:
        options: of the command line.
        out: the folder of the log, the rows and the summary.
        device: its name, for the summary.
    """

    def __init__(self, options: argparse.Namespace, out: Path, device: str) -> None:
        self.options, self.device, self.began = options, device, time.time()
        self.results: list[Result] = []
        self._summary = out / "gpu_check.txt"
        self._log = (out / "gpu_check.log").open("w+", errors="replace")
        self._rows = (out / "gpu_check.jsonl").open("w")

    def say(self, text: str) -> None:
        """Prints a text, and writes it to the log."""
        for file in (sys.stdout, self._log):
            print(text, file=file, flush=True)

    def run(self, words: list[str], seconds: float, result: Result) -> None:
        """Runs a command, whose lines of JSON the result takes; ends it, and all that it started, after the seconds."""
        self.say(f"== {' '.join(words)}")
        begin, before, code = self._log.tell(), len(result.failures), 0
        process = subprocess.Popen(words, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            result.cut = True
            os.killpg(process.pid, signal.SIGINT)  # of which pytest names the tests that have failed so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._log.seek(begin)
        lines = [line.rstrip() for line in self._log if line.strip()] or ["no output"]
        self._take(lines, result)
        if "pytest" in words:
            result.tests = lines[-1].strip("= ")
            if not (result.cut or code or " passed" in lines[-1]):
                result.failures.append("no test ran")
        if code and len(result.failures) == before:
            result.failures.append(f"{' '.join(words[:4])} ended with exit code {code}: {lines[-1]}")

    def _take(self, lines: list[str], result: Result) -> None:
        for line in lines:
            if line.startswith(("FAILED ", "ERROR ")):
                result.failures.append(line)
            elif (row := parsed(line)) is not None:
                result.rows.append(row)
                print(json.dumps({"step": result.name, **row}), file=self._rows, flush=True)
                if "not_run" in row and not row["is_refused"]:
                    result.failures.append(f"{row['row']}, {row['column']}: {row['not_run']}")

    def steps(self, folder: str) -> None:
        """Runs all steps, each for its share at most."""
        steps = chosen(self.options)
        for number, step in enumerate(steps):
            left = self.began + self.options.budget - RESERVE - time.time()
            result = Result(step.name, seconds_for(step, steps[number + 1 :], left))
            self.results.append(result)
            if result.limit < step.least:
                fewer = "" if self.options.only == [step.name] else f"give --only {step.name}, or "
                result.skipped = f"{result.limit:.0f} s are left, it needs {step.least}; {fewer}raise --budget"
            else:
                self._step(step, result, folder)
            self.keep()

    def _step(self, step: Step, result: Result, folder: str) -> None:
        began, options = time.time(), self.options
        self.say(f"== {step.name}: {result.limit:.0f} s")
        for part, words in commands(
            step, repeats=options.repeats, workers=options.workers, small=options.small, only=options.tests,
            folder=folder, checker=shutil.which("compute-sanitizer"),
        ):  # fmt: skip
            left = result.limit - (time.time() - began)
            if left > 1:
                self.run(words, left * part, result)
        result.seconds = time.time() - began

    def keep(self) -> str:
        """Writes the summary of what there is so far, and returns it: steps, failures, times beside predictions."""
        lines = [f"gpu_check: {time.time() - self.began:.0f} of {self.options.budget:.0f} s on {self.device}"]
        lines += [result.line() for result in self.results]
        lines += [f"{result.name}: {text}" for result in self.results for text in result.failures]
        lines += [line for result in self.results for line in measured_lines(result.rows)]
        text = "\n".join(line[:WIDTH] for line in lines)
        self._summary.write_text(f"{text}\n")
        return text


def chosen(options: argparse.Namespace) -> list[Step]:
    """Returns the steps that were asked for, in their order."""
    return [step for step in STEPS if not options.only or step.name in options.only]


def parsed(line: str) -> dict[str, Any] | None:
    """Returns a line's JSON object, if it is one."""
    if line.startswith("{"):
        with suppress(ValueError):
            found = json.loads(line)
            return found if isinstance(found, dict) else None
    return None


def measured_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each row of a step's table: microseconds / those predicted by h100 = ratio, in its columns.

    `~` marks times in which the host was slower, `peak` is of memory, over the plan's.
    """
    found: dict[str, list[str]] = {}
    peaks: dict[str, list[float]] = {}
    for row in rows:
        if "not_run" in row:
            found.setdefault(f"not run: {row['not_run']}", []).append(f"{row['row']} {row['column']}")
        elif "device_us" in row:
            mark, ratio = "~" if row["host_bound"] else "", row["device_us"] / row["predicted_us"]
            times = f"{mark}{row['device_us']:,.0f}/{row['predicted_us']:,.0f}={ratio:.2f}"
            found.setdefault(row["row"], []).append(f"{row['column']} {times}")
            if row.get("peak_predicted"):
                peaks.setdefault(row["row"], []).append(row["peak"] / row["peak_predicted"])
        elif "max_loss_diff" in row:
            told = (f"{name} {row[name]}" for name in ("max_loss_diff", "first_step_grad_diff", "tokens_per_second"))
            found["train, CP 2 beside 1"] = list(told)
    worst = {name: f" | peak {max(each):.2f}" for name, each in peaks.items()}
    return [f"{name:<20} {' | '.join(cells)}{worst.get(name, '')}" for name, cells in found.items()]


def arguments() -> argparse.ArgumentParser:
    """Returns the parser."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--budget", type=float, default=BUDGET, metavar="S", help="seconds for everything (default: 540)")
    add("--only", choices=BY_NAME, action="append", help="this step; may be given again (default: all)")
    add("--tests", default="", metavar="EXPRESSION", help="of a step's tests those alone: pytest's -k")
    add("--repeats", type=int, default=10, metavar="N", help="of each timing (default: 10)")
    add("--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="of pytest")
    add("--dry-run", dest="small", action="store_true", help="measures and trains little, to see that it runs")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raises an ArgumentError for a budget or a number that cannot be."""
    least = RESERVE + min(step.least for step in chosen(options))
    if not least <= options.budget < float("inf"):
        raise ArgumentError("--budget", options.budget, f"at least {least:g} seconds", f"The default is {BUDGET:g}.")
    for name in ("repeats", "workers"):
        if getattr(options, name) < 1:
            raise ArgumentError(f"--{name}", getattr(options, name), "at least 1")


def check_device(free: int, total: int, steps: list[Step]) -> None:
    """Raises an ArgumentError if a device, of so many bytes, is too small for a step, or used by another process."""
    large = [step for step in steps if total < step.memory << 30]
    if large:
        remedy = f"Leave {', '.join(step.name for step in large)} out: give --only for each of the others."
        allowed = f"at least {max(step.memory for step in large)} GiB"
        raise ArgumentError("device", f"one of {total / 2**30:.1f} GiB", allowed, remedy)
    if total - free > OTHERS:
        remedy = "End the other processes, which nvidia-smi lists, or take another device by CUDA_VISIBLE_DEVICES."
        raise ArgumentError("device", f"{(total - free) / 2**30:.1f} GiB in use", "an idle one", remedy)


def environment() -> dict[str, str]:
    """Returns the variables of all commands."""
    return {
        "PYTHONUNBUFFERED": "1",
        "CUDA_TEST_RANKS": "threads",
        # A fresh machine has compiled nothing; a call that follows finds what this one has, and what autotuning chose.
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(Path.cwd() / "build" / "triton")),
        "TRITON_CACHE_AUTOTUNING": "1",
    }


def main() -> int:
    """Runs the command."""
    parser = arguments()
    options = parser.parse_args()
    out = Path(os.environ.get("OUT") or "benchmarks/results")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    try:
        check_options(options)
        if not torch.cuda.is_available():
            raise ArgumentError("device", "none", "a CUDA device that torch sees", "Look at nvidia-smi and torch.cuda.")
        if not options.small:
            check_device(*torch.cuda.mem_get_info(), chosen(options))
        out.mkdir(parents=True, exist_ok=True)
    except (ArgumentError, OSError) as error:
        parser.error(str(error))
    os.environ |= environment()
    check = Check(options, out, f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        check.steps(folder)
    check.say(f"\n{check.keep()}")
    return 0 if all(result.status == "passed" for result in check.results) else 1


if __name__ == "__main__":
    sys.exit(main())
