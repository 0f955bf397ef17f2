"""Public names that a package imports when they are first used, listed in its `__init__.pyi`.

`lazy_loader` reads the stub, which type checkers read as well, so that a name is written once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import lazy_loader


def attach_stub(
    package: str, file: str, renamed: Mapping[str, str] | None = None, extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package, whose names stand in the stub beside its `__init__`.

    A name that is neither public nor a module is answered with the public name that it resembles, or with those of
    which it is a part. `dir` lists public names alone.

    Args:
        package: the package's `__name__`.
        file: the package's `__file__`.
        renamed: public names by those that they had before, with which a use of an old one is answered.
        extra: the extra of this distribution that the package needs; an import that fails says how to install it.
    """
    load, _, names = lazy_loader.attach_stub(package, file)
    public, folder, old = frozenset(names), Path(file).parent, dict(renamed or {})

    def get(name: str) -> Any:
        if name in public:
            try:
                found = load(name)
            except ImportError as error:
                if extra is None or (error.name or "").partition(".")[0] == "megatron_cp":
                    raise  # a mistake of ours, which no installation mends
                kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
                raise kind(_remedy(package, extra, error), name=error.name) from error
            vars(sys.modules[package])[name] = found  # lazy_loader keeps it from 0.6 on
            return found
        text = hint(name)
        # An import statement would drop the hint of an AttributeError, and look for a module of that name.
        if text and sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ImportError(f"cannot import name {name!r} from {package!r}{text}", name=package)
        # With its name, so that Python adds no hint of its own to this one.
        raise AttributeError(f"module {package!r} has no attribute {name!r}{text}", name=name)

    def hint(name: str) -> str:
        if name in old:
            return f". It is {old[name]} now"
        # Inspection asks for the former; an import statement asks for a module before it imports it.
        if name.startswith("__") or (folder / f"{name}.py").exists() or (folder / name).is_dir():
            return ""
        return _resembling(name, names, [f"{package}.{room}" for room in _rooms_with(name, folder)])

    return get, lambda: sorted(public), names


def _remedy(package: str, extra: str, error: ImportError) -> str:
    from megatron_cp.extras import install  # reads the metadata of the installation

    return f"{error}; {package} needs it: {install(extra)}"


def _rooms_with(name: str, folder: Path) -> list[str]:
    """Returns the packages in a folder that export a name."""
    stubs = sorted(folder.glob("*/__init__.pyi"))
    return [stub.parent.name for stub in stubs if f" as {name}\n" in stub.read_text()]


def _resembling(name: str, known: Collection[str], rooms: Collection[str]) -> str:
    from difflib import get_close_matches

    plain = {_plain(each): each for each in known}
    near = get_close_matches(_plain(name), plain, n=1, cutoff=0.75) or [each for each in plain if _is_part(name, each)]
    found = [*(f"{room}.{name}" for room in rooms), *(plain[each] for each in near)]
    return f". Did you mean {' or '.join(found)}?" if found else ""


def _is_part(name: str, plain: str) -> bool:
    """Tells if a name of at least four letters begins or ends another: shorter ones are in names by chance."""
    part = _plain(name)
    return len(part) >= 4 and (plain.startswith(part) or plain.endswith(part))


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
