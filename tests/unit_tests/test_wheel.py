"""Tests of an installed package's contents, which the build lists without building."""

from pathlib import Path

from setuptools.dist import Distribution

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
    modules = {path.relative_to(ROOT) for path in (ROOT / "megatron_cp").rglob("*.py")}
    assert {path for path in held if path.suffix == ".py"} == modules
    assert (ROOT / "megatron_cp" / "py.typed").read_bytes() == b""
    stubs = {path.relative_to(ROOT) for path in (ROOT / "megatron_cp").rglob("*.pyi")}
    assert Path("megatron_cp/__init__.pyi") in stubs
    assert {path for path in held if path.suffix == ".pyi"} == stubs  # without one its package cannot be imported
    page = ROOT / "megatron_cp" / "apps" / "estimate" / "page"
    assert {path.relative_to(ROOT) for kind in ("html", "css", "js") for path in page.glob(f"*.{kind}")} <= held
