import importlib
import sys
from pathlib import Path

import pytest
import torch

from megatron_cp import extras
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.layout import Packing
from megatron_cp.linear.kernels import fla
from megatron_cp.linear.kernels.base import LinearCall
from megatron_cp.linear.kernels.chunked import ChunkedRule
from megatron_cp.linear.kernels.common import installed
from tests.refusals import rejects

RULE, CONV = fla.FlaRule(), fla.FlaConv()
KINDS = [(RULE, "gdn"), (RULE, "kda"), (CONV, "conv1d")]


@pytest.fixture(autouse=True)
def on_a_gpu_that_can_train(monkeypatch):
    monkeypatch.setattr(installed, "installed_version", lambda package: (0, 6))
    monkeypatch.setattr(fla, "_gradients_are_wrong", lambda: False)


def _call(kind="gdn", dtype=torch.bfloat16, device="cuda", head_dim=128):
    return LinearCall(kind, Packing([3, 1]), dtype, torch.device(device), head_dim)


@pytest.mark.parametrize(("kernel", "kind"), KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_takes_what_fla_computes(kernel, kind, dtype):
    assert kernel.refusal(_call(kind, dtype, head_dim=256)) is None


@pytest.mark.parametrize(("kernel", "kind"), KINDS)
def test_rejects_a_missing_and_an_old_fla(monkeypatch, kernel, kind):
    monkeypatch.setattr(installed, "installed_version", lambda package: None)
    assert kernel.refusal(_call(kind)) == "fla-core is not installed; pip install fla-core==0.6.0 einops==0.8.2"
    monkeypatch.setattr(installed, "installed_version", lambda package: (0, 5))
    assert kernel.refusal(_call(kind)) == "fla-core is not of version 0.6; pip install fla-core==0.6.0 einops==0.8.2"


@pytest.mark.parametrize(("kernel", "kind"), KINDS)
def test_rejects_the_cpu_and_float64(kernel, kind):
    assert "runs on CUDA, the tensors are on cpu; use chunked" in kernel.refusal(_call(kind, device="cpu"))
    assert "has no torch.float64; use chunked" in kernel.refusal(_call(kind, torch.float64))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_rejects_wide_key_heads(kind):
    assert "at most 256, not 257; use chunked" in RULE.refusal(_call(kind, head_dim=257))


def test_rejects_wrong_gradients_on_hopper(monkeypatch):
    monkeypatch.setattr(fla, "_gradients_are_wrong", lambda: True)
    assert "pip install tilelang" in RULE.refusal(_call())
    with pytest.warns(UserWarning, match="chunked, not on fla .*tilelang"):
        assert choose_kernel([RULE, ChunkedRule()], "auto", _call()).name == "chunked"


@pytest.mark.parametrize(("kernel", "kind"), [(RULE, "kda"), (CONV, "conv1d")])
def test_takes_what_has_right_gradients_on_hopper(monkeypatch, kernel, kind):
    monkeypatch.setattr(fla, "_gradients_are_wrong", lambda: True)
    assert kernel.refusal(_call(kind)) is None


@pytest.mark.parametrize("name", ["chunk", "chunk_bwd", "chunk_intra", "wy_fast"])
def test_kda_does_not_call_what_has_wrong_gradients(name):
    pytest.importorskip("fla")
    module = importlib.import_module(f"fla.ops.kda.{name}")
    assert "chunk_bwd_dqkwg" not in Path(module.__file__).read_text()


def test_a_refusal_reaches_the_user():
    rejects("fla: runs on CUDA", choose_kernel, [RULE], "fla", _call(device="cpu"))


@pytest.mark.parametrize(("kernel", "kind"), KINDS)
def test_rejects_an_fla_that_cannot_be_imported(monkeypatch, kernel, kind):
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    extras.import_failure.cache_clear()
    assert "fla-core cannot be imported (ModuleNotFoundError: " in kernel.refusal(_call(kind))
    extras.import_failure.cache_clear()


@pytest.mark.parametrize(
    ("hopper", "from_3_4", "from_3_7_1", "tilelang", "wrong"),
    [
        (True, True, False, False, True), (True, True, False, True, False), (True, True, True, False, False),
        (True, False, False, False, False), (False, True, False, False, False),
    ],
)  # fmt: skip
def test_gradients_are_wrong_where_fla_would_raise(monkeypatch, hopper, from_3_4, from_3_7_1, tilelang, wrong):
    pytest.importorskip("fla")
    monkeypatch.undo()
    from fla.ops.common import backends, chunk_o

    for name, value in (
        ("IS_NVIDIA_HOPPER", hopper),
        ("TRITON_ABOVE_3_4_0", from_3_4),
        ("TRITON_ABOVE_3_7_1", from_3_7_1),
    ):
        monkeypatch.setattr(f"fla.utils.{name}", value)
        assert hasattr(chunk_o, name)  # what fla itself asks
    monkeypatch.setattr(backends.CommonTileLangBackend, "can_use", lambda: tilelang)
    assert fla._gradients_are_wrong() is wrong
