"""`megatron-cp` commands in processes of their own, and the JSON that they end with."""

import json
import subprocess
import sys
from pathlib import Path

from megatron_cp.cli.main import parsed
from tests.limits import limit

ROOT = Path(__file__).parents[1]


def only_json(text):
    """Returns the object that a command prints with --json, which is all that it prints."""
    return json.loads(text)


def command(*arguments, ranks=None, seconds=120, status=0):
    """Runs a command, under torchrun if a number of ranks is given, and asserts its exit code."""
    launcher = () if ranks is None else ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m")
    run = subprocess.run(
        [sys.executable, "-m", *launcher, "megatron_cp", *arguments],
        capture_output=True, text=True, timeout=limit(seconds), cwd=ROOT, check=False,
    )  # fmt: skip
    assert run.returncode == status, run.stderr
    return run


def reported(arguments, status=0):
    """Runs a command in this process; returns the text that it prints and the object that it prints with --json."""
    args = parsed(arguments)
    report = args.run(args)
    assert report.status == status, report.text
    return report.text, json.loads(json.dumps(report.data))
