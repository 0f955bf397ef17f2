"""Refusals before a check starts: a device that is busy or too small, and packages of another torch or GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from megatron_cp.errors import ArgumentError

BUSY_MIB, BUSY_PERCENT = 2048, 10
OTHERS = "End the other processes, which nvidia-smi lists, or take another device by CUDA_VISIBLE_DEVICES."


def check_idle(listed: str) -> None:
    """Raises an error if another process has the device.

    Args:
        listed: a line of nvidia-smi: MiB that are used, and per cent of the time in which kernels ran.
    """
    used, percent = (int(word) if word.strip().isdecimal() else 0 for word in listed.split(","))
    if used > BUSY_MIB or percent > BUSY_PERCENT:
        raise ArgumentError(
            "device", f"{used:,} MiB in use, busy for {percent} % of the time",
            f"an idle one, of which at most {BUSY_MIB:,} MiB and {BUSY_PERCENT} % are used", OTHERS,
        )  # fmt: skip


def check_size(found: int, steps: Iterable[tuple[str, int]]) -> None:
    """Raises an error if a device of so many bytes is too small for a step; `steps`: names and GiB."""
    large = [(name, needed) for name, needed in steps if found < needed << 30]
    if large:
        remedy = f"Leave {', '.join(name for name, _ in large)} out: give --only for each of the others."
        given = f"a device of {found / 2**30:.1f} GiB"
        raise ArgumentError("device", given, f"at least {max(needed for _, needed in large)} GiB", remedy)


def listed_by_smi(visible: str | None) -> str | None:
    """Returns what nvidia-smi says of the device, for `check_idle`; None where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    device = (visible or "0").split(",")[0]
    done = subprocess.run(["nvidia-smi", "-i", device, *query], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else None


def other_gpu(listing: str, capability: tuple[int, int]) -> str | None:
    """Returns for which GPUs an extension was built, or None if the device is one of them.

    Args:
        listing: cuobjdump's, of machine code and PTX.
        capability: of the device.
    """
    found = re.findall(r"sm_(\d+)(\d)\w*\.(cubin|ptx)", listing)
    machine = {(int(major), int(minor)) for major, minor, kind in found if kind == "cubin"}
    virtual = {(int(major), int(minor)) for major, minor, kind in found if kind == "ptx"}
    runs = any(major == capability[0] and minor <= capability[1] for major, minor in machine)
    if not found or runs or any(each <= capability for each in virtual):
        return None
    built = ", ".join(f"sm_{major}{minor}" for major, minor in sorted(machine | virtual))
    return f"was built for {built}, and the device is sm_{capability[0]}{capability[1]}"


def listing_of(extension: Path) -> str:
    """Returns what cuobjdump lists, which comes with CUDA and with Triton; nothing without it."""
    spec = find_spec("triton")
    places = [Path(place, "backends/nvidia/bin") for place in (spec.submodule_search_locations or ())] if spec else []
    tool = shutil.which("cuobjdump") or next((shutil.which("cuobjdump", path=str(place)) for place in places), None)
    if tool is None:
        return ""
    done = [
        subprocess.run([tool, option, str(extension)], capture_output=True, text=True, check=False, timeout=60)
        for option in ("--list-elf", "--list-ptx")
    ]
    return "".join(each.stdout for each in done)
