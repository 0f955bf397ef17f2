"""Tests of the page of `plan --report`: candidates with names that differ, owners, streams and traffic."""

import numpy as np

from megatron_cp.cli import plan, plan_report
from megatron_cp.cli.main import main

SHAPE = ["--lengths", "700,10,300,39", "--heads", "6", "--kv-heads", "2", "--head-dim", "128", "--gpu", "h100"]


def report_of(monkeypatch, *words):
    """Returns the report that a command would save, which needs no plotly."""
    reports = []
    monkeypatch.setattr(plan, "check_charts", lambda name, path: None)
    monkeypatch.setattr(plan_report, "save_page", lambda report, path: reports.append((report, path)))
    assert main(["plan", *words, "--report", "step.html"]) == 0
    ((report, path),) = reports
    assert path == "step.html"
    return report


def test_a_report_of_attention_has_every_candidate_once(monkeypatch, capsys):
    report = report_of(monkeypatch, "--cp", "4", *SHAPE)
    lines = capsys.readouterr().out.splitlines()
    assert report["verdict"] == {"text": lines[0], "ok": True}
    assert report["notes"][0] == lines[1]
    assert report["command"].startswith("megatron-cp plan --cp 4 --lengths 700,10,300,39")
    candidates, owners, streams, traffic = report["charts"]
    rows, parts = candidates["bars"]["rows"], candidates["bars"]["parts"]
    assert len(set(rows)) == len(rows) >= 5
    assert [row.endswith("(taken)") for row in rows] == [True] + [False] * (len(rows) - 1)
    assert {len(values) for values in parts.values()} == {len(rows)}
    held = sum(end - start for spans in owners["spans"]["parts"].values() for _, start, end, _ in spans)
    assert held == 1049
    assert len(streams["spans"]["rows"]) == 12
    assert all(end > start for spans in streams["spans"]["parts"].values() for _, start, end, _ in spans)
    matrix = np.array(traffic["matrix"])
    assert matrix.shape == (4, 4)
    assert np.trace(matrix) == 0 < matrix.sum()
    (table,) = report["tables"]
    assert [row[0] for row in table["rows"]] == [0, 1, 2, 3]


def test_a_report_of_linear_layers_has_their_modes(monkeypatch):
    report = report_of(monkeypatch, "--cp", "2", "--layer", "gdn", "--model", "qwen3-next", "--lengths", "4096")
    rows = report["charts"][0]["bars"]["rows"]
    assert len(set(rows)) == len(rows) >= 1


def test_rejects_a_report_of_a_whole_model_and_of_several_sizes(capsys):
    for words in (["--whole"], ["--cp", "2,4"]):
        assert main(["plan", *words, "--report", "step.html"]) == 2
        assert "--report: got 'step.html'; allowed: only with" in capsys.readouterr().err
