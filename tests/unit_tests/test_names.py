"""The public names of the packages that import them lazily: listed, completed, and hinted at."""

import importlib
import rlcompleter
import subprocess
import sys

import pytest

import megatron_cp
import tests.covering  # noqa: F401
from megatron_cp.lazy import lazy_names

PACKAGES = ("megatron_cp", "megatron_cp.transformers")


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_listed_without_torch(package):
    """In a process that has used none of them."""
    code = (
        f"import sys, {package} as p; names = dir(p); print(set(p.__all__) - set(names), names == sorted(set(names)))"
    )
    code += "; print([name for name in ('torch', 'numpy', 'difflib') if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.splitlines() == ["set() True", "[]"]


def test_tab_completion_knows_them():
    completer = rlcompleter.Completer({"cp": megatron_cp})
    found = [completer.complete("cp.plan_", state) for state in range(2)]
    assert [name.rstrip("()") for name in found] == ["cp.plan_attention", "cp.plan_linear"]


@pytest.mark.parametrize(
    ("package", "name", "hint"),
    [
        ("megatron_cp", "atention", ". Did you mean attention?"),
        ("megatron_cp", "ShardBatch", ". Did you mean shard_batch?"),
        ("megatron_cp", "packing", ". Did you mean Packing?"),
        ("megatron_cp", "frobnicate", ""),
        ("megatron_cp", "__wrapped__", ""),
        ("megatron_cp.transformers", "enable_contextparallel", ". Did you mean enable_context_parallel?"),
    ],
)
def test_rejects_a_misspelt_name_with_a_hint(package, name, hint):
    with pytest.raises(AttributeError) as error:
        getattr(importlib.import_module(package), name)
    assert str(error.value) == f"module {package!r} has no attribute {name!r}{hint}"
    assert error.value.obj is None  # else Python would print a hint of its own behind this one


def test_a_name_is_kept_once_it_is_used():
    get, names = lazy_names("tests.covering", {"sqrt": "math"})
    try:
        assert get("sqrt")(9) == 3
        assert vars(sys.modules["tests.covering"])["sqrt"] is get("sqrt")
        assert "sqrt" in names()
    finally:
        vars(sys.modules["tests.covering"]).pop("sqrt", None)
