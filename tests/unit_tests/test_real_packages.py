"""`tools/real_packages.py` says why it cannot build or use packages, before it fetches anything."""

import sys
from pathlib import Path

import pytest

from tests.refusals import rejects
from tools import real_packages
from tools.gpu_check.wheels import pins
from tools.real_packages import PACKAGES, check_machine, edit_source, make_wheels, unpack_wheels, variables, wheel_of

COMPILED = [package for package in PACKAGES if package.compiled]


@pytest.fixture
def nvidia(tmp_path, monkeypatch):
    """A machine with nvcc, a compiler, and torch's CUDA libraries, whose folder this is."""
    toolkit = tmp_path / "cuda"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv("CXX", sys.executable)
    folder = tmp_path / "nvidia"
    for package in COMPILED:
        for header in package.headers:
            (folder / header).parent.mkdir(parents=True, exist_ok=True)
            (folder / header).touch()
    return folder


def test_versions_are_those_of_the_extras():
    pinned = pins(
        (Path(__file__).parents[2] / "pyproject.toml").read_text().replace("[cu13]", "").replace("[pytorch]", "")
    )
    assert pinned["torch"] == real_packages.TORCH
    for package in PACKAGES:
        name = "transformer-engine" if package.name.startswith("transformer_engine") else package.name.replace("_", "-")
        assert package.version == pinned[name], package.name


def test_accepts_a_machine_with_all(nvidia):
    check_machine(COMPILED, real_packages.TORCH, nvidia)
    check_machine([], "1.0")  # nothing is to be compiled


def test_rejects_another_torch(nvidia):
    rejects("torch: got '2.10.0.cu130'; allowed: 2.11.0", check_machine, COMPILED, "2.10.0+cu130", nvidia)


def test_rejects_a_machine_without_nvcc(nvidia, monkeypatch):
    monkeypatch.setattr(real_packages, "cuda_home", lambda: None)
    rejects("CUDA_HOME: got None; allowed: .*nvcc", check_machine, COMPILED, real_packages.TORCH, nvidia)


def test_rejects_a_machine_without_a_compiler(nvidia, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    rejects("CXX: got 'no-such-compiler'; .*PATH", check_machine, COMPILED, real_packages.TORCH, nvidia)


def test_rejects_a_torch_without_headers(nvidia):
    (nvidia / "nccl" / "include" / "nccl.h").unlink()
    rejects("headers: got .*nccl.h. transformer_engine_torch", check_machine, COMPILED, real_packages.TORCH, nvidia)


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
