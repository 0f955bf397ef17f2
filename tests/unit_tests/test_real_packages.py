"""`tools/real_packages.py` says why it cannot build or use packages, before it fetches anything."""

import re
from pathlib import Path

import pytest

from tests.refusals import rejects
from tools import real_packages
from tools.real_packages import PACKAGES, edit_source, make_wheels, unpack_wheels, variables, wheel_of


def test_versions_are_those_of_the_extras():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    pinned = dict(re.findall(r'"([\w.-]+)(?:\[\w+\])?==([\w.+-]+)"', project))
    assert pinned["torch"] == real_packages.TORCH
    for package in PACKAGES:
        name = "transformer-engine" if package.name.startswith("transformer_engine") else package.name.replace("_", "-")
        assert package.version == pinned[name], package.name


@pytest.mark.parametrize(
    ("torch", "cuda", "says"),
    [
        ("2.10.0+cu130", "cuda", "torch: got '2.10.0.cu130'; allowed: 2.11.0"),
        (real_packages.TORCH, None, "CUDA_HOME: got None; allowed: .*nvcc"),
    ],
)
def test_rejects_a_machine_that_cannot_compile(torch, cuda, says, monkeypatch, tmp_path):
    monkeypatch.setattr(real_packages, "version", lambda _: torch)
    monkeypatch.setattr(real_packages, "cuda_home", lambda: cuda)
    rejects(says, make_wheels, tmp_path, list(PACKAGES))


def test_rejects_a_source_that_has_not_what_is_edited(tmp_path):
    (tmp_path / "setup.py").write_text("")
    rejects("causal_conv1d 1.7.0: got 'setup.py'; allowed: a file with", edit_source, PACKAGES[0], tmp_path)


def test_rejects_folders_without_packages(tmp_path):
    rejects("WHEELS: got .*real_packages build", unpack_wheels, tmp_path, tmp_path / "site")
    rejects("SITE: got .*real_packages install", variables, tmp_path)


def test_makes_no_wheel_that_is_there(tmp_path):
    for package in PACKAGES:
        (tmp_path / f"{package.name}-{package.version}-cp312-cp312-linux_x86_64.whl").touch()
    make_wheels(tmp_path, list(PACKAGES))  # would ask for a compiler, and fetch
    assert all(wheel_of(tmp_path, package) for package in PACKAGES)


def test_a_site_comes_first_for_python_and_the_libraries_for_the_loader(tmp_path, monkeypatch):
    (tmp_path / "mamba_ssm").mkdir()
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr(real_packages, "libraries", lambda: tmp_path)
    (tmp_path / "nccl" / "lib").mkdir(parents=True)
    given = variables(tmp_path)
    assert given["PYTHONPATH"].split(":") == [str(tmp_path), "before"]
    assert given["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path / "nccl" / "lib")
    assert given["NCCL_HOME"] == str(tmp_path / "nccl")
