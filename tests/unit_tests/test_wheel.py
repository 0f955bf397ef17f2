"""Tests of an installed package's contents, which the build lists without building, and of `make dist`."""

import subprocess
from pathlib import Path

import pytest
from setuptools.dist import Distribution

from megatron_cp.cli.main import COMMANDS
from megatron_cp.planner.predict.machine_files import tomllib
from tools import dist

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_every_module_and_says_that_it_is_typed(monkeypatch):
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files(["pyproject.toml"])
    distribution.include_package_data = False  # what is listed, not what git knows: a wheel may be made without git
    build = distribution.get_command_obj("build_py")
    build.build_lib = "wheel"
    build.ensure_finalized()
    held = {Path(name).relative_to("wheel") for name in build.get_outputs(include_bytecode=False)}
    assert Path("megatron_cp/py.typed") in held
    assert (ROOT / "megatron_cp" / "py.typed").read_bytes() == b""
    # Pages beside the code are for those who read it, and no command reads them.
    there = {path.relative_to(ROOT) for path in (ROOT / "megatron_cp").rglob("*") if path.is_file()}
    assert held == {path for path in there if "__pycache__" not in path.parts and path.suffix != ".md"}
    assert {path.suffix for path in held} == {".json", ".py", ".pyi", ".toml", ".typed"}


TRIED = {"extra": ["base: pip check: exit code 1"], "wheel": [f"te{dist.NO_WHEEL}"]}


@pytest.mark.parametrize(
    ("words", "wrong", "kept"),
    [
        (["base"], "", True),
        (["base"], "extra", False),
        (["base"], "wheel", True),
        (["base"], "tool", False),
        (["--build"], "extra", True),
    ],
)
def test_dist_keeps_sdist_and_wheel_if_nothing_is_wrong(words, wrong, kept, monkeypatch, tmp_path):
    """`uv tool run` is check-manifest, which ends with 1 if the sdist lacks a file that git knows."""
    clone = tmp_path / "clone"
    (clone / "dist").mkdir(parents=True)
    (clone / "dist" / "old.whl").touch()

    def asked(folder, *words):
        if words[0] == "build":
            (folder / "dist").mkdir()
            for name in ("p-1.whl", "p-1.tar.gz"):
                (folder / "dist" / name).touch()
        return subprocess.CompletedProcess(words, int(words[0] == wrong), "missing from sdist: a.py", "")

    monkeypatch.setattr(dist, "ROOT", clone)
    monkeypatch.setattr(dist, "find_uv", lambda: "uv")
    monkeypatch.setattr(dist, "_asked", asked)
    monkeypatch.setattr(dist, "tried", lambda *_: TRIED.get(wrong, []))
    monkeypatch.setattr(dist.sys, "argv", ["dist", *words])
    with pytest.raises(SystemExit) as ended:
        dist.main()
    assert bool(ended.value.code) is not kept
    held = {path.name for path in (clone / "dist").iterdir()}
    assert held == ({"p-1.whl", "p-1.tar.gz"} if kept else {"old.whl"})


def test_dist_tries_each_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(dist.EXTRAS) == {"base", *extras} - {"dev", "docs"}


def test_dist_tries_each_command_of_the_command_line():
    tried = {words[0] for extra in dist.EXTRAS.values() for words in extra.commands}
    assert {*tried, dist.CHECK[0]} == {*COMMANDS, "--version"}
    for extra in dist.EXTRAS.values():
        compile(extra.code, "code", "exec")


def test_dist_rejects_a_name_that_it_does_not_know(monkeypatch, capsys):
    monkeypatch.setattr(dist.sys, "argv", ["dist", "nothing"])
    with pytest.raises(SystemExit):
        dist.main()
    assert "there is no nothing; there are base, megatron" in capsys.readouterr().err
