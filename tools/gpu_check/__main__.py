"""`tools/gpu_check.sh [--budget 540]`: all that a machine with a GPU can teach in one call, on one that starts bare.

Each step has its share of the budget; one that exceeds it is ended, what it has found so far is kept, and the next one
begins. What a step spares is shared by those after it.

  smoke     versions, kernels that must be there, the shortest tests, memcheck of one pack and unpack
  kernels   every Triton kernel compiled and compared with torch's bits; pack and unpack beside a copy at three sizes
  one-rank  kernels of attention, GDN, KDA and Mamba-2: parity; then one rank of 2 and of 8 alone at two real sizes:
            device and host time, launches, memory beside what the plan predicted
  parity    all other tests of the CUDA path, ranks as threads; symmetric memory and benchmarks, ranks as processes
  nccl      one rank over NCCL: collectives to itself, capture, order of waits
  train     20 steps, two processes that share the device over gloo, beside one

Results are gpu_check.log, gpu_check.jsonl (a line for each test and measured row, as they come) and gpu_check.txt (the
summary, also printed last), in $OUT or else in benchmarks/results.
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
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megatron_cp.errors import ArgumentError
from tools.gpu_check.plan import BUDGET, BY_NAME, RESERVE, START, STEPS, Step, commands, seconds_for
from tools.gpu_check.refusals import check_idle, check_size, listed_by_smi
from tools.gpu_check.summary import Result, summary

# Kernels that must work: those of torch, and those that packages were brought for.
REQUIRED = {
    "torch": "varlen of attention", "fla-core": "fla of kda", "tilelang": "fla of gdn",
    "mamba-ssm": "mamba_ssm of mamba", "causal-conv1d": "causal_conv1d of conv1d",
    "flash-attn": "flash_attn of attention",
}  # fmt: skip
SHOWN = ("torch", "triton", *REQUIRED, "megatron-core")
PROBE_SECONDS = 60.0  # at most, of the first step's


class Check:
    """Runs the steps, and keeps what they write.

    Attributes:
        results: of the steps so far.
        head: the device and the versions, for the summary.
    """

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self.options, self.out = options, out
        self.results: list[Result] = []
        self.head = "a device that was not asked yet"
        self._last = "no output"  # line of the latest command
        self._log = (out / "gpu_check.log").open("w")
        self._rows: IO[str] | None = None

    @property
    def left(self) -> float:
        """Seconds until the summary must be written."""
        return float(self.options.began + self.options.budget - RESERVE - time.time())

    def say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=self._log, flush=True)

    def run(self, words: list[str], seconds: float, result: Result) -> bool:
        """Runs a command, whose lines of JSON the result takes; ends it, and all that it started, after the seconds."""
        self.say(f"== {' '.join(words)}")
        self._last, before = "no output", len(result.failures)
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
        )
        reader = threading.Thread(target=self._read, args=(process.stdout, result), daemon=True)
        reader.start()
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            result.cut = True
            self.say(f"== ended after {seconds:.0f} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join(5)
        if not result.cut and code and len(result.failures) == before:
            result.failures.append(f"{' '.join(words[:4])} ended with exit code {code}: {self._last}")
        return not result.cut

    def _read(self, output: IO[str], result: Result) -> None:
        for line in output:
            row = parsed(line)
            if row is None:
                self.say(line.rstrip("\n"))
                self._last = line.strip() or self._last
                continue
            result.take(row)
            self.say(line.rstrip("\n")[:300])
            if "probe" not in row:  # a device that is refused leaves an earlier run's rows
                self._rows = self._rows or (self.out / "gpu_check.jsonl").open("w")
                print(json.dumps({"step": result.name, **row}), file=self._rows, flush=True)

    def probe(self, site: str, seconds: float) -> None:
        """Asks what is here.

        Raises:
            ArgumentError: no device, or one that is too small.
        """
        result, packages = Result("smoke", seconds), brought(site)
        self.run([sys.executable, "-m", "tools.gpu_check.probe", *([site] if site else [])], seconds, result)
        found = next((row["probe"] for row in result.rows if "probe" in row), None)
        if found is None and result.cut:
            allowed = f"more: torch and the package were not imported within {seconds:.0f} s"
            raise ArgumentError("--budget", self.options.budget, allowed)
        if found is None:
            raise ArgumentError("torch", "no answer", "a torch that can be imported", f"See {self.out}/gpu_check.log.")
        if not found["devices"]:
            raise ArgumentError("device", "none", "a CUDA device that torch sees", "Look at nvidia-smi and torch.cuda.")
        if not self.options.small:
            check_size(found["bytes"], [(step.name, step.memory) for step in chosen(self.options)])
        versions = {name: each for name in SHOWN if (each := found["versions"].get(name))}
        self.head = ", ".join([found["devices"][0], *(f"{name} {each}" for name, each in versions.items())])
        told = Result("packages", rows=result.rows)
        told.failures = missing(found, packages, is_emulated="NULLGPU" in os.environ)
        if told.failures:
            self.results.append(told)
        for text in told.failures:
            self.say(f"FAILED: {text}")

    def steps(self, folder: str) -> None:
        """Runs all steps, each for its share at most."""
        steps = chosen(self.options)
        for number, step in enumerate(steps):
            limit = seconds_for(step, steps[number + 1 :], self.left)
            result = Result(step.name, limit)
            self.results.append(result)
            if limit < step.least:
                fewer = "" if self.options.only == [step.name] else f"give --only {step.name}, or "
                result.skipped = f"{limit:.0f} s are left for it and it needs {step.least}; {fewer}raise --budget"
            else:
                self._step(step, result, folder)
            self.keep()

    def _step(self, step: Step, result: Result, folder: str) -> None:
        began = time.time()
        self.say(f"== {step.name}: {result.limit:.0f} s")
        options = self.options
        for part, words in commands(
            step, repeats=options.repeats, workers=options.workers, small=options.small, only=options.tests,
            folder=folder, checker=shutil.which("compute-sanitizer"),
        ):  # fmt: skip
            left = result.limit - (time.time() - began)
            if left > 1:
                self.run(words, left * part, result)
        result.seconds = time.time() - began
        tests = [row["outcome"] for row in result.rows if "test" in row]
        if step.files and not result.cut and set(tests) <= {"skipped"}:
            result.failures.append("no test ran")

    def keep(self) -> list[str]:
        """Writes the summary of what there is so far, and returns its lines."""
        lines = summary(self.head, self.results, self.options.began, time.time(), self.options.budget)
        (self.out / "gpu_check.txt").write_text("\n".join(lines) + "\n")
        return lines


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


def brought(site: str) -> set[str]:
    """Returns the names of the packages that were brought as wheels."""
    from importlib.metadata import distributions

    return {package.name.lower().replace("_", "-") for package in distributions(path=[site])} if site else set()


def missing(found: dict[str, Any], packages: set[str], *, is_emulated: bool) -> list[str]:
    """Returns what is wrong with the packages: a line for each that does not load, and for each kernel that is lacking.

    Args:
        found: what the probe found.
        packages: those that were brought.
        is_emulated: kernels of other packages do not work on the emulated device.
    """
    lines = [f"{name} {why}: build it anew, or take it out of .whl" for name, why in found["broken"].items()]
    needed = {"torch"} if is_emulated else packages | {"torch"}
    for package, kernel in REQUIRED.items():
        remark = found["kernels"].get(kernel, "")
        if package in needed and remark:
            lines.append(f"kernel {kernel}, for which {package} is here: {remark}")
    return lines


def install(folder: str, site: str) -> None:
    """Installs the wheels of a folder.

    Raises:
        ArgumentError: there are none, or pip refuses one.
    """
    wheels = sorted(map(str, Path(folder).glob("*.whl")))
    if not wheels:
        raise ArgumentError("--wheels", folder, "a folder of wheels", "bash tools/gpu_wheels.sh makes one.")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    done = subprocess.run(
        [*pip, "--no-cache-dir", "--upgrade", "--target", site, *wheels], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip())
        raise ArgumentError("--wheels", folder, f"wheels for Python {sys.version_info[0]}.{sys.version_info[1]}", why)


def arguments() -> argparse.ArgumentParser:
    """Returns the parser."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--budget", type=float, default=BUDGET, metavar="S", help="seconds for everything (default: 540)")
    add("--only", choices=BY_NAME, action="append", help="this step; may be given again (default: all)")
    add("--wheels", metavar="FOLDER", help="installed for this run alone (default: .whl, if it is there)")
    add("--tests", default="", metavar="EXPRESSION", help="of a step's tests those alone: pytest's -k")
    add("--repeats", type=int, default=10, metavar="N", help="of each timing (default: 10)")
    add("--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="of pytest")
    add("--dry-run", dest="small", action="store_true", help="measures and trains little, to see that it runs")
    add("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    return parser


def checked(options: argparse.Namespace) -> None:
    """Raises an ArgumentError for a budget or a number that cannot be."""
    least = START + RESERVE + min(step.least for step in chosen(options))
    if not least <= options.budget < float("inf"):
        raise ArgumentError("--budget", options.budget, f"at least {least:g} seconds", f"The default is {BUDGET:g}.")
    for name in ("repeats", "workers"):
        if getattr(options, name) < 1:
            raise ArgumentError(f"--{name}", getattr(options, name), "at least 1")
    listed = listed_by_smi(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if listed is not None:
        check_idle(listed)


def environment(site: str) -> Iterator[tuple[str, str]]:
    """Yields the variables of all commands."""
    paths = [path for path in (site, os.environ.get("PYTHONPATH")) if path]
    # A checkout that was not installed has its packages first on the path, and its tests beside them.
    yield "PYTHONPATH", os.pathsep.join([str(Path.cwd()), *paths])
    yield "PYTHONUNBUFFERED", "1"
    yield "CUDA_TEST_RANKS", "threads"
    # A fresh machine has compiled nothing; a call that follows finds what this one has, and what autotuning chose.
    yield "TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR", str(Path.cwd() / "build" / "triton"))
    yield "TRITON_CACHE_AUTOTUNING", "1"


def main() -> int:
    """The command."""
    parser = arguments()
    options = parser.parse_args()
    out = Path(os.environ.get("OUT") or "benchmarks/results")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    try:
        checked(options)
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            wheels = options.wheels or (".whl" if Path(".whl").is_dir() else None)
            site = f"{folder}/site" if wheels else ""
            if wheels:
                install(wheels, site)
            check = Check(options, out)
            os.environ.update(environment(site))
            check.probe(site, min(PROBE_SECONDS, check.left))
            check.steps(folder)
            check.say("\n" + "\n".join(check.keep()))  # before the folder is removed, which takes seconds
    except (ArgumentError, OSError, subprocess.TimeoutExpired) as error:
        parser.error(str(error))
    return 0 if all(result.status == "passed" for result in check.results) else 1


if __name__ == "__main__":
    sys.exit(main())
