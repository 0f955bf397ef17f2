"""`benchmarks/plot.py` draws every result that is kept as JSON and has a picture, and nothing else."""

import json
from pathlib import Path

import pytest

from benchmarks.plot import draw

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["exchange_cpu", "wire_cpu"])
def test_kept_results_can_be_drawn(name, tmp_path):
    draw(json.loads((RESULTS / f"{name}.json").read_text()), tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "found.png").stat().st_size > 20_000  # an empty frame has less


def test_a_layer_with_fewer_chunks_leaves_its_place_empty(tmp_path):
    data = json.loads((RESULTS / "wire_cpu.json").read_text())
    del data["hidden_share"]["gdn"]["4"]
    draw(data, tmp_path / "found.png")
    draw(json.loads((RESULTS / "wire_cpu.json").read_text()), tmp_path / "whole.png")
    assert (tmp_path / "found.png").read_bytes() != (tmp_path / "whole.png").read_bytes()
    with pytest.raises(SystemExit, match="bench exchange or bench wire"):
        draw(json.loads((RESULTS / "layer_cpu.json").read_text()), tmp_path / "found.png")
