"""Tests of what a run leaves to look at: its metrics, and the page of its curves."""

import json
import math

import numpy as np
import pytest

from megatron_cp.apps.train.options import TrainingOptions
from megatron_cp.apps.train.record import RunRecord, curves_of, entries_of

ENTRIES = [
    {"step": step, "loss": float(step), "grad_norm": 1.0, "tokens_per_second": 7.0, "context_parallel_size": size}
    for step, size in ((1, 2), (2, 2), (3, 3), (4, 3), (5, 2))
]  # fmt: skip


def test_a_curve_is_in_parts_by_the_sizes_that_trained_it():
    loss, norm, speed = curves_of(ENTRIES, [])
    assert [line["name"] for line in loss["lines"]] == ["CP=2", "CP=3"]
    np.testing.assert_array_equal(loss["lines"][0]["y"], [1, 2, math.nan, math.nan, 5])
    np.testing.assert_array_equal(loss["lines"][1]["y"], [math.nan, math.nan, 3, 4, math.nan])
    assert norm["lines"][0]["y"][0] == 1.0
    assert speed["title"] == "tokens/s"


def test_the_difference_from_one_rank_is_a_curve_of_the_steps_that_both_have():
    reference = [{**entry, "loss": entry["loss"] - 0.25, "context_parallel_size": 1} for entry in ENTRIES[2:]]
    loss, difference, *_ = curves_of(ENTRIES, reference)
    assert [line["name"] for line in loss["lines"]] == ["CP=1, to compare", "CP=2", "CP=3"]
    assert [bool(line.get("beside")) for line in loss["lines"]] == [True, False, False]
    assert difference["title"] == "loss minus that of CP=1"
    assert difference["lines"] == [{"name": "difference", "x": [3, 4, 5], "y": [0.25] * 3}]


def test_metrics_are_read_as_they_were_written(tmp_path):
    assert entries_of(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in ENTRIES))
    assert entries_of(tmp_path) == ENTRIES


def test_a_report_is_written_where_it_was_asked_for(tmp_path):
    pytest.importorskip("plotly", reason="pip install '.[report]'")
    for report in (None, str(tmp_path / "page.html")):
        record = RunRecord(tmp_path, TrainingOptions(), "megatron-cp train --cp 2", report)
        record.report(("CP=2 and CP=1 agree", True), ENTRIES, ENTRIES, [["steps", 5, None]])
        assert (tmp_path / "page.html").exists() == (report is not None)
    page = (tmp_path / "page.html").read_text()
    for said in ("CP=2 and CP=1 agree", "megatron-cp train --cp 2", "loss minus that of CP=1", "--hidden-size"):
        assert said in page
