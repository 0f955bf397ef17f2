"""The emulated device: why there is none, and some of the tests of CUDA on it, of which `make test-cuda` runs all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.nullgpu import device as device_module
from tools.nullgpu.device import UnavailableError, environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def device():
    """The environment of a process that has it."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: make test-cuda")
    try:
        return environment()
    except UnavailableError as reason:
        pytest.skip(str(reason))


def run(device, *command):
    return subprocess.run(
        [sys.executable, *command], env=device, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )


def test_without_a_command_or_a_compiler_it_ends_with_2_and_says_why():
    done = run(None, "-m", "tools.nullgpu")
    assert (done.returncode, "tools.nullgpu [--or-gpu] COMMAND" in done.stderr) == (2, True)
    done = run(os.environ | {"CXX": "no-such-compiler"}, "-m", "tools.nullgpu", "true")
    assert (done.returncode, "nullgpu: no C++ compiler" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("compiler", "torch_version", "reason"),
    [
        ("no-such-compiler", None, "no C++ compiler: CXX is 'no-such-compiler', which is not on the PATH"),
        ("false", None, "cannot build the emulated device"),
        (None, "2.12.0+cu140", "symbols of torch 2.12.0+cu140; this is 2.11"),
    ],
)
def test_the_reason_for_none_is_said(compiler, torch_version, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler or os.environ.get("CXX", "c++"))
    monkeypatch.setattr(device_module, "TORCH", torch_version or device_module.TORCH)
    monkeypatch.setattr(device_module, "BUILD", tmp_path)
    with pytest.raises(UnavailableError, match=re.escape(reason)):
        environment()


# What the tests of CUDA are, and some of each kind, in parts of ten seconds; a part is a process.
PARTS = {
    "streams and faults": ["test_cuda_streams.py", "test_cuda_faults.py"],
    "host never waits, over NCCL, symmetric memory": [
        "test_cuda_faults.py::test_what_a_gpu_refuses_is_refused",
        "test_cuda_faults.py::test_values_are_right_and_memory_that_nobody_wrote_is_nan",
        *(f"test_cuda.py::test_host_never_waits[{what}]" for what in ("exchange", "varlen")),
        *(f"test_cuda.py::test_host_never_waits[chunked of {of} chunkwise]" for of in ("gdn", "kda", "mamba")),
        "test_cuda.py::test_host_never_waits[chunked of gdn headwise]",
        *(f"test_cuda_nccl.py::test_schemes[{scheme}-causal]" for scheme in ("p2p", "a2a+p2p")),
        *(f"test_cuda_nccl.py::test_linear_layers[{layer}-chunkwise]" for layer in ("gdn", "mamba")),
        "test_cuda_symmetric_memory.py::test_a_fault_of_order_is_seen",
        *(f"test_cuda_symmetric_memory.py::test_messages_arrive_and_the_host_waits_for_none[{n}]" for n in (2, 3, 5)),
        *(f"test_cuda_symmetric_memory.py::test_layers_equal_float64[{name}]" for name in ("p2p", "gdn chunkwise")),
        "test_cuda_symmetric_memory.py::test_rejects_being_captured",
        "test_cuda_symmetric_memory.py::test_rejects_memory_that_cannot_be_shared",
    ],
    "over gloo": [
        *(f"test_cuda.py::test_scheme_equals_float64[{scheme}-causal]" for scheme in ("p2p", "all_gather")),
        "test_cuda.py::test_exchange_moves_the_very_bits[2-zigzag]",
        "test_cuda.py::test_layer_equals_float64[chunked of mamba chunkwise-3-zigzag-True]",
    ],
    "kernels": [
        f"test_cuda.py::test_kernels_move_the_same_bytes_as_torch[padded-{codec}]" for codec in ("none", "fp8")
    ],
    "more over NCCL": [
        "test_cuda_nccl.py::test_schemes[exact-causal]",
        "test_cuda_nccl.py::test_linear_layers[conv1d-chunkwise]",
    ],
}


# What tests of the CPU guard too, or the part that is not here.
AGAIN = ("streams and faults", "over gloo", "kernels", "more over NCCL")


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.thorough if part in AGAIN else ()) for part in PARTS]
)
def test_tests_of_cuda_pass(device, part):
    """The same code and the same tests as on a GPU."""
    chosen = [f"tests/functional_tests/{name}" for name in PARTS[part]]
    done = run(device, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    assert (" failed" in last, " skipped" in last) == (False, False), last
