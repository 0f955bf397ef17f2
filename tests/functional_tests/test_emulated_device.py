"""The emulated device refuses what a GPU refuses, and its values are right. On it `make test-cuda` runs all of CUDA."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def run(device, *command, **more):
    return subprocess.run(
        [sys.executable, *command],
        env=device,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        **more,
    )


REFUSED = """
import torch
torch.cuda.set_sync_debug_mode("error")
x = torch.arange(6.0, device="cuda")
for name, call in {
    "item": lambda: x[0].item(), "tolist": lambda: x.tolist(), "cpu": lambda: x.cpu(), "nonzero": lambda: x.nonzero(),
    "a mask": lambda: x[x > 2], "two devices": lambda: x + torch.ones(6),
    "an index of the device into the host's": lambda: torch.ones(6)[x.long()],
    "a pageable copy": lambda: torch.ones(6).to("cuda"),
}.items():
    try:
        call()
        print("allowed", name)
    except RuntimeError:
        print("refused", name)
y = torch.ones(6).pin_memory().to("cuda", non_blocking=True)
torch.cuda.set_sync_debug_mode("default")
print((x @ y).item(), torch.empty(10_000_000, device="cuda").isnan().all().item())
"""


def test_what_a_gpu_refuses_is_refused_and_values_are_right(device):
    done = run(device, "-c", REFUSED)
    *refused, last = done.stdout.splitlines()
    assert len(refused) == 8
    assert all(line.startswith("refused") for line in refused), refused
    assert last == "15.0 True", done.stderr


def test_a_command_runs_on_it_and_no_device_is_said():
    done = run(None, "-m", "tools.nullgpu")
    assert (done.returncode, "tools.nullgpu [--or-gpu] COMMAND" in done.stderr) == (2, True)
