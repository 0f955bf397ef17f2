"""A plugin of pytest: which tests run which lines of the library, and running those alone that run one.

    python -m pytest -p tools.lines_of_tests --lines-to FOLDER ...      notes it, a file a process
    python -m pytest -p tools.lines_of_tests --only FILE ...            runs the tests that FILE names, in its order

Lines that run while a test is set up count for all tests of its module, which may share what was set up. Two kinds of
lines are credited to too few: those in other processes, of which a test that starts some has none, and those whose
result is cached, which the first test alone runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

LIBRARY = str(Path(__file__).resolve().parent.parent / "megatron_cp") + os.sep
monitoring = sys.monitoring


def digest(library: Path) -> str:
    """Returns a digest of all files of the library; line numbers are those of one digest."""
    found = hashlib.sha256()
    for file in sorted(library.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the plugin."""
    parser.addoption("--lines-to", metavar="FOLDER", help="notes there which tests run which lines")
    parser.addoption("--only", metavar="FILE", help="runs the tests that it names, one a line, in its order")


def pytest_configure(config: pytest.Config) -> None:
    """Begins to note lines if asked to."""
    folder = config.getoption("--lines-to")
    # Of several processes the one that hands out tests runs none.
    if folder and not config.getoption("numprocesses", None):
        config.pluginmanager.register(Lines(Path(folder)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests that are to run."""
    chosen = config.getoption("--only")
    if chosen:
        order = {name: place for place, name in enumerate(Path(chosen).read_text().splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


class Lines:
    """Notes lines by `sys.monitoring`, each once a test, which costs little."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: set[tuple[str, int]] = set()
        self.tests: dict[str, float] = {}
        self.of_test: dict[str, set[tuple[str, int]]] = {}
        self.of_setup: dict[str, set[tuple[str, int]]] = defaultdict(set)
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "lines of tests")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.PY_START, self.function)
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self.line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.PY_START)

    def function(self, code: CodeType, _: int) -> Any:
        if code.co_filename.startswith(LIBRARY):
            monitoring.set_local_events(monitoring.COVERAGE_ID, code, monitoring.events.LINE)
        return monitoring.DISABLE

    def line(self, code: CodeType, line: int) -> Any:
        self.seen.add((code.co_filename.removeprefix(LIBRARY), line))
        return monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self.seen = set()
        monitoring.restart_events()
        try:
            return (yield)
        finally:
            self.of_setup[item.nodeid.partition("::")[0]] |= self.seen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.seen = set()
        monitoring.restart_events()
        start = time.monotonic()
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] = time.monotonic() - start
            self.of_test[item.nodeid] = self.seen

    def pytest_sessionfinish(self) -> None:
        monitoring.set_events(monitoring.COVERAGE_ID, 0)
        for event in (monitoring.events.PY_START, monitoring.events.LINE):
            monitoring.register_callback(monitoring.COVERAGE_ID, event, None)
        monitoring.free_tool_id(monitoring.COVERAGE_ID)
        tests = list(self.tests)
        lines = defaultdict(list)
        for number, test in enumerate(tests):
            for file, line in self.of_test[test] | self.of_setup[test.partition("::")[0]]:
                lines[f"{file}:{line}"].append(number)
        found = {
            "library": digest(Path(LIBRARY)),
            "tests": tests,
            "seconds": [round(self.tests[test], 3) for test in tests],
            "lines": lines,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(found))
