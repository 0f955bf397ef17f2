"""`tools/gpu_check.sh --only STEP [OPTIONS]`: one step of what a machine with a GPU should check and measure.

Each step takes less than ten minutes on a machine with 16 cores, is useful alone, and leaves at most three files in
$OUT (or benchmarks/results): gpu_STEP.log, gpu_STEP.json and gpu_STEP.xml.

  smoke     versions, wheels, kernels that must be there, the shortest tests, memcheck of one pack and unpack
  kernels   bytes a second of the exchange's copy kernels, beside a copy
  parity    all tests of the CUDA path, ranks as threads
  one-rank  layers at real sizes, one rank of 2, 4 and 8 alone: device and host time, launches, memory
  gloo      ranks as processes that share the device: the exchange, transports, commands, and a training run
  symmetric ranks as processes that copy out of each other's devices, or out of the one that they share
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
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STEPS = ("smoke", "kernels", "parity", "one-rank", "gloo", "symmetric")
LIMIT = 570.0  # seconds of one step
TESTS = "tests/functional_tests/test_cuda"
# What else is brought as wheels, and what for.
WHEELS = {
    "megatron-core": "train, and the layers of Megatron models",
    "fla-core": "kernel fla of gdn and kda",
    "einops": "fla-core",
    "tilelang": "fla's gdn on compute capability 9.0 with Triton below 3.7.1; it needs nvcc",
    **dict.fromkeys(("apache-tvm-ffi", "torch-c-dlpack-ext", "cloudpickle", "ml-dtypes", "z3-solver"), "tilelang"),
}
REQUIRED = ("varlen of attention",)  # and, where these packages are there, what they are brought for
BROUGHT_FOR = {"fla-core": ("fla of kda",), "tilelang": ("fla of gdn",)}


class Step:
    """The results of a step.

    Attributes:
        results: for its JSON.
        failed: what went wrong, in words.
    """

    def __init__(self, name: str, out: Path, options: argparse.Namespace, known: dict[str, Any]) -> None:
        self.name, self.out, self.options, self.known = name, out, options, known
        self.results: dict[str, Any] = {
            "step": name,
            "devices": known["devices"],
            "versions": known["versions"],
            "dry_run": options.dry_run,
            "repeats": options.repeats,
        }
        self.failed: list[str] = []
        self._deadline = time.monotonic() + LIMIT
        self._log = (out / f"gpu_{name}.log").open("w")

    def say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=self._log, flush=True)

    def command(self, *command: str) -> str:
        """Runs one for as long as the step has, and shows and returns its output. After a failure the step goes on."""
        self.say(f"== {' '.join(command)}")
        left = self._deadline - time.monotonic()
        if left < 1:
            self.fail(f"{command[0]} was not started: the step's {LIMIT:g} s are over")
            return ""
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        # First as by Ctrl-C: pytest then says what has failed so far.
        timers = [
            threading.Timer(seconds, os.killpg, (process.pid, number))
            for seconds, number in ((max(left - 20, 1), signal.SIGINT), (left, signal.SIGKILL))
        ]
        for timer in timers:
            timer.start()
        lines = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                self.say(line.rstrip("\n"))
                lines.append(line)
            code = process.wait()
        finally:
            for timer in timers:
                timer.cancel()
        if code:
            why = "the step's time is over" if time.monotonic() > self._deadline else f"exit code {code}"
            self.fail(f"{' '.join(command)}: {why}")
        return "".join(lines)

    def python(self, *arguments: str) -> str:
        """A command of this interpreter."""
        return self.command(sys.executable, *arguments)

    def tests(self, *chosen: str, workers: int, threads: bool) -> None:
        """Runs tests of the CUDA path; those that are skipped are shown with the reason."""
        report = self.out / f"gpu_{self.name}.xml"
        report.unlink(missing_ok=True)  # of an earlier run
        os.environ["CUDA_TEST_RANKS"] = "threads" if threads else "processes"
        several = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
        self.python(
            "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "--durations", "5", f"--junitxml={report}", *several,
            *chosen,
        )  # fmt: skip
        if not report.exists():
            self.fail("pytest left no report")
            return
        suite = ElementTree.parse(report).getroot()[0]
        counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
        self.results["tests"] = counts
        if counts["tests"] == counts["skipped"]:
            self.fail("no test ran")

    def rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Measures, and shows each row at once, so that an interrupted run has results, too."""
        found = self.results.setdefault("rows", [])
        for row in rows:
            self.say(json.dumps(row))
            found.append(row)
            self.keep()
            if "not_run" in row and not row.get("is_refused"):
                self.fail(row["not_run"])
            if time.monotonic() > self._deadline:
                self.fail(f"rows after this one: the step's {LIMIT:g} s are over")
                return

    def fail(self, what: str) -> None:
        self.failed.append(what)
        self.say(f"FAILED: {what}")

    def keep(self) -> None:
        """Writes what there is so far."""
        text = json.dumps({**self.results, "failed": self.failed}, indent=1)
        (self.out / f"gpu_{self.name}.json").write_text(text + "\n")


def smoke(step: Step) -> None:
    """Checks correctness; failures must be mended before anything is timed."""
    if shutil.which("nvidia-smi"):
        step.command("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    _wheels(step)
    step.python("-m", "megatron_cp.cli.main", "doctor", "--all")
    _kernels_are_there(step)
    _memcheck(step)
    chosen = [
        f"{TESTS}.py::test_exchange_moves_the_very_bits[2-zigzag]", f"{TESTS}.py::test_host_never_waits[exchange]",
        f"{TESTS}.py::test_layer_equals_float64[varlen-2-zigzag-False]", f"{TESTS}_streams.py",
    ]  # fmt: skip
    if not step.options.dry_run:
        chosen = [
            f"{TESTS}.py", f"{TESTS}_streams.py", f"{TESTS}_one_device.py", "-k",
            "kernels_move or very_bits or host_never_waits or 2-zigzag or streams or one_device",
        ]  # fmt: skip
    step.tests(*chosen, workers=step.options.workers, threads=True)


def kernels(step: Step) -> None:
    """On an otherwise idle device."""
    from tools.gpu_check import kernels

    step.rows(kernels.rows(step.options.repeats, small=step.options.dry_run))


def parity(step: Step) -> None:
    """Values, all of them."""
    files = [f"{TESTS}{name}.py" for name in ("", "_streams", "_flex", "_one_device")]
    chosen = [name for name in files if Path(name).exists()]
    if step.options.dry_run:
        chosen = [f"{TESTS}.py", "-k", "scheme_equals and causal and (p2p or exact)"]
    step.tests(*chosen, workers=step.options.workers, threads=True)


def one_rank(step: Step) -> None:
    """Measures all that a single GPU can measure exactly."""
    from tools.gpu_check import one_rank

    step.rows(one_rank.rows(step.options.repeats, small=step.options.dry_run))


def gloo(step: Step) -> None:
    """Right, not fast: processes take turns on the device, and messages go through the host."""
    small = step.options.dry_run
    chosen = "very_bits or transports_and_chunks or (scheme_equals and causal) or benchmark or training"
    files = [f"{TESTS}.py", *([] if small else [f"{TESTS}_commands.py"])]
    step.tests(*files, "-k", "p2p-causal" if small else chosen, workers=step.options.workers, threads=False)
    with tempfile.TemporaryDirectory() as folder:
        step.python(
            "-m", "megatron_cp.cli.main", "train", "--context-parallel-size", "2", "--compare", "--json",
            "--device", "cuda", "--train-iters", "2" if small else "40", "--run-dir", f"{folder}/run",
            *_tiny(small=small),
        )  # fmt: skip


def symmetric(step: Step) -> None:
    """Runs every scheme over symmetric memory; ranks share a device where there are fewer devices than ranks."""
    chosen = ["-k", "host_waits"] if step.options.dry_run else []
    step.tests(f"{TESTS}_symmetric_memory.py", *chosen, workers=1, threads=False)


def _tiny(*, small: bool) -> list[str]:
    return ["--seq-length", "64", "--num-layers", "2"] if small else []


def _wheels(step: Step) -> None:
    found = {}
    for name in WHEELS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    step.results["wheels"] = found
    for name, what in WHEELS.items():
        step.say(f"{name} {found[name] or 'is not there'}: for {what}")


def _kernels_are_there(step: Step) -> None:
    brought = [name for package, names in BROUGHT_FOR.items() if step.results["wheels"][package] for name in names]
    required = [*REQUIRED, *([] if step.options.dry_run else brought)]
    for name in required if step.options.require is None else step.options.require:
        finding = step.known["kernels"][f"kernel {name}"]
        if not finding["works"]:
            step.fail(f"kernel {name} should be there: {finding['remark']}")


def _memcheck(step: Step) -> None:
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        step.say("skipped: memcheck of one pack and unpack, for there is no compute-sanitizer")
        step.python("-m", "tools.gpu_check.pack_once")
        return
    step.command(checker, "--error-exitcode", "9", sys.executable, "-m", "tools.gpu_check.pack_once")


def _doctor() -> dict[str, Any]:
    """Returns the results of doctor: versions, devices, and its lines about kernels by name."""
    from megatron_cp.cli import doctor

    found = doctor.run(argparse.Namespace(megatron=None, all=False)).data
    kernels = {line["feature"]: line for line in found["capabilities"] if line["feature"].startswith("kernel ")}
    return {"versions": found["versions"], "devices": found["devices"], "kernels": kernels}


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


RUN: dict[str, Callable[[Step], None]] = {
    "smoke": smoke, "kernels": kernels, "parity": parity, "one-rank": one_rank, "gloo": gloo,
    "symmetric": symmetric,
}  # fmt: skip


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=STEPS, action="append", help="this step; may be given again (default: all)")
    parser.add_argument(
        "--wheels", metavar="FOLDER", help="installed for this run alone (default: .whl, if it is there); comes first"
    )
    parser.add_argument(
        "--require", type=lambda text: text.split(","), metavar="KERNEL,...",
        help="kernels without which smoke fails, as doctor names them (default: varlen of attention, and those that "
        "packages were brought for)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=_positive, default=20, metavar="N", help="of each timing (default: 20)")
    parser.add_argument("--workers", type=_positive, default=min(8, os.cpu_count() or 1), metavar="N", help="of pytest")
    parser.add_argument("--dry-run", action="store_true", help="little of everything, to see that it runs")
    options = parser.parse_args()
    known = _doctor()
    unknown = [name for name in options.require or () if f"kernel {name}" not in known["kernels"]]
    if unknown:
        parser.error(f"--require: doctor knows no kernel {', '.join(unknown)}; it knows {', '.join(known['kernels'])}")
    if not known["devices"]:
        parser.error("torch sees no CUDA device")
    out = Path(os.environ.get("OUT") or "benchmarks/results")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"OUT={out}: {error.strerror}")
    failed = []
    for name in options.only or STEPS:
        step, start = Step(name, out, options, known), time.monotonic()
        try:
            RUN[name](step)
        except Exception as error:  # of whatever kind: the other steps are worth running
            step.fail(f"{type(error).__name__}: {error}")
        step.results["seconds"] = round(time.monotonic() - start, 1)
        step.keep()
        step.say(f"-- {name}: {'; '.join(step.failed) or 'passed'}, {step.results['seconds']} s")
        failed += [name] if step.failed else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
