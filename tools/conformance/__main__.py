"""Runs the cells and writes the page: `python -m tools.conformance --out PAGE.md`."""

import argparse
import os
import sys
import warnings
from pathlib import Path

import torch

from tools.conformance import cells, models, page


def main() -> None:
    """Runs every cell, as often as asked, and writes the page and its JSON."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    parser.add_argument("--out", type=Path, help="the page; a .json of the same name is written beside it")
    parser.add_argument("--only", default="", help="cells whose way or model has this in its name")
    parser.add_argument("--seconds", type=float, default=60.0, help="what takes longer is called hung")
    parser.add_argument("--rounds", type=int, default=1, help="so many runs of all, and which outcomes differ")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # ranks are forked from this process, which must have no threads
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    models.preload()
    found, again, differing = {}, set(), set()
    for number in range(given.rounds):
        for cell in cells.all_cells(given.only):
            outcome = cells.run(cell, given.seconds)
            where = f"{cell.way} | {cell.model} | {cell.lengths} | x{cell.ranks}"
            line = f"{where}: {outcome.name} {outcome.error} {outcome.gradient} {outcome.words}"
            print(line, file=sys.stderr, flush=True)
            if number:
                again.add(cell)
            if number and found[cell].name != outcome.name:
                differing.add(cell)
            found.setdefault(cell, outcome)
            if given.out:  # as it goes, so that a run that is cut off leaves something
                page.write(given.out, found, given.seconds, len(again), differing)
    if differing:
        sys.exit(1)


if __name__ == "__main__":
    main()
