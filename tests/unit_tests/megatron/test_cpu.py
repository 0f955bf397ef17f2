"""Tests of what makes Megatron run without CUDA, on a package that stands for it: the real one lasts for a process."""

import importlib
import sys
import types

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_cp.megatron.cpu import _exchange_torch


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with two modules that import torch."""
    folder = tmp_path / "stand_in"
    folder.mkdir()
    for name, text in {"__init__": "", "before": "import torch", "later": "import torch\nown = torch.Tensor"}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "stand_in"
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "stand_in"]:
        del sys.modules[name]


def test_modules_have_the_substitute_whether_they_were_imported_before_or_later(package):
    before, substitute = importlib.import_module(f"{package}.before"), types.ModuleType("torch")
    _exchange_torch(package, substitute)
    finders = len(sys.meta_path)
    _exchange_torch(package, types.ModuleType("torch"))  # changes nothing
    later = importlib.import_module(f"{package}.later")
    assert before.torch is later.torch is substitute
    assert later.own is torch.Tensor
    assert len(sys.meta_path) == finders
