"""`python -m tools.nullgpu.coverage`: which CUDA-only code has run, and how.

`python -m tools.nullgpu --note COMMAND` notes it, in the processes of the command: a line in a file for each piece of
code (`branches`), once a process.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import Any

from tools.nullgpu.branches import LIBRARY, Piece, file_pieces, offsets, pieces

VARIABLE = "NULLGPU_PIECES"  # names a folder
NOTES = LIBRARY.parent / "build" / "cuda_code"
HOW = ("emulated", "gpu")
# Files of kernels of packages that compile for CUDA as they are installed, which no machine without one can have.
OF_PACKAGES = {
    "linear/gated_norm.py": "mamba-ssm",
    "linear/kernels/causal_conv1d.py": "causal-conv1d",
    "linear/kernels/mamba_ssm.py": "mamba-ssm",
    "softmax/kernels/flash_attn.py": "flash-attn",
}
_TOOL = 4  # of those that sys.monitoring gives to nobody in particular

monitoring = sys.monitoring


class Collector:
    """Notes pieces by `sys.monitoring`, each instruction once, which costs little."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prefix = f"{LIBRARY}{os.sep}"
        self._of_code: dict[CodeType, dict[int, Piece]] = {}
        self._seen: set[Piece] = set()
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        monitoring.use_tool_id(_TOOL, "CUDA code")
        monitoring.register_callback(_TOOL, monitoring.events.PY_START, self._function)
        monitoring.register_callback(_TOOL, monitoring.events.INSTRUCTION, self._instruction)
        monitoring.set_events(_TOOL, monitoring.events.PY_START)

    def _function(self, code: CodeType, _: int) -> Any:
        if code.co_filename.startswith(self._prefix) and code not in self._of_code:
            found = offsets(code, file_pieces(code.co_filename.removeprefix(self._prefix)))
            self._of_code[code] = found
            if found:
                monitoring.set_local_events(_TOOL, code, monitoring.events.INSTRUCTION)
        return monitoring.DISABLE

    def _instruction(self, code: CodeType, offset: int) -> Any:
        piece = self._of_code.get(code, {}).get(offset)
        if piece is not None:
            with self._lock:
                if piece not in self._seen:
                    self._seen.add(piece)
                    with (self._folder / str(os.getpid())).open("a") as file:  # a rank may be ended at any time
                        file.write(f"{piece.note}\n")
        return monitoring.DISABLE


def collect() -> None:
    """Begins to note, if the environment says where."""
    folder = os.environ.get(VARIABLE)
    if folder:
        Collector(Path(folder))


def _has_run(piece: Piece, ran: dict[str, set[str]]) -> bool:
    return any(piece.note in of_how for of_how in ran.values())


def _noted(folder: Path) -> set[str]:
    files = folder.iterdir() if folder.is_dir() else ()
    return {line for file in files for line in file.read_text().splitlines()}


def main() -> int:
    """Runs the command."""
    ran, every = {how: _noted(NOTES / how) for how in HOW}, pieces()
    missed = [piece for piece in every if not _has_run(piece, ran)]
    if len(missed) == len(every):
        print("nothing of this source is noted: run python -m tools.nullgpu --note COMMAND before", file=sys.stderr)
        return 1
    for piece in missed:
        print(f"not run: {piece} {piece.where}")
    of_each = ", ".join(f"{sum(piece.note in notes for piece in every)} {how}" for how, notes in ran.items())
    share = 1 - len(missed) / len(every)
    print(f"CUDA-only code: {len(every) - len(missed)} of {len(every)} pieces ran, {share:.1%} ({of_each})")
    own, own_missed = (sum(piece.file not in OF_PACKAGES for piece in some) for some in (every, missed))
    packages = ", ".join(sorted(set(OF_PACKAGES.values())))
    print(f"without what calls {packages}: {own - own_missed} of {own}, {1 - own_missed / own:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
