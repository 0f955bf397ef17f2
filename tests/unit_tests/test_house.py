"""Dependencies point one way, in rooms and in modules; which room imports which package."""

import ast
import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_cp
from megatron_cp.plan.attention import SCHEDULES
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.schemes import MODES, SCHEMES

HOUSE = Path(megatron_cp.__file__).parent
# From the ground up: a room may import its own and lower ones.
FLOORS = [
    {"errors", "extras", "files", "versions"}, {"lazy"}, {"layout", "page", "torch_private"}, {"exchange", "data"},
    {"plan"},
    {"executor", "planner"}, {"softmax", "linear"}, {"batch"}, {"nn"}, {"testing"},
    {"megatron", "transformers", "diffusers"}, {"integrations"}, {"cli"}, {"apps"},
]  # fmt: skip


def statements(node):
    """Yields a node and all statements in it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(child)


@functools.cache
def imports_of(path):
    """Returns the pairs of a module and a name of it that a file imports anywhere; the name is "" for a module."""
    found = []
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found += [("." * node.level + (node.module or ""), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return found


def floor_of(room):
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


def test_imports_point_downward():
    upward = []
    for path in HOUSE.rglob("*.py"):
        room = path.relative_to(HOUSE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue  # the front doors: one names everything, one starts the command line
        for name, _ in imports_of(path):
            package, _, inner = name.partition(".")
            other = inner.partition(".")[0]
            if package == "megatron_cp" and other not in ("", room) and floor_of(other) >= floor_of(room):
                upward.append(f"{path.relative_to(HOUSE)} imports {name}")
    assert upward == []


def is_public(app, module, name):
    """Returns True if an application may import a name: it is its own, or not ours, or a package here exports it."""
    parts = module.split(".")
    if parts[0] not in ("", "megatron_cp") or f"{module}.".startswith(f"megatron_cp.apps.{app}."):
        return True
    if len(parts) > 2 or not parts[0] or not name or parts[1:] == ["apps"]:
        return False
    package = importlib.import_module(module)
    return name in getattr(package, "__all__", vars(package)) or (module, name) == ("megatron_cp", "__version__")


def test_applications_import_public_names_alone():
    found = [
        f"{path.relative_to(HOUSE)}: {module} {name}"
        for path in (HOUSE / "apps").rglob("*/*.py")
        for module, name in imports_of(path)
        if not is_public(path.relative_to(HOUSE).parts[1], module, name)
    ]
    assert found == []


def test_applications_are_named_in_one_place_of_the_library():
    naming = {
        path.relative_to(HOUSE).as_posix()
        for path in HOUSE.rglob("*.py")
        if not path.is_relative_to(HOUSE / "apps") and "megatron_cp.apps" in path.read_text()
    }
    assert naming == {"cli/applications.py"}


def reached_from(name, imports):
    """Returns the modules that one imports, directly or not."""
    found, ahead = set(), [name]
    while ahead:
        new = imports[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def module_name(path):
    parts = ("megatron_cp", *path.relative_to(HOUSE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_import_each_other():
    paths = {module_name(path): path for path in HOUSE.rglob("*.py")}
    imports = {
        # `from a import b` imports a.b if that is a module.
        name: {f"{module}.{each}" if f"{module}.{each}" in paths else module for module, each in imports_of(path)}
        & paths.keys() - {name}
        for name, path in paths.items()
    }
    reach = {name: reached_from(name, imports) for name in imports}
    assert {name: reach[name] for name in imports if name in reach[name]} == {}


# Where names of schemes, modes and kinds may be compared: where they are defined, and where users' words are read.
NAMED_IN = {"plan/kinds.py", "plan/schemes.py", "cli/case_options.py"}


def names_compared(source, names):
    """The lines in which a source compares something with one of the names, or looks for it, or for "+", in one."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare() | ast.Call(func=ast.Attribute(attr="startswith" | "endswith" | "get")):
                parts, line = list(ast.walk(node)), node.lineno
            case ast.MatchValue(value=ast.Constant() as value):
                parts, line = [value], value.lineno
            case _:
                continue
        found = {part.value for part in parts if isinstance(part, ast.Constant)}
        is_part = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)
        asks_for_plus = is_part and isinstance(node.left, ast.Constant) and node.left.value == "+"
        if found & names or asks_for_plus:
            yield line


def test_what_a_scheme_or_a_kind_can_do_is_read_from_its_record():
    names = {*SCHEMES, *MODES, *KINDS, *SCHEDULES}
    found = {
        f"{path.relative_to(HOUSE)}:{line}"
        for path in HOUSE.rglob("*.py")
        if str(path.relative_to(HOUSE)) not in NAMED_IN
        for line in names_compared(path.read_text(), names)
    }
    assert found == set()


WITHOUT_TORCH = ("layout", "plan", "planner")


def test_plans_import_no_torch():
    """Neither themselves nor through what they import when they are imported."""
    names = [
        module_name(path) for room in WITHOUT_TORCH for path in (HOUSE / room).rglob("*.py") if path.stem != "picture"
    ]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("package", "rooms"),
    [("transformers", ["transformers"]), ("diffusers", ["diffusers"]), ("megatron", ["megatron", "apps/train"])],
)
def test_only_its_adapter_imports_a_framework(package, rooms):
    importing = {
        path.relative_to(HOUSE)
        for path in HOUSE.rglob("*.py")
        for module, _ in imports_of(path)
        if module.split(".")[0] == package
    }
    assert {room for room in rooms for path in importing if path.is_relative_to(room)} == set(rooms)
    assert [path for path in importing if not any(path.is_relative_to(room) for room in rooms)] == []
