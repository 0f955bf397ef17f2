"""A rank in a process that is no fork: it imports what it needs, and it ends as a script does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tools.faults.cases import Case

_ROOT = Path(__file__).parents[2]


def start(case: Case, rank: int, folder: Path) -> None:
    """Becomes such a process. Its megatron_cp is this one's."""
    import megatron_cp

    found = os.pathsep.join(map(str, (Path(megatron_cp.__file__).parents[1], _ROOT)))
    arguments = ["-P", "-m", "tools.faults.rank", case.text(), str(rank), str(folder)]
    os.execve(sys.executable, [sys.executable, *arguments], os.environ | {"PYTHONPATH": found})


if __name__ == "__main__":
    from tools.faults import launches

    launches.independent_rank(Case.of(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
