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
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def read(path):
    return pytest.importorskip("yaml").safe_load(path.read_text())


def wrong_version(version, changelog, citation, tags):
    """Returns what disagrees between a version, the changelog's headings, the citation's fields and a commit's tags."""
    headings = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    if ".dev" in version:
        released = headings[1].split(" - ") if headings[0] == "Unreleased" and len(headings) > 1 else None
        wrong = [f"{version} is not released, and the changelog begins with {headings[0]}"] * (released is None)
    else:
        released = headings[0].split(" - ")
        wrong = [f"the version is {version}, the changelog begins with {headings[0]}"] * (released[0] != version)
    if released is not None and released != [citation["version"], str(citation["date-released"])]:
        wrong.append(f"CITATION.cff has {citation['version']} of {citation['date-released']}")
    return wrong + [f"tag {tag} of version {version}" for tag in tags if tag.startswith("v") and tag != f"v{version}"]


def test_version_changelog_citation_and_tag_agree():
    citation = read(ROOT / "CITATION.cff")
    asked = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert wrong_version(__version__, (ROOT / "CHANGELOG.md").read_text(), citation, asked.stdout.split()) == []
    assert citation["license"] == "Apache-2.0"
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", __version__)
    dates = re.findall(r"^## \d+\.\d+\.\d+ - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dates
    assert dates == sorted(dates, reverse=True)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_is_there_with_few_permissions_and_pinned_actions(path):
    workflow, targets = read(path), set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert workflow["permissions"] == {"contents": "read"}
    assert set(workflow) == {"name", True, "permissions", "jobs"} | {"concurrency"} & set(workflow)  # True is `on`
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360  # GitHub's own limit
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+\.\d+\.\d+", step.get("uses", "actions/none@v0.0.0"))
            commands = [step["run"]] if "run" in step else []
            if commands == ["${{ matrix.command }}"]:
                commands = job["strategy"]["matrix"]["command"]
            for command in commands:
                assert command == ".ci/run" or command.split()[:1] == ["make"]
                assert command == ".ci/run" or command.split()[1] in targets
    assert path.stem != "ci" or workflow["jobs"]["run"]["steps"][-1]["run"] == ".ci/run"


def test_the_nightly_workflow_has_every_environment():
    jobs = read(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]
    held = [(each["environment"], each["python"]) for each in jobs["versions"]["strategy"]["matrix"]["include"]]
    assert held == [(each.name, each.python) for each in ENVIRONMENTS]
    commands = " ".join(jobs["random"]["strategy"]["matrix"]["command"])
    assert re.search(r"make fuzz SECONDS=\d{3,}", commands)


def test_the_image_has_the_pinned_torch_and_known_extras():
    text = (ROOT / "Dockerfile").read_text()
    (torch,) = [each.partition("==")[2] for each in EXTRAS["dev"] if each.startswith("torch==")]
    assert re.findall(r"^FROM pytorch/pytorch:([\d.]+)-", text, re.MULTILINE) == [torch]
    assert re.findall(r'"torch==([\d.]+)"', text) == [torch]
    assert set(re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)[1].split(",")) <= set(EXTRAS)
    ignored = set((ROOT / ".gitignore").read_text().replace("/\n", "\n").split()) - {"__pycache__"}
    assert ignored <= set((ROOT / ".dockerignore").read_text().split())
