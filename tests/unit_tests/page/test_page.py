"""The page of results: its structure, what it refuses, its figures, and the page in a browser."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from megatron_cp.page import DISTINCT, check_charts, check_page, distinct_colours, page_of, save_page, spans_of
from megatron_cp.page.page import figure_of
from tests.limits import limit
from tests.refusals import rejects

NAME = "<script>alert(1)</script>"
PARTS = {f"part {number}": [1 + number, 2, 3] for number in range(12)}
OWNERS = spans_of([0, 1, 0], [0, 3, 5], [3, 5, 9], ["rank 0", "rank 1"])
TABLES = {
    "title": NAME,
    "verdict": {"text": f"take a2a {NAME}", "ok": True},
    "command": "megatron-cp plan --cp 8 --model '" + 60 * "--num-layers 2 " + "'",
    "tables": [
        {"title": "Cases", "columns": ["a", "b"], "rows": [[NAME, 0.123456], ["b", 1234567], ["c", None]],
         "bad": [[0, 1]]},
        {"title": "Options", "columns": ["option"], "rows": [["--lr"]], "folded": True},
    ],
    "facts": [["machine", NAME]],
    "notes": [NAME],
}  # fmt: skip
CHARTS = [
    {"title": "Candidates", "x": "ms", "bars": {"rows": ["cp 2, a2a", "cp 4, p2p", NAME], "parts": PARTS}},
    {"title": "loss", "x": "step", "lines": [{"name": "CP=1", "x": [1, 2, 3], "y": [3, 2, 1], "beside": True},
                                             {"name": NAME, "x": [1, 2, 3], "y": [3, float("nan"), 1]}]},
    {"title": "Who holds what", "spans": OWNERS},
    {"title": "Traffic", "matrix": [[0, 1], [2, 0]]},
    {"title": "Nothing", "spans": {"rows": ["rank 0"], "parts": {"kernel": []}}},
]  # fmt: skip


def test_parts_have_colours_of_their_own():
    for count in (12, 24, 200):
        assert len(set(distinct_colours(count))) == count
    assert tuple(distinct_colours(8)) == DISTINCT
    colours = dict(zip(PARTS, distinct_colours(12), strict=True))
    data = figure_of(CHARTS[0], colours)["data"]
    assert [bar["name"] for bar in data] == list(PARTS)
    assert len({bar["marker"]["color"] for bar in data}) == 12
    assert data[3]["x"] == PARTS["part 3"]


def test_spans_begin_where_they_begin():
    first, second = figure_of(CHARTS[2], {"rank 0": "#000", "rank 1": "#111"})["data"]
    assert (first["base"], first["x"], first["y"]) == ((0, 5), [3, 4], ["rank 0", "rank 0"])
    assert (second["base"], second["x"]) == ((3,), [2])


class _Outside(HTMLParser):
    """Collects the attributes by which a page could ask for something."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [(tag, name, value) for name, value in attributes if name in ("src", "srcset", "href", "action")]


def assert_closed(page):
    """Checks that a page asks for nothing outside itself, by its elements and by its policy."""
    parser = _Outside()
    parser.feed(page)
    assert parser.found == []
    assert "default-src 'none'" in page


def test_a_page_of_tables_shows_texts_as_texts_and_needs_no_plotly(tmp_path):
    save_page(TABLES, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert_closed(page)
    assert NAME not in page
    assert page.count(html.escape(NAME)) == 6
    assert html.escape(TABLES["command"]) in page  # whole
    assert '<td class="number worse">0.1235 ✗</td>' in page
    assert '<td class="number">1,234,567</td>' in page
    details = re.findall(r"<summary>(.*?)</summary>", page)
    assert details == ["Options", "Assumptions and environment"]
    assert len(page) < 10_000
    assert "A page" in page_of({"title": "A page"})


@pytest.mark.parametrize("path", ["page", "page.txt", "no/such/page.html", "a\0b.html"])
def test_rejects_what_is_no_name_for_a_page(path):
    for check in (check_page, check_charts):
        rejects("path: got .*; allowed: a file ending in .html, in a folder that exists", check, "path", path)


def test_rejects_charts_without_plotly_by_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("megatron_cp.page.page.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="report: got") as caught:
        check_charts("report", tmp_path / "page.html")
    assert "only where plotly is installed" in str(caught.value)
    assert "pip install" in str(caught.value)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Left in the document, which the browser prints.
PROBE = """<script>
const bars = (chart) => chart.querySelectorAll(".point path").length;
addEventListener("load", () => setTimeout(() => {
  const charts = [...document.querySelectorAll(".plotly-graph-div")];
  document.documentElement.dataset.charts = JSON.stringify(charts.map((chart) => [
    bars(chart), chart.querySelectorAll(".scatterlayer .trace").length, chart.querySelectorAll(".hm image").length,
  ]));
}, 500));
</script>"""


def drawn(report):
    pytest.importorskip("plotly", reason="pip install '.[report]'")
    return page_of(report)


def test_a_page_with_charts_asks_for_nothing_outside_itself():
    page = drawn({**TABLES, "charts": CHARTS})
    assert_closed(re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL))
    assert page.count("Plotly.newPlot(") >= len(CHARTS)
    assert NAME not in page
    assert len(page) < 8_000_000


@pytest.mark.thorough
@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_draws_every_chart_without_an_error(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(drawn({**TABLES, "charts": CHARTS}).replace("</body>", f"{PROBE}</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60), check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    charts = json.loads(html.unescape(re.search(r'<html[^>]*data-charts="(.*?)"', done.stdout)[1]))
    assert charts == [[36, 0, 0], [0, 2, 0], [3, 0, 0], [0, 0, 1], [0, 0, 0]]
