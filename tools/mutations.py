"""Breaks lines of the library at random, one at a time, and says which of the breakages no test sees.

    python tools/mutations.py --count 30 --seed 1 --list            what would be broken
    python tools/mutations.py --map                                 notes which tests run which lines: a quarter hour
    python tools/mutations.py --count 30 --seed 1 --run             breaks each in a copy, and runs its tests there

The tests are those of `make test`, or with `--thorough`, given to `--map` and `--run` alike, those of `make test-all`.
`--run` runs the tests that run the line, quick ones first, until one fails or their time is up. For a line that only
runs when its module is imported, these are the tests that run any line of the file. `--run --all` takes all the time
that they need and goes on with the tests that are not in the map: what starts other processes.

A breakage changes one operator, number, truth value or branch, or leaves out one call. Some change nothing that anyone
could see, such as a bound that is generous anyway: read what survives before you write a test for it.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lines_of_tests import digest

HERE = Path(__file__).resolve().parent.parent
ROOMS = ("layout", "plan", "planner", "exchange", "executor", "softmax", "linear", "batch")
# Need a GPU, or packages of CUDA: their tests run elsewhere.
NEEDS_GPU = ("flash_attn.py", "fla.py", "mamba_ssm.py", "launch.py", "stalls.py")
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+"}
# Their ranks or commands run in other processes, where no line is noted.
STARTS_PROCESSES = (
    *(f"tests/functional_tests/test_{name}.py" for name in (
        "benchmarks", "cluster", "disagreement", "examples",
        "faults", "package_kernels", "megatron_batch", "megatron_models", "megatron_oracle",
        "megatron_stock", "pretrain_example", "train",
    )),
    *(f"tests/unit_tests/{name}.py" for name in (
        "exchange/test_kernel_copies", "exchange/test_triton_compiled", "executor/test_launch",
    )),
)  # fmt: skip
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.lines_of_tests")
HANG = 150  # seconds that a test may take, many times what the longest does


@dataclass(frozen=True)
class Mutation:
    """A line, before and after its mutation."""

    path: Path
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n    - {self.before.strip()}\n    + {self.after.strip()}"

    def apply(self, root: Path) -> None:
        """Breaks the line in a checkout."""
        file = root / self.path
        lines = file.read_text().splitlines(keepends=True)
        assert lines[self.line - 1].rstrip("\n") == self.before, f"{self.path} is another one"
        lines[self.line - 1] = self.after + "\n"
        file.write_text("".join(lines))


def mutations(count: int, seed: int) -> list[Mutation]:
    """Draws mutations; the chance of a file is proportional to its places to break."""
    found = [
        mutation
        for room in ROOMS
        for path in sorted((HERE / "megatron_cp" / room).rglob("*.py"))
        if path.name not in NEEDS_GPU
        for mutation in _of_file(path)
    ]
    random.Random(seed).shuffle(found)
    return list(itertools.islice(filter(_compiles, found), count))


def _compiles(mutation: Mutation) -> bool:
    """Returns False if a mutation has lost a bracket."""
    lines = (HERE / mutation.path).read_text().splitlines()
    lines[mutation.line - 1] = mutation.after
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


def _of_file(path: Path) -> Iterator[Mutation]:
    text = path.read_text()
    lines = text.splitlines()
    for first, last, new in _edits(ast.parse(text)):
        (line, start), (last_line, end) = first, last
        if line == last_line:
            before = lines[line - 1]
            after = before[:start] + new + before[end:]
            if after != before:
                yield Mutation(path.relative_to(HERE), line, before, after)


def _edits(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    """Yields places, from the first character to the last as line and byte, and the text to write there."""
    for node in _looked_at(tree):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                yield _after(left), _before(right), f" {COMPARISONS[type(op)]} "
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                yield _after(left), _before(right), f" {ARITHMETIC[type(op)]} "
            case ast.BoolOp(op=op, values=[left, right]):
                yield _after(left), _before(right), " or " if isinstance(op, ast.And) else " and "
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield _before(node), _before(operand), ""
            case ast.Constant(value=bool(value)):
                yield _before(node), _after(node), str(not value)
            case ast.Constant(value=int(value)):
                yield _before(node), _after(node), str(value + 1)
            case ast.IfExp(test=test):
                yield _before(test), _after(test), "True"
            case ast.Expr(value=ast.Call()):
                yield _before(node), _after(node), "pass"


def _looked_at(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that are executed, but for errors, annotations and text."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
            continue
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _looked_at(ast.Module(child.body, []))
            continue
        yield child
        yield from _looked_at(child)


def _before(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _after(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


class Map:
    """The tests that run each line, quick ones first."""

    def __init__(self, folder: Path) -> None:
        found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        if not found:
            raise SystemExit(f"{folder}: got nothing; allowed: what --map wrote.")
        if {one["library"] for one in found} != {digest(HERE / "megatron_cp")}:
            raise SystemExit(f"{folder}: got lines of another library; allowed: what --map wrote for this one.")
        self.seconds: dict[str, float] = {}
        self.of_line: dict[str, list[str]] = {}
        for one in found:
            self.seconds |= dict(zip(one["tests"], one["seconds"], strict=True))
            for line, numbers in one["lines"].items():
                self.of_line.setdefault(line, []).extend(one["tests"][number] for number in numbers)

    def tests_of(self, mutation: Mutation, seconds: float) -> list[str]:
        """Returns the tests that run the line or one next to it in its statement, else those that run any line of its
        file, else all; the quickest, up to `seconds`.
        """
        file = mutation.path.relative_to("megatron_cp")
        near = (f"{file}:{line}" for line in (mutation.line, mutation.line - 1, mutation.line + 1))
        of_file = {test for line, tests in self.of_line.items() if line.startswith(f"{file}:") for test in tests}
        found = next((self.of_line[line] for line in near if line in self.of_line), of_file or self.seconds)
        found = sorted(found, key=self.seconds.__getitem__)
        sums = itertools.accumulate(self.seconds[test] for test in found)
        return [test for test, taken in zip(found, sums, strict=True) if taken <= seconds or test == found[0]]


def write_map(folder: Path, processes: int, chosen: list[str]) -> int:
    """Runs the tests once, and notes what they run."""
    shutil.rmtree(folder, ignore_errors=True)
    left_out = itertools.chain(*(("--ignore", name) for name in STARTS_PROCESSES))
    command = [*PYTEST, "--lines-to", str(folder), "-n", str(processes), "--dist", "worksteal", *chosen, *left_out]
    return subprocess.run(command, cwd=HERE, env=os.environ | {"PYTHONPATH": str(HERE)}, check=False).returncode


def seen_by(mutation: Mutation, tests: Map, seconds: float, others: list[str] | None) -> str | None:
    """Returns the first test that fails with the line broken; None if none does.

    Args:
        others: arguments of pytest that choose among the tests which start processes, and are run last; or None.
    """
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root, only = Path(folder) / "copy", Path(folder) / "tests"
        shutil.copytree(HERE, root, ignore=shutil.ignore_patterns(".git", ".venv", ".mypy_cache", "__pycache__"))
        mutation.apply(root)
        for arguments in (["init", "-q"], ["add", "-A"]):  # what git knows is a subject of tests
            subprocess.run(["git", *arguments], cwd=root, check=True)
        names = tests.tests_of(mutation, seconds)
        only.write_text("\n".join(names))
        runs = [["--only", str(only), *sorted({name.partition("::")[0] for name in names})]]
        if others is not None:
            runs.append([*others, *(name for name in STARTS_PROCESSES if (root / name).exists())])
        for number, arguments in enumerate(runs):
            limit = ["-o", f"timeout={HANG}"] if number == 0 else []
            done = subprocess.run(
                [*PYTEST, "-x", *limit, *arguments], cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if failed:
                return failed[0]
            if "ImportError while loading conftest" in done.stderr:
                return "every test, since the package cannot be imported"
            if "+ Timeout +" in done.stdout + done.stderr:
                return f"a test that takes more than {HANG} s"
            if done.returncode < 0:
                return f"a test whose process ends by signal {-done.returncode}"
            if done.returncode:
                raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
    return None


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2, help="breakages or, with --map, tests at a time")
    parser.add_argument("--seconds", type=float, default=240, help="of the quickest tests of a line (default: 240)")
    parser.add_argument(
        "--all", action="store_true", help="all of them, and those that start processes: half an hour each"
    )
    parser.add_argument("--thorough", action="store_true", help="the thorough tests as well as those of make test")
    parser.add_argument("--lines", type=Path, default=HERE / "build" / "lines", metavar="FOLDER", help="of --map")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--list", action="store_true")
    way.add_argument("--map", action="store_true")
    way.add_argument("--run", action="store_true")
    options = parser.parse_args()
    chosen_tests = [] if options.thorough else ["-m", "not thorough"]
    if options.map:
        return write_map(options.lines, options.processes, chosen_tests)
    chosen = list(enumerate(mutations(options.count, options.seed)))
    if options.list:
        print("\n".join(f"{number}: {mutation}" for number, mutation in chosen))
        return 0
    tests = Map(options.lines)

    def run(numbered: tuple[int, Mutation]) -> bool:
        number, mutation = numbered
        start = time.monotonic()
        others = chosen_tests if options.all else None
        test = seen_by(mutation, tests, math.inf if options.all else options.seconds, others)
        print(f"{number}: {mutation}\n    {test or 'NO TEST SEES IT'} ({time.monotonic() - start:.0f} s)", flush=True)
        return test is not None

    with ThreadPoolExecutor(options.processes) as pool:
        seen = list(pool.map(run, chosen))
    print(f"{sum(seen)} of {len(seen)} are seen by a test")
    return 0 if all(seen) else 1


if __name__ == "__main__":
    sys.exit(main())
