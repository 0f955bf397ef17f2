"""Tests of an installed package's contents, which the build lists without building, and of `make dist`."""

import re
import tarfile
import zipfile
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


@pytest.mark.parametrize(
    ("sdist", "wheel", "wrong"),
    [
        (["a.py", "docs/b.md", "PKG-INFO"], {"a.py": "1"}, []),
        (["a.py"], {"a.py": "1"}, ["p-1.tar.gz lacks docs/b.md"]),
        (["a.py", "docs/b.md"], {"a.py": "2"}, ["p-1.whl: a.py is not as in"]),
        (["a.py", "docs/b.md"], {}, ["p-1.whl: a.py is not as in"]),
        (["a.py", "docs/b.md"], {"a.py": "1", "c.py": ""}, ["p-1.whl: c.py is not as in"]),
    ],
)
def test_dist_compares_sdist_and_wheel_with_the_source(sdist, wheel, wrong, monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "_known_files", lambda: ["a.py", "docs/b.md"])
    (tmp_path / "file").touch()
    with tarfile.open(tmp_path / "p-1.tar.gz", "w:gz") as packed:
        for name in sdist:
            packed.add(tmp_path / "file", f"p-1/{name}")
    (tmp_path / "from-source").mkdir()
    for path, files in ((tmp_path / "p-1.whl", wheel), (tmp_path / "from-source" / "p-1.whl", {"a.py": "1"})):
        with zipfile.ZipFile(path, "w") as packed:
            for name, text in files.items():
                packed.writestr(name, text)
    found = dist._compared(tmp_path / "p-1.whl", tmp_path / "p-1.tar.gz", tmp_path)
    assert len(found) == len(wrong)
    assert all(each.startswith(start) for each, start in zip(found, wrong, strict=True))


@pytest.mark.parametrize(
    ("words", "wrong", "kept"),
    [
        (["base"], (), True),
        (["base"], ("extra",), False),
        (["base"], ("source",), False),
        (["--build"], ("extra",), True),
    ],
)
def test_dist_keeps_sdist_and_wheel_if_nothing_is_wrong(words, wrong, kept, monkeypatch, tmp_path):
    built, clone = tmp_path / "built", tmp_path / "clone"
    (clone / "dist").mkdir(parents=True)
    (clone / "dist" / "old.whl").touch()
    built.mkdir()
    files = built / "p-1.whl", built / "p-1.tar.gz"
    for file in files:
        file.touch()
    monkeypatch.setattr(dist, "ROOT", clone)
    monkeypatch.setattr(dist, "find_uv", lambda: "uv")
    monkeypatch.setattr(dist, "_built", lambda folder: files)
    monkeypatch.setattr(dist, "_build", lambda *_: None)
    monkeypatch.setattr(dist, "_compared", lambda *_: ["p lacks a file"] * ("source" in wrong))
    monkeypatch.setattr(dist, "extras", lambda *_, **__: "extra" in wrong)
    monkeypatch.setattr(dist.sys, "argv", ["dist", *words])
    with pytest.raises(SystemExit) as ended:
        dist.main()
    assert ended.value.code is (not kept)
    held = {path.name for path in (clone / "dist").iterdir()}
    assert held == ({file.name for file in files} if kept else {"old.whl"})


def test_what_dist_builds_from_is_what_git_knows():
    known = dist._known_files()
    assert {"pyproject.toml", "MANIFEST.in", "megatron_cp/__init__.py", ".ci/run"} <= set(known)
    assert not [name for name in known if name.startswith((".venv/", "dist/")) or name.endswith(".pyc")]
    taken = set(re.findall(r"^graft (.*)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE))
    assert taken == {name.partition("/")[0] for name in known if "/" in name} - {"megatron_cp"}


def test_dist_tries_each_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(dist.EXTRAS) == {"base", *extras} - {"dev", "docs"}
    assert set(dist.HOSTS.values()) <= {"", *extras}


def test_dist_tries_each_command_of_the_command_line():
    tried = {words[0] for extra in dist.EXTRAS.values() for words in extra.commands}
    assert {*tried, dist.CHECK[0]} == {*COMMANDS, "--version"}
    for extra in dist.EXTRAS.values():
        compile(extra.code, "code", "exec")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "error: No solution found\n  cause: Because flash-attn==2.8.3 has no usable wheels and\n we depend on it",
            "flash-attn==2.8.3 has no wheel",
        ),
        ("error: No solution found\n  cause: Because a needs\n   b<2", "Because a needs b<2"),
        ("error: disk full", "error: disk full"),
    ],
)
def test_dist_says_why_an_extra_cannot_be_installed(said, reason):
    assert dist._reason(said) == reason


@pytest.mark.parametrize("missing", [[], ["base"]])
def test_dist_fails_where_a_check_fails(missing, monkeypatch, tmp_path, capsys):
    """Without an installation: `_tried` says what it would have found."""
    monkeypatch.setattr(dist, "_tried", lambda name, *_, **__: (("1",) * 5, [f"{name} broke" for each in missing]))
    assert dist.extras(tmp_path, ["base"], tmp_path, compiled=False) is bool(missing)
    assert ("base broke" in capsys.readouterr().out) is bool(missing)


@pytest.mark.parametrize(("words", "known"), [(["nothing"], "base, megatron"), (["--beside", "base"], "axolotl, ")])
def test_dist_rejects_a_name_that_it_does_not_know(words, known, monkeypatch, capsys):
    monkeypatch.setattr(dist.sys, "argv", ["dist", *words])
    with pytest.raises(SystemExit):
        dist.main()
    assert f"there is no {words[-1]}; there are {known}" in capsys.readouterr().err
