import pytest
import torch

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.layout import Packing
from megatron_cp.linear.kernels import KERNELS, LinearCall, fla

KERNEL = fla.FlaGatedDelta()


@pytest.fixture(autouse=True)
def on_a_gpu_that_can_train(monkeypatch):
    monkeypatch.setattr(fla, "_installed_version", lambda: (0, 6))
    monkeypatch.setattr(fla, "_gradients_are_wrong", lambda: False)


def _call(dtype=torch.bfloat16, device="cuda", head_dim=128):
    return LinearCall(Packing([3, 1]), dtype, torch.device(device), head_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_takes_what_fla_computes(dtype):
    assert KERNEL.refusal(_call(dtype, head_dim=256)) is None
    assert choose_kernel(KERNELS, "auto", _call(dtype)).name == "fla"


def test_rejects_a_missing_fla(monkeypatch):
    monkeypatch.setattr(fla, "_installed_version", lambda: None)
    assert KERNEL.refusal(_call()) == "fla-core is not installed; pip install fla-core==0.6.0 einops"


def test_rejects_an_old_fla(monkeypatch):
    monkeypatch.setattr(fla, "_installed_version", lambda: (0, 5))
    assert KERNEL.refusal(_call()) == "fla-core is not of version 0.6; pip install fla-core==0.6.0 einops"


def test_rejects_the_cpu():
    assert "runs on CUDA, the tensors are on cpu; use chunked" in KERNEL.refusal(_call(device="cpu"))


def test_rejects_float64():
    assert "has no torch.float64; use chunked" in KERNEL.refusal(_call(torch.float64))


def test_rejects_wide_key_heads():
    assert "at most 256, not 257; use chunked" in KERNEL.refusal(_call(head_dim=257))


def test_rejects_wrong_gradients_on_hopper(monkeypatch):
    monkeypatch.setattr(fla, "_gradients_are_wrong", lambda: True)
    assert "pip install tilelang" in KERNEL.refusal(_call())
    with pytest.warns(UserWarning, match="chunked, not on fla .*tilelang"):
        assert choose_kernel(KERNELS, "auto", _call()).name == "chunked"


def test_a_refusal_reaches_the_user():
    with pytest.raises(ArgumentError, match="fla: runs on CUDA"):
        choose_kernel(KERNELS, "fla", _call(device="cpu"))


def test_the_installed_version_is_read_once(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(fla, "version", lambda package: {"fla-core": "0.6.0"}[package])
    fla._installed_version.cache_clear()
    assert fla._installed_version() == fla.SERIES
    monkeypatch.setattr(fla, "version", None)
    assert fla._installed_version() == fla.SERIES
    fla._installed_version.cache_clear()


@pytest.mark.parametrize(
    ("hopper", "from_3_4", "from_3_7_1", "tilelang", "wrong"),
    [
        (True, True, False, False, True),
        (True, True, False, True, False),
        (True, True, True, False, False),
        (True, False, False, False, False),
        (False, True, False, False, False),
    ],
)
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
