"""Remedies that install something name what pip finds, and what `pyproject.toml` pins."""

import ast
import re
import warnings
from importlib import metadata
from pathlib import Path

import pytest

import megatron_cp
from megatron_cp import extras
from megatron_cp.integrations import require
from megatron_cp.planner.predict.machine_files import tomllib

HOUSE = Path(megatron_cp.__file__).parent
PINS = tomllib.loads((HOUSE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
ASKS = {"install": 0, "package_refusal": 2, "attach_stub": None}  # the place of the extra; None for a keyword
DEVELOPMENT = {"dev", "docs"}  # what make installs, and no remedy
OF_OTHERS = {"pip install tilelang"}  # which flash-linear-attention uses where it is there, and no extra has


@pytest.fixture(autouse=True)
def forgotten():
    extras.install.cache_clear()
    yield
    extras.install.cache_clear()


def names(requirements):
    return {re.match(r"[\w.-]+", each)[0] for each in requirements}


def asked_for(source):
    """The extras that calls of these functions name, and the commands that are spelled out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (name := getattr(node.func, "id", "")) in ASKS:
            named = [each.value for each in node.keywords] if ASKS[name] is None else node.args[ASKS[name] :][:1]
            yield from (each.value for each in named if isinstance(each, ast.Constant))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"pip install [^\s,;]+", node.value)


def test_what_is_asked_for_is_an_extra():
    found = {each for path in HOUSE.rglob("*.py") if path.name != "extras.py" for each in asked_for(path.read_text())}
    assert found - OF_OTHERS == set(PINS) - DEVELOPMENT


@pytest.mark.parametrize("extra", [name for name in PINS if name not in DEVELOPMENT])
def test_a_remedy_installs_the_packages_of_the_extra(extra):
    words = extras.install(extra).replace("'", "").split()
    assert words[:2] == ["pip", "install"]
    assert names(word for word in words[2:] if not word.startswith("--")) == names(PINS[extra])
    assert all(re.search(r"[=<>]", word) for word in words[2:] if not word.startswith("--"))


def test_pins_are_those_of_the_distribution_that_is_installed_or_of_the_clone(monkeypatch):
    lines = ['flash-attn==9.9; extra == "flash"', 'flash-attn==1; extra == "flash-old"', "torch<2"]
    monkeypatch.setattr(extras, "requires", lambda name: lines)
    assert extras.install("flash") == "pip install --no-build-isolation flash-attn==9.9"

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", missing)
    assert extras.install("fla") == "pip install '.[fla]' in a clone of megatron_cp"


@pytest.fixture
def installed(monkeypatch):
    """A package of a framework that is installed in the version that a test says."""
    versions = {}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    return versions


@pytest.mark.parametrize("found", ["0.9.1", "0.9.7", "0.9.0.dev1", "0.9rc1", "0.10rc2", "0.10.0", "1.9.1", "0.8.4"])
def test_a_version_of_a_framework_that_was_not_tested_is_named(found, installed):
    installed["verl"] = found
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        require("json", "verl")  # whatever module is there
    short = ".".join(re.findall(r"\d+", found)[:2])
    said = f"tested with verl 0.9.1, and {found} is installed"
    assert [said in str(each.message) for each in given] == [True] * (short != "0.9")
