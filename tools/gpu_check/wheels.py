"""`tools/gpu_wheels.sh`: the wheels that travel to a machine with a GPU, as many as fit beside the working tree."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_cp.errors import ArgumentError

MUST = ("megatron-core", "fla-core", "einops")
BUILT = ("causal-conv1d", "mamba-ssm", "flash-attn")
TILELANG = "tilelang==0.1.15"  # with which fla-core runs its Gated DeltaNet on Hopper
# Of what it needs, what the machine has.
THERE = {"cloudpickle", "ml-dtypes", "numpy", "psutil", "setuptools", "torch", "tqdm", "typing-extensions"}
PLATFORMS = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17")
MIB = 1 << 20
MARK = "made_by_gpu_wheels"  # a file in the folder of the wheels, without which nothing there is removed
SMALL = 4 * MIB  # wheels up to here are taken as they are
# mamba-ssm imports it and calls it for Mamba-1 alone, which nothing here has: nine tenths of its wheel.
UNUSED = "selective_scan_cuda"


def pins(pyproject: str) -> dict[str, str]:
    """Returns the exact versions that pyproject.toml asks for, by package."""
    return dict(re.findall(r'"([\w.-]+)==([\w.+-]+)"', pyproject))


def needs(metadata: str) -> list[str]:
    """Returns what a wheel's metadata requires on Linux, without extras and what the machine has."""
    found = re.findall(r"^Requires-Dist: ([\w.-]+)([^;\n]*)(;.*)?$", metadata, re.MULTILINE)
    return [
        f"{name}{version.strip()}"
        for name, version, marker in found
        if name.lower().replace("_", "-") not in THERE and "extra" not in marker and "platform_system" not in marker
    ]


def downloaded(requirement: str, folder: Path) -> Path:
    """Returns the wheel of a requirement for the machine's Python, from the folder or the registry.

    Raises:
        ArgumentError: pip finds none.
    """
    platforms = [f"manylinux_{each}_x86_64" for each in PLATFORMS] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    words = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    words += ["--implementation", "cp", *(word for each in platforms for word in ("--platform", each))]
    done = subprocess.run(
        [sys.executable, *words, "-d", str(folder), requirement], capture_output=True, text=True, check=False
    )
    name = re.split(r"[<>=!~]", requirement)[0].replace("-", "_")
    found = sorted(folder.glob(f"{name}-*.whl"), key=lambda path: path.stat().st_mtime)
    if done.returncode or not found:
        why = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip found no wheel")
        raise ArgumentError("wheel", requirement, "one for Python 3.12 on Linux", why)
    return found[-1]


def built_wheels(folder: Path, versions: dict[str, str]) -> list[Path]:
    """Returns the wheels of a folder that were built for the GPU; those of other packages stay there.

    Raises:
        ArgumentError: there are none, or one is of another version, Python or platform.
    """
    allowed = ", ".join(f"{name} {versions[name]}" for name in BUILT)
    found = [path for path in sorted(folder.glob("*.whl")) if path.name.partition("-")[0].replace("_", "-") in BUILT]
    if not found:
        remedy = f"Compile them: python -m tools.real_packages build {folder}"
        raise ArgumentError("--built", str(folder), f"a folder with wheels of {allowed}", remedy)
    for path in found:
        name, version, python, _, platform = (*path.stem.split("-"), *("",) * 5)[:5]
        is_right = versions[name.replace("_", "-")] == version.partition("+")[0]
        if not is_right or python not in ("cp312", "py3") or not platform.endswith("x86_64"):
            remedy = "Build it for CPython 3.12 on Linux x86-64, or take it out of the folder."
            raise ArgumentError("--built", path.name, allowed, remedy)
    return found


def shrunk(wheel: Path, folder: Path) -> Path:
    """Returns a smaller wheel: compressed by LZMA, which pip reads too, without programs and with `UNUSED` empty."""
    target, made = folder / wheel.name, wheel.stat()
    if made.st_size <= SMALL:
        return wheel
    if not target.exists() or target.stat().st_mtime < made.st_mtime:
        folder.mkdir(exist_ok=True)
        part = target.with_suffix(".part")
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(part, "w", zipfile.ZIP_LZMA) as into:
            for entry in source.infolist():
                if entry.filename.startswith(UNUSED):
                    into.writestr(f"{UNUSED}.py", "")
                elif ".data/data/bin/" not in entry.filename:
                    into.writestr(entry.filename, source.read(entry))
        part.rename(target)
    return target


def fitting(
    groups: Iterable[Sequence[tuple[str, int]]], room: int
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Returns the wheels that fit, and those that are left out: of a group all or none. The first group must fit.

    Args:
        groups: names and bytes, the most important first.
        room: bytes.

    Raises:
        ArgumentError: the first group does not fit.
    """
    taken: list[tuple[str, int]] = []
    left: list[tuple[str, int]] = []
    for group in groups:
        size = sum(nbytes for _, nbytes in group)
        if size <= room:
            taken, room = [*taken, *group], room - size
        elif not taken:
            remedy = "Leave files out of the working tree: what git ignores does not travel."
            given, allowed = f"{max(room, 0) / MIB:.1f} MiB for wheels", f"{size / MIB:.1f} MiB or more"
            raise ArgumentError("--limit", given, allowed, remedy)
        else:
            left += group
    return taken, left


def check_own(folder: Path) -> None:
    """Raises an error unless a folder is new, empty, or one that this command has made: it removes the wheels there."""
    if folder.exists() and not (folder.is_dir() and ((folder / MARK).exists() or not any(folder.iterdir()))):
        raise ArgumentError(
            "--out", str(folder), "a new folder, or one that this command made", "Its wheels are removed."
        )


def tree_bytes() -> int:
    """Returns the bytes of the working tree: tracked files and those that git does not ignore."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, capture_output=True, check=True).stdout.split(b"\0")
    return sum(path.stat().st_size for path in map(Path, {each.decode() for each in listed if each}) if path.is_file())


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tools/gpu_wheels.sh", description=__doc__)
    parser.add_argument("--built", type=Path, metavar="FOLDER", help="of wheels that were built for the GPU")
    parser.add_argument("--limit", type=float, default=64, metavar="MIB", help="with the working tree (default: 64)")
    parser.add_argument(
        "--out", type=Path, default=Path(".whl"), metavar="FOLDER", help="of this command alone (default: .whl)"
    )
    options = parser.parse_args()
    cache = Path("build/wheels")
    cache.mkdir(parents=True, exist_ok=True)
    try:
        if not 0 < options.limit < float("inf"):
            raise ArgumentError("--limit", options.limit, "a number of MiB above 0")
        check_own(options.out)
        versions = pins(Path("pyproject.toml").read_text())
        must = [downloaded(f"{name}=={versions[name]}", cache) for name in MUST]
        built = built_wheels(options.built, versions) if options.built else []
        tilelang = downloaded(TILELANG, cache)
        with zipfile.ZipFile(tilelang) as wheel:
            metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            more = needs(wheel.read(metadata).decode())
        groups = [must, *([each] for each in built), [tilelang, *(downloaded(each, cache) for each in more)]]
        small = [[shrunk(path, cache / "small") for path in group] for group in groups]
        # tilelang, for Gated DeltaNet, before large wheels for one kernel each.
        small[1:] = sorted(small[1:], key=lambda group: len(group) == 1 and group[0].stat().st_size > SMALL)
        tree = tree_bytes()
        sizes = [[(str(path), path.stat().st_size) for path in group] for group in small]
        taken, left = fitting(sizes, int(options.limit * MIB) - tree)
    except ArgumentError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / MARK).touch()
    for old in options.out.glob("*.whl"):
        old.unlink()
    print(f"{tree / MIB:7.2f} MiB  the working tree")
    for path, nbytes in taken:
        shutil.copy(path, options.out)
        print(f"{nbytes / MIB:7.2f} MiB  {Path(path).name}")
    total = (tree + sum(nbytes for _, nbytes in taken)) / MIB
    print(f"{total:7.2f} MiB  of {options.limit:g}, in {options.out}, which travels beside the working tree")
    for path, nbytes in left:
        print(f"left out, {nbytes / MIB:.2f} MiB: {Path(path).name}")
    if options.built:
        others = sorted({path.name for path in options.built.glob("*.whl")} - {path.name for path in built})
        print(f"of other packages, and not taken: {', '.join(others) or 'none'}")
    names = [Path(path).name.partition("-")[0].replace("_", "-") for path, _ in taken]
    print(f"not there: {', '.join(name for name in (*BUILT, 'tilelang') if name not in names) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
