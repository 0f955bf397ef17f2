"""The parts of a page that show results: curves, layers, tables; what they hold, what they refuse, and their script."""

import base64
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron_cp.page import DISTINCT, blocks_of, page_of, rank_colours
from tests.limits import limit
from tests.page_sample import sample
from tests.refusals import rejects

TESTS = Path(__file__).parents[2]
OWNERSHIP = {"lengths": [5, 4], "starts": [0, 3, 5], "ends": [3, 5, 9], "ranks": [0, 1, 0]}
RESULTS = {
    "title": "a run",
    "verdict": {"text": "they agree", "ok": True},
    "command": "megatron-cp train --cp 2",
    "environment": [["torch", "2.11"]],
    "curves": [
        {
            "title": "loss",
            "lines": [
                {"name": "CP=2", "x": [1, 2, 3], "y": [3.0, math.nan, 1.0], "smooth": [3.0, 2.0, 1.0]},
                {"name": "validation", "x": [3], "y": [-1.5], "beside": True},
            ],
        }
    ],
    "layers": [
        {"name": "attention by a2a", "text": ["sends 1 MiB"], "ownership": OWNERSHIP, "work": [1, 3]},
        {"name": "gdn by chunkwise", "ownership": OWNERSHIP},
    ],
    "tables": [
        {
            "title": "ratios", "columns": ["peer", "ratio"], "rows": [["<b>", 0.5], ["b", 12], ["c", None]],
            "bad": [[0, 1]],
        },
        {"text": "NOT met.\nwords", "columns": [], "rows": []},
    ],
}  # fmt: skip


def shown(page):
    (text,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def unpacked(column):
    return np.frombuffer(base64.b64decode(column[1]), f"<{column[0]}")


def test_curves_keep_gaps_and_the_extremes_of_long_lines():
    (chart,) = shown(page_of(RESULTS))["curves"]
    line, held_out = chart["lines"]
    np.testing.assert_array_equal(unpacked(line["y"]), [3, math.nan, 1])
    assert unpacked(held_out["y"]).tolist() == [-1.5]
    assert (chart["x"], "smooth" in held_out) == ("step", False)
    assert (line["beside"], held_out["beside"]) == (False, True)
    steps = np.arange(100_000)
    losses = np.where(steps == 77_777, 50.0, 1.0 + steps % 7)
    page = page_of({"curves": [{"title": "loss", "lines": [{"name": "a", "x": steps, "y": losses, "smooth": losses}]}]})
    (line,) = shown(page)["curves"][0]["lines"]
    assert unpacked(line["y"]).size <= 4000
    assert unpacked(line["x"])[unpacked(line["y"]).argmax()] == 77_777


def test_ranks_of_layers_are_counted():
    assert shown(page_of(RESULTS))["ranks"] == 2


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("verdict", {"text": "a"}, "report.verdict: got"),
        ("verdict", {"text": "a", "ok": "yes"}, "report.verdict.ok: got 'yes'"),
        ("curves", [{"title": "a"}], r"report.curves\[0\]: got"),
        ("curves", [{"title": "a", "lines": [{"name": "a", "x": [1], "y": [1, 2]}]}], "lists of numbers of the same"),
        ("layers", [{"name": "a"}], r"report.layers\[0\]: got"),
        ("layers", [{"name": "a", "ownership": OWNERSHIP | {"ends": [3]}}], r"report.layers\[0\].ownership: got"),
        ("tables", [{"columns": ["a"], "rows": [[1, 2]]}], r"report.tables\[0\].rows\[0\]: got"),
        ("tables", [{"columns": ["a"], "rows": 3}], r"report.tables\[0\].rows: got '?3'?; allowed: a list"),
    ],
)
def test_rejects_parts_that_are_no_results(part, value, says):
    rejects(says, page_of, {part: value})


class _Outside(HTMLParser):
    """Collects the attributes by which a page could ask for something."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [(tag, name, value) for name, value in attributes if name in ("src", "srcset", "data", "action")]
        self.found += [(tag, name, value) for name, value in attributes if name == "href" and not value.startswith("#")]


def test_a_page_of_results_asks_for_nothing_outside_itself():
    parser = _Outside()
    parser.feed(page_of(RESULTS))
    parser.close()
    assert parser.found == []
    # The policy forbids what a script could ask for, and the names of SVG's elements are no addresses.
    assert "default-src 'none'" in page_of(RESULTS)
    assert set(re.findall(r"https?://[^\"'\s]+", page_of(RESULTS))) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_draws_every_part(tmp_path):
    """It has no browser: a page's script runs with as much of a DOM as it asks for."""
    drawn = {}
    for name, report in (("results", RESULTS), ("step", sample(4))):
        (tmp_path / "page.html").write_text(page_of(report))
        command = ["node", TESTS / "page_dom.js", tmp_path / "page.html"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit(60), check=True)
        drawn[name] = {section["id"]: section for section in json.loads(run.stdout)}
        for section in drawn[name].values():
            assert section["failed"] is None
            assert int(section["drawn"]) > 0, section["id"]
    assert list(drawn["results"]) == ["result", "curves", "layers", "tables"]
    assert list(drawn["step"]) == [
        "choice", "sizes", "memory", "ownership", "tiles", "work", "timeline", "traffic", "ranks", "notes"
    ]  # fmt: skip
    results = drawn["results"]
    assert "they agree" in results["result"]["text"]
    assert "megatron-cp train --cp 2" in results["result"]["text"]
    assert results["tables"]["tables"] == [[["peer", "ratio"], ["<b>", "0.500 ✗"], ["b", "12"], ["c", "\u2013"]]]
    raw = [path for path in results["curves"]["paths"] if path.count("M") == 2]
    assert len(raw) == 1  # the line with a gap


def test_a_text_in_markdown_becomes_its_tables():
    text = "\n".join([
        "first line: NOT met.", "", "### Cell", "", "| a | b |", "|---|--:|", "| x | 0.50 [0.4, 0.6] |", "| y |  |",
        "", "last", "words",
    ])  # fmt: skip
    table, rest = blocks_of(text, lambda columns, row: [1] if row[1].startswith("0.5") else [])
    assert table == {
        "title": "Cell", "text": "first line: NOT met.", "columns": ["a", "b"],
        "rows": [["x", "0.50 [0.4, 0.6]"], ["y", ""]], "bad": [[0, 1]],
    }  # fmt: skip
    assert rest == {"text": "last\nwords", "columns": [], "rows": []}
    assert len(blocks_of("\n".join(text.splitlines()[:8]), lambda *_: [])) == 1  # no text behind the table


def test_pictures_and_pages_have_the_same_colours():
    script = Path(page_of.__code__.co_filename).with_name("base.js").read_text()
    (colours,) = re.findall(r"const DISTINCT = \[(.*?)\];", script)
    assert tuple(re.findall(r'"(.*?)"', colours)) == DISTINCT
    assert len({tuple(colour) for colour in rank_colours(64).tolist()}) == 64
    assert rank_colours(2)[1].tolist() == pytest.approx([0xE6 / 255, 0x9F / 255, 0, 1])
