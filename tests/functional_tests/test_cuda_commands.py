"""Commands on a device: training agrees with one rank, benchmarks report, and gpu_check.sh runs all its steps.

Two ranks share the device, over gloo; on the emulated one times mean nothing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _pytest.mark.expression import Expression

from benchmarks.__main__ import main as benchmarks
from megatron_cp.cli.main import main
from tools.gpu_check.plan import BY_NAME, NEVER, STEPS, TESTS, expression

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROOT = Path(__file__).parents[2]
TINY = "--device cuda --model tiny --repeats 1"
BENCHMARKS = {
    "attention": f"{TINY} --cp 2 --tokens-per-rank 64 --documents 3",
    "linear": f"{TINY} --cp 2 --tokens-per-rank 32 --documents 3 --kernel chunked",
    "exchange": "--device cuda --repeats 1 --cp 2 --tokens-per-rank 32 --documents 4 --heads 8 --key-heads 4",
    "wire": f"{TINY} --cp 2 --tokens-per-rank 64 --documents 3",
    "layer": f"{TINY} --tokens-per-rank 32 --documents 3",
}


def report_of(capsys, *command, main=main):
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_reports(name, capsys, tmp_path):
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    more = ["--profile", str(tmp_path / "trace.json")] if name == "layer" else []
    report = report_of(capsys, name, *BENCHMARKS[name].split(), *more, main=benchmarks)
    assert report.get("device", "cuda") == "cuda"
    for trace in more[1:]:
        names = {event.get("name", "") for event in json.loads(Path(trace).read_text())["traceEvents"]}
        assert any(found.startswith("cp headwise to_heads") for found in names)


def test_training_agrees_with_one_rank(capsys, tmp_path):
    """Megatron's own model, optimizer and data parallelism, gradients over gloo, a checkpoint at the end."""
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    tiny = ["--device", "cuda", "--train-iters", "2", "--seq-length", "64", "--hybrid-layer-pattern", "G*-"]
    folder = ["--run-dir", str(tmp_path / "run")]
    report = report_of(capsys, "train", "--compare", "--context-parallel-size", "2", *tiny, *folder)
    assert report["max_loss_diff"] < 1e-3
    assert report["first_step_grad_diff"] < 1e-5


@pytest.mark.skipif("NULLGPU" not in os.environ, reason="a dry run, for the emulated device")
@pytest.mark.timeout(900)
def test_gpu_check_runs_dry(tmp_path):
    """Errors of a step that do not come from the hardware show here."""
    few = "of_gates and alone or very_bits and 2-zigzag or varlen-3-random or p2p-causal or device_is_its_own"
    options = ["--dry-run", "--budget", "850", "--repeats", "1", "--workers", "1", "--tests", few]
    done = subprocess.run(
        ["bash", "tools/gpu_check.sh", *options],
        env=os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}, cwd=ROOT, capture_output=True, text=True,
        timeout=880, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    lines = (tmp_path / "gpu_check.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines[1:7]] == [[step.name, "passed"] for step in STEPS]
    assert len(lines) > 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_check.jsonl", "gpu_check.log", "gpu_check.txt"]


def test_gpu_check_runs_each_test_in_one_step():
    """Only tests of the emulated device itself are in none, and those that train or check for themselves."""
    files = sorted(f"{TESTS}{name}.py" for name in {name for step in STEPS for name in step.files})
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=250, check=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(tests) > 200
    by_step = {step.name: Expression.compile(expression(step)) for step in STEPS if step.files}
    for test in tests:
        found = [name for name, each in by_step.items() if each.evaluate(lambda word, **_: word in test)]  # noqa: B023
        assert len(found) == (not any(word in test for word in NEVER.split(" or "))), (test, found)
        assert all(test.partition("::")[0] in [f"{TESTS}{end}.py" for end in BY_NAME[name].files] for name in found)
