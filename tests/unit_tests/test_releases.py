"""Version, changelog and citation agree, and so do workflows and the image with what they name."""

import re
import subprocess
from pathlib import Path

import pytest

from megatron_cp import __version__
from megatron_cp.planner.predict.machine_files import tomllib
from tools.versions import ENVIRONMENTS

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def read(path):
    return pytest.importorskip("yaml").safe_load(path.read_text())


def status(path):
    """Returns the paragraph that begins with the status."""
    return next(part for part in path.read_text().split("\n\n") if part.startswith("**Status"))


def test_version_changelog_citation_and_tag_agree():
    citation, changelog = read(ROOT / "CITATION.cff"), (ROOT / "CHANGELOG.md").read_text()
    assert citation["license"] == "Apache-2.0"
    releases = re.findall(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert releases[0] == (citation["version"], str(citation["date-released"]))
    assert {releases[0][0], __version__} == set(re.findall(r"\d+\.\d+\.\d+(?:\.dev0)?", status(ROOT / "README.md")))
    dates = [date for _, date in releases]
    assert dates == sorted(dates, reverse=True)
    is_released = re.search(r"^## (.*)$", changelog, re.MULTILINE)[1] != "Unreleased"
    assert re.fullmatch(r"\d+\.\d+\.\d+" + r"\.dev0" * (not is_released), __version__)
    if is_released:
        assert __version__ == releases[0][0]
    asked = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert {tag for tag in asked.stdout.split() if tag.startswith("v")} <= {f"v{__version__}"}


def test_workflows_run_what_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in ROOT.glob(".github/workflows/*.yml"):
        assert set(re.findall(r'[:"] ?make ([a-z-]+)', path.read_text())) <= targets
    nightly = read(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert [(each["environment"], each["python"]) for each in nightly] == [(e.name, e.python) for e in ENVIRONMENTS]


def test_the_image_has_the_pinned_torch_and_known_extras():
    text = (ROOT / "Dockerfile").read_text()
    (torch,) = [each.partition("==")[2] for each in EXTRAS["dev"] if each.startswith("torch==")]
    assert re.findall(r"^FROM pytorch/pytorch:([\d.]+)-", text, re.MULTILINE) == [torch]
    assert re.findall(r'"torch==([\d.]+)"', text) == [torch]
    assert set(re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)[1].split(",")) <= set(EXTRAS)
    ignored = set((ROOT / ".gitignore").read_text().replace("/\n", "\n").split()) - {"__pycache__"}
    assert ignored <= set((ROOT / ".dockerignore").read_text().split())
