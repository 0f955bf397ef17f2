"""The page of a report, without a browser: what it holds, what it refuses, how large it is."""

import base64
import copy
import json
import re
import sys

import numpy as np
import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.page import page as module
from megatron_cp.page.columns import packed, packed_matrix, packed_times
from megatron_cp.page.page import check_page, page_of, save_page
from tests.page_sample import sample
from tests.refusals import rejects

REPORT = {
    "title": "a model",
    "summary": "take this",
    "facts": [["hardware", "H100"], ["cp", 2]],
    "candidates": [
        {"name": "cp 4, slow", "cp": 4, "milliseconds": {"attention": 4.0, "step": 9.0}},
        {"name": "cp 2, unknown"},
        {
            "name": "cp 2, quick", "cp": 2, "milliseconds": {"attention": 2.0, "step": 5.0}, "mfu": 0.5,
            "bytes": {"a": 3},
        },
        {"name": "cp 2, taken", "cp": 2, "milliseconds": {"step": 6.0}, "chosen": True, "flags": "--cp 2"},
    ],
    "ownership": {"lengths": [5, 0, 4], "starts": [7, 0, 3], "ends": [9, 3, 7], "ranks": [1, 0, 1]},
    "tiles": [
        {"name": "attention forward", "text": "two", "queries": 9, "keys": 7, "ranks": [1, 0],
         "shapes": [[0, 4, 0, 1, 0, 4], [4, 9, 0, 5, 0, 7]]},
    ],
    "work": [3, 4],
    "timeline": {
        "unit": "us",
        "layers": ["attention"],
        "events": [
            {"rank": 1, "stream": "send", "start": 2.0, "end": 3.0, "name": "keys", "kind": "transfer", "peer": 0},
            {"rank": 0, "stream": "compute", "start": 4.0, "end": 10.0, "name": "attend", "kind": "kernel"},
            {"rank": 0, "stream": "compute", "start": 1.0, "end": 4.0, "name": "keys", "kind": "wait", "peer": None},
        ],
    },
    "traffic": {"unit": "bytes", "matrix": [[0, 3], [2**33, 0]]},
    "hosts": [0, "second"],
    "notes": ["a note"],
}  # fmt: skip
TYPES = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "f4": "<f4", "f8": "<f8"}


def shown(page):
    """The report as the scripts of a page read it."""
    (text,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def unpacked(column):
    name, text = column
    return np.frombuffer(base64.b64decode(text), TYPES[name]).tolist()


def test_candidates_are_led_by_the_chosen_one_and_a_kind_is_kept():
    candidates = shown(page_of(REPORT))["candidates"]
    assert [candidate["kind"] for candidate in candidates] == ["taken", "quick", "slow", "unknown"]
    assert shown(page_of({"candidates": [{"name": "cp 2, a", "kind": "b"}]}))["candidates"][0]["kind"] == "b"
    assert page_of(REPORT) == page_of(copy.deepcopy(REPORT))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cp 16, exact, headwise", "exact, headwise"), ("exact, cp=16, balanced", "exact, balanced"),
        ("exact cp 8", "exact"), ("cp 16", "cp 16"), ("decp 4x", "decp 4x"),
    ],
)  # fmt: skip
def test_a_kind_is_the_name_without_its_size(name, kind):
    assert shown(page_of({"candidates": [{"name": name}]}))["candidates"][0]["kind"] == kind


def test_fragments_tiles_and_hosts_are_kept_in_order():
    ownership = shown(page_of(REPORT))["ownership"]
    assert {name: unpacked(column) for name, column in ownership.items()} == {
        "lengths": [5, 0, 4], "starts": [0, 3, 7], "ends": [3, 7, 9], "ranks": [0, 1, 1],
    }  # fmt: skip
    (picture,) = shown(page_of(REPORT))["tiles"]
    given = REPORT["tiles"][0]
    assert unpacked(picture["shapes"]) == [number for shape in given["shapes"] for number in shape]
    assert unpacked(picture["ranks"]) == given["ranks"]
    assert {name: picture[name] for name in ("name", "text", "queries", "keys", "group")} == {
        **{name: given[name] for name in ("name", "text", "queries", "keys")}, "group": 1
    }  # fmt: skip
    empty = {"name": "a", "queries": 0, "keys": 3, "ranks": [], "shapes": []}
    (picture,) = shown(page_of({"tiles": [empty]}))["tiles"]
    assert (unpacked(picture["shapes"]), picture["text"]) == ([], "")
    assert shown(page_of(REPORT))["hosts"] == ["host 0", "second"]


def test_events_are_in_the_order_of_ranks_streams_and_starts():
    timeline = shown(page_of(REPORT))["timeline"]
    assert unpacked(timeline["rank"]) == [0, 0, 1]
    assert [timeline["names"][at] for at in unpacked(timeline["name"])] == ["keys", "attend", "keys"]
    assert [timeline["kinds"][at] for at in unpacked(timeline["kind"])] == ["wait", "kernel", "transfer"]
    assert [timeline["streams"][at] for at in unpacked(timeline["stream"])] == ["compute", "compute", "send"]
    assert unpacked(timeline["peer"]) == [0, 0, 1]  # one more than the peer; 0 where there is none
    starts, ends = (
        np.array(unpacked(timeline[name])) * timeline["tick"] + timeline["origin"] for name in ("start", "end")
    )
    assert starts == pytest.approx([1, 4, 2], rel=1e-8)
    assert ends == pytest.approx([4, 10, 3], rel=1e-8)
    assert timeline["seconds"] == 1e-6


@pytest.mark.parametrize("part", REPORT)
def test_every_part_may_be_absent_or_alone(part):
    without = {name: value for name, value in REPORT.items() if name != part}
    assert part not in {name for name in shown(page_of(without)) if name != "ranks"}
    assert page_of({**REPORT, part: None}) == page_of(without)
    assert set(shown(page_of({part: REPORT[part]}))) == {part, "ranks"}


@pytest.mark.parametrize(
    ("report", "ranks"),
    [
        ({}, 0), ({"work": {"values": [1, 2, 3]}}, 3), ({"ownership": REPORT["ownership"]}, 2),
        ({"timeline": REPORT["timeline"]}, 2), ({"tiles": REPORT["tiles"]}, 2),
        ({"tiles": [{**REPORT["tiles"][0], "group": 3, "ranks": [3, 0]}]}, 6),
        ({"traffic": {"matrix": np.zeros((5, 5))}}, 5), ({"ownership": REPORT["ownership"], "hosts": ["a"] * 7}, 7),
    ],
)  # fmt: skip
def test_ranks_are_counted(report, ranks):
    assert shown(page_of(report))["ranks"] == ranks


def test_numpy_is_taken_as_lists_are_and_lists_may_be_empty():
    given = copy.deepcopy(REPORT)
    given["ownership"] = {name: np.array(value, dtype=np.int32) for name, value in given["ownership"].items()}
    given["work"] = np.array(given["work"])
    given["tiles"][0] |= {name: np.array(given["tiles"][0][name]) for name in ("ranks", "shapes")}
    given["traffic"]["matrix"] = np.array(given["traffic"]["matrix"])
    given["candidates"][2] |= {"cp": np.int64(2), "mfu": np.float64(0.5)}
    assert shown(page_of(given)) == shown(page_of(REPORT))
    report = {"timeline": {"events": []}, "ownership": {name: [] for name in REPORT["ownership"]}}
    assert unpacked(shown(page_of(report))["timeline"]["start"]) == []


EVIL = "<script>alert(1)</script><!-- </script> &amp; \" ' ${x} $title \u2028 \ud800"


def evil():
    return {
        "title": EVIL,
        "summary": EVIL,
        "facts": [[EVIL, EVIL]],
        "candidates": [{"name": EVIL, "flags": EVIL, "why_not": EVIL, "milliseconds": {EVIL: 1.0}, "chosen": True}],
        "tiles": [{"name": EVIL, "text": EVIL, "queries": 1, "keys": 1, "ranks": [0], "shapes": [[0, 1, 0, 1, 0, 1]]}],
        "work": {"unit": EVIL, "values": [1]},
        "timeline": {
            "layers": [EVIL],
            "events": [{"rank": 0, "stream": "send", "start": 0, "end": 1, "name": EVIL, "kind": "copy"}],
        },
        "traffic": {"unit": EVIL, "matrix": [[0]]},
        "hosts": [EVIL],
        "notes": [EVIL],
    }  # fmt: skip


def test_texts_are_escaped(tmp_path):
    page = page_of(evil())
    assert "<script>alert" not in page
    assert page.count("</script>") == 2  # of the report and of the scripts
    assert "<title>&lt;script&gt;alert(1)" in page
    report = shown(page)
    assert report["title"] == EVIL
    assert report["candidates"][0]["name"] == EVIL
    save_page(evil(), tmp_path / "evil.html")
    assert "<title>&lt;script&gt;alert(1)" in (tmp_path / "evil.html").read_text(encoding="utf-8")


def test_the_page_asks_for_nothing_outside_itself():
    page = page_of(REPORT)
    for wanted in ("src=", "@import", "url(", "fetch(", "XMLHttpRequest", "import(", "<link"):
        assert wanted not in page
    assert re.findall(r"https?://[^\s\"'`]+", page) == ["http://www.w3.org/2000/svg"]  # the name of SVG, not asked for
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert "default-src 'none'" in policy
    assert f"style-src 'sha256-{module._hash(style)}'" in policy
    assert f"script-src 'sha256-{module._hash(script)}'" in policy


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ([], "u1"), ([0, 255], "u1"), ([256], "u2"), ([65536.0], "u4"), ([2**32 - 1], "u4"), ([2**32], "f4"),
        ([0.5], "f4"), ([-1], "f4"), ([1e300], "f8"),
    ],
)  # fmt: skip
def test_numbers_have_the_smallest_type_that_holds_them(values, name):
    column = packed(np.array(values))
    assert column[0] == name
    assert unpacked(column) == values


def test_times_are_finer_than_float32():
    starts = 1e9 + np.arange(1000) * 0.25
    times = packed_times(starts, starts + 0.25)
    back = times["origin"] + times["tick"] * np.array(unpacked(times["start"]))
    assert np.abs(back - starts).max() < 1e-6
    assert np.abs(starts.astype(np.float32) - starts).max() > 1
    times = packed_times(np.array([3.0]), np.array([3.0]))
    assert (times["origin"], unpacked(times["start"]), unpacked(times["end"])) == (3.0, [0], [0])


def test_a_matrix_of_few_values_is_sent_as_places():
    ring = np.roll(np.eye(8, dtype=np.int64) * 7, 1, axis=1)
    sent = packed_matrix(ring)
    back = np.zeros(64, dtype=np.int64)
    back[unpacked(sent["places"])] = unpacked(sent["values"])
    np.testing.assert_array_equal(back.reshape(8, 8), ring)
    full = packed_matrix(np.arange(9).reshape(3, 3))
    assert "places" not in full
    assert unpacked(full["values"]) == list(range(9))


def test_1024_ranks_are_below_15_megabytes():
    ranks, events = 1024, 50_000
    draw = np.random.default_rng(7)
    names = ["attend", "merge", "keys and values"]
    report = {
        "work": draw.random(ranks),
        "hosts": [rank // 8 for rank in range(ranks)],
        "traffic": {"matrix": draw.integers(1, 2**40, size=(ranks, ranks))},
        "ownership": {
            "lengths": [131_072],
            "starts": np.arange(131_072),
            "ends": np.arange(1, 131_073),
            "ranks": np.arange(131_072) % ranks,
        },
        "timeline": {
            "events": [
                {"rank": at % ranks, "stream": "send", "start": at / 7, "end": at / 7 + 3.3, "name": names[at % 3],
                 "kind": "transfer", "peer": (at + 1) % ranks}
                for at in range(events)
            ]
        },
    }  # fmt: skip
    assert len(page_of(report)) < 15e6


def changed(path, value):
    """The report with another value at a path such as "timeline.events.0.rank"."""
    report = copy.deepcopy(REPORT)
    *folders, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    here = report
    for step in folders:
        here = here[step]
    here[last] = value
    return report


NO_NUMBER = ["1", True, float("nan"), float("inf"), -1, 1j, [1]]
REFUSED = [
    *[("title", value) for value in (5j, ["a"], True, b"a")],
    *[("facts", value) for value in ("a", [["a"]], [["a", "b", "c"]], [["a", None]], {"a": "b"})],
    *[("candidates", value) for value in ({}, "a", [5], [{}], [{"cp": 2}])],
    *[("candidates.0.cp", value) for value in (0, 1.5, "2", True, 2**20)],
    *[("candidates.0.milliseconds", value) for value in (5, [1], {1: 2})],
    *[("candidates.0.milliseconds.step", value) for value in NO_NUMBER],
    *[("candidates.0.limit_bytes", value) for value in NO_NUMBER],
    ("candidates.0.mfu", 1.5),
    ("candidates.0.chosen", 1),
    ("candidates.0.chosen", True),  # a second one
    ("candidates.0.time", 3),
    *[("ownership.lengths", value) for value in (5, [1.5], ["5"], [[5]], [-1], [True], [2**60], [5, [4]])],
    ("ownership.starts", [7, 0]),
    ("ownership.starts", [7, 0, 2]),  # overlaps the one before
    ("ownership.ends", [9, 3, 10]),  # beyond the stream
    ("ownership.ends", [6, 3, 7]),  # before its start
    ("ownership.ends", None),
    ("ownership.ranks", [2, 0, 1]),  # of two
    *[("tiles", value) for value in (5, {}, [5], [{}], [{"name": "a"}])],
    *[(f"tiles.0.{name}", value) for name in ("queries", "keys") for value in (-1, 1.5, "9", None, True, 2**32)],
    ("tiles.0.queries", 8),  # fewer than the shapes have
    ("tiles.0.keys", 6),
    *[("tiles.0.ranks", value) for value in (5, [1], [1, 2], [0, 1, 1], [0.5, 1], ["1", 0], [-1, 0])],
    *[("tiles.0.group", value) for value in (0, 2, 1.5, "1", True)],
    *[("tiles.0.shapes", value) for value in (5, [[0, 4, 0, 1, 0, 4]], [[0, 1], [1, 2]], [[0, 4, 0, 1, 0, 4], 5])],
    *[("tiles.0.shapes.0", value) for value in ([4, 4, 0, 1, 0, 4], [0, 4, 2, 1, 0, 4], [0, 4, 0, 1, 5, 4], [0.5] * 6)],
    ("tiles.0.colour", "red"),
    *[("work", value) for value in (5, ["a"], [[1]], [-1, 2], [float("nan"), 1], {"unit": "ms"}, [1, 2, 3])],
    ("timeline.unit", "minutes"),
    ("timeline.unit", ["s"]),
    ("timeline.events", None),
    *[("timeline.events.0", value) for value in (5, {}, [])],
    *[("timeline.events.0.rank", value) for value in (-1, 2, 1.5, "0", None, True, 2**70)],
    *[("timeline.events.0.peer", value) for value in (-1, 2, 1.5, "0", [0])],
    *[("timeline.events.0.start", value) for value in ("0", None, float("nan"), float("inf"), [1], 3.5)],
    *[("timeline.events.0.stream", value) for value in ("sending", 0, None, ["send"])],
    *[("timeline.events.0.kind", value) for value in ("gemm", 0, None, {})],
    ("timeline.events.0.name", ["a"]),
    ("timeline.events.0.layer", "a"),
    *[("traffic.matrix", value) for value in (5, [1], [[1, 2]], [[0, -1], [0, 0]], [[0, 1], [2]], np.zeros((3, 3)))],
    *[("hosts", value) for value in ("ab", [None, 1], ["a"], 5)],
    *[("notes", value) for value in ("a note", [["a"]], 5)],
    ("subtitle", "a"),
]


@pytest.mark.parametrize(("path", "value"), REFUSED, ids=[f"{path}={value!r:.30}" for path, value in REFUSED])
def test_rejects_what_is_no_report(path, value):
    with pytest.raises(ArgumentError) as error:
        page_of(changed(path, value))
    assert error.value.argument.startswith("report")
    assert "allowed" in str(error.value)


@pytest.mark.parametrize("report", [None, 5, "report", [], [("title", "a")]])
def test_rejects_what_is_no_dictionary(report):
    rejects("report: got", page_of, report)


def test_a_refusal_names_the_field():
    with pytest.raises(
        ArgumentError, match=re.escape("report.timeline.events[0].kind: got 'gemm'; allowed: kernel, product")
    ):
        page_of(changed("timeline.events.0.kind", "gemm"))
    with pytest.raises(ArgumentError, match=re.escape("report.candidates[0].cp: got 0; allowed: an integer from 1")):
        page_of(changed("candidates.0.cp", 0))


@pytest.mark.parametrize(
    "path", [None, 5, "page", "page.htm", "page.png", "no folder/page.html", "a\0.html", b"a.html"]
)
def test_rejects_what_is_no_name_for_a_page(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (lambda: save_page(REPORT, path), lambda: check_page("path", path)):
        rejects("path: got", call)
    assert list(tmp_path.iterdir()) == []


def test_rejects_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "page.html").mkdir()
    rejects("path: got", save_page, REPORT, tmp_path / "page.html")


@pytest.mark.skipif(sys.platform == "win32", reason="file names may be longer there")
def test_rejects_a_name_that_the_system_refuses(tmp_path):
    rejects("can be written", save_page, REPORT, tmp_path / f"{'a' * 300}.html")


def test_a_sample_has_every_part(tmp_path):
    report = sample(4)
    assert set(report) == set(REPORT)
    save_page(report, str(tmp_path / "step.html"))
    assert (tmp_path / "step.html").stat().st_size < 200_000
