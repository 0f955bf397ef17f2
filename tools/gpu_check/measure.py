"""`python -m tools.gpu_check.measure kernels|one-rank|nccl`: measures, a line of JSON for each row."""

from __future__ import annotations

import argparse
import json
from importlib import import_module

MODULES = {"kernels": "kernels", "one-rank": "one_rank", "nccl": "nccl"}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.measure", description=__doc__)
    parser.add_argument("step", choices=MODULES)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    for row in import_module(f"tools.gpu_check.{MODULES[options.step]}").rows(options.repeats, small=options.small):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
