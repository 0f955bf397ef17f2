"""Writes the files of a run that are there to be looked at: `run.json`, `log.txt`, and the page `report.html`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron_cp.apps.train.curves import Entry, lines_of, validation_of
from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.run_folder import write_whole, writing
from megatron_cp.cli import environment, environment_facts
from megatron_cp.page import save_page

RUN_FILE, LOG_FILE, PAGE = "run.json", "log.txt", "report.html"
_STEPS_SHOWN = 200
_TIMES = {
    "batch_seconds": "making packs and plans", "forward_backward_seconds": "forward and backward",
    "optimizer_seconds": "optimizer", "other_seconds": "the rest, with waiting for the device",
}  # fmt: skip


class RunRecord:
    """The file that says how a run came to be: written as it starts, and again as it ends.

    A run that goes on in its folder keeps what was written before, under `before`.
    """

    def __init__(self, folder: Path, options: TrainingOptions, command: str) -> None:
        self._folder = folder
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

    def say(self, text: str) -> None:
        """Adds text to the run's log."""
        with writing(self._folder, LOG_FILE), (self._folder / LOG_FILE).open("a") as file:
            file.write(f"{_now()}\n{text}\n\n")

    def ended(self, result: dict[str, Any] | None = None, error: str | None = None) -> None:
        """Writes the run's end and its result, or the error that ended it."""
        self._data |= {"ended": _now(), "result": result, "error": error}
        self._write()

    def _write(self) -> None:
        with writing(self._folder, RUN_FILE):
            write_whole(self._folder / RUN_FILE, json.dumps(self._data, indent=2) + "\n")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _before(path: Path) -> list[Any]:
    """Returns what a run that goes on wrote before; a file that is damaged or not ours is left out."""
    try:
        earlier = json.loads(path.read_text())
        return [*earlier.pop("before", []), earlier]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return []


def write_report(
    folder: Path, options: TrainingOptions, command: str, found: dict[str, Any], label: str,
    entries: Sequence[Entry], reference: Sequence[Entry] | None, data: dict[str, Any], verdict: tuple[str, bool],
    limits: dict[str, float],
) -> None:  # fmt: skip
    """Writes the run's page; the verdict is its text, and True if it is good news."""
    curves = [("loss", "loss, nats per token"), ("grad_norm", "gradient norm"), ("tokens_per_second", "tokens/s")]
    report = {
        "title": f"Training run {folder.name}",
        "verdict": {"text": verdict[0], "ok": verdict[1]},
        "command": command,
        "environment": environment_facts(found),
        "curves": [
            {"title": title, "lines": _lines(entries, reference, label, key)}
            for key, title in curves
            if any(key in entry for entry in entries)
        ],
        "layers": data.get("layers"),
        "tables": [
            table
            for table in (
                _numbers(data, reference, limits, label), _times(entries, reference, label), _samples(data),
                _steps(entries), _options(options),
            )
            if table["rows"]
        ],
    }  # fmt: skip
    with writing(folder, PAGE):
        save_page(report, folder / PAGE)


def _lines(entries: Sequence[Entry], reference: Sequence[Entry] | None, label: str, key: str) -> list[dict[str, Any]]:
    lines = lines_of(entries, label, key)
    if reference is not None:
        lines += [{**line, "name": "CP=1, to compare", "beside": True} for line in lines_of(reference, "CP=1", key)][
            -1:
        ]
    if key == "loss" and (held_out := validation_of(entries)):
        lines.append({"name": "validation", "x": list(held_out), "y": list(held_out.values())})
    return lines


def _numbers(
    data: dict[str, Any], reference: Sequence[Entry] | None, limits: dict[str, float], label: str
) -> dict[str, Any]:
    rows: list[list[Any]] = [
        [name.replace("_", " "), data[name], limits.get(name)]
        for name in (
            "steps", "first_loss", "final_loss", "validation_loss", "tokens_per_second", "pad_tokens", "max_loss_diff",
            "max_validation_diff", "first_step_grad_diff",
        )
        if data.get(name) is not None
    ]  # fmt: skip
    bad = [[place, 1] for place, (_, value, limit) in enumerate(rows) if limit is not None and not value <= limit]
    text = f"Differences are between {label} and CP=1." if reference is not None else ""
    return {"title": "Numbers", "text": text, "columns": ["", label, "limit"], "rows": rows, "bad": bad}


def _times(entries: Sequence[Entry], reference: Sequence[Entry] | None, label: str) -> dict[str, Any]:
    """Returns the mean milliseconds of each part of a step, without the first step, which also warms up."""
    columns = [(label, entries), *([("CP=1", reference)] if reference is not None else [])]
    timed = [(name, [each for each in of[1:] if "batch_seconds" in each]) for name, of in columns]
    timed = [(name, of) for name, of in timed if of]
    rows = [
        [text, *(1e3 * sum(_part(entry, key) for entry in of) / len(of) for _, of in timed)]
        for key, text in _TIMES.items()
    ]
    return {
        "title": "Time of a step, by the clock of the first rank's host",
        "text": "Mean milliseconds a step, without the first. Transfers are inside forward and backward.",
        "columns": ["", *(f"{name}, ms" for name, _ in timed)],
        "rows": rows if timed else [],
    }


def _part(entry: Entry, key: str) -> float:
    if key in entry:
        return float(entry[key])
    return float(max(0.0, entry["seconds"] - sum(entry[name] for name in _TIMES if name in entry)))


def _samples(data: dict[str, Any]) -> dict[str, Any]:
    rows = [[each["prompt"], each["text"]] for each in data.get("samples") or []]
    text = "The likeliest token each time, after the beginnings of documents."
    return {"title": "What the model writes", "text": text, "columns": ["beginning", "written"], "rows": rows}


def _steps(entries: Sequence[Entry]) -> dict[str, Any]:
    names = [name for name, value in entries[0].items() if isinstance(value, int | float)] if entries else []
    each = -(-len(entries) // _STEPS_SHOWN)
    shown = [*entries[::each], *([entries[-1]] if entries and (len(entries) - 1) % each else [])]
    return {
        "title": "Steps",
        "text": "" if each == 1 else f"Every step number {each} of {len(entries)}; metrics.jsonl has all.",
        "columns": [name.replace("_", " ") for name in names],
        "rows": [[entry.get(name) for name in names] for entry in shown],
    }


def _options(options: TrainingOptions) -> dict[str, Any]:
    rows = [[f"--{name.replace('_', '-')}", _word(value)] for name, value in asdict(options).items()]
    return {"title": "Options", "columns": ["option", "value"], "rows": rows}


def _word(value: Any) -> str | None:
    if value is None:
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
