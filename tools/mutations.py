"""Breaks lines of the library at random, one at a time, and says which of the breakages no test sees.

    python tools/mutations.py --count 30 --seed 1 --list            what would be broken
    python tools/mutations.py --count 30 --seed 1 --apply 7         breaks that line in this checkout, to look into it
    python tools/mutations.py --count 30 --seed 1 --run             breaks each in a copy, and runs the tests there

A breakage changes one operator, number, truth value or branch, or leaves out one call. Some change nothing that anyone
could see, such as a bound that is generous anyway: read what survives before you write a test for it.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
ROOMS = ("layout", "plan", "planner", "exchange", "executor", "softmax", "linear", "batch")
# Need a GPU, or packages of CUDA: their tests run elsewhere.
ELSEWHERE = ("flash_attn.py", "fla.py", "mamba_ssm.py", "launch.py", "stalls.py")
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+"}
# The tests that are quick to see most of what can go wrong, and then all others but those that start whole programs.
FIRST = (
    "tests/unit_tests/{room}",
    "tests/unit_tests/layout tests/unit_tests/exchange tests/unit_tests/executor tests/unit_tests/planner "
    "tests/unit_tests/softmax tests/unit_tests/linear tests/unit_tests/test_arguments.py",
    "tests/functional_tests/test_schemes.py tests/functional_tests/test_pad_rows.py "
    "tests/functional_tests/test_in_flight.py tests/functional_tests/test_linear_operations.py",
    "tests/functional_tests/test_parity.py tests/functional_tests/test_scheme_fuzz.py "
    "tests/functional_tests/test_fuzz.py tests/functional_tests/test_wire_options.py "
    "tests/functional_tests/test_message_buffers.py tests/functional_tests/test_isolation.py",
    "tests --ignore tests/functional_tests/test_faults.py --ignore tests/functional_tests/test_train.py "
    "--ignore tests/functional_tests/test_cluster.py",
)


@dataclass(frozen=True)
class Mutation:
    """One line, before and after."""

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
    """So many, a file as likely as it has places to break."""
    found = [
        mutation
        for room in ROOMS
        for path in sorted((HERE / "megatron_cp" / room).rglob("*.py"))
        if path.name not in ELSEWHERE
        for mutation in _of_file(path)
    ]
    random.Random(seed).shuffle(found)
    return list(itertools.islice(filter(_compiles, found), count))


def _compiles(mutation: Mutation) -> bool:
    """Not where a bracket was lost."""
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
    """Places, as line and byte of the first and behind the last character, and what to write there."""
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


def seen_by(mutation: Mutation, processes: int) -> str | None:
    """The first test that fails with the line broken; None if none does."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder) / "copy"
        shutil.copytree(HERE, root, ignore=shutil.ignore_patterns(".git", ".venv", ".mypy_cache", "__pycache__"))
        mutation.apply(root)
        room = mutation.path.parts[1]
        environment = os.environ | {"PYTHONPATH": str(root)}
        for selection in FIRST:
            chosen = selection.format(room=room).split()
            if chosen[0] == f"tests/unit_tests/{room}" and not (root / chosen[0]).exists():
                continue
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", str(processes)]
            try:
                done = subprocess.run(
                    [*command, *chosen], cwd=root, env=environment, capture_output=True, text=True, timeout=2400
                )
            except subprocess.TimeoutExpired:
                return f"tests that never ended: {selection}"
            if done.returncode:
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0] if failed else done.stdout[-300:]
    return None


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="skips those before")
    parser.add_argument("--processes", type=int, default=2)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--list", action="store_true")
    way.add_argument("--apply", type=int, metavar="NUMBER")
    way.add_argument("--run", action="store_true")
    options = parser.parse_args()
    drawn = mutations(options.count, options.seed)
    if options.apply is not None:
        drawn[options.apply].apply(HERE)
        print(drawn[options.apply])
        return 0
    survived = 0
    for number, mutation in list(enumerate(drawn))[options.first :]:
        print(f"{number}: {mutation}", flush=True)
        if options.run:
            start = time.monotonic()
            test = seen_by(mutation, options.processes)
            survived += test is None
            print(f"    {test or 'NO TEST SEES IT'} ({time.monotonic() - start:.0f} s)", flush=True)
    if options.run:
        print(f"{len(drawn) - options.first - survived} of {len(drawn) - options.first} are seen by a test")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
