"""`save_page`: writes results as one HTML file, which a browser opens without a network."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_cp.errors import ArgumentError
from megatron_cp.extras import install
from megatron_cp.files import whole_file
from megatron_cp.page.colours import distinct_colours

Chart = dict[str, Any]
_ROW = 26  # pixels of a row of bars
_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 0 auto; padding: 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
pre { background: #f3f3f3; padding: .7em; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: .7em 0; } .scroll { overflow-x: auto; }
th, td { padding: .2em .7em; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.ok { border-left: 5px solid #009e73; padding-left: .7em; } .bad { border-left: 5px solid #d55e00; padding-left: .7em; }
td.worse { background: #fbe3d6; } summary { cursor: pointer; margin: .7em 0; }
"""
_COPY = """
document.getElementById("copy")?.addEventListener("click", () => {
  getSelection().selectAllChildren(document.getElementById("command"));
  document.execCommand("copy");
});
"""


def page_of(report: dict[str, Any]) -> str:
    """Returns the page of a report. Charts need plotly: `check_charts` refuses where it is not installed.

    Every part may be absent. Texts are shown as they are: nothing in them is taken for HTML. The page asks for nothing
    outside itself, and its own policy forbids it to.

    Args:
        report: a dictionary of

            - `title`: a text.
            - `verdict`: `text`, and `ok`: True if the text is good news.
            - `command`: the command to copy, whole.
            - `charts`: dictionaries with a `title` and one of `lines`, `bars`, `spans` and `matrix`, and any of `text`,
              `x` and `y`, the names of the axes. `lines` are dictionaries with `name`, `x` and `y`, where NaN leaves a
              gap, and may have `beside`: True for a line that the others are compared with, drawn wide and grey.
              `bars` has `rows`, their names, and `parts`, a dictionary from a part's name to its value in each row,
              which are stacked. `spans` has `rows`, and `parts`, a dictionary from a name to `(row, start, end, text)`,
              where a row is its place. `matrix` is a list of lists, a row of which sends to a column. A part has one
              colour on the whole page.
            - `tables`: dictionaries with `columns` (names) and `rows` (cells: texts, numbers or None), and any of
              `title`, `text`, `folded` (True for a table that is opened by a click) and `bad` (pairs of a row and a
              column: cells that are bad news).
            - `facts`: pairs of a name and a text, such as what a prediction assumes; they are folded.
            - `notes`: texts.

    Example:
        >>> page = page_of({"title": "Llama-3 8B, cp 2", "verdict": {"text": "it fits", "ok": True}})
        >>> "Llama-3 8B, cp 2" in page
        True
    """
    title, charts = html.escape(report.get("title") or "Results"), report.get("charts") or []
    stacked = [chart[kind] for chart in charts for kind in ("bars", "spans") if kind in chart]
    names = dict.fromkeys(name for each in stacked for name in each["parts"])
    colours = dict(zip(names, distinct_colours(len(names)), strict=True))
    body = [f"<h1>{title}</h1>"]
    if verdict := report.get("verdict"):
        body.append(f'<p class="{"ok" if verdict["ok"] else "bad"}">{html.escape(verdict["text"])}</p>')
    if command := report.get("command"):
        body.append(f'<pre id="command">{html.escape(command)}</pre><button id="copy">Copy the command</button>')
    body += [f"<p>{html.escape(note)}</p>" for note in report.get("notes") or []]
    for number, chart in enumerate(charts):
        body += [f"<h2>{html.escape(chart['title'])}</h2>", _paragraph(chart), _drawn(chart, colours, number)]
    body += [_table(table) for table in report.get("tables") or []]
    if facts := report.get("facts"):
        body.append(_table({"title": "Assumptions and environment", "columns": [], "rows": facts, "folded": True}))
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_NETWORK}">'
    head += f"<title>{title}</title><style>{_STYLE}</style>{_library() if charts else ''}"
    text = "\n".join(filter(None, [*body, f"<script>{_COPY}</script>"]))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{text}</body></html>\n'


def _library() -> str:
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


def _drawn(chart: Chart, colours: dict[str, str], number: int) -> str:
    from plotly.io import to_html

    drawn: str = to_html(
        figure_of(chart, colours), full_html=False, include_plotlyjs=False, div_id=f"chart-{number}",
        default_height=None, config={"displaylogo": False, "responsive": True},
    )  # fmt: skip
    return drawn


def figure_of(chart: Chart, colours: dict[str, str]) -> dict[str, Any]:
    """Returns plotly's figure of a chart of `page_of`; `colours` has those of the parts of bars and spans."""
    x, y = ({"title": {"text": html.escape(chart.get(axis, ""))}, "automargin": True} for axis in "xy")
    layout: dict[str, Any] = {"xaxis": x, "yaxis": y, "margin": {"t": 20, "r": 10}, "template": "plotly_white"}
    if "matrix" in chart:
        data = [{"type": "heatmap", "z": chart["matrix"], "colorscale": "Blues"}]
        return {"data": data, "layout": {**layout, "yaxis": {**y, "autorange": "reversed"}, "height": 500}}
    if "lines" in chart:
        lines, shades = chart["lines"], distinct_colours(len(chart["lines"]))
        data = [
            {
                "type": "scatter", "mode": "lines" if len(line["x"]) > 1 else "markers",
                "name": html.escape(line["name"]), "x": line["x"], "y": line["y"],
                "line": {"color": "#bbbbbb", "width": 5} if line.get("beside") else {"color": colour, "width": 1.5},
            }
            for line, colour in zip(lines, shades, strict=True)
        ]  # fmt: skip
        return {"data": data, "layout": {**layout, "height": 380, "showlegend": True}}
    kind = "bars" if "bars" in chart else "spans"
    rows = [html.escape(str(row)) for row in chart[kind]["rows"]]
    data = [_bars(rows, name, values, colours[name], kind) for name, values in chart[kind]["parts"].items()]
    inside = max(90, _ROW * len(rows))  # pixels of the rows
    layout |= {
        "barmode": "stack" if kind == "bars" else "overlay", "height": inside + 150,
        "showlegend": list(chart[kind]["parts"]) != list(chart[kind]["rows"]),  # which have their names beside them
        "legend": {"orientation": "h", "y": -60 / inside, "yanchor": "top", "traceorder": "normal"},
        "yaxis": {**y, "autorange": "reversed", "type": "category", "categoryarray": rows},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _bars(rows: Sequence[str], name: str, values: Sequence[Any], colour: str, kind: str) -> dict[str, Any]:
    """Returns the horizontal bars of one part: a value in each row, or spans that begin anywhere."""
    bars = {"type": "bar", "orientation": "h", "name": html.escape(name), "marker": {"color": colour}}
    if kind == "bars":
        return {**bars, "y": rows, "x": list(values)}
    places, starts, ends, texts = zip(*values, strict=True) if len(values) else ((), (), (), ())
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return {
        **bars, "y": [rows[place] for place in places], "base": starts, "x": lengths, "width": 0.8,
        "hovertext": [html.escape(text) for text in texts], "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def _paragraph(part: dict[str, Any]) -> str:
    return f"<p>{html.escape(part['text'])}</p>" if part.get("text") else ""


def _table(table: dict[str, Any]) -> str:
    bad = {tuple(pair) for pair in table.get("bad") or []}
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in table["columns"])
    rows = "".join(
        f"<tr>{''.join(_cell(cell, (place, column) in bad) for column, cell in enumerate(row))}</tr>"
        for place, row in enumerate(table["rows"])
    )
    body = f'{_paragraph(table)}<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
    title = html.escape(table.get("title") or "")
    if table.get("folded"):
        return f"<details><summary>{title}</summary>{body}</details>"
    return f"<h2>{title}</h2>{body}" if title else body


def _cell(value: Any, is_bad: bool) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    shown = "-" if value is None else _decimal(value) if is_number else html.escape(str(value))
    names = " ".join(["number"] * is_number + ["worse"] * is_bad)
    return f'<td class="{names}">{shown}{" ✗" if is_bad else ""}</td>'


def _decimal(value: float) -> str:
    """Returns whole numbers with commas, and others with four significant digits."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"


def spans_of(rows: Iterable[int], starts: Iterable[int], ends: Iterable[int], names: Sequence[str]) -> dict[str, Any]:
    """Returns the spans of a chart in which each row has a colour of its own, such as who holds which tokens."""
    parts: dict[str, list[tuple[int, int, int, str]]] = {name: [] for name in names}
    for row, start, end in zip(rows, starts, ends, strict=True):
        parts[names[row]].append((row, start, end, f"{names[row]}: {start:,} to {end:,}"))
    return {"rows": list(names), "parts": parts}


def save_page(report: dict[str, Any], path: str | Path) -> None:
    """Writes the page that shows results.

    Args:
        report: as `page_of` takes it.
        path: path of the file, which ends in .html.

    Raises:
        ArgumentError: the folder does not exist, or the file cannot be written there.

    Example:
        >>> save_page({"title": "Llama-3 8B, cp 2", "notes": ["it fits"]}, "step.html")
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


def check_charts(name: str, path: str | Path) -> None:
    """Refuses a page with charts where plotly is not installed, or a wrong path, before anything is planned or drawn.

    Raises:
        ArgumentError: as `check_page`, or plotly is not installed.
    """
    check_page(name, path)
    if find_spec("plotly") is None:
        raise ArgumentError(name, str(path), "only where plotly is installed, which draws it", install("report"))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False
