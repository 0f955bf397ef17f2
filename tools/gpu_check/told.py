"""A plugin of pytest, for `-p tools.gpu_check.told`: it writes a line of JSON for each test as soon as it has run."""

from __future__ import annotations

import json

import pytest


class Told:
    """Writes to the terminal of the process that gathers the reports of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passes by its call, and fails or is skipped in any phase."""
        if report.passed and report.when != "call":
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
        if not report.passed:
            row["why"] = reason(report)
        self._tell(row)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported fails."""
        if report.failed:
            self._tell({"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "why": reason(report)})

    def _tell(self, row: dict[str, object]) -> None:
        self.config.get_terminal_writer().line("\n" + json.dumps(row), flush=True)


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the first line of what was raised, or why the test was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    lines = report.longreprtext.splitlines()
    raised = [line[2:].strip() for line in lines if line.startswith("E ")]
    return next(filter(None, raised or reversed(lines)), "")[:300]


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin, but not in xdist's workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Told(config))
