"""Builds the emulated device, and gives the environment in which a process has it."""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "nullgpu"
TORCH = "2.11.0+cu130"  # whose symbols the runtime has


class UnavailableError(RuntimeError):
    """Raised if there is no emulated device here; says why."""


def environment() -> dict[str, str]:
    """This process's environment with the device in it, which is built if it has not been.

    Raises:
        UnavailableError: no compiler, no CUDA headers, another torch, or no Linux.
    """
    folder = _built()
    paths = [str(HERE / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    libraries = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    given = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return given | {
        "LD_PRELOAD": str(folder / "libnullgpu.so"), "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1", "NULLGPU": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiled kernels would compute nothing
    }  # fmt: skip


def _built() -> Path:
    """The folder of the libraries."""
    if not sys.platform.startswith("linux"):
        raise UnavailableError("the emulated device is for Linux alone")
    found = _torch_version()
    if found != TORCH:
        raise UnavailableError(f"the emulated device has the symbols of torch {TORCH}; this is {found}")
    named = os.environ.get("CXX", "g++").split()
    if not named or shutil.which(named[0]) is None:
        whose = f"CXX is {os.environ['CXX']!r}" if "CXX" in os.environ else "g++"
        raise UnavailableError(f"no C++ compiler: {whose}, which is not on the PATH")
    sources = [HERE / "runtime.cpp", HERE / "driver.c"]
    mark = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = BUILD / mark
    if not (folder / "libcuda.so.1").exists():
        part = folder.with_name(f"{mark}.{os.getpid()}")
        part.mkdir(parents=True)
        flags = [*named, "-O1", "-shared", "-fPIC"]
        runtime, driver = ("-std=c++17", *(f"-I{each}" for each in _headers())), ("-x", "c")
        for options, source, name in ((runtime, sources[0], "libnullgpu.so"), (driver, sources[1], "libcuda.so.1")):
            done = subprocess.run(
                [*flags, *options, str(source), "-o", str(part / name)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise UnavailableError(f"{' '.join(named)} cannot build the emulated device:\n{done.stderr}")
        try:
            part.rename(folder)
        except OSError:  # another process was quicker
            shutil.rmtree(part)
    return folder


def _torch_version() -> str:
    """Without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "not installed"
    return str(runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])


def _headers() -> list[Path]:
    """Folders of CUDA's headers, which come with torch and Triton."""
    found = []
    for package, parts in (("nvidia", ("cu13", "include")), ("triton", ("backends", "nvidia", "include"))):
        spec = find_spec(package)
        places = [Path(place).joinpath(*parts) for place in (spec.submodule_search_locations or ())] if spec else []
        found += [place for place in places if place.is_dir()]
    if not any((place / "cuda_runtime_api.h").exists() for place in found):
        raise UnavailableError("CUDA's headers (cuda_runtime_api.h), which come with torch for CUDA, are not here")
    return found
