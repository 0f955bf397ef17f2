"""Private names of torch are asked for in one module, and the package works without each."""

import ast
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from torch import distributed as dist

from megatron_cp import torch_private
from megatron_cp.executor.no_compile import no_compile
from tests.unit_tests.test_house import HOUSE

ASKED_IN = "torch_private.py"


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names_asked(source):
    """The parts of dotted paths that `torch_private` looks for, and attributes that it reads."""
    tree = ast.parse(source)
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    parts = {part for text in texts if " " not in text for part in text.split(".")}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in parts | attributes if is_private(name)} - {"_fields"}


def private_uses(source, known):
    """The lines in which a source imports or reads a private name of torch, or any attribute of a name in `known`."""
    nodes, roots = list(ast.walk(ast.parse(source))), {"torch"}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [f"{getattr(node, 'module', '')}.{alias.name}".strip(".") for alias in node.names]
            of_torch = [name for name in names if name.split(".")[0] == "torch"]
            roots |= {alias.asname or alias.name for alias in node.names if of_torch}
            if any(is_private(part) for name in of_torch for part in name.split(".")):
                yield node.lineno
    for node in nodes:
        is_read = isinstance(node, ast.Attribute) and is_private(node.attr)
        if is_read and (node.attr in known or ast.unparse(node).split(".")[0] in roots):
            yield node.lineno


def test_private_names_of_torch_are_asked_for_in_one_module():
    known = private_names_asked((HOUSE / ASKED_IN).read_text())
    found = {
        f"{path.relative_to(HOUSE)}:{line}"
        for path in HOUSE.rglob("*.py")
        if path.relative_to(HOUSE).as_posix() != ASKED_IN
        for line in private_uses(path.read_text(), known)
    }
    assert found == set()
    assert "_varlen_attn" in known
    assert "_version" in known


class _Public:
    """An object's public attributes; private ones are missing, as in a later release."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        if is_private(name):
            raise AttributeError(name)
        found = getattr(self._inner, name)
        return _Public(found) if isinstance(found, ModuleType) else found


@pytest.fixture
def without(monkeypatch):
    """The module as it is where torch has none of the names."""
    spec = importlib.util.spec_from_file_location("without_private_names", HOUSE / ASKED_IN)
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", _Public(torch))
        spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    return module


def test_this_torch_has_all_names_that_are_asked_for_at_import():
    assert set(torch_private.lacking()) <= {"torch.nn.attention.varlen"}


def test_missing_names_are_listed_and_done_without(without):
    assert "torch._C._cuda_getCurrentRawStream" in without.lacking()
    assert without.varlen_operators() is None
    assert without.cpu_flash is None
    assert len(without.lacking()) >= 10
    assert without.is_any_autocast_enabled() is False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert without.is_any_autocast_enabled() is True
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    without.multiply_each(tensors, 3)
    assert [each.tolist() for each in tensors] == [[3, 3], [6, 6, 6]]
    assert without.profiler_enabled() is True  # ranges are made always
    without.occupy_device(1)
    with without.no_modes(), without.below_autograd():
        pass
    assert without.operators("aten") == []

    def function(x):
        return x + 1

    marked = without.skip_when_compiling(function, "a reason")
    assert marked(1) == 2
    assert marked._torchdynamo_disable
    assert no_compile(function)._torchdynamo_disable
    assert isinstance(without.store_of(None), dist.HashStore)
    with pytest.warns(UserWarning, match="cannot change the time limit"):
        assert without.limit_waits(None) == []
    with pytest.raises(RuntimeError, match="has no TorchDispatchMode"):
        without.DispatchMode()


def test_versions_and_leaves_and_operators_are_those_of_torch():
    tensor = torch.zeros(2)
    before = torch_private.version_of(tensor)
    assert torch_private.version_of(tensor) == before
    tensor.add_(1)
    assert torch_private.version_of(tensor) != before
    assert torch_private.leaves({"a": [1, (2, None)], "b": 3}) == [1, 2, None, 3]
    add = _packet(torch.ops.aten.add.Tensor)  # self, other, and a scale by keyword
    taken = [torch_private._takes(add, names) for names in (["self", "other"], ["self"], ["other", "self"])]
    assert taken == [True, False, False]
    assert not torch_private._takes(None, ["self"])


def _packet(overload):
    packet = ModuleType("packet")
    packet.default = overload
    return packet
