"""Tests of the refusals of mamba_ssm's and causal-conv1d's kernels."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_cp import extras
from megatron_cp.exchange.kernels import copies
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.extras import install
from megatron_cp.layout import Packing
from megatron_cp.linear.kernels import causal_conv1d, mamba_ssm
from megatron_cp.linear.kernels.base import LinearCall
from megatron_cp.linear.kernels.common import installed
from tests.refusals import rejects

RULE, CONV = mamba_ssm.MambaSsmRule(), causal_conv1d.CausalConv1dConv()
PAIRS = [(RULE, mamba_ssm, "mamba"), (CONV, causal_conv1d, "conv1d")]
of_both = pytest.mark.parametrize(("kernel", "module", "kind"), PAIRS)


@pytest.fixture(autouse=True)
def on_a_gpu_with_both(monkeypatch):
    monkeypatch.setattr(installed, "installed_version", lambda package: (9, 9))
    monkeypatch.setattr(installed, "import_failure", lambda *modules: None)


def _call(kind, dtype=torch.bfloat16, device="cuda", width=4, channels=(64,)):
    return LinearCall(kind, Packing([3, 1]), dtype, torch.device(device), 128, width, channels)


@of_both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_takes_what_the_package_computes(kernel, module, kind, dtype):
    assert kernel.refusal(_call(kind, dtype)) is None


@of_both
def test_rejects_a_missing_and_an_old_package(monkeypatch, kernel, module, kind):
    monkeypatch.setattr(installed, "installed_version", lambda package: None)
    assert kernel.refusal(_call(kind)) == f"{kernel.package} is not installed; {install('mamba')}"
    major, minor = module.OLDEST
    monkeypatch.setattr(installed, "installed_version", lambda package: (major, minor))
    assert kernel.refusal(_call(kind)) is None
    monkeypatch.setattr(installed, "installed_version", lambda package: (major, minor - 1))
    assert kernel.refusal(_call(kind)) == f"{kernel.package} is older than version {major}.{minor}; {install('mamba')}"


@of_both
def test_rejects_a_package_that_cannot_be_imported(monkeypatch, kernel, module, kind):
    monkeypatch.undo()
    monkeypatch.setattr(installed, "installed_version", lambda package: (9, 9))
    monkeypatch.setitem(sys.modules, kernel.name, None)
    extras.import_failure.cache_clear()
    assert f"{kernel.package} cannot be imported (ModuleNotFoundError: " in kernel.refusal(_call(kind))
    extras.import_failure.cache_clear()


@of_both
def test_rejects_the_cpu_and_float64_and_the_user_hears_of_it(kernel, module, kind):
    assert "runs on CUDA, the tensors are on cpu; use chunked" in kernel.refusal(_call(kind, device="cpu"))
    assert "has no torch.float64; use chunked" in kernel.refusal(_call(kind, torch.float64))
    rejects(f"{kernel.name}: runs on CUDA", choose_kernel, [kernel], kernel.name, _call(kind, device="cpu"))


@pytest.mark.parametrize("width", [1, 5])
def test_rejects_other_numbers_of_taps(width):
    assert f"has 2 to 4 taps, not {width}; use fla" in CONV.refusal(_call("conv1d", width=width))


@pytest.mark.parametrize("width", [2, 3, 4])
def test_takes_two_to_four_taps(width):
    assert CONV.refusal(_call("conv1d", width=width)) is None


def test_rejects_channels_that_are_no_multiple_of_8():
    assert "has multiples of 8 channels, not 12; use fla" in CONV.refusal(_call("conv1d", channels=(64, 12)))


@of_both
def test_the_installed_version_is_read_once(monkeypatch, kernel, module, kind):
    monkeypatch.undo()
    extras.installed_version.cache_clear()
    monkeypatch.setattr(extras, "version", lambda package: {kernel.package: "2.3.2.post1"}[package])
    assert extras.installed_version(kernel.package) == (2, 3)
    monkeypatch.setattr(extras, "version", None)
    assert extras.installed_version(kernel.package) == (2, 3)
    extras.installed_version.cache_clear()


def test_copies_that_the_exchanges_kernels_do_not_make_are_left_to_torch():
    shared = SimpleNamespace(
        copies=2,
        coded=[True],
        dtypes=[torch.int64],
        exchange=SimpleNamespace(sections=SimpleNamespace(replicated=True)),
    )
    for make in (copies._packs_heads, copies._unpacks_heads, copies._unpacks_tokens):
        assert make([], [], shared) is None
