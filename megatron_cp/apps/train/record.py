"""Writes what a run leaves to look at: `run.json`, and the page of `--report`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_cp.apps.train.options import METRICS, TrainingOptions
from megatron_cp.apps.train.run_folder import write_whole, writing
from megatron_cp.cli import environment, environment_facts
from megatron_cp.files import whole_file
from megatron_cp.page import distinct_colours, save_page

Entry = dict[str, Any]
RUN_FILE, LOSS_PICTURE = "run.json", "loss.png"


def entries_of(folder: Path) -> list[Entry]:
    """Returns the metrics of each step of the run in a folder, without a line that is not whole."""
    entries = []
    for line in (folder / METRICS).read_text().splitlines() if (folder / METRICS).exists() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            entry = json.loads(line)
            entries += [entry] if int(entry["step"]) == entry["step"] else []
    return entries


def losses_of(entries: Sequence[Entry]) -> dict[int, float]:
    """Returns the loss of each step."""
    return {entry["step"]: entry["loss"] for entry in entries}


class RunRecord:
    """The file that says how a run came to be: written as it starts, and again as it ends.

    A run that goes on in its folder keeps what was written before, under `before`.

    Args:
        folder: the run's folder.
        options: the run's options.
        command: the command line that started it.
        report: the path of a page to write at the end; None for none.
    """

    def __init__(self, folder: Path, options: TrainingOptions, command: str, report: str | None = None) -> None:
        self._folder, self._report = folder, report
        self.environment = environment()
        self._data: dict[str, Any] = {
            "command": command,
            "started": _now(),
            "ended": None,
            "result": None,
            "error": None,
            "options": asdict(options),
            "environment": self.environment,
            "before": _before(folder / RUN_FILE),
        }
        self._write()

    def ended(self, result: dict[str, Any] | None = None, error: str | None = None) -> None:
        """Writes the run's end and its result, or the error that ended it."""
        self._data |= {"ended": _now(), "result": result, "error": error}
        self._write()

    def _write(self) -> None:
        with writing(self._folder, RUN_FILE):
            write_whole(self._folder / RUN_FILE, json.dumps(self._data, indent=2) + "\n")

    def report(
        self, verdict: tuple[str, bool], entries: Sequence[Entry], reference: Sequence[Entry] = (),
        numbers: Sequence[list[Any]] = (),
    ) -> None:  # fmt: skip
        """Draws the losses, and writes the run's page if one was asked for.

        Args:
            verdict: the text of the page's first line, and True if it is good news.
            entries, reference: the metrics of the run, and of that on one rank.
            numbers: rows of a name, a value and its limit.
        """
        if entries and draws_pictures():
            self._draw_losses(curves_of(entries, reference)[0])
        if self._report is not None:
            options = [[f"--{name.replace('_', '-')}", _word(value)] for name, value in self._data["options"].items()]
            tables = [
                {"title": "Numbers", "columns": ["", "value", "limit"], "rows": list(numbers)},
                {"title": "Options", "columns": ["option", "value"], "rows": options, "folded": True},
            ]  # fmt: skip
            page = {
                "title": f"Training run {self._folder.name}", "verdict": {"text": verdict[0], "ok": verdict[1]},
                "command": self._data["command"], "charts": curves_of(entries, reference),
                "tables": tables[not numbers :], "facts": environment_facts(self.environment),
            }  # fmt: skip
            with writing(self._folder, "the report"):
                save_page(page, self._report)

    def _draw_losses(self, chart: dict[str, Any]) -> None:
        from matplotlib.figure import Figure  # not pyplot: no global state, no display

        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for line, colour in zip(chart["lines"], distinct_colours(len(chart["lines"])), strict=True):
            width, shade = (5.0, "0.8") if line.get("beside") else (1.2, colour)
            axes.plot(line["x"], line["y"], label=line["name"], linewidth=width, color=shade)
        axes.set(xlabel=chart["x"], ylabel=chart["y"])
        axes.legend(frameon=False)
        with writing(self._folder, LOSS_PICTURE), whole_file(self._folder / LOSS_PICTURE) as new:
            figure.savefig(new, dpi=130)


def draws_pictures() -> bool:
    """Returns True if matplotlib is installed, with which a run draws its losses and its plan."""
    return find_spec("matplotlib") is not None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _before(path: Path) -> list[Any]:
    """Returns what a run that goes on wrote before; a file that is damaged or not ours is left out."""
    try:
        earlier = json.loads(path.read_text())
        return [*earlier.pop("before", []), earlier]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return []


def curves_of(entries: Sequence[Entry], reference: Sequence[Entry]) -> list[dict[str, Any]]:
    """Returns the charts of a run: loss, its difference from one rank, gradient norm and tokens a second.

    A run that was resumed at another size has a line for each size, with gaps where another one trained.
    """
    charts, titles = [], {"loss": "loss, nats per token", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}
    for key, title in titles.items():
        steps = [entry["step"] for entry in entries]
        lines = []
        if reference:
            at, values = [entry["step"] for entry in reference], [entry.get(key, math.nan) for entry in reference]
            lines.append({"name": "CP=1, to compare", "x": at, "y": values, "beside": True})
        sizes = [entry.get("context_parallel_size") for entry in entries]
        for size in dict.fromkeys(sizes):
            values = [
                entry.get(key, math.nan) if of == size else math.nan for of, entry in zip(sizes, entries, strict=True)
            ]
            lines.append({"name": f"CP={size}", "x": steps, "y": values})
        charts.append({"title": title, "x": "step", "y": title, "lines": lines})
    if reference:
        ours, theirs = losses_of(entries), losses_of(reference)
        shared = [step for step in ours if step in theirs]
        line = {"name": "difference", "x": shared, "y": [ours[step] - theirs[step] for step in shared]}
        title = "loss minus that of CP=1"
        charts.insert(1, {"title": title, "x": "step", "y": title, "lines": [line]})
    return charts


def _word(value: Any) -> str | None:
    return value if value is None else " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
