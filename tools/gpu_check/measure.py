"""`python -m tools.gpu_check.measure kernels|attention|linear|nccl`: measures, a line of JSON for each row."""

from __future__ import annotations

import argparse
import json
from importlib import import_module

ROWS = {"kernels": "kernels:rows", "attention": "one_rank:attention", "linear": "one_rank:linear", "nccl": "nccl:rows"}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.measure", description=__doc__)
    parser.add_argument("what", choices=ROWS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    module, _, name = ROWS[options.what].partition(":")
    for row in getattr(import_module(f"tools.gpu_check.{module}"), name)(options.repeats, small=options.small):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
