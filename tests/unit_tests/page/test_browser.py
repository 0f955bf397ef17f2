"""The page in a browser that shows nothing: no errors, every section drawn, texts as texts, hover, zoom and sorting."""

import html
import re
import shutil
import subprocess

import pytest

from megatron_cp.page.page import page_of
from tests.limits import limit
from tests.page_sample import sample

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium"),
]
SECTIONS = ["choice", "sizes", "memory", "ownership", "tiles", "work", "timeline", "traffic", "ranks", "notes"]
NAME = "<script>alert(1)</script>"

# Appended to a page whose policy is taken away. Results are left in the document, which is printed.
PROBE = """<script>
const say = (name, value) => { document.documentElement.dataset[name] = value; };
const tip = document.getElementById("tip");
window.requestAnimationFrame = (act) => act();
const at = (id, x, y, type = "pointermove", more = {}) => {
  const canvas = document.querySelector(`#${id} canvas`);
  const box = canvas.getBoundingClientRect();
  const place = {clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true, ...more};
  canvas.dispatchEvent(type === "wheel" ? new WheelEvent(type, place) : new PointerEvent(type, place));
  return tip.hidden ? "" : tip.textContent;
};
const painted = (id) => {
  const canvas = document.querySelector(`#${id} canvas`);
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, place) => place % 4 === 3 && value > 0).length / (data.length / 4);
};
for (const id of ["ownership", "tiles", "timeline", "traffic"]) say(`${id}Painted`, painted(id));
say("ownershipTip", at("ownership", 100, 40));
say("timelineTip", at("timeline", TIMELINE));
say("trafficTip", at("traffic", 60, 300));
say("tilesTip", at("tiles", 76, 8));
say("invisibleTip", at("tiles", 500, 8));
const pictures = () => [...document.querySelectorAll("#tiles canvas")].map((canvas) => canvas.toDataURL());
const whole = pictures();
at("tiles", 76, 8, "pointerdown");
at("tiles", 76, 8, "pointerup");
say("chosen", document.querySelector("#tiles input").value);
say("alone", pictures().every((picture, place) => picture !== whole[place]));
at("tiles", 76, 8, "pointerdown");
at("tiles", 76, 8, "pointerup");
say("everyone", pictures().every((picture, place) => picture === whole[place]));
at("tiles", 300, 100, "wheel", {deltaY: -200});
say("bothZoomed", pictures().every((picture, place) => picture !== whole[place]));
document.querySelector("#tiles .controls button:nth-child(3)").click();
const before = document.querySelector("#timeline canvas").toDataURL();
at("timeline", 400, 10, "wheel", {deltaY: -200});
say("zoomed", before !== document.querySelector("#timeline canvas").toDataURL());
document.querySelector("#timeline .controls button:nth-child(3)").click();
say("back", before === document.querySelector("#timeline canvas").toDataURL());
document.querySelector("#timeline canvas").dispatchEvent(new KeyboardEvent("keydown", {key: "+"}));
say("said", document.getElementById("said").textContent);
const heading = document.querySelectorAll("#choice th[scope=col]")[2];
heading.firstChild.click();
const cells = () => [...document.querySelectorAll("#choice tbody td:nth-child(3)")];
const steps = () => cells().map((cell) => Number(cell.textContent.replace(",", "")));
const sorted = (inOrder) => steps().every((step, row) => row === 0 || inOrder(steps()[row - 1], step));
say("rising", sorted((one, next) => one <= next) && heading.getAttribute("aria-sort"));
heading.firstChild.click();
say("falling", sorted((one, next) => one >= next) && heading.getAttribute("aria-sort"));
const light = document.querySelector("#traffic canvas").toDataURL();
document.getElementById("theme").click();
say("repainted", light !== document.querySelector("#traffic canvas").toDataURL());
document.querySelector("#ranks details").open = true;
document.querySelector("#ranks details").dispatchEvent(new Event("toggle"));
say("rows", document.querySelectorAll("#ranks tbody tr").length);
</script>"""


def opened(page, folder, *, width=1200):
    """The document of a page after its scripts have run, and what they wrote to the console."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60), check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def drawn(document):
    """The sections of a document, with how much each has drawn."""
    sections = re.findall(r'<section id="(\w+)"[^>]*?data-drawn="(\d+)"', document)
    assert document.count("<section ") == len(sections)
    return {name: int(marks) for name, marks in sections}


@pytest.mark.parametrize(("cp_size", "width"), [(4, 1200), (5, 360), (40, 1200)])
def test_every_section_is_drawn_without_errors(cp_size, width, tmp_path):
    document, console = opened(page_of({**sample(cp_size), "title": NAME}), tmp_path, width=width)
    assert console == []
    assert 'data-ready="yes"' in document
    assert "data-failed" not in document
    marks = drawn(document)
    assert list(marks) == SECTIONS
    assert min(marks.values()) > 0
    assert f"<h1>{html.escape(NAME, quote=False)}</h1>" in document


def test_sections_of_absent_parts_are_left_out(tmp_path):
    report = {"work": [1, 2, 0], "notes": [NAME], "candidates": [{"name": NAME, "why_not": NAME}]}
    document, console = opened(page_of(report), tmp_path)
    assert console == []
    assert list(drawn(document)) == ["choice", "work", "ranks", "notes"]
    assert document.count(html.escape(NAME, quote=False)) == 3
    assert "<script>alert" not in re.sub(r"<script type=.*?</script>", "", document, flags=re.DOTALL)


EMPTY = {
    "nothing": {},
    "no work": {"work": [0, 0], "traffic": {"matrix": [[0, 0], [0, 0]]}},
    "no events": {"timeline": {"events": []}},
    "one moment": {
        "timeline": {
            "events": [{"rank": 0, "stream": "send", "start": 5, "end": 5, "name": "a", "kind": "copy"}],
            "layers": [],
        }
    },
    "no tokens": {"ownership": {"lengths": [0, 0], "starts": [], "ends": [], "ranks": []}},
    "one rank": {"ownership": {"lengths": [1], "starts": [0], "ends": [1], "ranks": [0]}, "traffic": {"matrix": [[4]]}},
    "a hole": {"ownership": {"lengths": [9], "starts": [2], "ends": [5], "ranks": [20]}, "hosts": [0] * 21},
    "no tiles": {"tiles": [{"name": "a", "queries": 0, "keys": 0, "ranks": [], "shapes": []},
                           {"name": "b", "queries": 1, "keys": 1, "ranks": [2], "shapes": [[0, 1, 0, 1, 0, 1]]}]},
    "zeros": {"candidates": [{"name": "a", "cp": 1, "milliseconds": {"step": 0}, "bytes": {}, "limit_bytes": 0},
                             {"name": "b", "cp": 2, "milliseconds": {"step": 0}, "mfu": 0, "bytes": {"x": 0}}]},
}  # fmt: skip


def test_reports_of_almost_nothing_are_drawn(tmp_path):
    """All in one document, each in a frame of its own: a browser takes a second to start."""
    frames = "".join(
        f'<iframe id="{at}" srcdoc="{html.escape(page_of(each))}"></iframe>' for at, each in enumerate(EMPTY.values())
    )
    gather = """<script>addEventListener("load", () => { for (const frame of document.querySelectorAll("iframe")) {
      const root = frame.contentDocument.documentElement;
      const failed = root.querySelectorAll("[data-failed]").length;
      frame.outerHTML = `<p>${frame.id} ${root.dataset.ready} ${failed}</p>`; } });</script>"""
    document, console = opened(f"<!doctype html>{frames}{gather}", tmp_path)
    assert console == []
    assert re.findall(r"<p>(\d+) (\w+) (\d+)</p>", document) == [(str(at), "yes", "0") for at in range(len(EMPTY))]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """Returns the probe's results for the page of few ranks, and of many."""

    def probe(cp_size, timeline):
        page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page_of(sample(cp_size)))
        page = page.replace("</body>", PROBE.replace("TIMELINE", timeline) + "</body>")
        document, console = opened(page, tmp_path_factory.mktemp("probe"))
        assert console == []
        (root,) = re.findall(r"<html ([^>]*)>", document)
        return {name: html.unescape(value) for name, value in re.findall(r'data-([\w-]+)="([^"]*)"', root)}

    return {4: probe(4, "122, 6"), 40: probe(40, "122, 6")}


@pytest.mark.parametrize("cp_size", [4, 40])
def test_the_wheel_the_keyboard_and_clicks_change_pictures(probed, cp_size):
    # Words on their axes alone would be a hundredth of them.
    for name in ("ownership", "tiles", "timeline", "traffic"):
        assert float(probed[cp_size][f"{name}-painted"]) > 0.3
    found = probed[cp_size]
    assert (found["zoomed"], found["back"]) == ("true", "true")
    assert re.fullmatch(r"From .* to .*\.", found["said"])
    # In both directions, and the wheel zooms both.
    found = probed[cp_size]
    assert re.search(rf"computed by rank {found['chosen']} on", found["tiles-tip"])
    assert (found["alone"], found["everyone"], found["both-zoomed"]) == ("true", "true", "true")


def test_hover_names_what_is_under_the_pointer(probed):
    few, many = probed[4], probed[40]
    assert re.search(
        r"token [\d,]+ of the stream\ndocument \d+: token [\d,]+ of [\d,]+\nrank \d on host 0 holds",
        few["ownership-tip"],
    )
    assert few["timeline-tip"].startswith("attend stage 0\nrank 0 on host 0, compute: kernel\ntakes ")
    assert re.match(r"rank \d on host 0 sends\nto rank 0 on host 0:\n[\d.]+ ([KMG]i)?B?", few["traffic-tip"])
    assert re.fullmatch(
        r"query \d+, key \d+\ncomputed by rank \d on host 0\nin a piece of the queries \d+ to [\d,]+", few["tiles-tip"]
    )
    assert re.fullmatch(r"query \d+, key [\d,]+\nnot visible", few["invisible-tip"])
    assert re.match(r"rank \d on host 0, compute\n[\d.]+ % of the time about ", many["timeline-tip"])


def test_a_click_on_a_heading_sorts_and_colours_change(probed):
    assert (probed[4]["rising"], probed[4]["falling"]) == ("ascending", "descending")
    assert [probed[size]["repainted"] for size in (4, 40)] == ["true", "true"]
    assert [probed[size]["rows"] for size in (4, 40)] == ["4", "40"]


WIDE = {
    "name": "cp 128, contiguous, chunkwise, a2a+all_gather (u = 16), 4 chunks", "cp": 128,
    "flags": " ".join(f"--context-parallel-flag-{number} value" for number in range(9)),
    "milliseconds": dict.fromkeys((
        "attention", "linear layers", "products", "exposed transfers", "imbalance", "memory traffic", "sharded weights",
        "step",
    ), 88_888.8),
    "tokens_per_second_per_gpu": 8_888, "mfu": 0.1234, "bytes": {"parameters": 8.8e10}, "limit_bytes": 8.5e10,
    "why_not": "slower per token and GPU",
}  # fmt: skip


def test_the_table_of_candidates_is_not_wider_than_the_window(tmp_path):
    """The table is of a whole model, in a window of 1,280: as many columns as there can be, and long flags."""
    page = page_of(
        {"candidates": [{**WIDE, "chosen": row == 0, "name": f"{WIDE['name']}, {row}"} for row in range(30)]}
    )
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    # Read at once: the page loads no fonts, and what a promise brings may come after the document is printed.
    probe = """<script>{
      const box = document.querySelector("#choice .scroll");
      Object.assign(document.documentElement.dataset, {inside: box.scrollWidth, shown: box.clientWidth});
    }</script>"""
    document, console = opened(page.replace("</body>", f"{probe}</body>"), tmp_path, width=1280)
    assert console == []
    inside, shown = (int(re.search(rf'data-{name}="(\d+)"', document)[1]) for name in ("inside", "shown"))
    assert 900 < inside == shown
    assert document.count("<details><summary>show</summary><code>--context-parallel-flag-0") == 30
