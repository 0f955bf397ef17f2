"""Builds the package, installs it as its users do, and tries it away from the clone.

    python -m tools.dist [EXTRA ...]
    python -m tools.dist --build

`uv build` makes the sdist, and the wheel from that sdist; `check-manifest` compares the sdist with what git knows. The
wheel is installed in a bare environment for each extra, one after another, with the newest versions that suit it. There
`megatron-cp check`, the commands and imports that the extra is for, and `pip check` must pass. Sdist and wheel are left
in `dist/` if nothing failed. Without `--build` all extras are tried, or those that are named.

Environments share nothing but files: `uv` keeps what it has downloaded in a temporary folder, and puts hard links into
each environment. So torch and its CUDA libraries are downloaded once, and are on the disk once.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.versions import ROOT, clean_variables, find_uv

CHECK_MANIFEST = (
    "--from", "check-manifest==0.51", "--with", "setuptools>=77", "check-manifest", "--no-build-isolation"
)  # fmt: skip
NO_WHEEL = ": a package has no wheel, and is not installed here"
CHECK = ("check", "--cp", "3", "--lengths", "7,1,130,64,2", "--dtype", "float64")
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
            (*PLAN, "--heads", "6", "--kv-heads", "2", "--head-dim", "128"),
            ("check", "--cp", "2", "--report", "check.html"),
            ("plan", "--whole", "--model", "tiny", "--cp", "2", "--gpu", "h100"),
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
    "plot": Extra("import matplotlib", ((*PLAN, "--plot", "owners.png"),)),
    "report": Extra("import plotly", ((*PLAN, "--report", "plan.html"),)),
    "solver": Extra(
        "import ortools.sat.python.cp_model, ortools.linear_solver.pywraplp",
        (("plan", "--cp", "3", "--lengths", "700,100,300", "--scheme", "tiled", "--search", "1"),),
    ),
}  # fmt: skip


def main() -> None:
    """Builds sdist and wheel, tries what was asked for, and prints what failed."""
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="dist-") as name:
        folder = Path(name).resolve()
        _uv(folder, "build", "--python", sys.executable, "--out-dir", folder / "dist", ROOT)
        built = [max((folder / "dist").glob(kind)) for kind in ("*.tar.gz", "*.whl")]
        print(*(f"{file.name} {file.stat().st_size:,} bytes" for file in built), sep=", ", flush=True)
        _uv(folder, "tool", "run", "--python", sys.executable, *CHECK_MANIFEST, ROOT)
        failed = False
        for extra in () if args.build else args.names or EXTRAS:
            failures = tried(extra, built[1], folder)
            print(*failures or [f"{extra}: passed"], sep="\n", flush=True)
            failed |= any(not failure.endswith(NO_WHEEL) for failure in failures)
        if not failed:
            shutil.rmtree(ROOT / "dist", ignore_errors=True)  # those of other versions
            (ROOT / "dist").mkdir()
            print(*(shutil.copy(file, ROOT / "dist") for file in built), sep="\n")
    sys.exit(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXTRAS)}")
    parser.add_argument("--build", action="store_true", help="make and check sdist and wheel, and install nothing")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in EXTRAS]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(EXTRAS)}")
    if find_uv() is None:
        parser.error("it needs uv: pip install uv")
    return args


def _uv(folder: Path, *words: str | Path) -> None:
    """Runs uv, and ends with what it says if it fails."""
    done = _asked(folder, *words)
    if done.returncode:
        sys.exit(f"uv {words[0]} failed:\n{done.stdout}{done.stderr}")


def _asked(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [find_uv(), "--quiet", "--cache-dir", folder / "cache", *words]
    return subprocess.run(list(map(str, command)), cwd=folder, env=clean_variables(), capture_output=True, text=True)


def tried(name: str, wheel: Path, folder: Path) -> list[str]:
    """Installs an extra, tries it, and removes it again. Returns what failed, a text each."""
    environment, away, extra = folder / name, folder / "away", EXTRAS[name]
    away.mkdir(exist_ok=True)  # neither the clone nor its files are in reach of what runs there
    inner = environment / "bin" / "python"
    _uv(folder, "venv", "--seed", "--python", sys.executable, environment)
    wanted = f"megatron_cp{'' if name == 'base' else f'[{name}]'} @ {wheel.as_uri()}"
    made = _asked(folder, "pip", "install", "--no-build", "--link-mode", "hardlink", "--python", inner, wanted)
    if made.returncode:
        if "no usable wheels" in " ".join(made.stderr.split()):  # which such a package compiles on its user's machine
            return [f"{name}{NO_WHEEL}"]
        return [f"{name} was not installed: {made.stderr}"]

    def ran(*words: str | Path) -> list[str]:
        try:
            done = subprocess.run(
                list(map(str, words)), cwd=away, env=clean_variables(), capture_output=True, text=True, timeout=900
            )
        except subprocess.TimeoutExpired:
            return [f"{name}: {' '.join(map(str, words))}: not finished in 900 s"]
        ending = f"exit code {done.returncode}\n{done.stderr[-1500:]}"
        return [f"{name}: {' '.join(map(str, words))}: {ending}"] if done.returncode else []

    command = inner.with_name("megatron-cp")
    failures = ran(inner, "-m", "pip", "check") + ran(inner, "-W", "ignore", "-c", extra.code)
    for words in (CHECK, *extra.commands):
        failures += ran(command, *words)
    for other in EXTRAS.values() if name == "base" else ():
        if other.ours:  # and not here: its names say how to install it
            done = ran(inner, "-c", other.code)
            last = done[0].strip().splitlines()[-1] if done else "nothing"
            if not (last.startswith("ModuleNotFoundError: ") and "pip install" in last):
                failures.append(f"{other.code!r} says {last}, and not what to install")
    shutil.rmtree(environment)
    return failures


if __name__ == "__main__":
    main()
