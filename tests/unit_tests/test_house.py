"""Dependencies point one way through the house, and only the adapter imports Megatron."""

import ast
from pathlib import Path

import megatron_cp

HOUSE = Path(megatron_cp.__file__).parent
# From the ground up: a room may import its own and lower ones.
FLOORS = [
    {"errors"},
    {"layout"},
    {"exchange", "data"},
    {"plan"},
    {"executor", "planner"},
    {"softmax", "linear"},
    {"batch"},
    {"testing"},
    {"megatron"},
    {"cli"},
]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def floor_of(room):
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


def test_imports_point_downward():
    upward = []
    for path in HOUSE.rglob("*.py"):
        room = path.relative_to(HOUSE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue  # the front door names everything
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] != "megatron_cp" or len(parts) == 1:
                continue
            other = parts[1]
            if other != room and floor_of(other) >= floor_of(room):
                upward.append(f"{path.relative_to(HOUSE)} imports {name}")
    assert upward == []


def test_only_the_adapter_imports_megatron():
    importing = {
        path.relative_to(HOUSE).parts[0]
        for path in HOUSE.rglob("*.py")
        for name in imports_of(path)
        if name.split(".")[0] == "megatron"
    }
    assert importing == {"megatron"}
