"""Modules of frameworks that are not installed, whose classes tests stand in for."""

import sys
from types import ModuleType


def stand_in(patch, contents):
    """Makes modules importable by their dotted names, with `{name: value}` in each, and the packages that they are in.

    Returns all of them by name.
    """
    made = {}
    for name, values in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path, parent = ".".join(parts[:end]), ".".join(parts[: end - 1])
            if path not in made:
                made[path] = ModuleType(path)
                patch.setitem(sys.modules, path, made[path])
                if parent:
                    setattr(made[parent], parts[end - 1], made[path])
        vars(made[name]).update(values)
    return made
