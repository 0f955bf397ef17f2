"""Runs the tests that are marked `any_cpu` as several kinds of CPU compute, and says which kind each really was.

    python -m tools.cpus [arguments of pytest]

oneDNN computes with the instructions that a CPU has where a setting asks for more. ATen would stop with an illegal
instruction there, so such a setting is left out, with a line that says so. Exit code 1 if a test failed in any.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SETTINGS = (
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ATEN_CPU_CAPABILITY": "avx512"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
)
ROOT = Path(__file__).parents[1]
# oneDNN names its instructions when it is first used.
ASK = """
import torch
print("ATen:", torch.backends.cpu.get_cpu_capability(), flush=True)
torch.ones(64, 64).to_mkldnn().relu()
"""


def exceeds(setting: dict[str, str], best: str) -> bool:
    """Returns True if a setting asks ATen for more than the best of this CPU."""
    order = ("default", "avx2", "avx512")
    asked, best = setting.get("ATEN_CPU_CAPABILITY", "default"), best.lower()
    return best in order and order.index(asked) > order.index(best)


def in_force(environment: dict[str, str]) -> str:
    """Returns the instructions that ATen and oneDNN use, in their own words."""
    asked = environment | {"ONEDNN_VERBOSE": "1"}
    said = subprocess.run([sys.executable, "-c", ASK], env=asked, capture_output=True, text=True, check=True).stdout
    aten, onednn = (re.search(pattern, said) for pattern in (r"ATen: (.*)", r"cpu,isa:(.*)"))
    return f"ATen {aten[1]}, oneDNN {onednn[1] if onednn else 'not used'}"


def main() -> None:
    """Runs them."""
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.any_cpu" in path.read_text())
    failed = False
    plain = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    best = in_force(plain).removeprefix("ATen ").partition(",")[0]
    for setting in SETTINGS:
        environment = os.environ | setting
        said = " ".join(f"{name}={value}" for name, value in setting.items())
        if exceeds(setting, best):
            print(f"{said}: left out, this CPU has {best}", flush=True)
            continue
        print(f"{said}: {in_force(environment)}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "any_cpu", *sys.argv[1:], *files]
        failed |= subprocess.run(command, env=environment, cwd=ROOT).returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
