"""Runs unit tests with other versions of Python, torch and other packages, and keeps the table that doctor prints.

    python -m tools.versions [NAME ...] [--short] [--write] [--if-there] [-n PROCESSES]

Without names all environments are made by `uv`, one after another, in a temporary folder. `--short` runs the few files
that CI has time for, and prints their counts; `--write` puts the counts of the full set into
`megatron_cp/versions.json` and into `docs/versions.md`. Exit code 1 if a test failed that the table does not have.

A Python is looked for on PATH as `python3.10` and so on. An environment whose Python is not there is left out, with a
line that says so, and exit code 1 if it was named, unless `--if-there` is given, which also goes on where packages
cannot be had.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from megatron_cp import versions

ROOT = Path(__file__).parents[1]
TABLE, PAGE = ROOT / "megatron_cp" / "versions.json", ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- make versions writes from here -->", "<!-- to here -->"
# What tests import besides the package; their versions do not matter to it, and the newest that fits is taken.
FLA = ("fla-core==0.6.0", "einops==0.8.2")
SOLVER = "ortools==9.15.6755"  # needs numpy 2.0.2
OF_TESTS = (
    "accelerate", "hypothesis", "peft", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "setuptools", "tqdm",
)  # fmt: skip
MEGATRON = "megatron-core==0.19.2"  # the newest; it needs Python 3.12
# Everything that touches torch, numpy or an adapter. Left out: whole-model estimates, searches for tiles and prices,
# which are arithmetic in numpy and take as long again, and the registers and instructions of compiled kernels, which
# are those of the pinned Triton.
TESTS = tuple(
    f"tests/unit_tests/{name}"
    for name in (
        "batch", "data", "exchange", "executor", "layout", "linear", "megatron", "nn", "plan", "softmax", "testing",
        "test_arguments.py", "test_autocast.py", "test_errors.py", "test_extras.py", "test_house_torch.py",
        "test_names.py", "test_versions.py", "test_wheel.py", "transformers/test_calls.py",
        "transformers/test_refusals.py", "transformers/test_swap.py", "transformers/test_trainer.py",
    )
)  # fmt: skip
PINNED_TRITON = ("exchange/test_triton_compiled.py", "linear/test_gates_compiled.py")
SHORT = tuple(
    f"tests/unit_tests/{name}"
    for name in (
        "batch/test_training.py", "exchange/test_head_exchange.py", "executor/test_run.py", "linear/test_kernels.py",
        "nn", "softmax/test_attention.py", "test_autocast.py", "test_house_torch.py", "test_versions.py",
        "transformers/test_swap.py",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """An environment: its name, its Python, and requirements that say the versions of the others."""

    name: str
    python: str
    requirements: tuple[str, ...]


ENVIRONMENTS = (
    Environment(
        "oldest", "3.10",
        ("torch==2.9.0", "transformers==5.5.0", "numpy==1.26.4", "lazy_loader==0.4", "matplotlib==3.10.0", *FLA),
    ),
    Environment("older", "3.11", ("torch==2.10.0", "transformers==5.6.2", "numpy==2.0.2", *FLA, SOLVER)),
    Environment("pinned", "3.12", ()),  # as the extra dev pins them
    Environment("newer", "3.12", ("torch==2.13.0", "transformers==5.18.0", "numpy==2.3.5", MEGATRON, *FLA, SOLVER)),
    Environment("newest", "3.13", ("torch==2.15.0", "transformers==5.24.0", "numpy==2.5.5", MEGATRON, *FLA, SOLVER)),
    Environment("next", "3.14", ("torch==2.15.0", "transformers==5.24.0", "numpy==2.5.5", MEGATRON, *FLA, SOLVER)),
)  # fmt: skip


def main() -> None:
    """Makes the environments and runs the tests in each."""
    args = _arguments()
    failed = False
    for environment in ENVIRONMENTS:
        if args.names and environment.name not in args.names:
            continue
        python = _python(environment.python)
        if python is None:
            print(f"{environment.name}: no python{environment.python} on PATH that starts, left out", flush=True)
            failed |= bool(args.names) and not args.if_there
            continue
        try:
            row = _measured(environment, python, args)
        except subprocess.CalledProcessError as error:  # of an installation
            print(f"{environment.name}: not installed, exit code {error.returncode}", flush=True)
            failed |= not args.if_there
            continue
        print(json.dumps(row), flush=True)
        failed |= bool(set(row["failures"]) - _known_failures(environment.name))
        if args.write and not args.short:
            _keep(row)
    sys.exit(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(each.name for each in ENVIRONMENTS))
    parser.add_argument("--short", action="store_true", help="the few files that CI runs")
    parser.add_argument("--write", action="store_true", help="keep the counts in the table")
    parser.add_argument(
        "--if-there", action="store_true", help="no error where a Python that is named, or a package, is missing"
    )
    parser.add_argument("-n", type=int, default=2, metavar="PROCESSES", help="processes of pytest")
    args = parser.parse_args()
    unknown = set(args.names) - {each.name for each in ENVIRONMENTS}
    if unknown:
        parser.error(f"no environment {', '.join(sorted(unknown))}; there are {[each.name for each in ENVIRONMENTS]}")
    return args


def _python(version: str) -> str | None:
    """Returns the command of a Python, if it is on PATH and starts."""
    command = shutil.which(f"python{version}")
    starts = command is not None and subprocess.run([command, "--version"], capture_output=True).returncode == 0
    return command if starts else None


def _measured(environment: Environment, python: str, args: argparse.Namespace) -> dict[str, Any]:
    """Makes an environment, runs the tests in it, and returns its row of the table."""
    with tempfile.TemporaryDirectory(prefix="versions-", ignore_cleanup_errors=True) as name:
        folder, report = Path(name, "environment"), Path(name, "report.xml")
        _install(environment, python, folder)
        inner = folder / "bin" / "python"
        command = [
            inner, "-m", "pytest", "-q", "-n", str(args.n), "--dist", "worksteal", "-m", "not thorough",
            "-p", "no:cacheprovider", f"--junitxml={report}", *(SHORT if args.short else TESTS),
            *(f"--ignore=tests/unit_tests/{name}" for name in PINNED_TRITON),
        ]  # fmt: skip
        subprocess.run(list(map(str, command)), cwd=ROOT, env=clean_variables(), check=False)
        found = {"environment": environment.name, **_versions(inner), **_counts(report)}
    return found | {"date": datetime.date.today().isoformat()}


def _install(environment: Environment, python: str, folder: Path) -> None:
    is_pinned = environment.name == "pinned"
    others = () if is_pinned else (*environment.requirements, *OF_TESTS)
    uv = find_uv()
    if uv is None:
        raise SystemExit("make versions needs uv, which the extra dev has: pip install uv")
    subprocess.run([uv, "venv", "--quiet", "--python", python, folder], check=True)
    # Without its cache, which would keep 5 GB of each environment.
    install = [uv, "pip", "install", "--quiet", "--no-cache", "--python", folder / "bin" / "python"]
    own = ["--editable", f"{ROOT}[dev]" if is_pinned else str(ROOT)]
    subprocess.run([*install, *own, *others], cwd=ROOT, env=clean_variables(), check=True)


def find_uv() -> str | None:
    """Returns the path of `uv`, which the extra `dev` puts beside Python; None if it is not there."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("uv", path=beside)


def clean_variables() -> dict[str, str]:
    """Returns the environment variables without those that choose this process's Python, or keep no bytecode.

    Hundreds of processes import the packages: compiling them each time takes several times as long as the tests.
    """
    dropped = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def _counts(report: Path) -> dict[str, Any]:
    """Reads pytest's report: counts of tests, and the names of those that failed."""
    if not report.exists():
        return {"passed": 0, "failed": 0, "skipped": 0, "failures": ["pytest did not come to an end"]}
    passed, skipped, failures = 0, 0, []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "failed": len(failures), "skipped": skipped, "failures": sorted(failures)}


def _versions(python: Path) -> dict[str, str | None]:
    """Asks an environment for the versions of the table's columns."""
    code = f"""
import json, platform
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
print(json.dumps({{name: platform.python_version() if name == "python" else of(name) for name in {versions.PACKAGES}}}))
"""
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    found: dict[str, str | None] = json.loads(said)
    return found


def _known_failures(name: str) -> set[str]:
    rows = json.loads(TABLE.read_text())["rows"]
    return {test for row in rows if row["environment"] == name for test in row["failures"]}


def _keep(row: dict[str, Any]) -> None:
    """Replaces the row of this environment in the table, and the table on the page."""
    kept = json.loads(TABLE.read_text())
    order = [each.name for each in ENVIRONMENTS]
    rows = [each for each in kept["rows"] if each["environment"] != row["environment"]] + [row]
    kept["rows"] = sorted(rows, key=lambda each: order.index(each["environment"]))
    TABLE.write_text(json.dumps(kept, indent=1) + "\n")
    versions.tested.cache_clear()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{page_table()}\n{END}{rest.partition(END)[2]}")


def page_table() -> str:
    """Returns the table as the page has it."""
    heads, *rows = versions.cells()
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ("---",) * len(heads), *rows))


if __name__ == "__main__":
    main()
