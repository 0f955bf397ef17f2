"""The curves of a run: what its metrics say, smoothed, in parts by the context-parallel size that trained them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.apps.train.options import METRICS
from megatron_cp.page import DISTINCT

Entry = dict[str, Any]
LOSS_PICTURE = "loss.png"
_PARTS = 30  # of a curve: a value is smoothed over one of them on either side


def entries_of(folder: Path) -> list[Entry]:
    """Returns the metrics of each step of the run in a folder, without a line that is not whole."""
    entries = []
    for line in (folder / METRICS).read_text().splitlines():
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def losses_of(entries: Sequence[Entry]) -> dict[int, float]:
    """Returns the loss of each step."""
    return {entry["step"]: entry["loss"] for entry in entries}


def smoothed(values: Sequence[float]) -> NDArray[np.float64]:
    """Returns the mean of each value and its neighbours, as many on either side, so that nothing lags behind.

    NaN and infinities are left out; where there is nothing else, the mean is NaN.
    """
    given = np.asarray(values, np.float64)
    is_finite = np.isfinite(given)
    sums, counts = (np.append(0, np.cumsum(each)) for each in (np.where(is_finite, given, 0), is_finite))
    places = np.arange(given.size)
    reach = np.minimum(max(1, given.size // _PARTS), np.minimum(places, given.size - 1 - places))
    first, last = places - reach, places + reach + 1
    number = counts[last] - counts[first]
    return np.where(number > 0, (sums[last] - sums[first]) / np.maximum(number, 1), np.nan)


def stretches(entries: Sequence[Entry], label: str) -> list[tuple[str, range]]:
    """Returns the run's stretches, each with the size that trained it: a run may be resumed at another one.

    A stretch begins with the last step of the one before, so that the curve has no gaps. Steps that do not say their
    size have the name `label`.
    """
    found: list[tuple[str, range]] = []
    for place, entry in enumerate(entries):
        size = entry.get("context_parallel_size")
        name = label if size is None else f"CP={size}"
        if not found or found[-1][0] != name:
            found.append((name, range(max(0, place - 1), place)))
        found[-1] = name, range(found[-1][1].start, place + 1)
    return found


def lines_of(entries: Sequence[Entry], label: str, key: str) -> list[dict[str, Any]]:
    """Returns a line for each size that trained the run, with gaps where another one did.

    Returns:
        `name`, `x`, `y` and `smooth` of each, as a page's curves take them.
    """
    steps, values = ([entry.get(name, math.nan) for entry in entries] for name in ("step", key))
    columns = [np.array(each, np.float64) for each in (steps, values, smoothed(values))]
    found: dict[str, list[NDArray]] = {}
    for name, places in stretches(entries, label):
        part = [column[places.start : places.stop] for column in columns]
        if name in found:
            gap = [part[0][:1], np.array([math.nan]), np.array([math.nan])]
            part = [np.concatenate(each) for each in zip(found[name], gap, part, strict=True)]
        found[name] = part
    return [{"name": name, "x": x, "y": y, "smooth": smooth} for name, (x, y, smooth) in found.items()]


def validation_of(entries: Sequence[Entry]) -> dict[int, float]:
    """Returns the loss on held-out documents at the steps that have one."""
    return {entry["step"]: entry["validation_loss"] for entry in entries if "validation_loss" in entry}


def loss_figure(entries: Sequence[Entry], label: str, reference: Sequence[Entry] | None) -> Any:
    """Draws losses over steps, raw and smoothed, in a colour for each size, above those of one rank."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    if reference is not None:
        theirs = losses_of(reference)
        axes.plot(list(theirs), list(theirs.values()), label="CP=1, to compare", linewidth=5, color="0.8")
    for place, line in enumerate(lines_of(entries, label, "loss")):
        colour = DISTINCT[place % len(DISTINCT)]
        axes.plot(line["x"], line["y"], color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(line["x"], line["smooth"], color=colour, linewidth=1.8, label=line["name"])
    if held_out := validation_of(entries):
        axes.plot(list(held_out), list(held_out.values()), "o--", color="0.2", markersize=4, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token (thin: each step)")
    axes.legend(frameon=False)
    return figure
