"""`save_page`: writes results as one HTML file, which a browser opens without a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from megatron_cp.errors import ArgumentError
from megatron_cp.files import whole_file
from megatron_cp.page.fields import checked_report

# In this order: later ones use earlier ones.
_SCRIPTS = (
    "base.js", "axes.js", "tables.js", "charts.js", "results.js", "stream.js", "tiles.js", "timeline.js", "traffic.js",
    "page.js",
)  # fmt: skip


def page_of(report: dict[str, Any]) -> str:
    """Returns the page that shows a predicted training step, a training run, or results of checks and benchmarks.

    Every part of the report may be absent; its section is then left out. Texts are shown as they are: nothing in
    them is taken for HTML. The page asks for nothing outside itself, and its own policy forbids it to.

    Args:
        report: a dictionary of

            - `title`, `summary`: texts. The summary says what to run.
            - `verdict`: `text`, and `ok`: True if the text is good news.
            - `command`: the command that made the results.
            - `environment`, `facts`: pairs of a name and a text; the latter are what a prediction assumes.
            - `curves`: charts, dictionaries with `title`, `lines` and, unless it is "step", `x`, the name of the axis.
              A line has `name`, `x` and `y`, and may have `smooth`, drawn over a fainter `y`, and `beside`: True for
              one that the others are compared with, drawn wide below them. NaN leaves a gap.
            - `layers`: a dictionary for each kind of layer: `name`, `ownership`, and any of `text` (a list of lines)
              and `work`, the last two as below.
            - `tables`: dictionaries with `columns` (names) and `rows` (cells: texts, numbers or None), and any of
              `title`, `text` and `bad` (pairs of a row and a column: cells that are bad news).
            - `candidates`: dictionaries with `name`, and any of `kind` (joined by a line over cp; by default the name
              without its "cp N"), `cp`, `flags`, `milliseconds` (parts by name, and `step`, the whole),
              `tokens_per_second_per_gpu`, `mfu` (0 to 1), `bytes` (parts by name), `limit_bytes`, `chosen` (of one at
              most), `why_not`.
            - `ownership`: `lengths` of the documents in tokens; `starts`, `ends`, `ranks` of fragments: half-open
              ranges of tokens of the packed stream, which do not overlap.
            - `tiles`: who computes which part of a mask, a dictionary for each picture: `name`, `queries` and `keys`
              (tokens), `ranks` (`[n]` who computes each shape), `shapes` (`[n, 6]` a range of queries, the range of
              keys that its first query sees, and the range that its last one sees), and any of `text` and `group`
              (neighbouring ranks that compute a shape together, the first of them in `ranks`; 1 unless given).
            - `work`: a number for each rank; or `{"unit": "ms", "values": [...]}`.
            - `timeline`: `unit` ("s", "ms", "us" or "ns"), `layers` (names), and `events`, dictionaries of `rank`,
              `stream` ("compute", "send" or "receive"), `start`, `end`, `name`, `kind` ("kernel", "product", "copy",
              "transfer" or "wait"), and `peer` where there is one.
            - `traffic`: `unit` ("bytes") and `matrix`: n x n, a row sends to a column.
            - `hosts`: of each rank, a name or a number.
            - `notes`: texts.

            Numbers are Python's or numpy's; lists of numbers may be numpy arrays.

    Returns:
        The text of the HTML file.

    Raises:
        ArgumentError: a part is not what it should be, or has a name that is not known.

    Example:
        >>> page = page_of({"title": "Llama-3 8B, cp 2", "work": [120, 124]})
        >>> "Llama-3 8B, cp 2" in page
        True
    """
    checked = checked_report(report)
    folder = files("megatron_cp.page")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    scripts = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{scripts}}})();\n'
    return Template(folder.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(checked.get("title") or "A predicted training step"),
        summary=html.escape(checked.get("summary") or checked.get("verdict", {}).get("text", "")),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        report=_json(checked),
    )


def save_page(report: dict[str, Any], path: str | Path) -> None:
    """Writes the page that shows results.

    Args:
        report: as `page_of` takes it.
        path: path of the file, which ends in .html.

    Raises:
        ArgumentError: the report is wrong, the folder does not exist, or the file cannot be written there.

    Example:
        >>> save_page({"title": "Llama-3 8B, cp 2", "work": [120, 124]}, "step.html")
    """
    check_page("path", path)
    page = page_of(report)
    try:
        with whole_file(path) as new:
            new.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise ArgumentError("path", str(path), "a file that can be written, ending in .html", str(error)) from None


def check_page(name: str, path: str | Path) -> None:
    """Refuses a wrong path for a page, before anything is planned or drawn.

    Raises:
        ArgumentError: the folder does not exist, or the ending is not .html.
    """
    target = Path(path) if isinstance(path, str | Path) and "\0" not in str(path) else None
    if target is None or target.suffix != ".html" or not _is_folder(target.parent) or _is_folder(target):
        raise ArgumentError(name, path, "a file ending in .html, in a folder that exists")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def _hash(text: str) -> str:
    """Hashes an inline script or style, for the page's policy, which names those that it allows."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: Any) -> str:
    """Returns JSON for a script element: without a "<", no text can end the element or open a comment."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
