"""Commands on a device: training agrees with one rank, benchmarks report, and steps of gpu_check.sh run to their end.

Two ranks share the device, over gloo; on the emulated one times mean nothing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_cp.cli.main import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROOT = Path(__file__).parents[2]
TINY = "--device cuda --model tiny --repeats 1"
BENCHMARKS = {
    "attention": f"{TINY} --cp 2 --tokens-per-rank 64 --documents 3",
    "linear": f"{TINY} --cp 2 --tokens-per-rank 32 --documents 3 --kernel chunked",
    "exchange": "--device cuda --repeats 1 --cells 2x64/4 --tokens-per-rank 64 --documents 4 --heads 8 --key-heads 4",
    "wire": f"{TINY} --cp 2 --tokens-per-rank 64 --documents 3",
    "layer": f"{TINY} --tokens-per-rank 32 --documents 3",
}


def report_of(capsys, *command):
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_reports(name, capsys, tmp_path):
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    more = ["--profile", str(tmp_path / "trace.json")] if name == "layer" else []
    report = report_of(capsys, "bench", name, *BENCHMARKS[name].split(), *more)
    assert report.get("device", "cuda") == "cuda"
    for trace in report.get("traces", {}).values():
        names = {event.get("name", "") for event in json.loads(Path(trace).read_text())["traceEvents"]}
        assert any(found.startswith("cp headwise to_heads") for found in names)


def test_training_agrees_with_one_rank(capsys, tmp_path):
    """Megatron's own model, optimizer and data parallelism, gradients over gloo, a checkpoint at the end."""
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    tiny = ["--device", "cuda", "--train-iters", "2", "--seq-length", "64", "--num-layers", "2"]
    folder = ["--run-dir", str(tmp_path / "run")]
    report = report_of(capsys, "train", "--compare", "--context-parallel-size", "2", *tiny, *folder)
    assert report["max_loss_diff"] < 1e-3
    assert report["first_step_grad_diff"] < 1e-5


@pytest.mark.skipif("NULLGPU" not in os.environ, reason="a dry run, for the emulated device")
@pytest.mark.parametrize("step", ["smoke", "kernels", "parity", "one-rank", "gloo", "symmetric"])
def test_gpu_check_runs_dry(step, tmp_path):
    """Errors of a step that do not come from the hardware show here."""
    options = ["--dry-run", "--repeats", "1", "--workers", "1", "--require", "varlen of attention"]
    done = subprocess.run(
        ["bash", "tools/gpu_check.sh", "--only", step, *options],
        env=os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}, cwd=ROOT, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    left = json.loads((tmp_path / f"gpu_{step}.json").read_text())
    assert left["failed"] == []
    rows = left.get("rows")
    assert rows is None or len(rows) >= 10
    assert not any("not_run" in row for row in rows or ())
    assert rows or step == "gloo" or left["tests"]["tests"] > left["tests"]["skipped"]


@pytest.mark.skipif("NULLGPU" not in os.environ, reason="fla works on a GPU")
def test_gpu_check_fails_where_a_kernel_is_missing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_check", "--only", "smoke", "--dry-run", "--require", "mamba_ssm of mamba"],
        env=os.environ | {"OUT": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    failed = json.loads((tmp_path / "gpu_smoke.json").read_text())["failed"]
    assert len(failed) == 1
    assert "kernel mamba_ssm of mamba should be there" in failed[0]
