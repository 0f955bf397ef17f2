"""`megatron-cp` commands and other programs in processes of their own, and the JSON that commands end with."""

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron_cp.cli.main import parsed
from tests.limits import limit

ROOT = Path(__file__).parents[1]


def run_python(*arguments, seconds=240, status=0, **environment):
    """Runs Python with these arguments, on one thread, and asserts its exit code; `environment` is added to its own."""
    run = subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, cwd=ROOT,
        capture_output=True, text=True, timeout=limit(seconds), check=False,
    )  # fmt: skip
    assert run.returncode == status, run.stdout[-4000:] + run.stderr
    return run


def run_module(module, *arguments, **environment):
    """Runs a module of the tests, and returns what it prints: for what must come before any other import."""
    return run_python("-m", module, *arguments, **environment).stdout


def run_code(code):
    """Runs code, and returns what it prints."""
    return run_python("-c", code).stdout


def command(*arguments, ranks=None, seconds=120, status=0):
    """Runs a command on the CPU, under torchrun if a number of ranks is given, and asserts its exit code."""
    launcher = () if ranks is None else ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m")
    module = ("-m", *launcher, "megatron_cp")
    return run_python(*module, *arguments, seconds=seconds, status=status, CUDA_VISIBLE_DEVICES="")


def only_json(text):
    """Returns the object that a command prints with --json, which is all that it prints."""
    return json.loads(text)


def reported(arguments, status=0):
    """Runs a command in this process; returns the text that it prints and the object that it prints with --json."""
    args = parsed(arguments)
    report = args.run(args)
    assert report.status == status, report.text
    return report.text, json.loads(json.dumps(report.data))
