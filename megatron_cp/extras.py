"""Commands that install what some features of this package need: the extras of `pyproject.toml`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from shlex import quote

# Their sources compile against the torch that is installed, which pip's isolated builds do not have.
_COMPILED = ("flash", "mamba", "te")


@cache
def install(extra: str) -> str:
    """Returns the command that installs what an extra of this package pins.

    It names the packages themselves, from the metadata of what is installed: `pip install 'megatron_cp[...]'` finds
    nothing outside of a clone. Where the package is imported without having been installed, it installs from a clone.
    """
    try:
        lines = requires("megatron_cp") or []
    except PackageNotFoundError:
        return f"pip install '.[{extra}]' in a clone of megatron_cp"
    pins = [line.partition(";")[0].strip() for line in lines if line.endswith(f'extra == "{extra}"')]
    options = "--no-build-isolation " if extra in _COMPILED else ""
    return f"pip install {options}{' '.join(map(quote, pins))}"
