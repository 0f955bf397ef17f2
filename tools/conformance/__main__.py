"""Runs the cells and writes the page: `python -m tools.conformance --out PAGE.md`."""

import argparse
import os
import sys
import warnings
from pathlib import Path

import torch

from tools.conformance import cells, models, page


def main() -> None:
    """Runs every cell, and writes the page as it goes, so that a run that is cut off leaves something."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    parser.add_argument("--out", type=Path, help="the page")
    parser.add_argument("--only", default="", help="cells whose way or model has this in its name")
    parser.add_argument("--seconds", type=float, default=60.0, help="what takes longer is called hung")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # ranks are forked from this process, which must have no threads
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    models.preload()
    found = {}
    for cell in cells.all_cells(given.only):
        found[cell] = outcome = cells.run(cell, given.seconds)
        print(cell, outcome, file=sys.stderr, flush=True)
        if given.out:
            given.out.write_text(page.text_of(found, given.seconds))


if __name__ == "__main__":
    main()
