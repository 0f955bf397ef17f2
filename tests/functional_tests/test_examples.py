"""The examples run as their first lines say, on local threads and under torchrun; docs/trees.md quotes one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_commands import run_script
from tests.limits import limit

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*_without_megatron.py"))
COMPARED = {
    "attention_without_megatron": [f"step {number}, {what}" for number in range(3) for what in ("loss", "gradients")],
    "gated_delta_net_without_megatron": ["out", "gradient of qkv", "gradient of conv"],
}
# On the CPU wherever this runs: two ranks need two devices or none.
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("launcher", ["threads", pytest.param("torchrun", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.few
def test_example(example, launcher):
    if launcher == "threads":
        printed = run_script(example)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example]
        printed = subprocess.run(
            command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=limit(120), check=True
        ).stdout
    ranks = {"threads": 4, "torchrun": 2}[launcher]
    assert f"over {ranks} ranks: 4 documents" in printed
    for name in COMPARED[example.stem]:
        assert f"{name}: {ranks} ranks and each document alone differ by at most" in printed


@pytest.mark.thorough
def test_grpo_on_trees():
    command = [sys.executable, EXAMPLES[0].parent / "grpo_on_trees.py"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=limit(200))
    assert done.returncode == 0, done.stderr
    assert "32 sequences of 2783 tokens in 37 segments of 864" in done.stdout
    assert "trees and 32 documents alone differ by at most" in done.stdout
