"""The curves of a run: smoothing, parts by the size that trained them, and the picture."""

import json
import math

import numpy as np

from megatron_cp.apps.train.curves import entries_of, lines_of, loss_figure, smoothed, stretches, validation_of
from megatron_cp.page import DISTINCT

ENTRIES = [
    {"step": step, "loss": float(step), "context_parallel_size": size}
    for step, size in ((1, 2), (2, 2), (3, 3), (4, 3), (5, 2))
]  # fmt: skip


def test_a_curve_is_smoothed_without_a_lag():
    line = np.arange(100.0)
    np.testing.assert_allclose(smoothed(line), line)  # a mean of earlier values alone would be behind
    noisy = line + np.tile([1.0, -1.0], 50)
    assert np.abs(smoothed(noisy) - line)[5:-5].max() < 0.3
    assert smoothed([3.0]) == [3.0]
    assert smoothed([]).size == 0
    np.testing.assert_allclose(smoothed([1.0, math.nan, 3.0]), [1, 2, 3])
    assert math.isnan(smoothed([math.nan])[0])


def test_a_curve_is_in_parts_by_the_sizes_that_trained_it():
    assert stretches(ENTRIES, "CP=9") == [("CP=2", range(2)), ("CP=3", range(1, 4)), ("CP=2", range(3, 5))]
    assert stretches([{"step": 1, "loss": 1.0}], "CP=9") == [("CP=9", range(1))]
    first, second = lines_of(ENTRIES, "CP=9", "loss")
    assert (first["name"], second["name"]) == ("CP=2", "CP=3")
    np.testing.assert_array_equal(first["y"], [1, 2, math.nan, 4, 5])
    np.testing.assert_array_equal(second["x"], [2, 3, 4])


def test_the_picture_names_each_size_once_and_shows_validation():
    entries = [*ENTRIES[:-1], ENTRIES[-1] | {"validation_loss": 4.5}]
    axes = loss_figure(entries, "CP=9", ENTRIES[:2]).axes[0]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["CP=1, to compare", "CP=2", "CP=3", "validation"]
    raw, smooth, other = axes.lines[1], axes.lines[2], axes.lines[3]
    assert raw.get_color() == smooth.get_color() == DISTINCT[0] != other.get_color()
    assert validation_of(entries) == {5: 4.5}


def test_metrics_are_read_as_they_were_written(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in ENTRIES))
    assert entries_of(tmp_path) == ENTRIES
