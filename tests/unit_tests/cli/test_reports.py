"""The page of `check --report`, and the environment that it names."""

import argparse
import json
import math
import subprocess
from dataclasses import replace

import pytest

from megatron_cp.cli import check_report
from megatron_cp.cli.check_report import save_check
from megatron_cp.cli.environment import environment, environment_facts, git_state
from megatron_cp.cli.main import main
from megatron_cp.testing.parity import Case, Parity


@pytest.fixture
def saved(monkeypatch):
    """The reports of pages that would be written."""
    reports = []
    monkeypatch.setattr(check_report, "save_page", lambda report, path: reports.append((report, path)))
    return reports


def test_check_saves_a_page_of_its_cases(tmp_path, capsys):
    """The page has tables alone, for which nothing more need be installed."""
    target = tmp_path / "check.html"
    shape = ["--lengths", "5,1,9", "--heads", "2", "--kv-heads", "1", "--head-dim", "4", "--scheme", "exact"]
    assert main(["check", "--cp", "2,3", *shape, "--report", str(target)]) == 0
    page = target.read_text()
    assert f'<p class="ok">{capsys.readouterr().out.splitlines()[0]}</p>' in page
    assert "megatron-cp check --cp 2,3 --lengths 5,1,9" in page
    assert page.count("<td") > 20


def test_a_check_shows_the_worst_case_first(tmp_path, saved):
    case = Case("attention", 2, (5,), heads=2, head_dim=4)
    results = [
        Parity(replace(case, seed=seed), {"out": 1e-13, "d_q": error}, False, False, 1e-12, {})
        for seed, error in enumerate((2e-13, 5e-12, math.nan))
    ]
    args = argparse.Namespace(layer="attention", words=["check"], report=tmp_path / "check.html")
    save_check(args, results, "FAILED: 3 cases")
    ((report, path),) = saved
    assert path == args.report
    schemes, cases = report["tables"]
    assert report["verdict"] == {"text": "FAILED: 3 cases", "ok": False}
    assert str([row[2] for row in cases["rows"]]) == "[nan, 5e-12, 2e-13]"
    assert {row for row, _ in cases["bad"]} == {0, 1}
    assert schemes["rows"][0][:4] == ["auto", 2, 3, 2]


def test_the_environment_has_versions_and_no_names():
    found = environment()
    assert found["versions"]["python"].count(".") == 2
    assert found["threads"] >= 1
    names = [name for name, _ in environment_facts(found | {"git": {"commit": "abc", "dirty": True}})]
    assert names == ["versions", "platform", "processor", "devices", "git"]
    assert json.loads(json.dumps(found)) == found


def test_git_is_named_where_a_checkout_tracks_the_code(tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True)

    assert git_state(tmp_path) is None
    git("init")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "a")
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "a.py").write_text("1")
    assert git_state(tmp_path / "installed") is None  # into a checkout that does not track it
    state = git_state(tmp_path / "code")
    assert (len(state["commit"]), state["dirty"]) == (40, False)
    (tmp_path / "code" / "a.py").write_text("2")
    assert git_state(tmp_path / "code") == state | {"dirty": True}
