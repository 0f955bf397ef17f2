"""Tabulates the results of `torch.compile` for every operation: operation x mode x ranks x backend.

    PYTHONPATH=. python tools/compile_table.py --ranks 1 2 --backends eager aot_eager

Each row is one function: a projection, the operation, a projection, forward and backward in float64 over packs of other
lengths each, against the same without compiling. Ranks are gloo processes.
"""

from __future__ import annotations

import argparse
import platform
import sys

import torch

from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.launch import RankError, run_ranks
from tests.compile_cases import OPERATIONS, PACKS, TOLERANCE, Found, compile_and_compare

HEAD = "| operation | mode | ranks | backend | runs | graph breaks | graphs after each pack | same numbers | warnings |"


def main() -> int:
    """Prints the table. Exit code 1 if a row does not run, differs, breaks more than once or warns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--backends", nargs="+", default=["eager", "aot_eager", "inductor"])
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=list(OPERATIONS))
    parser.add_argument("--packs", type=int, default=len(PACKS), help=f"of {len(PACKS)} lengths")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for the rows of one operation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread a rank\n")
    print(HEAD + "\n|" + "---|" * HEAD.count(" | ") + "---|")
    good = True
    for operation in args.operations:
        for ranks in args.ranks:
            good &= _rows(operation, ranks, args.backends, PACKS[: args.packs], args.time_limit)
    return 0 if good else 1


def _rows(operation: str, ranks: int, backends: list[str], packs: tuple[tuple[int, ...], ...], limit: float) -> bool:
    cases = [(operation, mode, backend) for mode in OPERATIONS[operation] for backend in backends]
    try:
        found = run_ranks(compared, ranks, cases, packs, kind="processes", timeout=limit)
    except RankError as error:
        print(f"| {operation} | | {ranks} | | no: {str(error).splitlines()[-1]} | | | | |", flush=True)
        return False
    good = [_row(case, ranks, [of_rank[number] for of_rank in found]) for number, case in enumerate(cases)]
    return all(good)


def compared(group: RankGroup, cases: list[tuple[str, str, str]], packs: tuple[tuple[int, ...], ...]) -> list[Found]:
    """Returns the result of each case on this rank."""
    with torch._inductor.config.patch(compile_threads=1):  # no processes beside the ranks
        return [compile_and_compare(group, *case, packs) for case in cases]


def _row(case: tuple[str, str, str], ranks: int, found: list[Found]) -> bool:
    operation, mode, backend = case
    worst, breaks = max(each.difference for each in found), max(each.breaks for each in found)
    graphs = max(each.graphs for each in found)
    complaints = sorted({complaint for each in found for complaint in each.complaints})
    same = "to the bit" if worst == 0 else f"to {worst:.0e}" if worst <= TOLERANCE else f"no: {worst:.0e}"
    print(
        f"| {operation} | {mode} | {ranks} | {backend} | yes | {breaks} | {' '.join(map(str, graphs))} | {same} | "
        f"{'; '.join(complaints) or 'none'} |",
        flush=True,
    )
    return worst <= TOLERANCE and breaks <= 1 and not complaints


if __name__ == "__main__":
    sys.exit(main())
