"""Builds the package, installs it as its users do, and tries it away from the clone.

    python -m tools.dist [EXTRA ...] [--folder FOLDER] [--keep] [--compile]
    python -m tools.dist --build
    python -m tools.dist --beside [HOST ...] [--install] [--platform PLATFORM] [--folder FOLDER]

The first makes an sdist, which must hold every file that git knows, and a wheel from that sdist, which must be the one
that the source itself gives. The wheel is installed in a bare environment for each extra, one after another, with the
newest versions that the pins allow. There it runs `megatron-cp check`, the commands and the imports that the extra is
for, and `pip check`; in `base` also the imports of all other extras, which must say what to install. Exit code 1 if
anything fails. An extra without wheels is "not installable here", unless `--compile` is given. Sdist and wheel are left
in `dist/` of the clone if all went well; `--build` makes and compares these two, and installs nothing.

The third resolves the wheel together with the newest release of each package that it is used beside, and prints which
versions were found; `--install` also installs them and runs `pip check`.

Environments share nothing but files: `uv` keeps what it has downloaded in `FOLDER/cache`, and puts hard links into each
environment. So torch and its CUDA libraries are downloaded once, and are on the disk once; FOLDER must be one file
system. Without `--keep` all of it is removed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.versions import ROOT, clean_variables, find_uv

CHECK = ("check", "--cp", "3", "--lengths", "7,1,130,64,2", "--dtype", "float64")
VERSIONS = ("torch", "transformers", "numpy", "diffusers", "fla-core", "megatron-core")
ALL_NAMES = "import {0} as room\nfor name in room.__all__:\n    getattr(room, name)"


@dataclass(frozen=True)
class Extra:
    """An extra: Python code that its packages must run, and commands of `megatron-cp` that it is for.

    Attributes:
        ours: `code` imports a part of this package, which must say what to install where the extra is missing.
    """

    code: str
    commands: tuple[tuple[str, ...], ...] = ()
    ours: bool = False


PLAN = ("plan", "--cp", "4", "--lengths", "70000,100,300000,39500,1700")
EXTRAS = {
    "base": Extra(
        ALL_NAMES.format("megatron_cp"),
        (
            ("--version",),
            ("doctor",),
            (*PLAN, "--heads", "6", "--kv-heads", "2", "--head-dim", "128", "--plot", "owners.png"),
            ("plan", "--whole", "--model", "tiny", "--cp", "2", "--gpu", "h100", "--report", "report.html"),
        ),
    ),
    "megatron": Extra(
        ALL_NAMES.format("megatron_cp.megatron"),
        (
            ("train", "--context-parallel-size", "2", "--train-iters", "2", "--device", "cpu"),
            ("doctor", "--megatron", "--context-parallel-size", "2", "--num-layers", "2", "--calculate-per-token-loss",
             "--spec", "megatron_cp.megatron.specs", "gpt_layer_spec"),
        ),
        ours=True,
    ),
    "fla": Extra("import fla.ops.gated_delta_rule, fla.ops.kda, fla.modules.causal_conv1d"),
    "tokenizers": Extra(
        "import tokenizers as t\nfrom megatron_cp.data.tokenizer import read_tokenizer\n"
        't.Tokenizer(t.models.WordLevel({"a": 0, "</s>": 1}, "a")).save("t.json")\nread_tokenizer("t.json").encode("a")'
    ),
    "transformers": Extra(ALL_NAMES.format("megatron_cp.transformers"), ours=True),
    "diffusers": Extra(ALL_NAMES.format("megatron_cp.diffusers"), ours=True),
    "mamba": Extra("import mamba_ssm, causal_conv1d"),
    "te": Extra("import transformer_engine.pytorch"),
    "flash": Extra("import flash_attn"),
    "flash4": Extra("import flash_attn.cute"),
    "solver": Extra(
        "import ortools.sat.python.cp_model, ortools.linear_solver.pywraplp",
        (("plan", "--cp", "3", "--lengths", "700,100,300", "--scheme", "tiled", "--search", "1"),),
    ),
}  # fmt: skip
# What the package is used beside, and with which of its extras.
HOSTS = {
    "axolotl": "transformers",
    "llamafactory": "transformers",
    "ms-swift": "transformers",
    "verl": "transformers",
    "torchtitan": "",
    "nemo-automodel": "transformers",
    "megatron-bridge": "megatron",
    "diffusers": "diffusers",
    "trl": "transformers",
}


def main() -> None:
    """Builds the wheel, tries what was asked for, and prints a table of it."""
    args = _arguments()
    with _folder(args) as folder:
        wheel, sdist = _built(folder)
        if args.beside:
            sys.exit(beside(wheel, args.names or list(HOSTS), folder, install=args.install, platform=args.platform))
        _build(folder / "source", folder / "from-source", folder, "--wheel")
        wrong = _compared(wheel, sdist, folder)
        print(*wrong, sep="\n", end="\n" * bool(wrong))
        failed = bool(wrong)
        if not args.build:
            failed |= extras(wheel, args.names or list(EXTRAS), folder, compiled=args.compile)
        if not failed:
            shutil.rmtree(ROOT / "dist", ignore_errors=True)  # those of other versions
            (ROOT / "dist").mkdir()
            print(*(shutil.copy(file, ROOT / "dist") for file in (sdist, wheel)), sep="\n")
    sys.exit(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXTRAS)}; or {', '.join(HOSTS)}")
    parser.add_argument("--build", action="store_true", help="make and compare sdist and wheel, and install nothing")
    parser.add_argument("--beside", action="store_true", help="resolve it together with other packages")
    parser.add_argument("--install", action="store_true", help="with --beside: install them as well")
    parser.add_argument("--platform", help="with --beside: resolve for another one, such as x86_64-manylinux_2_39")
    parser.add_argument("--compile", action="store_true", help="compile packages that have no wheel")
    parser.add_argument("--folder", type=Path, help="where environments are made (default: a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="leave wheel, cache and environments in the folder")
    args = parser.parse_args()
    known = HOSTS if args.beside else EXTRAS
    unknown = [name for name in args.names if name not in known]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    if find_uv() is None:
        parser.error("it needs uv: pip install uv")
    return args


@contextmanager
def _folder(args: argparse.Namespace) -> Iterator[Path]:
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(prefix="dist-", dir=args.folder) if not args.keep or args.folder is None else args.folder
    try:
        yield Path(made).resolve()
    finally:
        if not args.keep:
            shutil.rmtree(made)


def _uv(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [find_uv(), *words, "--quiet", "--cache-dir", folder / "cache"]
    return subprocess.run(list(map(str, command)), cwd=folder, env=clean_variables(), capture_output=True, text=True)


def _built(folder: Path) -> tuple[Path, Path]:
    """Makes the sdist and, from it, the wheel; returns the paths of wheel and sdist."""
    _build(_copy_source(folder), folder / "dist", folder)
    wheel, sdist = (max((folder / "dist").glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    print(f"{sdist.name} {sdist.stat().st_size:,} bytes, {wheel.name} {wheel.stat().st_size:,} bytes", flush=True)
    return wheel, sdist


def _build(source: Path, into: Path, folder: Path, *options: str) -> None:
    done = _uv(folder, "build", *options, "--python", sys.executable, "--out-dir", into, source)
    if done.returncode:
        sys.exit(f"not built:\n{done.stderr}")


def _copy_source(folder: Path) -> Path:
    """Copies the files that git knows: a build in the clone would leave files there, and take old ones into a wheel."""
    for name in _known_files():
        file = folder / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, file)
    return folder / "source"


def _known_files() -> list[str]:
    """Returns the names of the files in the clone that git knows, or would take, and that are there."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in set(said.split("\0")) if (ROOT / name).is_file())


def _compared(wheel: Path, sdist: Path, folder: Path) -> list[str]:
    """Returns what the sdist lacks of the source, and in what the wheel made from it differs from the source's own."""
    with tarfile.open(sdist) as packed:
        held = {member.name.partition("/")[2] for member in packed if member.isfile()}
    failures = [f"{sdist.name} lacks {name}" for name in _known_files() if name not in held]
    both = [zipfile.ZipFile(path).infolist() for path in (wheel, folder / "from-source" / wheel.name)]
    found, expected = ({info.filename: info.CRC for info in each} for each in both)
    failures += [
        f"{wheel.name}: {name} is not as in a wheel made from the source"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    print(f"{len(held)} files in the sdist, {len(found)} in the wheel, {len(failures)} wrong", flush=True)
    return failures


# -- each extra --------------------------------------------------------------------------------------------------------


def extras(wheel: Path, names: list[str], folder: Path, *, compiled: bool) -> bool:
    """Tries extras and prints their table. Returns True if one of them fails."""
    rows, failures = [("extra", "packages", "megatron-cp check", "pip check", "commands", "imports", "seconds")], []
    for name in names:
        began = time.monotonic()
        found, failed = _tried(name, wheel, folder, compiled=compiled)
        rows.append((name, *found, f"{time.monotonic() - began:.0f}"))
        failures += failed
        print(*(f"{head}: {cell}" for head, cell in zip(rows[0], rows[-1], strict=True)), sep=", ")
        print(*failed, sep="\n", flush=True)
    print(f"\n{_table(rows)}")
    return bool(failures)


def _tried(name: str, wheel: Path, folder: Path, *, compiled: bool) -> tuple[tuple[str, ...], list[str]]:
    """Installs an extra and tries it. Returns its row, without its name and its seconds, and what failed."""
    requirement = f"megatron_cp{'' if name == 'base' else f'[{name}]'} @ {wheel.as_uri()}"
    inner, reason = _environment(name, [requirement], folder, wheels_alone=not compiled, compiled=compiled)
    if inner is None:
        failed = [] if reason.endswith("has no wheel") else [f"{name} was not installed: {reason}"]
        return (f"not installable here: {reason}", *["-"] * 4), failed
    away, extra, failures = folder / "away", EXTRAS[name], []
    away.mkdir(exist_ok=True)  # neither the clone nor its files are in reach of what runs there

    def ran(*words: str | Path) -> tuple[bool, str]:
        try:
            done = subprocess.run(
                list(map(str, words)), cwd=away, env=clean_variables(), capture_output=True, text=True, timeout=900
            )
        except subprocess.TimeoutExpired:
            failures.append(f"{' '.join(map(str, words))}: not finished in 900 s")
            return False, ""
        if done.returncode:
            failures.append(f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr[-1500:]}")
        return done.returncode == 0, (done.stdout.strip() or done.stderr.strip())

    command = inner.with_name("megatron-cp")
    passed, said = ran(command, *CHECK)
    pip, _ = ran(inner, "-m", "pip", "check")
    commands = [ran(command, *words)[0] for words in extra.commands]
    imports = [ran(inner, "-W", "ignore", "-c", extra.code)[0]]
    if name == "base":
        for other, each in EXTRAS.items():
            if each.ours:
                wrong = _not_refused(inner, other, each)
                imports.append(not wrong)
                failures += wrong
    packages = json.loads(_uv(folder, "pip", "list", "--format", "json", "--python", inner).stdout)
    row = (
        str(len(packages)),
        said.splitlines()[0] if passed else "failed",
        "passed" if pip else "failed",
        f"{sum(commands)} of {len(commands)}",
        f"{sum(imports)} of {len(imports)}",
    )
    _remove(inner)
    return row, failures


def _not_refused(inner: Path, name: str, extra: Extra) -> list[str]:
    """Checks that without an extra its names say how to install it; returns what is wrong, if anything."""
    done = subprocess.run([inner, "-c", extra.code], env=clean_variables(), capture_output=True, text=True, cwd="/")
    last = done.stderr.strip().splitlines()[-1:] or [""]
    if done.returncode and last[0].startswith("ModuleNotFoundError: ") and "pip install" in last[0]:
        return []
    return [f"without {name}, {extra.code!r} says {last[0]!r}, and not what to install"]


def _environment(
    name: str, wanted: list[str], folder: Path, *, wheels_alone: bool = False, compiled: bool = False
) -> tuple[Path | None, str]:
    """Makes an environment with pip and what is wanted. Returns its Python, or None and why there is none."""
    inner = folder / name / "bin" / "python"
    shutil.rmtree(folder / name, ignore_errors=True)
    made = _uv(folder, "venv", "--seed", "--python", sys.executable, folder / name)
    into = ("pip", "install", "--link-mode", "hardlink", "--python", inner)
    if made.returncode == 0 and compiled:  # against the torch that they will be used with
        made = _uv(folder, *into, "torch", "ninja", "setuptools", "wheel", "numpy", "psutil")
    if made.returncode == 0:
        options = ["--no-build"] * wheels_alone + ["--no-build-isolation"] * compiled
        made = _uv(folder, *into, *options, *wanted)
    if made.returncode:
        shutil.rmtree(folder / name, ignore_errors=True)
        return None, _reason(made.stderr)
    return inner, ""


def _remove(inner: Path) -> None:
    shutil.rmtree(inner.parents[1])


def _reason(errors: str) -> str:
    """Shortens what uv says of a failed installation to one line."""
    words = " ".join(errors.split())
    without = re.search(r"Because (\S+) has no usable wheels", words)
    if without:
        return f"{without[1]} has no wheel"
    return words.partition("cause: ")[2][:300] or words[:300]


def _table(rows: list[tuple[str, ...]]) -> str:
    heads, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *others))


# -- beside other packages ---------------------------------------------------------------------------------------------


def beside(wheel: Path, names: list[str], folder: Path, *, install: bool, platform: str | None = None) -> bool:
    """Resolves the wheel with other packages and prints their table. Returns True if one of them has no solution."""
    rows, failures = [("beside", "extra", *VERSIONS, *(["pip check"] if install else []))], []
    for name in names:
        extra = HOSTS[name]
        wanted = [name, f"megatron_cp{f'[{extra}]' if extra else ''} @ {wheel.as_uri()}"]
        pins, reason = _resolved(wanted, folder, platform)
        if pins is None:
            rows.append((name, extra or "-", reason, *["-"] * (len(rows[0]) - 3)))
            failures.append(f"{name}: {reason}")
            continue
        row = [f"{name} {pins[name]}", extra or "-", *(pins.get(each, "-") for each in VERSIONS)]
        if install:
            row.append(_pip_check(name, [f"{each}=={pin}" for each, pin in pins.items()], wheel, folder))
            failures += [f"{name}: {row[-1]}"] if row[-1] != "passed" else []
        rows.append(tuple(row))
        print(*rows[-1], sep=", ", flush=True)
    print(f"\n{_table(rows)}\n", *failures, sep="\n")
    return bool(failures)


def _resolved(wanted: list[str], folder: Path, platform: str | None) -> tuple[dict[str, str] | None, str]:
    """Returns the versions of all packages that the resolver takes together, or None and why there are none."""
    asked, answer = folder / "wanted.txt", folder / "pins.txt"
    asked.write_text("\n".join(wanted))
    answer.unlink(missing_ok=True)  # the versions in it would be preferred
    options = ["--python", sys.executable, *(["--python-platform", platform] if platform else [])]
    done = _uv(folder, "pip", "compile", asked, "-o", answer, "--no-annotate", "--no-header", *options)
    if done.returncode:
        return None, _reason(done.stderr)
    lines = (line.partition(";")[0].strip() for line in answer.read_text().splitlines())
    return dict(line.split("==") for line in lines if "==" in line), ""


def _pip_check(name: str, pins: list[str], wheel: Path, folder: Path) -> str:
    inner, reason = _environment(name, [*pins, wheel.as_uri()], folder)  # of some there are sdists alone
    if inner is None:
        return f"not installable here: {reason}"
    done = subprocess.run([inner, "-m", "pip", "check"], capture_output=True, text=True, env=clean_variables())
    _remove(inner)
    return "passed" if done.returncode == 0 else " ".join(done.stdout.split())


if __name__ == "__main__":
    main()
