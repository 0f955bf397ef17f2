"""The table of tested versions, and the warning outside of it."""

import json
import warnings

import pytest

from megatron_cp import versions
from tests.unit_tests.test_house import HOUSE
from tools import versions as tool

ROWS = [
    {"python": "3.10.1", "torch": "2.9.0", "transformers": "5.0.0", "megatron-core": None, "numpy": "1.26.4"},
    {"python": "3.99.0", "torch": "2.14.1", "transformers": "5.24.0", "megatron-core": "0.19.2", "numpy": "2.5.5"},
]
COUNTS = {"passed": 5, "failed": 0, "skipped": 1, "failures": [], "date": "2026-11-25"}


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(versions, "tested", lambda: {"rows": [row | COUNTS for row in ROWS]})
    monkeypatch.setattr(versions, "_warned", set())


def test_ranges_go_by_numbers_from_the_oldest_environment_on(table):
    assert versions.tested_range("torch") == ("2.9.0", "2.14.1")
    assert versions.tested_range("megatron-core") == ("0.19.2", "0.19.2")
    project = (HOUSE.parent / "pyproject.toml").read_text()
    oldest = tool.ENVIRONMENTS[0]
    torch = next(each.removeprefix("torch==") for each in oldest.requirements if each.startswith("torch=="))
    numpy = next(each.removeprefix("numpy==") for each in oldest.requirements if each.startswith("numpy=="))
    assert f'"torch>={torch.removesuffix(".0")}"' in project
    assert f'"numpy>={".".join(numpy.split(".")[:2])},<3"' in project
    assert f'requires-python = ">={oldest.python}"' in project


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0", "2.11.0+cu130", "2.14.9", "2.14.0a0+git"])
def test_versions_within_the_range_are_tested(table, version):
    assert versions.outside({"torch": version}) == []


@pytest.mark.parametrize("version", ["2.8.0", "2.15.0", "3.0", "1.13.1"])
def test_versions_outside_the_range_are_named(table, version):
    assert versions.outside({"torch": version, "numpy": None}) == [f"torch {version}, tested from 2.9.0 to 2.14.1"]


def test_warns_once_with_the_table(table):
    with pytest.warns(UserWarning, match="has not been tested with torch 2.99.0") as caught:
        versions.warn_if_untested(torch="2.99.0", numpy="2.0.0")
    assert len(caught) == 1
    assert "3.10.1  2.9.0" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_untested(torch="2.99.0")
        versions.warn_if_untested(torch="2.12.0")


@pytest.mark.parametrize(("words", "status"), [(["newest"], 1), (["newest", "--if-there"], 0), ([], 0)])
def test_an_environment_without_its_python_is_left_out(words, status, monkeypatch, capsys):
    monkeypatch.setattr(tool.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(tool.sys, "argv", ["versions", *words])
    with pytest.raises(SystemExit) as stopped:
        tool.main()
    assert stopped.value.code == status
    assert "newest: no python3.13 on PATH that starts, left out" in capsys.readouterr().out


def test_rejects_an_environment_that_is_not_known(monkeypatch, capsys):
    monkeypatch.setattr(tool.sys, "argv", ["versions", "nwest"])
    with pytest.raises(SystemExit):
        tool.main()
    assert "no environment nwest" in capsys.readouterr().err


def test_counts_are_read_from_a_report(tmp_path):
    cases = '<testcase classname="a" name="b"/><testcase classname="a" name="c"><failure/></testcase>'
    cases += '<testcase classname="a" name="d"><skipped/></testcase>'
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert tool._counts(report) == {"passed": 1, "failed": 1, "skipped": 1, "failures": ["a::c"]}
    assert tool._counts(tmp_path / "none")["failures"] == ["pytest did not come to an end"]


def test_a_row_replaces_that_of_the_same_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "TABLE", tmp_path / "versions.json")
    monkeypatch.setattr(tool, "PAGE", tmp_path / "versions.md")
    rows = [row | COUNTS | {"environment": name} for row, name in zip(ROWS, ("oldest", "newest"), strict=True)]
    tool.TABLE.write_text(json.dumps({"rows": rows}))
    tool.PAGE.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n")
    tool._keep(rows[0] | {"passed": 7})
    assert [row["passed"] for row in json.loads(tool.TABLE.read_text())["rows"]] == [7, 5]
    text = tool.PAGE.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{tool.END}\nafter\n")
    assert "old\n" not in text


def test_an_adapter_is_tested_with_its_version_or_within_the_range():
    for package, version in versions.ADAPTERS.items():
        if version is not None:
            newer = version.replace(version.split(".")[1], "999", 1)
            assert versions.adapter_tested(package, version) == "tested"
            assert versions.adapter_tested(package, newer) == f"untested: only {version}"
    low, high = versions.tested_range("transformers")
    assert versions.adapter_tested("transformers", low) == versions.adapter_tested("transformers", high) == "tested"
    assert versions.adapter_tested("transformers", "99.0") == f"untested: only {low} to {high}"
