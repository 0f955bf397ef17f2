"""CUDA-only code is found in the source."""

import sys
from pathlib import Path

import pytest

if not hasattr(sys, "monitoring"):
    pytest.skip("what has run is noted by sys.monitoring, which Python has from 3.12 on", allow_module_level=True)

from tools.nullgpu.branches import pieces


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
