"""Builds the compiled packages that users have beside ours, without a GPU, and runs tests with them on the CPU.

    python -m tools.real_packages build WHEELS [--only NAME]  # wheels that WHEELS has not yet
    python -m tools.real_packages install WHEELS SITE         # unpacks them into a folder of their own
    python -m tools.real_packages run SITE COMMAND...         # a command that imports from SITE first

They are Transformer Engine, causal-conv1d, mamba-ssm and flash-attn 4 of the versions that the extras pin, for the
torch that is installed. Transformer Engine's kernels come compiled from the registry; what binds them to torch is
compiled without optimization, which only its host time shows. The kernels of causal-conv1d and mamba-ssm are compiled
for Hopper alone. mamba-ssm's selective scan, which nothing here calls, is assembled without optimization: its package
cannot be imported without it. flash-attn 4 is Python that compiles its kernels when they are called.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from megatron_cp.errors import ArgumentError

TORCH = "2.11.0"
TOOLS = ("wheel",)  # what their builds import beside torch and setuptools
HOPPER = ["-gencode", "arch=compute_90,code=sm_90"]
ARCHS = ("\n    # HACK: The compiler flag", f"\n    cc_flag = {HOPPER}\n    # HACK: The compiler flag")

# A compiler that reads a header, and torch's with it, once for all files that it compiles with the same flags.
COMPILER = """#!{python}
import fcntl, os, subprocess, sys
compiler, shared, words = {compiler!r}, __file__ + ".h", sys.argv[1:]
if "-c" in words:
    with open(__file__ + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(shared + ".gch"):
            pairs = zip(["", *words], words)
            dropped = "-c", "-o", "-MF"  # each with the word after it
            flags = [word for last, word in pairs if word not in ("-MMD", *dropped) and last not in dropped]
            given = [compiler, *flags, "-x", "c++-header", shared, "-o", shared + ".part"]
            subprocess.run(given, check=True)
            os.rename(shared + ".part", shared + ".gch")
    words = ["-include", shared, *words]
os.execvp(compiler, [compiler, *words])
"""


@dataclass(frozen=True)
class Package:
    """A package: its name and version, and how it is compiled unless the registry has its wheel.

    Args:
        edits: file, text in it, and what replaces that text before it is compiled.
        headers: files in the folder of torch's CUDA libraries that it includes.
        shared: its own header that all its files include, if they are so many that it pays to read it once.
        imported: packages that it imports, and the project does not.
    """

    name: str
    version: str
    variables: tuple[tuple[str, str], ...] = ()
    edits: tuple[tuple[str, str, str], ...] = ()
    headers: tuple[str, ...] = ()
    shared: str | None = None
    imported: tuple[str, ...] = ()

    @property
    def compiled(self) -> bool:
        return bool(self.edits)


PACKAGES = (
    Package(
        "causal_conv1d", "1.7.0", (("CAUSAL_CONV1D_FORCE_BUILD", "TRUE"),), (("setup.py", *ARCHS),),
        ("cu13/include/cusparse.h",),
    ),
    Package(
        "mamba_ssm", "2.3.2.post1", (("MAMBA_FORCE_BUILD", "TRUE"),),
        (("setup.py", *ARCHS), ("setup.py", '"-O3",\n                    "-std=c++17",', '"-Xptxas=-O0",')),
        ("cu13/include/cusparse.h",),
    ),
    Package(
        "flash_attn_4", "4.0.0b36",
        imported=(
            *(f"nvidia-cutlass-dsl{part}==4.8.1" for part in ("", "-libs-base", "-libs-core", "-libs-cu13")),
            "quack-kernels==0.6.5", "apache-tvm-ffi==0.1.15.post2", "torch-c-dlpack-ext==0.1.5",
        ),
    ),
    Package(
        "transformer_engine", "2.20.2",
        imported=("nvdlfw-inspect==0.2.2", "onnx==1.23.2", "onnxscript==0.7.2", "onnx-ir==1.1.0", "ml-dtypes==0.6.0"),
    ),
    Package("transformer_engine_cu13", "2.20.2"),
    Package(
        "transformer_engine_torch", "2.20.2",
        (
            ("NVTE_BUILD_USE_NVIDIA_WHEELS", "1"), ("NVTE_PYTORCH_FORCE_BUILD", "TRUE"), ("NVTE_FRAMEWORK", "pytorch"),
        ),
        (("build_tools/pytorch.py", '"-O3"', '"-O0"'),),
        ("cu13/include/cublas_v2.h", "cudnn/include/cudnn.h", "nccl/include/nccl.h", "nvshmem/include/nvshmem.h"),
        "extensions.h",
    ),
)  # fmt: skip


def main() -> int:
    """Does what the command line says; exit code 2 and a line that says why it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    build = commands.add_parser("build", help="compile the wheels that a folder has not yet")
    build.add_argument("wheels", type=Path, metavar="WHEELS")
    build.add_argument("--only", choices=[each.name for each in PACKAGES], help="one of the packages")
    install = commands.add_parser("install", help="unpack wheels into a folder")
    install.add_argument("wheels", type=Path, metavar="WHEELS")
    install.add_argument("site", type=Path, metavar="SITE")
    run = commands.add_parser("run", help="run a command with the packages of a folder")
    run.add_argument("site", type=Path, metavar="SITE")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    args = parser.parse_args()
    try:
        if args.action == "build":
            make_wheels(args.wheels, [each for each in PACKAGES if args.only in (None, each.name)])
        elif args.action == "install":
            unpack_wheels(args.wheels, args.site)
        else:
            if not args.command:
                run.error("no command")
            given = variables(args.site)
            os.execvpe(args.command[0], args.command, given)
    except ArgumentError as error:
        print(f"real_packages: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"real_packages: exit code {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"real_packages: {error}", file=sys.stderr)
        return 2
    return 0


def make_wheels(folder: Path, packages: list[Package]) -> None:
    """Fetches or compiles those wheels of `packages` that a folder has not, and prints seconds and bytes of each.

    Raises:
        ArgumentError: another torch, no compiler, or no headers; before anything is fetched.
    """
    missing = [each for each in packages if not wheel_of(folder, each)]
    check_machine([each for each in missing if each.compiled])
    folder.mkdir(parents=True, exist_ok=True)
    for package in missing:
        began = time.monotonic()
        if package.compiled:
            with tempfile.TemporaryDirectory(prefix=f"{package.name}-") as scratch:
                _compile(package, folder, Path(scratch))
        else:
            _pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, f"{package.name}=={package.version}")
        made = wheel_of(folder, package)
        assert made is not None, f"no wheel of {package.name}"
        print(f"{made.name}: {time.monotonic() - began:.0f} s, {made.stat().st_size:,} bytes", flush=True)


def wheel_of(folder: Path, package: Package) -> Path | None:
    """Returns the path of a package's wheel in a folder, or None."""
    return next(iter(sorted(folder.glob(f"{package.name}-{package.version}-*.whl"))), None)


def check_machine(packages: list[Package], torch_version: str | None = None, nvidia: Path | None = None) -> None:
    """Refuses to compile packages for another torch, or without a compiler or the headers of torch's CUDA libraries.

    Args:
        torch_version: that of the installed torch, by default.
        nvidia: the folder of torch's CUDA libraries; by default where Python finds them.
    """
    if not packages:
        return
    check_torch(torch_version or version("torch"))
    cuda = cuda_home()
    if cuda is None:
        raise ArgumentError("CUDA_HOME", None, "a folder with bin/nvcc", "Install nvcc of CUDA 13.0, or set CUDA_HOME.")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ArgumentError("CXX", os.environ.get("CXX"), "a C++ compiler on PATH", "Install g++.")
    folder = nvidia or libraries()
    for package in packages:
        for header in package.headers:
            if folder is None or not (folder / header).exists():
                remedy = f"{package.name} includes it: install torch {TORCH} with its CUDA libraries (cu130)."
                raise ArgumentError("headers", str(folder), f"a folder nvidia with {header}", remedy)


def check_torch(found: str) -> None:
    """Refuses another torch than that for which wheels are compiled."""
    if found.partition("+")[0] != TORCH:
        remedy = "A wheel that is compiled against one torch cannot be imported beside another: make .venv anew."
        raise ArgumentError("torch", found, TORCH, remedy)


def cuda_home() -> Path | None:
    """Returns the folder of the CUDA toolkit: CUDA_HOME, /usr/local/cuda, or that of the nvcc on PATH."""
    on_path = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", on_path and Path(on_path).resolve().parents[1]]
    return next((Path(each) for each in places if each and Path(each, "bin", "nvcc").exists()), None)


def libraries() -> Path | None:
    """Returns the folder `nvidia` of the CUDA libraries that torch's wheels depend on, or None."""
    spec = find_spec("nvidia")
    places = [Path(each) for each in (spec.submodule_search_locations or [])] if spec else []
    return next((each for each in places if (each / "cu13").is_dir()), None)


def _compile(package: Package, folder: Path, scratch: Path) -> None:
    _pip("download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", scratch,
         f"{package.name}=={package.version}", path=_tools(scratch))  # fmt: skip
    with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
        archive.extractall(scratch, filter="data")
    source = scratch / f"{package.name}-{package.version}"
    edit_source(package, source)
    cuda, nvidia = cuda_home(), libraries()
    assert cuda is not None
    assert nvidia is not None
    # The compiler's own headers, which torch's libraries do not have, are in the toolkit.
    includes = [str(each) for each in (*sorted(nvidia.glob("*/include")), cuda / "include")]
    given = {"CUDA_HOME": str(cuda), "CPATH": _first(os.pathsep.join(includes), "CPATH"), **dict(package.variables)}
    given["MAX_JOBS"] = os.environ.get("MAX_JOBS", "2")
    if package.shared is not None:
        given["CXX"] = str(_shared_compiler(scratch, package.shared))
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, path=_tools(scratch), **given)


def edit_source(package: Package, source: Path) -> None:
    """Replaces in an unpacked source what takes long to compile.

    Raises:
        ArgumentError: the source does not have the text that is to be replaced.
    """
    for name, old, new in package.edits:
        text = (source / name).read_text()
        if old not in text:
            remedy = "The source is another: write its edits anew."
            raise ArgumentError(f"{package.name} {package.version}", name, f"a file with {old!r}", remedy)
        (source / name).write_text(text.replace(old, new))


def _shared_compiler(scratch: Path, header: str) -> Path:
    made = scratch / "bin" / "g++"
    made.parent.mkdir()
    made.write_text(COMPILER.format(python=sys.executable, compiler=os.environ.get("CXX", "g++")))
    made.chmod(0o755)
    made.with_name("g++.h").write_text(f'#include "{header}"\n')
    return made


def _tools(scratch: Path) -> Path:
    place = scratch / "tools"
    if not place.exists():
        _pip("install", "--no-deps", "--target", place, *TOOLS)
    return place


def _pip(*arguments: object, path: Path | None = None, **given: str) -> None:
    environment = {**os.environ, **given}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)


def unpack_wheels(folder: Path, site: Path) -> None:
    """Installs into a folder the wheels that are there, and what they import.

    Raises:
        ArgumentError: no wheel is there, or another torch is installed.
    """
    check_torch(version("torch"))
    packages = [each for each in PACKAGES if wheel_of(folder, each) is not None]
    if not packages:
        remedy = f"Compile them first: python -m tools.real_packages build {folder}"
        raise ArgumentError("WHEELS", str(folder), "a folder with wheels of these packages", remedy)
    wheels = [wheel_of(folder, each) for each in packages]
    imported = [name for each in packages for name in each.imported]
    _pip("install", "--no-deps", "--upgrade", "--target", site, *wheels, *imported)


def variables(site: Path) -> dict[str, str]:
    """Returns environment variables with which Python imports from a folder first, and Transformer Engine finds CUDA.

    Raises:
        ArgumentError: none of the packages is there, or torch has no CUDA libraries.
    """
    if not any((site / name).is_dir() for name in ("flash_attn", *(each.name for each in PACKAGES))):
        remedy = f"Install wheels into it: python -m tools.real_packages install WHEELS {site}"
        raise ArgumentError("SITE", str(site), "a folder with these packages", remedy)
    nvidia = libraries()
    if nvidia is None:
        raise ArgumentError("torch", version("torch"), "a torch with CUDA libraries beside it", "Make .venv anew.")
    # The second is what nvidia-cutlass-dsl adds by a file that Python reads in its own folder alone.
    folders = [str(site.resolve() / each) for each in ("", "nvidia_cutlass_dsl/dsl_packages") if (site / each).is_dir()]
    path = _first(os.pathsep.join(folders), "PYTHONPATH")
    return {**os.environ, **dict(_of_libraries(nvidia)), "PYTHONPATH": path}


def _of_libraries(nvidia: Path) -> Iterator[tuple[str, str]]:
    yield "CUDA_HOME", str(nvidia / "cu13")
    yield from ((f"{name.upper()}_HOME", str(nvidia / name)) for name in ("cudnn", "nccl"))
    yield "CUDNN_PATH", str(nvidia / "cudnn")
    folders = os.pathsep.join(str(each) for each in sorted(nvidia.glob("*/lib")))
    yield "LD_LIBRARY_PATH", _first(folders, "LD_LIBRARY_PATH")


def _first(path: str, name: str) -> str:
    return os.pathsep.join(filter(None, (path, os.environ.get(name))))


if __name__ == "__main__":
    sys.exit(main())
