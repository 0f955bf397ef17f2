"""Dependencies point one way, in rooms and in modules; who imports what; who replaces what."""

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
    found = []
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def floor_of(room):
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


def test_imports_point_downward():
    upward = []
    for path in HOUSE.rglob("*.py"):
        room = path.relative_to(HOUSE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue  # the front doors: one names everything, one starts the command line
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] != "megatron_cp" or len(parts) == 1:
                continue
            other = parts[1]
            if other != room and floor_of(other) >= floor_of(room):
                upward.append(f"{path.relative_to(HOUSE)} imports {name}")
    assert upward == []


def private_imports(source, app, is_public):
    """Returns the names that an application's source imports from the library, anywhere in it, beside public names.

    Args:
        source: of a module of the application.
        app: the application's package.
        is_public: says of a package of the library and a name whether the package exports it.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [("." * node.level + (node.module or ""), alias.name) for alias in node.names]
        else:
            continue
        for module, name in found:
            parts = module.split(".")
            if parts[0] not in ("", "megatron_cp") or f"{module}.".startswith(f"{app}."):
                continue
            if len(parts) > 2 or not parts[0] or not name or parts[1:] == ["apps"] or not is_public(module, name):
                yield f"{module} {name}".strip()


def exports(package, name):
    """Returns True if a package names it in `__all__`, or a module without such a list has it."""
    module = importlib.import_module(package)
    return name in getattr(module, "__all__", vars(module)) or (package, name) == ("megatron_cp", "__version__")


APPLICATIONS = sorted(path.parent.name for path in (HOUSE / "apps").glob("*/__init__.py"))


@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications_import_public_names_alone(name):
    found = [
        f"{path.relative_to(HOUSE)}: {imported}"
        for path in (HOUSE / "apps" / name).rglob("*.py")
        for imported in private_imports(path.read_text(), f"megatron_cp.apps.{name}", exports)
    ]
    assert found == []


def test_applications_are_named_in_one_place_of_the_library():
    naming = {
        path.relative_to(HOUSE).as_posix()
        for path in HOUSE.rglob("*.py")
        if not path.is_relative_to(HOUSE / "apps") and "megatron_cp.apps" in path.read_text()
    }
    assert naming == {"cli/applications.py"}


def imported_modules(source, modules):
    """Returns the `modules` that a source imports anywhere; `from a import b` imports a.b if that is a module."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules:
                    yield inner
                elif node.module in modules:
                    yield node.module


def circles(sources):
    """Sets of modules that import each other, directly or not. `sources` by the modules' names."""
    imports = {name: set(imported_modules(source, sources)) - {name} for name, source in sources.items()}
    reach = {name: reached_from(name, imports) for name in imports}
    together = (frozenset(other for other in reach[name] if name in reach[other]) for name in reach)
    return {circle for circle in together if len(circle) > 1}


def reached_from(name, imports):
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
    assert circles({module_name(path): path.read_text() for path in HOUSE.rglob("*.py")}) == set()


# Where names of schemes, modes and kinds may be compared: where they are defined, and where users' words are read.
NAMED_IN = {"plan/kinds.py", "plan/schemes.py", "cli/options.py"}


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


def importers_of(package):
    return {
        path.relative_to(HOUSE)
        for path in HOUSE.rglob("*.py")
        for name in imports_of(path)
        if name.split(".")[0] == package
    }


@pytest.mark.parametrize("package", ["transformers", "diffusers"])
def test_only_its_adapter_imports_it(package):
    importing = importers_of(package)
    assert importing
    assert [path for path in importing if not path.is_relative_to(package)] == []


def test_only_the_adapter_and_the_trainer_import_megatron():
    importing = importers_of("megatron")
    rooms = (Path("megatron"), Path("apps/train"))
    assert {room for room in rooms for path in importing if path.is_relative_to(room)} == set(rooms)
    assert [path for path in importing if not any(path.is_relative_to(room) for room in rooms)] == []


def root_of(node):
    """The name that a dotted expression begins with, or a dictionary of its attributes: a of a.b.c, of vars(a)."""
    while True:
        match node:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case ast.Call(func=ast.Name(id="vars" | "getattr"), args=[inner, *_]):
                node = inner
            case ast.Name(id=name):
                return name
            case _:
                return None


def imported_names(tree, package=None):
    """Names by which a source knows what it imports, of one package or of any, other names for them included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and package in (None, node.module.split(".")[0]):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            roots = {alias: alias.name.split(".")[0] for alias in node.names}
            found |= {alias.asname or root for alias, root in roots.items() if package in (None, root)}
    renamed = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for _ in renamed:  # as often as names could be handed on
        for node in renamed:
            if isinstance(node.value, ast.Name | ast.Attribute) and root_of(node.value) in found:
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


REPLACING = ("setattr", "delattr", "exchanged")  # functions that replace what their first argument has


def replacements(source, package=None):
    """The lines of a source that replace something of what it imports, or have the tools for it.

    Args:
        source: of a module.
        package: whose names are meant; None for those of any.
    """
    tree = ast.parse(source)
    known = imported_names(tree, package)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="unittest" | "unittest.mock") | ast.Name(id="monkeypatch" | "MonkeyPatch"):
                yield node.lineno
            case ast.Import() if any(alias.name.startswith("unittest") for alias in node.names):
                yield node.lineno
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]) if name in REPLACING:
                if root_of(first) in known:
                    yield node.lineno
            case ast.Call(func=ast.Name(id="partial"), args=[ast.Name(id="exchanged"), first, *_]):
                if root_of(first) in known:
                    yield node.lineno
            case ast.Call(
                func=ast.Attribute(value=ast.Call() | ast.Attribute(attr="__dict__") as where, attr="update")
            ):
                if root_of(where) in known:
                    yield node.lineno
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                if any(isinstance(x, ast.Attribute | ast.Subscript) and root_of(x) in known for x in flat(targets)):
                    yield node.lineno
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                if isinstance(target, ast.Attribute | ast.Subscript) and root_of(target) in known:
                    yield node.lineno


def flat(targets):
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from flat(target.elts)
        else:
            yield target


@pytest.mark.parametrize("room", ["apps", "cli", "testing"])
def test_nothing_of_the_library_is_replaced(room):
    paths = sorted((HOUSE / room).rglob("*.py"))
    found = [
        f"{path.relative_to(HOUSE)}:{line}" for path in paths for line in replacements(path.read_text(), "megatron_cp")
    ]
    assert found == []


def test_what_is_imported_is_exchanged_in_one_place():
    # Megatron's names and those of torch and of Python, which Megatron uses: `patches.py` says why each.
    exchanging = {
        path.relative_to(HOUSE) for path in (HOUSE / "megatron").rglob("*.py") if list(replacements(path.read_text()))
    }
    assert exchanging == PATCHES


PATCHES = {Path("megatron/patches.py"), Path("megatron/cpu.py")}
