"""The summary of a check: at most 30 lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LINES, WIDTH = 30, 180
FEWEST_FAILURES = 4  # lines that failures have, however many rows there are


@dataclass
class Result:
    """The result of a step.

    Attributes:
        limit: seconds that it had.
        failures: one line each.
        rows: lines of JSON that its commands wrote.
        skipped: why it did not run, if it did not.
        cut: it was ended, since its seconds were over.
    """

    name: str
    limit: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""
    cut: bool = False

    @property
    def status(self) -> str:
        """Returns passed, failed, cut or skipped."""
        return "skipped" if self.skipped else "failed" if self.failures else "cut" if self.cut else "passed"

    def take(self, row: dict[str, Any]) -> None:
        """Takes a line of a command; it may be a failure."""
        self.rows.append(row)
        if row.get("outcome") == "failed":
            self.failures.append(f"{row['test'].rpartition('/')[2]}: {row['why']}")
        elif "not_run" in row and not row["is_refused"]:
            self.failures.append(f"{row['row']}, {row['column']}: {row['not_run']}")

    def line(self) -> str:
        """Returns the line of the step."""
        if self.skipped:
            return f"{self.name:<9}skipped  {self.skipped}"
        tests = Counter(row["outcome"] for row in self.rows if "test" in row)
        told = [f"{tests[name]} {name}" for name in ("passed", "failed", "skipped") if tests[name]]
        measured = sum("device_us" in row for row in self.rows)
        told += [f"{measured} rows measured"] if measured else []
        told += ["cut: its time was over"] if self.cut else []
        return f"{self.name:<9}{self.status:<8}{self.seconds:>4.0f} of {self.limit:.0f} s: {', '.join(told) or 'ran'}"


def summary(head: str, results: list[Result], began: float, now: float, budget: float) -> list[str]:
    """Returns the lines: what was checked, steps, failures, and each measured row beside its prediction.

    Args:
        head: the device and the versions.
        results: of all steps.
        began, now: seconds of one clock.
        budget: seconds.
    """
    top = [f"gpu_check: {now - began:.0f} of {budget:.0f} s on {head}", *(result.line() for result in results)]
    rows = [line for result in results for line in measured_lines(result.rows)]
    if any("device_us" in row for result in results for row in result.rows):
        rows.insert(
            0, "measured us / predicted by h100 = ratio; ~: the host was slower; peak: of memory, over the plan's"
        )
    failures = [f"FAILED {result.name}: {text}" for result in results for text in result.failures]
    room = max(LINES - len(top) - len(rows), FEWEST_FAILURES)
    if len(failures) > room:
        failures[room - 1 :] = [f"and {len(failures) - room + 1} failures more: gpu_check.jsonl and gpu_check.log"]
    return [line.replace("\n", " ")[:WIDTH] for line in (*top, *failures, *rows)][:LINES]


def measured_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each row of a step's table, with its columns."""
    found: dict[str, list[str]] = {}
    peaks: dict[str, list[float]] = {}
    refused: dict[str, list[str]] = {}
    for row in rows:
        if "not_run" in row:
            refused.setdefault(row["not_run"], []).append(row["row"])
        elif "device_us" in row:
            mark = "~" if row["host_bound"] else ""
            times = f"{mark}{row['device_us']:,.0f}/{row['predicted_us']:,.0f}"
            ratio = row["device_us"] / row["predicted_us"]
            found.setdefault(row["row"], []).append(f"{row['column']} {times}={ratio:.2f}")
            if row.get("peak_predicted"):
                peaks.setdefault(row["row"], []).append(row["peak"] / row["peak_predicted"])
        elif "max_loss_diff" in row:
            told = (f"{name} {row[name]}" for name in ("max_loss_diff", "first_step_grad_diff", "tokens_per_second"))
            found["train, CP 2 beside 1"] = list(told)
    worst = {name: f" | peak {max(each):.2f}" for name, each in peaks.items()}
    lines = [f"{name:<20} {' | '.join(cells)}{worst.get(name, '')}" for name, cells in found.items()]
    return lines + [f"not run: {', '.join(dict.fromkeys(names))}: {why}" for why, names in refused.items()]
