"""Runs the tests that are marked `any_cpu` as several kinds of CPU compute, and says which kind each really was.

    python -m tools.cpus [arguments of pytest]

A CPU without the instructions of a setting computes with those that it has. Exit code 1 if a test failed in any.
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
    for setting in SETTINGS:
        environment = os.environ | setting
        said = " ".join(f"{name}={value}" for name, value in setting.items())
        print(f"{said}: {in_force(environment)}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "any_cpu", *sys.argv[1:], *files]
        failed |= subprocess.run(command, env=environment, cwd=ROOT).returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
