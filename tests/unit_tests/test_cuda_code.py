"""CUDA-only code is found in the source, and doctor's table of how it is proved is that of this source."""

import ast
import json
import sys
from pathlib import Path

import pytest

if not hasattr(sys, "monitoring"):
    pytest.skip("what has run is noted by sys.monitoring, which Python has from 3.12 on", allow_module_level=True)

from megatron_cp.cli.main import main
from tests.unit_tests.exchange.test_triton_compiled import ARCHITECTURES
from tools.nullgpu.branches import Piece, pieces
from tools.nullgpu.coverage import COMPILED_FOR, HOW, OF_PACKAGES, TABLE, digest


def found_in(tmp_path: Path, source: str) -> list[str]:
    (tmp_path / "module.py").write_text(source)
    lines = source.splitlines()
    found = []
    for piece in pieces(tmp_path):
        (first, start), (last, end) = piece.start, piece.end
        found.append(lines[first - 1][start : end if first == last else None])
    return found


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if x.is_cuda:\n        a()\n    else:\n        b()", ["a()"]),
        ("if not x.is_cuda:\n        a()\n    else:\n        b()", ["b()"]),
        ("if x.device.type != 'cuda':\n        return a()\n    b()\n    c()", ["b()", "c()"]),
        ("return a() if x.device.type == 'cuda' else b()", ["a()"]),
        ("if x.is_cuda and a(x):\n        b()", ["a(x)", "b()"]),
        ("if x.device.type != 'cuda' or a(x):\n        b()", ["a(x)"]),
        ("if any(y.is_cuda for y in x):\n        for z in a():\n            b()", ["a()", "b()"]),
        ("if dist.get_backend(x) == 'nccl':\n        a()", ["a()"]),
        ("if x.device.type != 'cpu':\n        a()", ["a()"]),
        ("if self.device == 'cpu':\n        return a()\n    b()", ["b()"]),
        ("if x.name == 'cuda':\n        a()", []),
        ("a(x)", []),
    ],
)
def test_conditions_that_lead_to_cuda(tmp_path, body, expected):
    assert found_in(tmp_path, f"def f(x):\n    {body}\n") == expected


def test_what_only_such_code_uses_is_such_code(tmp_path):
    source = """
def f(x):
    if x.is_cuda:
        _only(x)
    _both(x)

def _only(x):
    _both(x)

def _both(x):
    return x

class Kernel:
    devices = ('cuda',)

    def run(self):
        return 1
"""
    assert sorted(found_in(tmp_path, source)) == ["_both(x)", "_only(x)", "return 1"]


@pytest.fixture(scope="module")
def table():
    return json.loads(TABLE.read_text())


def test_the_table_is_that_of_the_source(table):
    functions: dict[tuple[str, str], list[Piece]] = {}
    for piece in pieces():
        functions.setdefault((piece.file, piece.where), []).append(piece)
    found = {where: digest(of_function) for where, of_function in functions.items()}
    kept = {(row["file"], row["function"]): row["source"] for row in table["functions"]}
    assert kept == found, "run make cuda-table, which takes a quarter of an hour, and commit what it writes"


def test_nearly_all_of_it_runs_somewhere(table):
    rows = [row for row in table["functions"] if row["file"] not in OF_PACKAGES]
    ran, total = (sum(row[key] for row in rows) for key in ("run", "pieces"))
    assert ran >= 0.95 * total
    for row in table["functions"]:
        assert max(row[how] for how in HOW) <= row["run"] <= row["pieces"]


def test_compiled_kernels_are_those_that_a_test_compiles(table):
    source = Path(TABLE).parents[1] / "exchange" / "kernels" / "triton_kernels.py"
    names = [node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert [kernel["name"] for kernel in table["kernels"]] == [name for name in names if name.endswith("_kernel")]
    assert [kernel["compiled_for"] for kernel in table["kernels"]] == [list(COMPILED_FOR)] * len(table["kernels"])
    assert tuple(COMPILED_FOR) == tuple(ARCHITECTURES)


def test_doctor_prints_it(capsys):
    assert main(["doctor", "--all"]) == 0
    text = capsys.readouterr().out
    assert "exchange/device.py" in text
    assert "compiled for sm_80, sm_90, sm_100" in text
    assert "NCCL" in text
