"""Tests of the refusals of the kernels of other packages: flash-linear-attention, mamba_ssm and causal-conv1d."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from megatron_cp import extras
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.extras import install
from megatron_cp.layout import Packing
from megatron_cp.linear.kernels import causal_conv1d, fla, mamba_ssm
from megatron_cp.linear.kernels.base import LinearCall
from megatron_cp.linear.kernels.chunked import ChunkedRule
from megatron_cp.linear.kernels.common import installed
from tests.refusals import rejects

FLA_RULE, FLA_CONV, CONV = fla.FlaRule(), fla.FlaConv(), causal_conv1d.CausalConv1dConv()
KINDS = [(FLA_RULE, "gdn"), (FLA_RULE, "kda"), (FLA_CONV, "conv1d"), (mamba_ssm.MambaSsmRule(), "mamba"),
         (CONV, "conv1d")]  # fmt: skip
VERSIONS = {
    "fla-core": ("fla", fla.SERIES, "not of"), "mamba-ssm": ("mamba", mamba_ssm.OLDEST, "older than"),
    "causal-conv1d": ("mamba", causal_conv1d.OLDEST, "older than"),
}  # fmt: skip
of_each = pytest.mark.parametrize(("kernel", "kind"), KINDS)


@pytest.fixture(autouse=True)
def on_a_gpu_with_all(monkeypatch):
    monkeypatch.setattr(installed, "installed_version", lambda package: (0, 6) if package == "fla-core" else (9, 9))
    monkeypatch.setattr(installed, "import_failure", lambda *modules: None)
    monkeypatch.setattr(fla, "_gradients_are_wrong", lambda: False)


def call_of(kind="gdn", dtype=torch.bfloat16, device="cuda", head_dim=256, width=4, channels=(64,)):
    return LinearCall(kind, Packing([3, 1]), dtype, torch.device(device), head_dim, width, channels)


@of_each
def test_takes_what_the_package_computes(kernel, kind):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert kernel.refusal(call_of(kind, dtype)) is None


@of_each
def test_rejects_a_missing_and_an_old_package(monkeypatch, kernel, kind):
    extra, (major, minor), is_wrong = VERSIONS[kernel.package]
    for version, says in (
        (None, "not installed"), ((major, minor), None), ((major, minor - 1), f"{is_wrong} version {major}.{minor}"),
    ):  # fmt: skip
        monkeypatch.setattr(installed, "installed_version", lambda package, version=version: version)
        assert kernel.refusal(call_of(kind)) == (says and f"{kernel.package} is {says}; {install(extra)}")


@of_each
def test_rejects_a_package_that_cannot_be_imported(monkeypatch, kernel, kind):
    monkeypatch.setattr(installed, "import_failure", extras.import_failure.__wrapped__)
    monkeypatch.setitem(sys.modules, "fla.ops.kda" if kernel.package == "fla-core" else kernel.name, None)
    assert f"{kernel.package} cannot be imported (ModuleNotFoundError: " in kernel.refusal(call_of(kind))


@of_each
def test_rejects_the_cpu_and_float64_and_the_user_hears_of_it(kernel, kind):
    assert "runs on CUDA, the tensors are on cpu; use chunked" in kernel.refusal(call_of(kind, device="cpu"))
    assert "has no torch.float64; use chunked" in kernel.refusal(call_of(kind, torch.float64))
    rejects(f"{kernel.name}: runs on CUDA", choose_kernel, [kernel], kernel.name, call_of(kind, device="cpu"))


OWN = [
    (FLA_RULE, {"kind": "gdn", "head_dim": 257}, "at most 256, not 257; use chunked"),
    (FLA_RULE, {"kind": "kda", "head_dim": 257}, "at most 256, not 257; use chunked"),
    *((CONV, {"kind": "conv1d", "width": width}, f"has 2 to 4 taps, not {width}; use fla") for width in (1, 5)),
    *((CONV, {"kind": "conv1d", "width": width}, None) for width in (2, 3, 4)),
    (CONV, {"kind": "conv1d", "channels": (64, 12)}, "has multiples of 8 channels, not 12; use fla"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "given", "says"), OWN)
def test_rejects_what_one_package_does_not_compute(kernel, given, says):
    found = kernel.refusal(call_of(**given))
    assert found is None if says is None else says in found


def test_the_installed_version_is_read_once(monkeypatch):
    extras.installed_version.cache_clear()
    monkeypatch.setattr(extras, "version", lambda package: {"mamba-ssm": "2.3.2.post1"}[package])
    assert extras.installed_version("mamba-ssm") == (2, 3)
    monkeypatch.setattr(extras, "version", None)
    assert extras.installed_version("mamba-ssm") == (2, 3)
    extras.installed_version.cache_clear()


def test_rejects_wrong_gradients_on_hopper_which_other_kernels_do_not_have(monkeypatch):
    monkeypatch.setattr(fla, "_gradients_are_wrong", lambda: True)
    assert "pip install tilelang" in FLA_RULE.refusal(call_of())
    with pytest.warns(UserWarning, match="chunked, not on fla .*tilelang"):
        assert choose_kernel([FLA_RULE, ChunkedRule()], "auto", call_of()).name == "chunked"
    assert FLA_RULE.refusal(call_of("kda")) is None
    assert FLA_CONV.refusal(call_of("conv1d")) is None


@pytest.mark.parametrize("name", ["chunk", "chunk_bwd", "chunk_intra", "wy_fast"])
def test_kda_does_not_call_what_has_wrong_gradients(name):
    pytest.importorskip("fla")
    module = importlib.import_module(f"fla.ops.kda.{name}")
    assert "chunk_bwd_dqkwg" not in Path(module.__file__).read_text()


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

    named = {"IS_NVIDIA_HOPPER": hopper, "TRITON_ABOVE_3_4_0": from_3_4, "TRITON_ABOVE_3_7_1": from_3_7_1}
    for name, value in named.items():
        monkeypatch.setattr(f"fla.utils.{name}", value)
        assert hasattr(chunk_o, name)  # what fla itself asks
    monkeypatch.setattr(backends.CommonTileLangBackend, "can_use", lambda: tilelang)
    assert fla._gradients_are_wrong() is wrong
