"""`python -m tools.nullgpu.coverage [--write]`: which CUDA-only code has run, and how.

`python -m tools.nullgpu --note COMMAND` notes it, in the processes of the command: a line in a file for each piece of
code (`branches`), once a process. --write keeps what has run in the table that `megatron-cp doctor` prints.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType
from typing import Any

from tools.nullgpu.branches import LIBRARY, TRITON, Piece, file_pieces, offsets, pieces

VARIABLE = "NULLGPU_PIECES"  # names a folder
NOTES = LIBRARY.parent / "build" / "cuda_code"
TABLE = LIBRARY / "cli" / "cuda_code.json"
# On the CPU refusals are tested, and Triton's interpreter runs other packages' kernels.
HOW = ("emulated", "cpu", "gpu")
# Files of kernels of packages that compile for CUDA as they are installed, which no machine without one can have.
OF_PACKAGES = {
    "linear/gated_norm.py": "mamba-ssm",
    "linear/kernels/causal_conv1d.py": "causal-conv1d",
    "linear/kernels/mamba_ssm.py": "mamba-ssm",
    "softmax/kernels/flash_attn.py": "flash-attn",
}
COMPILED = "compiled code of Triton and FlexAttention, which is compiled only"
NEVER = (  # what no emulation is
    "NCCL (its values, its order, several devices)",
    "kernels of mamba-ssm, causal-conv1d and flash-attn, in whose place others ran",
)
LAUNCHER = "exchange/kernels/triton.py"  # whose code on a GPU runs the compiled kernels
COMPILED_FOR = (80, 90, 100)  # by tests/unit_tests/exchange/test_triton_compiled.py
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


def table() -> dict[str, Any]:
    """Returns the numbers of pieces of each function that have run, in each way; and the Triton kernels."""
    ran = {how: _noted(NOTES / how) for how in HOW}
    functions: defaultdict[tuple[str, str], list[Piece]] = defaultdict(list)
    for piece in pieces():
        functions[piece.file, piece.where].append(piece)
    rows = [
        {
            "file": file,
            "function": function,
            "source": digest(found),
            "pieces": len(found),
            "run": sum(_has_run(piece, ran) for piece in found),
            **{how: sum(piece.note in ran[how] for piece in found) for how in HOW},
        }
        for (file, function), found in functions.items()
    ]
    on_gpu = any(piece.note in ran["gpu"] for piece in file_pieces(LAUNCHER))
    kernels = [{"name": name, "compiled_for": COMPILED_FOR, "gpu": on_gpu} for name in _kernels()]
    return {"functions": rows, "kernels": kernels, "never": list(NEVER if on_gpu else (COMPILED, *NEVER))}


def digest(found: list[Piece]) -> str:
    """Returns a digest of the source of some pieces of a file."""
    lines = (LIBRARY / found[0].file).read_text().splitlines()
    text = "\n".join("\n".join(lines[piece.start[0] - 1 : piece.end[0]]) for piece in found)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _has_run(piece: Piece, ran: dict[str, set[str]]) -> bool:
    return any(piece.note in of_how for of_how in ran.values())


def _noted(folder: Path) -> set[str]:
    files = folder.iterdir() if folder.is_dir() else ()
    return {line for file in files for line in file.read_text().splitlines()}


def _kernels() -> list[str]:
    tree = ast.parse((LIBRARY / TRITON).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")]
    return [function.name for function in functions]


def main() -> int:
    """Runs the command."""
    ran = {how: _noted(NOTES / how) for how in HOW}
    if not set(sys.argv[1:]) <= {"--write"}:
        print(__doc__, file=sys.stderr)
        return 2
    if not any(piece.note in of_how for of_how in ran.values() for piece in pieces()):
        print("nothing of this source is noted: run python -m tools.nullgpu --note COMMAND before", file=sys.stderr)
        return 1
    found = table()
    missed = [piece for piece in pieces() if not _has_run(piece, ran)]
    for piece in missed:
        print(f"not run: {piece} {piece.where}")
    total = len(pieces())
    of_each = ", ".join(f"{sum(row[how] for row in found['functions'])} {how}" for how in HOW)
    print(f"CUDA-only code: {total - len(missed)} of {total} pieces ran, {1 - len(missed) / total:.1%} ({of_each})")
    own, own_missed = (sum(piece.file not in OF_PACKAGES for piece in some) for some in (pieces(), missed))
    packages = ", ".join(sorted(set(OF_PACKAGES.values())))
    print(f"without what calls {packages}: {own - own_missed} of {own}, {1 - own_missed / own:.1%}")
    if "--write" in sys.argv[1:]:
        TABLE.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
