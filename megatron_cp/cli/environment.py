"""The machine, the versions and the state of the code with which a command ran, for reports and records."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_cp import __version__
from megatron_cp.extras import install

PACKAGES = (
    "torch", "numpy", "megatron-core", "fla-core", "flash-attn", "flash-attn-4", "transformer-engine", "mamba-ssm",
    "causal-conv1d", "triton", "transformers", "diffusers", "accelerate", "trl",
)  # fmt: skip
INSTALL_MEGATRON = install("megatron")
_GIT_SECONDS = 10.0  # a checkout on a slow disk is left out


def command_line(args: argparse.Namespace) -> str:
    """Returns the command as it was typed, quoted for a shell, and the number of ranks that torchrun started."""
    ranks = os.environ.get("WORLD_SIZE")
    return shlex.join(["megatron-cp", *args.words]) + (f"  # under torchrun, {ranks} ranks" if ranks else "")


def version_of(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def megatron_is_installed() -> bool:
    """Returns True if Megatron-Core can be imported here; another package that is called megatron does not count."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def environment() -> dict[str, Any]:
    """Returns versions of what is installed, the platform, its processor, cores and devices, threads, and git's state.

    It names no host and no user. `git` is there only where this package runs from a checkout that tracks it.
    """
    import torch

    git = git_state(Path(__file__).parent)
    return {
        "versions": {
            "megatron_cp": __version__,
            "python": platform.python_version(),
            **{name: found for name in PACKAGES if (found := version_of(name)) is not None},
        },
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] or ["CPU"],
        "threads": torch.get_num_threads(),
        **({} if git is None else {"git": git}),
    }


def environment_facts(found: dict[str, Any]) -> list[list[str]]:
    """Returns an environment as pairs of a name and a text."""
    git = found.get("git")
    state = [] if git is None else [["git", git["commit"] + (", with changes" if git["dirty"] else "")]]
    return [
        ["versions", ", ".join(f"{name} {number}" for name, number in found["versions"].items())],
        ["platform", found["platform"]],
        ["processor", f"{found['processor']}, {found['cores']} cores, {found['threads']} threads a rank"],
        ["devices", ", ".join(found["devices"])],
        *state,
    ]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the `commit` of the checkout that tracks a folder, and if tracked files are changed: `dirty`."""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        run = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
        return run.stdout.strip()

    try:
        if not git("ls-files", "."):  # installed into some other project's checkout
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
