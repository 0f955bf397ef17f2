"""The public names of the packages that import them lazily: listed, completed, and hinted at."""

import importlib
import pickle
import rlcompleter
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_cp
from megatron_cp import extras, lazy
from tests.commands import run_code
from tests.limits import limit

HOUSE = Path(megatron_cp.__file__).parent
PACKAGES = sorted(
    ".".join(("megatron_cp", *stub.parent.relative_to(HOUSE).parts)) for stub in HOUSE.rglob("__init__.pyi")
)
NEEDS = {
    "megatron_cp.diffusers": "diffusers",
    "megatron_cp.megatron": "megatron.core",
    "megatron_cp.transformers": "transformers",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there_and_is_listed_without_torch(package):
    if package in NEEDS:
        pytest.importorskip(NEEDS[package])
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is vars(module)[name]  # kept once it is used
    # In a process that has used none of them; nothing else is listed.
    code = f"import sys, {package} as p; print(dir(p) == sorted(p.__all__))"
    code += "; print([name for name in ('torch', 'numpy', 'difflib') if name in sys.modules])"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60), check=True
    ).stdout
    assert said.splitlines() == ["True", "[]"]


def test_tab_completion_knows_them_and_modules_are_imported_without_a_hint(monkeypatch):
    completer = rlcompleter.Completer({"cp": megatron_cp})
    found = [completer.complete("cp.plan_", state) for state in range(3)]
    assert [name.rstrip("()") for name in found] == ["cp.plan_attention", "cp.plan_held_attention", "cp.plan_linear"]
    # An import statement asks the package before it imports the module.
    monkeypatch.setattr("difflib.get_close_matches", None)
    with pytest.raises(AttributeError, match=r"no attribute 'transport'$"):
        importlib.import_module("megatron_cp.plan").__getattr__("transport")


@pytest.mark.parametrize(
    ("package", "name", "hint"),
    [
        ("megatron_cp", "ShardBatch", ". Did you mean shard_batch?"),
        ("megatron_cp", "loss", ". Did you mean token_loss?"),
        (
            "megatron_cp", "gated",
            ". Did you mean gated_delta_net or gated_delta_product or gated_delta_product_mixer or gated_delta_rule?",
        ),
        ("megatron_cp", "net", ""), ("megatron_cp", "frobnicate", ""), ("megatron_cp", "__wrapped__", ""),
        (
            "megatron_cp", "enable_context_parallel",
            ". Did you mean megatron_cp.diffusers.enable_context_parallel or"
            " megatron_cp.transformers.enable_context_parallel?",
        ),
        ("megatron_cp", "run_ranks", ". Did you mean megatron_cp.executor.run_ranks?"),
        ("megatron_cp.transformers", "enable_contextparallel", ". Did you mean enable_context_parallel?"),
    ],
)  # fmt: skip
def test_rejects_a_misspelt_name_with_a_hint(package, name, hint):
    with pytest.raises(AttributeError) as error:
        getattr(importlib.import_module(package), name)
    assert str(error.value) == f"module {package!r} has no attribute {name!r}{hint}"
    assert error.value.obj is None  # else Python would print a hint of its own behind this one


@pytest.mark.parametrize(
    ("statement", "hint"),
    [
        ("from megatron_cp import AttentionSlot", "It is AttentionSpec now"),
        ("from megatron_cp import LinearSlot", "It is LinearSpec now"),
        ("from megatron_cp import PlanSlots", "It is GraphTables now"),
        ("from megatron_cp import atention, cli", "Did you mean attention?"),
    ],
)
def test_rejects_the_import_of_a_former_or_misspelt_name_with_a_hint(statement, hint):
    with pytest.raises(ImportError, match=r"^cannot import name '\w+' from 'megatron_cp'") as error:
        exec(statement)
    assert str(error.value).endswith(hint)


@pytest.mark.parametrize(
    ("package", "name", "missing"),
    [
        ("megatron_cp.diffusers", "enable_context_parallel", "diffusers"),
        ("megatron_cp.megatron", "specs", "megatron"),
        ("megatron_cp.transformers", "enable_context_parallel", "transformers"),
        ("megatron_cp.transformers", "ContextParallelTrainer", "accelerate"),
    ],
)
def test_rejects_a_name_whose_extra_is_not_installed(package, name, missing):
    """In a process that cannot find one package of the extra, as if it had not been installed."""
    code = f"""
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
import {package} as package
try:
    package.{name}
except ModuleNotFoundError as error:
    print(error.name.split(".")[0], str(error))
"""
    said = run_code(code)
    assert said.startswith(f"{missing} No module named '{missing}")
    assert f"; {package} needs it: {extras.install(package.rpartition('.')[2])}" in said


def test_an_error_of_our_own_is_not_answered_with_an_installation(monkeypatch):
    def fails(name):
        raise ImportError(f"cannot import name {name!r}", name="megatron_cp.diffusers.enable")

    monkeypatch.setattr(lazy.lazy_loader, "attach_stub", lambda *_: (fails, None, ["enable"]))
    get, _, _ = lazy.attach_stub("megatron_cp.diffusers", "there/__init__.py", extra="diffusers")
    with pytest.raises(ImportError, match=r"^cannot import name 'enable'$"):
        get("enable")


def test_public_names_are_pickled():
    assert pickle.loads(pickle.dumps(megatron_cp.shard_batch)) is megatron_cp.shard_batch
    assert pickle.loads(pickle.dumps(megatron_cp.AttentionSpec)) is megatron_cp.AttentionSpec
